// The arguments and results of an operator in Python's form: tensors by label, everything else as
// JSON. python/fastcheck/utils/torch/operators.py has the same in Python.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <string>
#include <vector>

#include "torch/operators/op_table.h"

namespace fastcheck::dump {

inline bool is_sequence(PyObject* value) { return PyTuple_Check(value) || PyList_Check(value); }

inline PyObject* item_of(PyObject* sequence, Py_ssize_t i) {
  return PyTuple_Check(sequence) ? PyTuple_GET_ITEM(sequence, i) : PyList_GET_ITEM(sequence, i);
}

// visit(label, tensor) for `value`, or for those in a list or tuple.
template <class Visit>
void each_tensor(PyObject* value, const std::string& label, const Visit& visit) {
  if (THPVariable_Check(value)) {
    visit(label, value);
  } else if (is_sequence(value)) {
    for (Py_ssize_t i = 0; i < Py_SIZE(value); ++i) {
      PyObject* const item = item_of(value, i);
      if (!THPVariable_Check(item) && !is_sequence(item)) continue;
      each_tensor(item, label + "[" + std::to_string(i) + "]", visit);
    }
  }
}

// visit(name, place in the schema, value) for each argument.
template <class Visit>
void each_argument(const Op& op, PyObject* args, PyObject* kwargs, const Visit& visit) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
    const auto place = static_cast<std::size_t>(i);
    visit(op.arguments.at(place), place, PyTuple_GET_ITEM(args, i));
  }
  Py_ssize_t at = 0;
  PyObject *key = nullptr, *value = nullptr;
  while (PyDict_Next(kwargs, &at, &key, &value) != 0) {
    const auto name = py::cast<std::string>(py::handle(key));
    visit(name, op.place(name), value);
  }
}

// visit(place, label, tensor)
template <class Visit>
void each_input(const Op& op, PyObject* args, PyObject* kwargs, const Visit& visit) {
  each_argument(op, args, kwargs, [&](const std::string& name, std::size_t place, PyObject* value) {
    each_tensor(value, name,
                [&](const std::string& label, PyObject* tensor) { visit(place, label, tensor); });
  });
}

// The tensors that an operator has written in place, and behind the first `written` what it has
// returned beside that.
struct Made {
  std::vector<PyObject*> tensors;
  std::size_t written = 0;
};
Made made_by(const Op& op, PyObject* args, PyObject* kwargs, PyObject* result);

// A tensor, or a list or tuple of some.
bool holds_tensor(PyObject* value);

// Appends what json.dumps would make of fastcheck.dump.arguments.plain(value). False: ask them;
// then some of it may have been appended.
bool append_plain(std::string& text, PyObject* value, int depth = 0);

}  // namespace fastcheck::dump
