#include "torch/hooks/flatten.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>

#include "torch/hooks/reader.h"
#include "torch/python/tensors.h"
#include "torch/python/types.h"
#include "torch/read/tensor_view.h"

namespace py = pybind11;

namespace fastcheck {
namespace {

constexpr std::size_t kLabels = 16;

std::array<PyObject*, kLabels> first_labels(PyObject* of) {
  std::array<PyObject*, kLabels> labels{};
  for (std::size_t i = 0; i < kLabels; ++i) {
    labels[i] = owned(PyUnicode_FromFormat("%U[%zu]", of, i)).release().ptr();
  }
  return labels;
}

const std::array<PyObject*, kLabels>& input_labels() {
  static const std::array<PyObject*, kLabels> kInputs = first_labels(hook_labels().input);
  return kInputs;
}

// "input[3]"
py::object indexed(PyObject* label, Py_ssize_t index) {
  static const std::array<PyObject*, kLabels> kOutputs = first_labels(hook_labels().output);
  const auto i = static_cast<std::size_t>(index);
  if (i < kLabels && label == hook_labels().input) {
    return py::reinterpret_borrow<py::object>(input_labels()[i]);
  }
  if (i < kLabels && label == hook_labels().output) {
    return py::reinterpret_borrow<py::object>(kOutputs[i]);
  }
  return owned(PyUnicode_FromFormat("%U[%zd]", label, index));
}

bool holds_no_tensor(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) ||
         PyFloat_CheckExact(value) || PyUnicode_CheckExact(value);
}

// False as soon as `visit` is, with an argument that may hold tensors and its label.
template <class Visit>
bool each_argument(PyObject* args, PyObject* kwargs, const Visit& visit) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
    PyObject* const value = PyTuple_GET_ITEM(args, i);
    if (holds_no_tensor(value)) continue;
    if (!visit(value, indexed(hook_labels().input, i))) return false;
  }
  Py_ssize_t place = 0;
  PyObject *key = nullptr, *value = nullptr;
  while (PyDict_Next(kwargs, &place, &key, &value) != 0) {
    if (holds_no_tensor(value)) continue;
    if (!visit(value, owned(PyUnicode_FromFormat("input.%U", key)))) return false;
  }
  return true;
}

}  // namespace

const HookLabels& hook_labels() {
  static const HookLabels kLabels{interned("input"), interned("output")};
  return kLabels;
}

std::int64_t HookSites::of(PyObject* label) {
  // These two are for good; another label's address may become that of the next.
  const bool is_common = label == hook_labels().output || label == input_labels()[0];
  if (is_common && commonest_ >= 0) return commonest_;
  PyObject* const number = PyDict_GetItemWithError(numbers_.ptr(), label);
  if (number == nullptr) return -1;
  const std::int64_t site = PyLong_AsLongLong(number);
  if (is_common) commonest_ = site;
  return site;
}

bool HookTensors::add(PyObject* value, PyObject* label, HookSites& sites, int depth) {
  if (THPVariable_Check(value)) return add_tensor(value, label, sites);
  const bool is_tuple = PyTuple_CheckExact(value);
  if (!is_tuple && !PyList_CheckExact(value)) return holds_no_tensor(value);
  constexpr int kMaxDepth = 8;
  if (depth == kMaxDepth) return true;
  for (Py_ssize_t i = 0; i < Py_SIZE(value); ++i) {
    PyObject* const item = is_tuple ? PyTuple_GET_ITEM(value, i) : PyList_GET_ITEM(value, i);
    if (holds_no_tensor(item)) continue;
    if (!add(item, indexed(label, i).ptr(), sites, depth + 1)) return false;
  }
  return true;
}

bool HookTensors::add_arguments(PyObject* args, PyObject* kwargs, HookSites& sites) {
  return each_argument(args, kwargs, [&](PyObject* value, const py::object& label) {
    return add(value, label.ptr(), sites);
  });
}

py::object labelled_arguments(PyObject* args, PyObject* kwargs) {
  py::list found;
  const bool is_all = each_argument(args, kwargs, [&](PyObject* value, const py::object& label) {
    if (!THPVariable_Check(value)) return false;
    const at::Tensor& tensor = unpack(value);
    if (tensor.layout() != at::kStrided || tensor.is_nested() ||
        tensor.key_set().has(c10::DispatchKey::Python)) {
      return false;
    }
    found.append(py::make_tuple(label, py::handle(value)));
    return true;
  });
  return is_all ? py::object(std::move(found)) : py::object();
}

bool HookTensors::add_tensor(PyObject* tensor, PyObject* label, HookSites& sites) {
  const Py_ssize_t position = count++;
  if (is_transformed(unpack(tensor))) return false;
  if (!may_be_nonfinite(unpack(tensor).scalar_type())) return true;
  const std::int64_t site = sites.of(label);
  if (site < 0) return false;
  items.push_back({py::reinterpret_borrow<py::object>(label), tensor, site, position});
  return true;
}

}  // namespace fastcheck
