// Finds the tensors among a module's arguments or results. python/fastcheck/utils/torch/flatten.py
// does the same for more kinds of containers.
#pragma once

#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>

namespace fastcheck {

struct HookLabels {
  PyObject* input;
  PyObject* output;
};
const HookLabels& hook_labels();

// The numbers of a module's sites of one role, out of a dict by label, which only grows. That of
// the commonest label is kept at hand: the dict would not be in the cache.
class HookSites {
 public:
  explicit HookSites(pybind11::object numbers) : numbers_(std::move(numbers)) {}

  // -1 where there is none yet.
  std::int64_t of(PyObject* label);
  const pybind11::object& held() const { return numbers_; }

 private:
  pybind11::object numbers_;
  std::int64_t commonest_ = -1;
};

// The tensors that can be non-finite, in order, with the numbers of their sites.
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
  bool add(PyObject* value, PyObject* label, HookSites& sites, int depth = 0);
  bool add_arguments(PyObject* args, PyObject* kwargs, HookSites& sites);

 private:
  bool add_tensor(PyObject* tensor, PyObject* label, HookSites& sites);
};

// A list of (label, tensor), as flatten_arguments() of Python makes it; empty where Python has to
// look: at containers, and at tensors that are sparse, nested or of a class with operators of its
// own.
pybind11::object labelled_arguments(PyObject* args, PyObject* kwargs);

}  // namespace fastcheck
