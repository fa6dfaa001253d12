#include "torch/hook_reader.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <memory>
#include <optional>

#include "core/record.h"
#include "torch/observe_from_python.h"
#include "torch/python_tensors.h"
#include "torch/seen_tensors.h"
#include "torch/slots.h"
#include "torch/tensor_view.h"

namespace py = pybind11;

namespace fastcheck {
namespace {

constexpr std::int64_t kUnread = -1, kUnknownDevice = -2;
constexpr std::int64_t kNew = 1, kBad = 2, kElsewhere = 4, kNeedsGradient = 8, kNewStream = 16;
constexpr int kDTypeShift = 5, kOrderShift = 10, kTokenShift = 11;
// What a tensor is remembered under that could not be read; the largest sequence number of all.
constexpr std::int64_t kNoToken = std::int64_t{1} << 50;

// Ordinary memory: not sparse, nested, fake, or wrapped by a subclass or a functorch transform.
bool is_plain(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kWrapped({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                          c10::DispatchKey::FuncTorchBatched,
                                          c10::DispatchKey::FuncTorchGradWrapper});
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_nested() &&
         !tensor.is_meta() && !tensor.key_set().has_any(kWrapped) && tensor.has_storage();
}

bool can_be_nonfinite(at::ScalarType type) {
  return at::isFloatingType(type) || at::isComplexType(type);
}

class HookReader {
 public:
  HookReader(py::object seen, const at::Tensor& slots, Depth depth)
      : seen_object_(std::move(seen)),
        seen_(seen_object_.cast<SeenTensors&>()),
        slots_(slots),
        depth_(depth) {
    known_[static_cast<std::size_t>(c10::DeviceType::CPU)] = true;
  }

  void know(const at::Tensor& tensor) { known_[type_index(tensor)] = true; }

  std::int64_t read(py::handle object, std::int64_t index, const Identity& identity,
                    bool any_dtype) {
    const at::Tensor& tensor = unpack(object);
    const std::optional<DType> dtype = dtype_of(tensor.scalar_type());
    if (!dtype.has_value() || !(any_dtype || can_be_nonfinite(tensor.scalar_type()))) {
      return kUnread;
    }
    if (!known_[type_index(tensor)]) return kUnknownDevice;
    if (!is_plain(tensor)) return kUnread;
    const std::int64_t token = seen_.add(tensor, identity.seq);
    if (token == kNoToken) return kUnread;
    if (token >= 0) return token << kTokenShift;
    std::int64_t code = identity.seq << kTokenShift | kNew;
    if (tensor.requires_grad()) code |= kNeedsGradient;
    if (!tensor.is_cpu()) return code | elsewhere(tensor, *dtype);
    Record* const record = slot(slots_, index);
    observe_from_python(readable(object), depth_, false, identity, *record);
    return (record->flags & kFlagNonfinite) != 0 ? code | kBad : code;
  }

 private:
  static std::size_t type_index(const at::Tensor& tensor) {
    return static_cast<std::size_t>(tensor.device().type());
  }

  std::int64_t elsewhere(const at::Tensor& tensor, DType dtype) {
    const bool is_dense = tensor.is_conj() || tensor.is_neg() || tensor.is_contiguous() ||
                          tensor.is_non_overlapping_and_dense();
    const auto order = static_cast<std::int64_t>(is_dense ? Order::kStorage : Order::kLogical);
    const c10::Stream stream =
        c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
    const bool is_same = last_stream_.has_value() && *last_stream_ == stream;
    if (!is_same) last_stream_ = stream;
    return kElsewhere | static_cast<std::int64_t>(dtype) << kDTypeShift | order << kOrderShift |
           (is_same ? 0 : kNewStream);
  }

  py::object seen_object_;
  SeenTensors& seen_;
  at::Tensor slots_;
  Depth depth_;
  std::array<bool, c10::COMPILE_TIME_MAX_DEVICE_TYPES> known_{};
  std::optional<c10::Stream> last_stream_;
};

// ---- The type -----------------------------------------------------------------------------------

struct Object {
  PyObject head;
  HookReader* reader;
};

HookReader& reader_of(PyObject* self) { return *reinterpret_cast<Object*>(self)->reader; }

// Python's exception for what C++ has thrown.
template <class Body>
PyObject* translated(const Body& body) {
  try {
    return body();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::out_of_range& error) {
    PyErr_SetString(PyExc_IndexError, error.what());
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

void destroy(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  delete reinterpret_cast<Object*>(self)->reader;
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* read(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  constexpr Py_ssize_t kCount = 8;
  if (count != kCount) {
    return PyErr_Format(PyExc_TypeError,
                        "expected %zd arguments (tensor, index, site, call, step, "
                        "seq, flags, any_dtype), came %zd",
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
        reader_of(self).read(arguments[0], number[1], identity, number[7] != 0));
  });
}

PyObject* know(PyObject* self, PyObject* tensor) {
  return translated([&] {
    reader_of(self).know(unpack(tensor));
    Py_RETURN_NONE;
  });
}

PyMethodDef kMethods[] = {
    {"read", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&read)), METH_FASTCALL,
     "read(self, tensor, index, site, call, step, seq, flags, any_dtype) -> int"},
    {"know", &know, METH_O, "know(self, tensor) -> None"},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot kSlots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(&destroy)},
    {Py_tp_methods, kMethods},
    {0, nullptr},
};

PyType_Spec kSpec = {"fastcheck._C.HookReader", sizeof(Object), 0, Py_TPFLAGS_DEFAULT, kSlots};

PyTypeObject* type() {
  static PyTypeObject* const made = [] {
    auto* const fresh = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&kSpec));
    if (fresh == nullptr) throw py::error_already_set();
    fresh->tp_new = nullptr;  // made by hook_reader() alone
    return fresh;
  }();
  return made;
}

py::object hook_reader(py::object seen, py::handle slots, std::int64_t depth) {
  auto reader = std::make_unique<HookReader>(std::move(seen), unpack(slots), checked_depth(depth));
  auto self = py::reinterpret_steal<py::object>(type()->tp_alloc(type(), 0));
  if (!self) throw py::error_already_set();
  reinterpret_cast<Object*>(self.ptr())->reader = reader.release();
  return self;
}

}  // namespace

void define_hook_reader(py::module_& m) {
  m.attr("HookReader") = py::handle(reinterpret_cast<PyObject*>(type()));
  m.def("hook_reader", hook_reader, py::arg("seen"), py::arg("slots"), py::arg("depth"));
}

}  // namespace fastcheck
