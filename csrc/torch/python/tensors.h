// Python objects to the tensors that they hold, and back.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <memory>
#include <vector>

namespace fastcheck {

// Tensors that C++ gathers and reads; to Python a sequence. One that has no object of Python's gets
// one only where Python asks for it. A part of a list is of the same tensors.
struct TensorList {
  std::shared_ptr<std::vector<at::Tensor>> all = std::make_shared<std::vector<at::Tensor>>();
  std::size_t first = 0, stop = std::numeric_limits<std::size_t>::max();
  bool are_on_host = true;

  void add(const at::Tensor& tensor) {
    are_on_host &= tensor.is_cpu();
    all->push_back(tensor);
  }

  at::ArrayRef<at::Tensor> tensors() const {
    return at::ArrayRef<at::Tensor>(*all).slice(first, std::min(stop, all->size()) - first);
  }
};

// All throw pybind11::type_error with what was expected and what came.
const at::Tensor& unpack(pybind11::handle object);
// A tensor that kernels of a device of type `device` can read.
const at::Tensor& readable(pybind11::handle object, c10::DeviceType device = c10::DeviceType::CPU);
std::vector<at::Tensor> readable_list(const pybind11::sequence& objects,
                                      c10::DeviceType device = c10::DeviceType::CPU);

pybind11::object wrap(at::Tensor tensor);

// Asks for what is read of tensors some places ahead in a list, one pointer after the other. Of
// many small tensors each lies anywhere in memory, and waiting for that takes longer than reading.
// But for the first places of a list, nothing is followed before it was asked for. Nothing is kept.
class Lookahead {
 public:
  // `objects`: references that stay where they are meanwhile. `gradients`: theirs are read instead.
  Lookahead(PyObject* const* objects, std::size_t count, bool gradients = false)
      : objects_(objects), count_(count), gradients_(gradients) {}

  // The next to be read is this one.
  void operator()(std::size_t at) const;

 private:
  // The tensor so many places ahead; nullptr: there is none, or it is of another class.
  c10::TensorImpl* ahead(std::size_t at) const;

  PyObject* const* objects_;
  std::size_t count_;
  bool gradients_;
};

}  // namespace fastcheck
