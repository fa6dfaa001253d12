#include "torch/hooks/reader.h"

#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>

#include "torch/python/observe.h"
#include "torch/python/tensors.h"
#include "torch/python/types.h"
#include "torch/read/slots.h"
#include "torch/read/tensor_view.h"

namespace py = pybind11;

namespace fastcheck {
namespace {

// The number of a tensor that could not be read; larger than any sequence number.
constexpr std::int64_t kNoSeq = std::int64_t{1} << 50;

}  // namespace

HookReader::HookReader(py::object seen, const at::Tensor& slots, Depth depth)
    : seen_object_(std::move(seen)),
      seen_(seen_object_.cast<SeenTensors&>()),
      slots_(slots),
      depths_(depth),
      capacity_(slots.numel() / static_cast<std::int64_t>(sizeof(Record))) {
  known_[static_cast<std::size_t>(c10::DeviceType::CPU)] = true;
}

std::int64_t HookReader::read(py::handle object, std::int64_t index, const Identity& identity,
                              bool any_dtype) {
  const at::Tensor& tensor = unpack(object);
  const std::optional<DType> dtype = dtype_of(tensor.scalar_type());
  if (!dtype.has_value() || !(any_dtype || may_be_nonfinite(tensor.scalar_type()))) {
    return code::kUnread;
  }
  if (!known_[type_index(tensor)]) return code::kUnknownDevice;
  if (!has_plain_memory(tensor) || may_be_in_flight(tensor)) return code::kUnread;
  const std::int64_t tensor_seq = seen_.add(tensor, identity.seq);
  if (tensor_seq == kNoSeq) return code::kUnread;
  if (tensor_seq >= 0) return tensor_seq << code::kSeqShift;
  std::int64_t found = identity.seq << code::kSeqShift | code::kNew;
  if (tensor.requires_grad()) found |= code::kNeedsGradient;
  if (!tensor.is_cpu()) return found | elsewhere(tensor, *dtype);
  Record* const record = slot(slots_, index);
  observe_from_python(readable(object), depths_.of(tensor), false, identity, *record);
  return (record->flags & kFlagNonfinite) != 0 ? found | code::kBad : found;
}

std::int64_t HookReader::elsewhere(const at::Tensor& tensor, DType dtype) {
  const auto order = static_cast<std::int64_t>(order_of(tensor));
  const c10::Stream stream =
      c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
  const bool is_same = last_stream_.has_value() && *last_stream_ == stream;
  if (!is_same) last_stream_ = stream;
  return code::kElsewhere | static_cast<std::int64_t>(dtype) << code::kDTypeShift |
         order << code::kOrderShift | (is_same ? 0 : code::kNewStream);
}

// ---- The type -----------------------------------------------------------------------------------

namespace {

using ReaderObject = Object<HookReader>;

PyObject* read(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  constexpr Py_ssize_t kCount = 8;
  if (count != kCount) {
    return PyErr_Format(PyExc_TypeError,
                        "expected %zd arguments (tensor, index, site, call, step, "
                        "seq, flags, any_dtype), got %zd",
                        kCount, count);
  }
  std::array<long long, kCount> number{};
  for (std::size_t i = 1; i < kCount; ++i) number[i] = PyLong_AsLongLong(arguments[i]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  return translated([&] {
    const Identity identity{number[5], number[4], static_cast<std::int32_t>(number[3]),
                            static_cast<std::int32_t>(number[2]),
                            static_cast<std::uint32_t>(number[6])};
    return PyLong_FromLongLong(
        ReaderObject::of(self).read(arguments[0], number[1], identity, number[7] != 0));
  });
}

PyObject* add_device(PyObject* self, PyObject* tensor) {
  return translated([&] {
    ReaderObject::of(self).add_device(unpack(tensor));
    Py_RETURN_NONE;
  });
}

PyObject* set_depth(PyObject* self, PyObject* depth) {
  return translated([&] {
    ReaderObject::of(self).depths().set(checked_depth(py::handle(depth).cast<std::int64_t>()));
    Py_RETURN_NONE;
  });
}

PyMethodDef kMethods[] = {
    {"read", as_method(&read), METH_FASTCALL,
     "read(self, tensor, index, site, call, step, seq, flags, any_dtype) -> int"},
    {"add_device", &add_device, METH_O, "add_device(self, tensor) -> None"},
    {"set_depth", &set_depth, METH_O, "set_depth(self, depth) -> None"},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot kSlots[] = {
    {Py_tp_dealloc, as_slot(&ReaderObject::destroy)},
    {Py_tp_methods, kMethods},
    {0, nullptr},
};

PyType_Spec kSpec = {"fastcheck._C.HookReader", sizeof(ReaderObject), 0, Py_TPFLAGS_DEFAULT,
                     kSlots};

PyTypeObject* type() {
  static PyTypeObject* const made = [] {
    PyTypeObject* const fresh = new_type(kSpec);
    fresh->tp_new = nullptr;  // made by hook_reader() alone
    return fresh;
  }();
  return made;
}

py::object hook_reader(py::object seen, py::handle slots, std::int64_t depth) {
  return owned(ReaderObject::make(type(), std::move(seen), unpack(slots), checked_depth(depth)));
}

}  // namespace

HookReader& hook_reader_of(py::handle object) {
  if (Py_TYPE(object.ptr()) != type()) throw py::type_error("expected a HookReader");
  return ReaderObject::of(object.ptr());
}

void define_hook_reader(py::module_& m) {
  m.attr("HookReader") = py::handle(reinterpret_cast<PyObject*>(type()));
  m.def("hook_reader", hook_reader, py::arg("seen"), py::arg("slots"), py::arg("depth"));
}

}  // namespace fastcheck
