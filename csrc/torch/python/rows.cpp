#include "torch/python/rows.h"

#include <ATen/core/Tensor.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <array>

#include "torch/python/tensors.h"
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

void define_rows(py::module_& m) {
  m.def(
      "copy_rows",
      [](py::handle source, py::handle to, std::int64_t count, std::int64_t stream_id,
         std::int64_t device_index, std::int64_t device_type) {
        const at::Tensor &from = unpack(source), &mirror = unpack(to);
        const py::gil_scoped_release released;
        const c10::StreamGuard on_stream(
            c10::Stream::unpack3(stream_id, static_cast<c10::DeviceIndex>(device_index),
                                 static_cast<c10::DeviceType>(device_type)));
        mirror.narrow(0, 0, count).copy_(from.narrow(0, 0, count), true);
      },
      py::arg("source"), py::arg("to"), py::arg("count"), py::arg("stream_id"),
      py::arg("device_index"), py::arg("device_type"));
}

}  // namespace fastcheck
