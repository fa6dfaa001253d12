// The tensors among what a module takes or returns: python/fastcheck/_flatten.py has the same, and
// looks into more kinds of containers.
#pragma once

#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>

#include <cstdint>

namespace fastcheck {

struct HookLabels {
  PyObject* input;
  PyObject* output;
};
const HookLabels& hook_labels();

// Those that can be non-finite, in order, with the numbers of their sites, out of a dict by label.
struct HookTensors {
  struct Item {
    pybind11::object label;
    PyObject* tensor;  // the caller holds it
    std::int64_t site;
    Py_ssize_t position;  // among all tensors
  };
  c10::SmallVector<Item, 4> items;
  Py_ssize_t count = 0;  // of all tensors

  // False where Python has to look: a container of another kind, a tensor without a site.
  bool add(PyObject* value, PyObject* label, PyObject* sites, int depth = 0);
  bool add_arguments(PyObject* args, PyObject* kwargs, PyObject* sites);

 private:
  bool add_tensor(PyObject* tensor, PyObject* label, PyObject* sites);
};

}  // namespace fastcheck
