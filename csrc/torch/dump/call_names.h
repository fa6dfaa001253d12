// The names that the calls of a dump go by: python/fastcheck/dump/dispatch.py, CallNamer, has the
// same in Python, and says what they are.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>

#include "torch/dump/op_facts.h"

namespace fastcheck::dump {

enum class Direction { kForward, kBackward, kOptimizer };
constexpr std::array<const char*, 3> kDirections{"forward", "backward", "optimizer"};

// A module, and how the index names it, in JSON.
struct ModuleText {
  pybind11::object node;  // a ModuleNode; None: outside the model
  std::string path, type;
};

// What backward has to know of a call of the forward pass.
struct Forward {
  Forward(const OpFacts* op, std::int64_t call, const ModuleText* module)
      : op(op), call(call), module(module) {}

  const OpFacts* op;
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
  const OpFacts* op;
  std::int64_t call;
  Direction direction;
  const ModuleText* module;
  std::shared_ptr<Forward> forward;
  bool is_recompute = false;
};

// Where Python is.
struct Whereabouts {
  PyObject* node;  // the innermost module's, or None
  bool is_recompute;
  bool is_in_optimizer;
};

// Of one dump. Not thread-safe.
class CallNamer {
 public:
  CallNamer();

  // The call of `op` that is about to run. `python` has what module.h says of it.
  CallName name(const OpFacts& op, const Whereabouts& where, const pybind11::object& python);
  // Remembers which of autograd's nodes a call of forward has made, if it has made one: the first
  // call that finds a new one is the one that it belongs to.
  void add(const CallName& name);

 private:
  const ModuleText* module_of(PyObject* node, const pybind11::object& python);

  // What a thread has seen last of the nodes that it makes.
  struct Thread {
    std::int64_t newest = -1;
    bool is_first = false;
  };

  std::int64_t oldest_;  // nodes up to this one belong to nothing that was seen
  std::unordered_map<std::thread::id, Thread> threads_;
  std::array<std::unordered_map<const OpFacts*, std::int64_t>, 3> counts_;
  std::unordered_map<std::int64_t, std::shared_ptr<Forward>> forwards_;
  std::unordered_map<const PyObject*, std::unique_ptr<ModuleText>> modules_;
};

}  // namespace fastcheck::dump
