// The C interface of the CUDA kernels: tensors in, Records and flags out, all on a stream.
//
// No function here waits for the device, allocates, or looks at the current device: the caller
// makes the tensors' device current, and owns every buffer. All of it may be captured in a CUDA
// graph; `workspace` and `slots` then belong to the graph for as long as it is replayed.
// Functions return 0, a cudaError_t, or an Error; fastcheck_cuda_error_name() gives its text.
#pragma once

#include <cstdint>

#include "core/dtypes.h"
#include "core/record.h"

namespace fastcheck::cuda {

using Counter = unsigned int;

// Up to this many tensors of a dtype travel in the arguments of a launch; more need a table.
constexpr int kWithoutTable = 32;

// One tensor. Sizes and strides are in elements, strides not negative, and are not read when
// `dense`: then the traversal is the memory from `data` on.
struct TensorArgument {
  const void* data;
  std::int64_t numel;
  const std::int64_t* sizes;
  const std::int64_t* strides;
  std::int64_t slot;  // index into the slots of a launch
  std::int32_t ndim;
  std::uint8_t dtype;
  std::uint8_t order;  // as in the record
  std::uint8_t dense;
  std::uint8_t reserved;
};

// The first non-finite records of each of the last stretches of launches, in memory of the host: it
// can be read when the device is lost. A stretch is a segment of a ring (ring/segments.py), and
// there are as many as a ring has segments: a later one takes the place of none that is still in
// flight.
constexpr int kBoxRows = 16;
constexpr int kBoxStretches = 64;

struct BoxRow {
  Record record;
  std::uint64_t slot;     // the device address that the record was written to
  std::uint64_t stretch;  // 0: the row holds nothing, or is being written
};

struct BlackBox {
  BoxRow rows[kBoxStretches][kBoxRows];
};

// The box that launches use: the device's address of it, and in the device's memory how many rows
// of each stretch are taken, zeroed once, when allocated.
struct BoxArgument {
  BlackBox* box;  // null: there is none
  unsigned long long* claims;
  unsigned long long stretch;  // from 1 on; launches of a later one have a higher number
  std::uint64_t slots;         // the address of the launch's slots; set by the launcher
};

// Buffers of a launch. They may serve any number of launches one after the other on one stream;
// launches that may overlap need their own.
struct Workspace {
  // Zeroed once, when allocated; every launch leaves it zeroed. workspace_counters() of them.
  Counter* counters;
  void* partials;  // device memory, 16-byte aligned, any contents
  std::int64_t partials_bytes;
  // For lists that do not fit the arguments of a launch (more than kWithoutTable): pinned host
  // memory, which must stay as it is until the stream has passed the launch (for as long as a
  // graph that captured it is replayed), and as much device memory. May be null otherwise.
  void* table_host;
  void* table_device;
  std::int64_t table_bytes;
  BoxArgument box;
  // In device memory: where it is 0 when a launch of records runs, that launch reads and writes
  // nothing. So a captured graph can be replayed without them. Null: there is none.
  const std::int32_t* gate;
};

// The way in which the work is cut. Any choice gives the same bits.
struct Tuning {
  std::int32_t multiprocessors;  // of the device
  std::int32_t warps_per_block;  // 1, 2, 4 or 8; 0: chosen
  std::int32_t tiles_per_warp;   // 1, 2, 4, 8, 16 or 32; 0: chosen
  std::int32_t blocks;           // 0: chosen
};

struct WorkspaceSize {
  std::int64_t counters;
  std::int64_t partials_bytes;
  std::int64_t table_bytes;
};

enum Error : int {
  kErrorArgument = -1,   // an unknown dtype or depth, or a tuning that is not in its list
  kErrorWorkspace = -2,  // a buffer is too small or missing
  kErrorAbsent = -3,     // built without the kernels (absent.cpp)
};

extern "C" {

// Tells if the kernels run on the current device, and how many multiprocessors it has. All of them
// are loaded there, so that no launch has to wait for that.
int fastcheck_cuda_device(std::int32_t* multiprocessors);

// Tells if what is put on `stream` becomes part of a graph instead of running.
int fastcheck_cuda_is_capturing(void* stream, int* is_capturing);

// A number that no other stream of this process has or will have, unlike its handle.
int fastcheck_cuda_stream_number(void* stream, std::uint64_t* number);

// Sets which calls of this thread end another thread's capture in failure, and returns what it was:
// 0 (global) is a thread's own; with 2 (relaxed) an event may be queried. Negative: it failed.
int fastcheck_cuda_exchange_capture_mode(int mode);

// Memory for a BlackBox, all zeros, and its claims. Allocates; may wait for the device.
int fastcheck_cuda_new_box(BlackBox** host, BoxArgument* argument);

// The workspace that the two launchers need for these tensors.
int fastcheck_cuda_workspace(const TensorArgument* tensors, int count, const Tuning* tuning,
                             WorkspaceSize* size);

// Writes one Record per tensor to `slots`, in device memory; what the host gives a record (seq,
// step, call, site) is 0. One kernel per dtype among the dense tensors, and one for each tensor
// that must be read through its strides.
int fastcheck_cuda_records(const TensorArgument* tensors, int count, int depth, Record* slots,
                           const Workspace* workspace, const Tuning* tuning, void* stream);

// Sets *found to 1.0f if any component of any tensor is not finite, else leaves it alone: the
// caller zeroes it, or does not, to have the OR with what it holds.
int fastcheck_cuda_found_nonfinite(const TensorArgument* tensors, int count, float* found,
                                   const Workspace* workspace, const Tuning* tuning, void* stream);

const char* fastcheck_cuda_error_name(int error);

// True if the device can't be used by this process any more. An earlier kernel has failed then, not
// the call that returns the error.
int fastcheck_cuda_is_device_lost(int error);
}

}  // namespace fastcheck::cuda
