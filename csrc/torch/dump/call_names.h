// The names of the calls in a dump. CallNamer of python/fastcheck/calls/namer.py gives the same
// names in Python, and defines them.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <string>
#include <thread>
#include <unordered_map>

#include "torch/operators/filter.h"
#include "torch/operators/op_table.h"
#include "torch/read/own_pages.h"

namespace fastcheck::dump {

constexpr std::array<const char*, 3> kDirections{"forward", "backward", "optimizer"};

// A module, and how the index names it, in JSON.
struct ModuleText {
  pybind11::object node;  // a ModuleNode; None: outside the model
  std::string path, type;
};

// The part of a call of the forward pass that backward has to know.
struct Forward {
  Forward(const Op* op, std::int64_t call, const ModuleText* module)
      : op(op), call(call), module(module) {}

  const Op* op;
  std::int64_t call;
  const ModuleText* module;

  // Numbers what one run of its backward makes.
  std::int64_t next_made();

 private:
  std::int64_t task_ = -1, made_ = -1;
};

// One call: of backward it goes by the call of forward that it is the backward of, where that is
// known.
struct CallName {
  const Op* op;
  std::int64_t call;
  Direction direction;
  const ModuleText* module;
  std::shared_ptr<Forward> forward;
  bool is_recompute = false;
};

// Names the calls of one dump. The interpreter's lock guards it.
class CallNamer {
 public:
  CallNamer();

  // `python` has the methods listed in module.h. This thread has entered or left a module or an
  // optimizer's step: `node` is the innermost module that runs now, None outside of all.
  void move(PyObject* node, bool is_recompute, bool is_in_optimizer,
            const pybind11::object& python);
  // The call of `op` that is about to run.
  CallName name(const Op& op, const pybind11::object& python);
  // Remembers which of autograd's nodes a call of forward has made, if it has made one: the first
  // call that finds a new one is the one that it belongs to.
  void add(const CallName& name);

 private:
  const ModuleText* module_of(PyObject* node, const pybind11::object& python);

  struct Thread {
    // The newest of autograd's nodes that the thread makes, as it was seen last.
    std::int64_t newest = -1;
    bool is_first = false;
    // The module in which the thread's Python is; null: outside of all modules.
    const ModuleText* module = nullptr;
    bool is_recompute = false, is_in_optimizer = false;
  };

  OwnPool pool_;
  std::int64_t oldest_;  // nodes up to this one belong to nothing that was seen
  std::unordered_map<std::thread::id, Thread> threads_;
  using Counts = std::pmr::unordered_map<const Op*, std::int64_t>;
  std::array<Counts, 3> counts_{Counts(pool_.get()), Counts(pool_.get()), Counts(pool_.get())};
  // Calls by the number of autograd's node. Each Forward lies in the pool.
  std::pmr::unordered_map<std::int64_t, std::shared_ptr<Forward>> forwards_{pool_.get()};
  std::unordered_map<const PyObject*, std::unique_ptr<ModuleText>> modules_;
};

}  // namespace fastcheck::dump
