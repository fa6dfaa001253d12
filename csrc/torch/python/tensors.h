// Python objects to the tensors that they hold, and back.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <vector>

namespace fastcheck {

// All throw pybind11::type_error with what was expected and what came.
const at::Tensor& unpack(pybind11::handle object);
// A tensor that kernels of a device of type `device` can read.
const at::Tensor& readable(pybind11::handle object, c10::DeviceType device = c10::DeviceType::CPU);
std::vector<at::Tensor> readable_list(const pybind11::sequence& objects,
                                      c10::DeviceType device = c10::DeviceType::CPU);

pybind11::object wrap(at::Tensor tensor);

}  // namespace fastcheck
