#include "torch/dump/op_arguments.h"

#include <torch/csrc/Dtype.h>

#include <algorithm>
#include <cstdint>

#include "torch/dump/json_text.h"

namespace fastcheck::dump {

Made made_by(const Op& op, PyObject* args, PyObject* kwargs, PyObject* result) {
  Made made;
  std::vector<PyObject*>& tensors = made.tensors;
  if (!op.written.empty()) {
    each_input(op, args, kwargs, [&](std::size_t place, const std::string&, PyObject* tensor) {
      if (op.writes(place)) tensors.push_back(tensor);
    });
  }
  made.written = tensors.size();
  each_tensor(result, "", [&](const std::string&, PyObject* tensor) {
    const auto end = tensors.begin() + static_cast<std::ptrdiff_t>(made.written);
    if (std::find(tensors.begin(), end, tensor) == end) tensors.push_back(tensor);
  });
  return made;
}

bool append_plain(std::string& text, PyObject* value, int depth) {
  constexpr Py_ssize_t kMostItems = 64;
  constexpr int kMostDepth = 6;
  if (value == Py_None) {
    text += "null";
  } else if (PyBool_Check(value)) {
    text += value == Py_True ? "true" : "false";
  } else if (PyLong_CheckExact(value)) {
    int overflows = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflows);
    if (overflows != 0) return false;
    append(text, static_cast<std::int64_t>(number));
  } else if (PyFloat_CheckExact(value)) {
    append(text, PyFloat_AS_DOUBLE(value));
  } else if (THPDtype_Check(value)) {
    text += in_quotes(reinterpret_cast<THPDtype*>(value)->name);
  } else if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) {
    if (depth == kMostDepth || Py_SIZE(value) > kMostItems) return false;
    text += '[';
    for (Py_ssize_t i = 0; i < Py_SIZE(value); ++i) {
      if (i != 0) text += ", ";
      if (!append_plain(text, item_of(value, i), depth + 1)) return false;
    }
    text += ']';
  } else {
    return false;
  }
  return true;
}

bool holds_tensor(PyObject* value) {
  if (THPVariable_Check(value)) return true;
  if (!is_sequence(value)) return false;
  for (Py_ssize_t i = 0; i < Py_SIZE(value); ++i) {
    if (THPVariable_Check(item_of(value, i))) return true;
  }
  return false;
}

}  // namespace fastcheck::dump
