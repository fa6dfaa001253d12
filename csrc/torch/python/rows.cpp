#include "torch/python/rows.h"

#include <algorithm>
#include <array>

#include "torch/python/types.h"

namespace py = pybind11;

namespace fastcheck {

void write_identity(const Identity& identity, std::int64_t dtype, std::int64_t order, Depth depth,
                    long long* row) {
  const std::array<long long, kIdentityNumbers> numbers{
      identity.seq,   identity.step, identity.call, identity.site,
      identity.flags, dtype,         order,         static_cast<long long>(depth)};
  std::copy(numbers.begin(), numbers.end(), row);
}

void RingRows::set(py::object slots, py::object identities, py::object cursor) {
  cursor_ = &cursor_of(cursor);
  Py_buffer view;
  checked(PyObject_GetBuffer(identities.ptr(), &view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE));
  numbers_ = static_cast<long long*>(view.buf);
  count_ = view.len / static_cast<Py_ssize_t>(kIdentityNumbers * sizeof(long long));
  PyBuffer_Release(&view);  // the array keeps its memory
  slots_ = std::move(slots);
  identities_ = std::move(identities);
  cursor_object_ = std::move(cursor);
}

void RingRows::clear() {
  slots_ = identities_ = cursor_object_ = py::none();
  count_ = 0;
}

void RingRows::put(const Identity& identity, std::int64_t dtype, std::int64_t order, Depth depth) {
  write_identity(identity, dtype, order, depth, numbers_ + cursor_->slot * kIdentityNumbers);
  ++cursor_->slot;
}

}  // namespace fastcheck
