// Call and CallCounter: what the hooks keep of module calls.
// python/fastcheck/calls/module_calls.py has the same in Python.
#pragma once

#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "torch/python/types.h"

namespace fastcheck {

// One call of one module: the tensors that went in and came out, by number, and where it stood. It
// holds no tensors or modules, so that nothing is kept alive. The interpreter's lock guards it.
struct Call {
  pybind11::object node;
  pybind11::object parent;  // a Call, or None
  long long index;
  long long depth;
  unsigned long long thread;
  // The next sequence number when the call began, and when its outputs began to be read: what has
  // it or a later one was made inside, or was first read as one of them.
  long long first_seq;
  long long outputs_seq;
  bool is_recompute;
  // All that it returned was read, and there was any.
  bool is_complete;
  pybind11::object watched;
  struct Input {
    std::int64_t seq;
    std::int64_t site;
  };
  c10::SmallVector<Input, 2> inputs{};
  c10::SmallVector<std::int64_t, 2> outputs{};

  static pybind11::object make(pybind11::object node, long long index, PyObject* parent,
                               unsigned long long thread, long long first_seq, bool is_recompute);
  // nullptr where `object` is of another type.
  static Call* of(PyObject* object);
};

// Numbers the calls of one module within a step, and says whether the recorder takes part in them.
struct CallCounter {
  long long step = -1;
  long long calls = 0;
  long long total = 0;
  std::vector<long long> not_recomputed;
  // The module is not observed any longer.
  bool is_off = false;

  // The index of this call of the module in this step.
  long long next(long long in_step);
  // The index of the call that a recompute repeats, -1 where there is none: backward goes through
  // them last call first.
  long long recomputed(long long in_step);

  static CallCounter& of(pybind11::handle object);
};

// Defines the types Call and CallCounter.
void define_hook_call(pybind11::module_& m);

}  // namespace fastcheck
