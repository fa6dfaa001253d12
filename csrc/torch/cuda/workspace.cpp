#include <Python.h>

#include "torch/cuda/workspace.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <limits>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/exponents.h"
#include "kernels/cuda_errors.h"
#include "torch/cuda/black_box.h"
#include "torch/cuda/device.h"
#include "torch/cuda/relaxed_capture.h"
#include "torch/read/unobserved.h"

namespace fastcheck::cuda {

// Pinned memory that the stream reads, and the event behind that reading.
struct PinnedTable {
  at::Tensor memory;
  c10::Event passed;
};

struct StreamBuffers {
  at::Tensor counters;  // int32, zero between launches
  at::Tensor partials;
  at::Tensor table;
  std::vector<PinnedTable> pinned;
  // The identity of a stream that may be destroyed: which one it is, and the event behind the last
  // launch.
  std::uint64_t number = 0;
  std::optional<c10::Event> last;
};

namespace {

constexpr std::int64_t kFirstCounters = 256;
constexpr std::int64_t kFirstBytes = 64 * 1024;

std::mutex mutex;

// Never destroyed: at exit a device may be gone before its memory.
std::map<std::pair<c10::DeviceIndex, void*>, StreamBuffers>& all_buffers() {
  static auto* const buffers = new std::map<std::pair<c10::DeviceIndex, void*>, StreamBuffers>;
  return *buffers;
}

// Asked once, and outside of a capture if anything was launched before it.
std::int32_t multiprocessors_of(c10::DeviceIndex device) {
  static std::map<c10::DeviceIndex, std::int32_t> known;
  const auto found = known.find(device);
  if (found != known.end()) return found->second;
  std::int32_t count = 0;
  check(fastcheck_cuda_device(&count), "looking for the kernels");
  check(fastcheck_cuda_find_exponents(), "looking for the kernels");
  return known[device] = count;
}

// Allocating may let go of Python's lock and take it again: a thread that waits here must not hold
// it.
std::unique_lock<std::mutex> lock() {
  std::unique_lock<std::mutex> held(mutex, std::try_to_lock);
  if (held) return held;
  if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) {
    held.lock();
    return held;
  }
  PyThreadState* const state = PyEval_SaveThread();
  held.lock();
  PyEval_RestoreThread(state);
  return held;
}

// A power of two, so that a size that creeps up does not allocate each time.
std::int64_t grown(std::int64_t wanted, std::int64_t size) {
  while (size < wanted) size *= 2;
  return size;
}

bool is_smaller(const at::Tensor& buffer, std::int64_t wanted) {
  return !buffer.defined() || buffer.numel() < wanted;
}

c10::Stream stream_of(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

Workspaces::Workspaces(c10::Device device, void* stream) : device_(device), lock_(lock()) {
  tuning_.multiprocessors = multiprocessors_of(device.index());
  int is_capturing = 0;
  check(fastcheck_cuda_is_capturing(stream, &is_capturing), "asking for a graph's capture");
  is_capturing_ = is_capturing != 0;
  kept_ = &all_buffers()[{device.index(), stream}];
  if (!is_capturing_) follow_stream(stream);
}

// The buffers of an external stream pass on to the next one with the same handle, behind its work.
void Workspaces::follow_stream(void* stream) {
  const c10::Stream current = stream_of(device_);
  is_external_ = is_external(current, stream);
  if (!is_external_) return;
  std::uint64_t number = 0;
  check(fastcheck_cuda_stream_number(stream, &number), "asking for a stream's number");
  if (kept_->last && kept_->number != number) kept_->last->block(current);
  kept_->number = number;
}

Workspaces::~Workspaces() {
  try {
    mark_table();
    if (is_external_) {
      if (!kept_->last) kept_->last.emplace(device_.type());
      kept_->last->record(stream_of(device_));
    }
  } catch (const std::exception&) {
    // Without an event it is not known when the table is free: it is dropped, and its memory left.
    if (table_ < 0) return;
    new at::Tensor(kept_->pinned[static_cast<std::size_t>(table_)].memory);
    kept_->pinned.erase(kept_->pinned.begin() + table_);
  }
}

std::size_t Workspaces::most_tensors() const {
  return is_capturing_ ? kWithoutTable : std::numeric_limits<int>::max();
}

void Workspaces::mark_table() {
  if (table_ < 0) return;
  kept_->pinned[static_cast<std::size_t>(table_)].passed.record(stream_of(device_));
  table_ = -1;
}

Workspace Workspaces::fit(const WorkspaceSize& size) {
  mark_table();
  const PlainTorch plain;
  const auto bytes = at::TensorOptions(device_).dtype(at::kByte);
  at::Tensor& counters = is_capturing_ ? counters_ : kept_->counters;
  at::Tensor& partials = is_capturing_ ? partials_ : kept_->partials;
  if (is_smaller(counters, size.counters)) {
    counters = at::zeros({grown(size.counters, kFirstCounters)}, bytes.dtype(at::kInt));
  }
  if (is_smaller(partials, size.partials_bytes)) {
    partials = at::empty({grown(size.partials_bytes, kFirstBytes)}, bytes);
  }
  Workspace space{static_cast<Counter*>(counters.mutable_data_ptr()),
                  partials.mutable_data_ptr(),
                  partials.numel(),
                  nullptr,
                  nullptr,
                  0,
                  {},
                  nullptr};
  // A replay would write to the stretch of its capture.
  if (!is_capturing_) space.box = box_of(device_.index());
  if (size.table_bytes == 0) return space;
  if (is_smaller(kept_->table, size.table_bytes)) {
    kept_->table = at::empty({grown(size.table_bytes, kFirstBytes)}, bytes);
  }
  // One that the stream has passed; it is made larger rather than left beside another.
  std::size_t free = 0;
  const RelaxedCapture relaxed;
  while (free < kept_->pinned.size() && !kept_->pinned[free].passed.query()) ++free;
  if (free == kept_->pinned.size()) {
    kept_->pinned.push_back({at::Tensor(), c10::Event(device_.type())});
  }
  at::Tensor& host = kept_->pinned[free].memory;
  if (is_smaller(host, size.table_bytes)) {
    host = at::empty({kept_->table.numel()},
                     at::TensorOptions(at::kCPU).dtype(at::kByte).pinned_memory(true));
  }
  table_ = static_cast<std::ptrdiff_t>(free);
  space.table_host = host.mutable_data_ptr();
  space.table_device = kept_->table.mutable_data_ptr();
  space.table_bytes = size.table_bytes;
  return space;
}

}  // namespace fastcheck::cuda
