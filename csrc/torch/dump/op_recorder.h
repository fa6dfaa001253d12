// The calls of operators that a dump takes in, in C++: what each has read and made, as records, and
// its line of the index. python/fastcheck/dump/op_calls.py does the same in Python and more: lists
// of names, values, a reference; the two write the same bytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "core/record.h"
#include "torch/dump/call_names.h"
#include "torch/dump/fresh_memory.h"
#include "torch/dump/known_readings.h"
#include "torch/dump/op_facts.h"
#include "torch/observe.h"

namespace fastcheck::dump {

// A call that is under way.
struct OpCall {
  pybind11::object recorder;  // which has what is pointed to
  const OpFacts* op;
  CallName name;
  std::string inputs;  // the items of a JSON list
};

// The RecordWriter, and what it counts: both sides take slots from it.
struct Writer {
  pybind11::object object;
  std::int64_t count = 0, used = 0;

  void load();
  void store() const;
};

// Of one dump; `python` and `writer` are what module.h says. Not thread-safe.
class OpRecorder {
 public:
  OpRecorder(pybind11::object python, pybind11::object writer, at::Tensor slots, Depth depth,
             std::int64_t step)
      : python_(std::move(python)),
        writer_{std::move(writer)},
        slots_(std::move(slots)),
        capacity_(slots_.numel() / static_cast<std::int64_t>(sizeof(Record))),
        depth_(depth),
        step_(step) {}

  OpCall begin(PyObject* self, PyObject* func, PyObject* args, PyObject* kwargs,
               const Whereabouts& where);
  std::string end(OpCall& call, PyObject* args, PyObject* kwargs, PyObject* result,
                  std::int64_t number);
  void forget() { known_.clear(); }
  // Other threads may be within a call.
  void clear() {
    known_.clear();
    fresh_.clear();
  }
  std::int64_t reused() const { return reused_; }

  template <class Visit>
  int each(const Visit& visit) const {
    if (const int status = visit(python_.ptr())) return status;
    return visit(writer_.object.ptr());
  }

 private:
  enum class Role { kInput, kOutput };
  using SiteKey = std::tuple<const ModuleText*, const OpFacts*, Direction, Role, std::string>;

  void describe(std::string& text, const std::string& label, PyObject* object);
  void read(std::string& text, const OpCall& call, Role role, const std::string& label,
            std::size_t place, PyObject* object);
  bool read_here(std::string& text, const at::Tensor& tensor, const Identity& identity);
  std::int32_t site(const OpCall& call, Role role, const std::string& label, std::size_t place);
  void append_others(std::string& text, const OpFacts& op, PyObject* args, PyObject* kwargs);

  pybind11::object python_;
  Writer writer_;
  at::Tensor slots_;
  std::int64_t capacity_;
  Depth depth_;
  std::int64_t step_;
  OpTable ops_;
  CallNamer namer_;
  FreshMemory fresh_;
  KnownReadings known_;
  std::map<SiteKey, std::int32_t> sites_;
  std::int64_t reused_ = 0;
};

}  // namespace fastcheck::dump
