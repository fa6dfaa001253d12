// The __torch_dispatch__ method of a dump's mode, which torch calls in place of each operator:
// without Python bytecode between an operator and its record.
//
// A mode of the dispatcher and not a callback of at::RecordFunction, as op level has it: a dump's
// calls are those below autograd, with what autocast, conjugate views and transforms have made of
// the arguments, and of a kernel of autograd that calls others those others. RecordFunction is
// called above all that, once, and not for what is dispatched again.
#pragma once

#include <pybind11/pybind11.h>

#include <unordered_map>
#include <utility>

#include "torch/dump/op_recorder.h"
#include "torch/operators/op_table.h"
#include "torch/python/lock.h"

namespace fastcheck::dump {

// The dispatch mode of one dump; `python` has the methods listed in module.h. Called with the
// interpreter's lock held.
class OpMode {
 public:
  OpMode(const pybind11::object& python, const pybind11::object& writer, at::Tensor slots,
         Depth depth, std::int64_t step)
      : python_(python),
        session_(python.attr("session")),
        lock_(session_.attr("lock")),
        recorder_(python, writer, std::move(slots), depth, step) {}

  // A new reference; null with Python's exception, which is the operator's own.
  PyObject* dispatch(PyObject* func, PyObject* types, PyObject* args, PyObject* kwargs);
  OpRecorder& recorder() { return recorder_; }

  template <class Visit>
  int each(const Visit& visit) const {
    for (const pybind11::object* held : {&python_, &session_, &lock_}) {
      if (const int status = visit(held->ptr())) return status;
    }
    return recorder_.each(visit);
  }

 private:
  // A function that torch may call in an operator's place.
  struct Function {
    pybind11::object func;   // held, so that no other gets its address
    pybind11::object call;   // the same, without a frame of Python
    const Op* op = nullptr;  // null: a higher-order operator, or one that is passed by
    bool is_higher_order = false;
  };
  const Function& function(PyObject* func);
  bool is_on() const;
  bool is_for_subclass(PyObject* types) const;
  template <class Body>
  bool attempt(const Body& body);

  pybind11::object python_, session_, lock_;
  OpRecorder recorder_;
  std::unordered_map<const PyObject*, Function> functions_;
};

}  // namespace fastcheck::dump
