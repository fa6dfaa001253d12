#include "torch/python/tensors.h"

#include <torch/csrc/autograd/python_variable.h>

#include <string>

#include "torch/read/tensor_view.h"

namespace py = pybind11;

namespace fastcheck {

const at::Tensor& unpack(py::handle object) {
  if (!THPVariable_Check(object.ptr())) {
    throw py::type_error("expected a torch.Tensor, got " +
                         std::string(Py_TYPE(object.ptr())->tp_name));
  }
  return THPVariable_Unpack(object.ptr());
}

const at::Tensor& readable(py::handle object, c10::DeviceType device) {
  const at::Tensor& tensor = unpack(object);
  const std::string reason = unreadable_reason(tensor, device);
  if (!reason.empty()) throw py::type_error(reason);
  return tensor;
}

std::vector<at::Tensor> readable_list(const py::sequence& objects, c10::DeviceType device) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(objects.size());
  for (const py::handle object : objects) {
    try {
      tensors.push_back(readable(object, device));
    } catch (const py::type_error& error) {
      throw py::type_error("item " + std::to_string(tensors.size()) + ": " + error.what());
    }
  }
  return tensors;
}

py::object wrap(at::Tensor tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
}

}  // namespace fastcheck
