// OpRecorder: records the calls of operators in a dump: records of their inputs and outputs, and a
// line of the index. python/fastcheck/dump/op_calls.py does the same in Python, and also
// lists of names, values and a reference; the two write the same bytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory_resource>
#include <string>
#include <tuple>
#include <utility>

#include "core/record.h"
#include "torch/dump/call_names.h"
#include "torch/dump/fresh_memory.h"
#include "torch/dump/read_cache.h"
#include "torch/operators/filter.h"
#include "torch/operators/op_table.h"
#include "torch/read/observe.h"
#include "torch/read/own_pages.h"

namespace fastcheck::dump {

// A call that is under way.
struct OpCall {
  const Op* op;
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

// The recorder of one dump; `python` and `writer` have the methods listed in module.h. The
// interpreter's lock guards it, and the session's: reading a large tensor lets the former go.
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

  OpCall begin(const Op& op, PyObject* args, PyObject* kwargs);
  // The call's line of the index.
  std::string end(const OpCall& call, PyObject* args, PyObject* kwargs, PyObject* result,
                  std::int64_t number);
  void move(PyObject* node, bool is_recompute, bool is_in_optimizer) {
    namer_.move(node, is_recompute, is_in_optimizer, python_);
  }
  void forget() { cache_.clear(); }
  // Other threads may be within a call.
  void clear() {
    cache_.clear();
    fresh_.clear();
  }
  std::int64_t reused() const { return reused_; }

  template <class Visit>
  int each(const Visit& visit) const {
    if (const int status = visit(python_.ptr())) return status;
    return visit(writer_.object.ptr());
  }

 private:
  using SiteKey = std::tuple<const ModuleText*, const Op*, Direction, Role, std::pmr::string>;

  void describe(std::string& text, const std::string& label, PyObject* object);
  void read(std::string& text, const OpCall& call, Role role, const std::string& label,
            std::size_t place, PyObject* object, bool is_written);
  bool read_here(std::string& text, const at::Tensor& tensor, const Identity& identity,
                 bool is_written);
  std::int32_t site(const OpCall& call, Role role, const std::string& label, std::size_t place);
  void append_others(std::string& text, const Op& op, PyObject* args, PyObject* kwargs);

  pybind11::object python_;
  Writer writer_;
  at::Tensor slots_;
  std::int64_t capacity_;
  Depth depth_;
  std::int64_t step_;
  CallNamer namer_;
  FreshMemory fresh_;
  ReadCache cache_;
  OwnPool pool_;
  std::pmr::map<SiteKey, std::int32_t> sites_{pool_.get()};
  std::int64_t reused_ = 0;
};

}  // namespace fastcheck::dump
