// RingRows: the rows of a device's ring that C++ fills without a call into Python.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "core/record.h"
#include "torch/python/cursor.h"
#include "torch/read/observe.h"

namespace fastcheck {

constexpr long long kIdentityNumbers = 8;  // seq, step, call, site, flags, dtype, order, depth

void write_identity(const Identity& identity, std::int64_t dtype, std::int64_t order, Depth depth,
                    long long* row);

// A kernel writes a record to row cursor.slot of `slots`; its identity goes to that row of
// `identities`, a NumPy array of int64 (rows, 8) that python/fastcheck/ring/segments.py reads. All
// with the interpreter's lock and, as Python moves the cursor too, the session's.
class RingRows {
 public:
  // Python's objects, which are kept.
  void set(pybind11::object slots, pybind11::object identities, pybind11::object cursor);
  void clear();

  bool has_room() const { return count_ != 0 && cursor_->slot != count_; }
  long long room() const { return count_ == 0 ? 0 : count_ - cursor_->slot; }
  const pybind11::object& slots() const { return slots_; }
  long long next() const { return cursor_->slot; }
  // The next row was written to: who it is of.
  void put(const Identity& identity, std::int64_t dtype, std::int64_t order, Depth depth);
  // True if both fill the same rows.
  bool has_cursor(pybind11::handle cursor) const { return cursor_object_.is(cursor); }

  // For garbage collection.
  template <class Visit>
  int each(const Visit& visit) const {
    for (const pybind11::object* held : {&slots_, &identities_, &cursor_object_}) {
      if (const int status = visit(held->ptr())) return status;
    }
    return 0;
  }

 private:
  pybind11::object slots_ = pybind11::none(), identities_ = pybind11::none(),
                   cursor_object_ = pybind11::none();
  Cursor* cursor_ = nullptr;
  long long* numbers_ = nullptr;  // of the identities, row by row
  long long count_ = 0;
};

// Defines
//
// copy_rows(source, to, count, stream_id, device_index, device_type)
//                              puts a copy of the first rows on this stream; does not wait
void define_rows(pybind11::module_& m);

}  // namespace fastcheck
