#include "torch/python/tensors.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <string>

#include "torch/python/types.h"
#include "torch/read/tensor_view.h"

namespace py = pybind11;

namespace fastcheck {
namespace {

// Between one pointer and the next: a few tensors take as long as memory does.
constexpr std::size_t kStride = 10;

template <class T>
void ask_for(const T* object) {
  constexpr std::size_t kLine = 64;
  for (std::size_t i = 0; i < sizeof(T); i += kLine) {
    __builtin_prefetch(reinterpret_cast<const char*>(object) + i);
  }
}

const c10::StorageImpl* storage_of(c10::TensorImpl* tensor) {
  return tensor->unsafe_storage().unsafeGetStorageImpl();
}

const torch::autograd::AutogradMeta* autograd_of(c10::TensorImpl* tensor) {
  return static_cast<const torch::autograd::AutogradMeta*>(tensor->autograd_meta());
}

const at::Tensor& checked(const at::Tensor& tensor, c10::DeviceType device) {
  const std::string reason = unreadable_reason(tensor, device);
  if (!reason.empty()) throw py::type_error(reason);
  return tensor;
}

}  // namespace

const at::Tensor& unpack(py::handle object) {
  if (!THPVariable_Check(object.ptr())) {
    throw py::type_error("expected a torch.Tensor, got " +
                         std::string(Py_TYPE(object.ptr())->tp_name) +
                         "; give torch.as_tensor(x) for numbers or an array, list(x.parameters()) "
                         "for the weights of a model");
  }
  return THPVariable_Unpack(object.ptr());
}

const at::Tensor& readable(py::handle object, c10::DeviceType device) {
  return checked(unpack(object), device);
}

std::vector<at::Tensor> readable_list(const py::sequence& objects, c10::DeviceType device) {
  std::vector<at::Tensor> tensors;
  const auto gather = [&](std::size_t count, const auto& tensor_at) {
    tensors.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      try {
        tensors.push_back(checked(tensor_at(i), device));
      } catch (const py::type_error& error) {
        throw py::type_error("item " + std::to_string(i) + ": " + error.what());
      }
    }
  };
  if (py::isinstance<TensorList>(objects)) {
    const at::ArrayRef<at::Tensor> given = objects.cast<const TensorList&>().tensors();
    gather(given.size(), [&](std::size_t i) -> const at::Tensor& {
      if (i + 2 * kStride < given.size()) ask_for(given[i + 2 * kStride].unsafeGetTensorImpl());
      if (i + kStride < given.size()) ask_for(storage_of(given[i + kStride].unsafeGetTensorImpl()));
      return given[i];
    });
    return tensors;
  }
  const py::object held = owned(PySequence_Fast(objects.ptr(), "expected a sequence of tensors"));
  PyObject* const* const items = PySequence_Fast_ITEMS(held.ptr());
  const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(held.ptr()));
  const Lookahead lookahead(items, count);
  gather(count, [&](std::size_t i) -> const at::Tensor& {
    lookahead(i);
    return unpack(items[i]);
  });
  return tensors;
}

c10::TensorImpl* Lookahead::ahead(std::size_t at) const {
  if (at >= count_ || !THPVariable_CheckExact(objects_[at])) return nullptr;
  return THPVariable_Unpack(objects_[at]).unsafeGetTensorImpl();
}

void Lookahead::operator()(std::size_t at) const {
  std::size_t place = at + (gradients_ ? 5 : 3) * kStride;
  if (place < count_) ask_for(reinterpret_cast<const THPVariable*>(objects_[place]));
  if (c10::TensorImpl* const tensor = ahead(place -= kStride)) ask_for(tensor);
  const auto gradient_at = [&](std::size_t at) -> c10::TensorImpl* {
    c10::TensorImpl* const tensor = ahead(at);
    const auto* const meta = tensor == nullptr ? nullptr : autograd_of(tensor);
    return meta == nullptr ? nullptr : meta->grad_.unsafeGetTensorImpl();
  };
  if (gradients_) {
    if (c10::TensorImpl* const tensor = ahead(place -= kStride)) ask_for(autograd_of(tensor));
    if (c10::TensorImpl* const gradient = gradient_at(place -= kStride)) ask_for(gradient);
  }
  place -= kStride;
  if (c10::TensorImpl* const read = gradients_ ? gradient_at(place) : ahead(place)) {
    ask_for(storage_of(read));
  }
}

py::object wrap(at::Tensor tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
}

}  // namespace fastcheck
