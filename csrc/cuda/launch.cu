// The C interface: groups tensors by component type, cuts them into chunks, and launches.
//
// A group is one launch over the tensors of one component type that are read directly; every other
// tensor is a launch of its own, with its layout in the arguments. Nothing here waits or allocates:
// a long list is written to the caller's pinned memory and copied from there by the stream.
#include "cuda/launch.h"

#include <cstring>

#include "cuda/plan.h"
#include "cuda/records.cuh"
#include "cuda/start.h"

namespace fastcheck::cuda {
namespace {

// ---- groups -------------------------------------------------------------------------------------

// The first dtype of the same component type.
constexpr int component_of(int dtype) {
  if (dtype == static_cast<int>(DType::k_complex64)) return static_cast<int>(DType::k_float32);
  if (dtype == static_cast<int>(DType::k_complex128)) return static_cast<int>(DType::k_float64);
  return dtype;
}

struct Request {
  const TensorArgument* tensors;
  int count;
  Tuning tuning;
};

// Tensors of one launch: a single strided one, or all direct ones of a component type.
struct Group {
  const Request& request;
  int component;
  int strided;  // index of the one tensor, or -1

  template <class Body>
  void for_each(const Body& body) const {
    if (strided >= 0) return body(request.tensors[strided]);
    for (int i = 0; i < request.count; ++i) {
      const TensorArgument& tensor = request.tensors[i];
      if (component_of(tensor.dtype) == component && reads_directly(tensor)) body(tensor);
    }
  }

  int size() const {
    int n = 0;
    for_each([&](const TensorArgument&) { ++n; });
    return n;
  }

  Cut cut(int warps_per_multiprocessor = kRecordsWarpsPerMultiprocessor) const {
    return cuda::cut(
        [&](const auto& body) {
          for_each([&](const TensorArgument& tensor) { body(tile_count(tensor)); });
        },
        request.tuning, warps_per_multiprocessor);
  }
};

// Calls body(group) until one returns something other than 0, and returns that.
template <class Body>
int for_each_group(const Request& request, const Body& body) {
  for (int component = 0; component < kDTypeCount; ++component) {
    if (component_of(component) != component) continue;
    const Group group{request, component, -1};
    if (group.size() == 0) continue;
    if (const int error = body(group)) return error;
  }
  for (int i = 0; i < request.count; ++i) {
    if (reads_directly(request.tensors[i])) continue;
    if (const int error = body(Group{request, component_of(request.tensors[i].dtype), i})) {
      return error;
    }
  }
  return 0;
}

bool readable(const Request& request) {
  if (request.count < 0 || !valid(request.tuning)) return false;
  for (int i = 0; i < request.count; ++i) {
    const TensorArgument& tensor = request.tensors[i];
    if (tensor.dtype >= kDTypeCount || tensor.numel < 0 || tensor.ndim > kMaxDims) return false;
  }
  return true;
}

// ---- arguments of a launch ----------------------------------------------------------------------

class TableSpace {
 public:
  TableSpace(const Workspace& workspace, cudaStream_t stream)
      : host_(static_cast<Entry*>(workspace.table_host)),
        device_(static_cast<Entry*>(workspace.table_device)),
        left_(workspace.table_bytes / static_cast<std::int64_t>(sizeof(Entry))),
        stream_(stream) {}

  int fill(const Group& group, const Cut& cut, int size, List& list) {
    list.chunks = cut.chunks;
    list.count = size;
    list.tiles_per_warp = cut.tiles_per_warp;
    list.table = nullptr;
    if (group.strided >= 0) list.strided.layout = layout_of(group.request.tensors[group.strided]);
    Entry* entries = list.entries;
    const bool inline_entries = size <= kInlineEntries;
    if (!inline_entries) {
      if (host_ == nullptr || device_ == nullptr || left_ < size) return kErrorWorkspace;
      entries = host_;
    }
    const std::int64_t chunk_tiles = std::int64_t{cut.warps} * cut.tiles_per_warp;
    std::int64_t chunk = 0;
    int i = 0;
    group.for_each([&](const TensorArgument& tensor) {
      entries[i++] = entry_of(tensor, chunk);
      chunk += chunks_of(tile_count(tensor), chunk_tiles);
    });
    if (inline_entries) return 0;
    const cudaError_t error =
        cudaMemcpyAsync(device_, host_, size * sizeof(Entry), cudaMemcpyHostToDevice, stream_);
    list.table = device_;
    host_ += size;
    device_ += size;
    left_ -= size;
    return static_cast<int>(error);
  }

 private:
  Entry* host_;
  Entry* device_;
  std::int64_t left_;
  cudaStream_t stream_;
};

template <class Component>
cudaError_t find_kernels() {
  cudaError_t error = find_records<Component>();
  if constexpr (Component::kIsFloat) {
    if (error == cudaSuccess) error = find_found_nonfinite<Component>();
  }
  return error;
}

// Finds the code of all dtypes: a tensor of another one may come while the device is busy, or in a
// capture.
cudaError_t find_code() {
  cudaError_t error = cudaSuccess;
#define FASTCHECK_FIND(code, name, component, components) \
  if (error == cudaSuccess) error = find_kernels<component>();
  FASTCHECK_FOR_EACH_DTYPE(FASTCHECK_FIND)
#undef FASTCHECK_FIND
  return error;
}

template <class Component>
cudaError_t start_found(unsigned grid, unsigned block, cudaStream_t stream,
                        const FoundLaunch& launch) {
  if constexpr (Component::kIsFloat) {
    return start_found_nonfinite<Component>(grid, block, stream, launch);
  } else {
    return cudaSuccess;  // every integer is finite
  }
}

int records(const Request& request, Depth depth, Record* slots, const Workspace& workspace,
            cudaStream_t stream) {
  TableSpace tables(workspace, stream);
  return for_each_group(request, [&](const Group& group) -> int {
    const Cut cut = group.cut();
    if (cut.chunks * kChunkBytes > workspace.partials_bytes) return kErrorWorkspace;
    const int size = group.size();
    const auto start = [&](auto component) -> int {
      using Component = decltype(component);
      const auto with = [&](auto& launch) {
        launch.slots = slots;
        launch.counters = workspace.counters;
        launch.partials = static_cast<Partial*>(workspace.partials);
        launch.box = workspace.box;
        launch.box.slots = reinterpret_cast<std::uintptr_t>(slots);
        launch.gate = workspace.gate;
        return static_cast<int>(start_records<Component>(
            depth, cut.blocks, static_cast<unsigned>(cut.warps * kWarp), stream, launch));
      };
      if constexpr (kHasKernelsOfOne<Component>) {
        if (size == 1 && group.strided < 0) {
          RecordsLaunch<OneTensor> launch;
          group.for_each([&](const TensorArgument& tensor) {
            launch.list = {entry_of(tensor, 0), cut.chunks, cut.tiles_per_warp};
          });
          return with(launch);
        }
      }
      RecordsLaunch<List> launch;
      const int error = tables.fill(group, cut, size, launch.list);
      return error != 0 ? error : with(launch);
    };
    switch (static_cast<DType>(group.component)) {
#define FASTCHECK_CASE(code, name, component, components) \
  case DType::k_##name: return start(component());
      FASTCHECK_FOR_EACH_DTYPE(FASTCHECK_CASE)
#undef FASTCHECK_CASE
    }
    return kErrorArgument;
  });
}

int found_nonfinite(const Request& request, float* found, const Workspace& workspace,
                    cudaStream_t stream) {
  TableSpace tables(workspace, stream);
  return for_each_group(request, [&](const Group& group) -> int {
    const Cut cut = group.cut(kFoundWarpsPerMultiprocessor);
    FoundLaunch launch;
    if (const int error = tables.fill(group, cut, group.size(), launch.list)) return error;
    launch.found = found;
    const auto block = static_cast<unsigned>(cut.warps * kWarp);
    switch (static_cast<DType>(group.component)) {
#define FASTCHECK_CASE(code, name, component, components) \
  case DType::k_##name:                                   \
    return static_cast<int>(start_found<component>(cut.blocks, block, stream, launch));
      FASTCHECK_FOR_EACH_DTYPE(FASTCHECK_CASE)
#undef FASTCHECK_CASE
    }
    return kErrorArgument;
  });
}

}  // namespace
}  // namespace fastcheck::cuda

using namespace fastcheck::cuda;

extern "C" {

int fastcheck_cuda_device(std::int32_t* multiprocessors) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = find_code();
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  return static_cast<int>(error);
}

int fastcheck_cuda_is_capturing(void* stream, int* is_capturing) {
  *is_capturing = 0;
  // The legacy default stream can't be captured, and must not be queried while another one is.
  if (stream == nullptr) return 0;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  *is_capturing = status != cudaStreamCaptureStatusNone;
  return static_cast<int>(error);
}

int fastcheck_cuda_stream_number(void* stream, std::uint64_t* number) {
  unsigned long long id = 0;
  const cudaError_t error = cudaStreamGetId(static_cast<cudaStream_t>(stream), &id);
  *number = id;
  return static_cast<int>(error);
}

int fastcheck_cuda_exchange_capture_mode(int mode) {
  auto exchanged = static_cast<cudaStreamCaptureMode>(mode);
  const cudaError_t error = cudaThreadExchangeStreamCaptureMode(&exchanged);
  return error == cudaSuccess ? static_cast<int>(exchanged) : -1;
}

int fastcheck_cuda_new_box(BlackBox** host, BoxArgument* argument) {
  void* mapped = nullptr;
  void* claims = nullptr;
  cudaError_t error = cudaHostAlloc(&mapped, sizeof(BlackBox), cudaHostAllocMapped);
  if (error != cudaSuccess) return static_cast<int>(error);
  std::memset(mapped, 0, sizeof(BlackBox));
  *host = static_cast<BlackBox*>(mapped);
  error = cudaHostGetDevicePointer(&mapped, mapped, 0);
  constexpr std::size_t kBytes = kBoxStretches * sizeof(*argument->claims);
  if (error == cudaSuccess) error = cudaMalloc(&claims, kBytes);
  // The stream is one of its own: kernels of any stream may follow, and none is waited for.
  cudaStream_t stream = nullptr;
  if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaMemsetAsync(claims, 0, kBytes, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (stream != nullptr) static_cast<void>(cudaStreamDestroy(stream));
  if (error != cudaSuccess) {
    static_cast<void>(cudaFree(claims));
    static_cast<void>(cudaFreeHost(*host));
    return static_cast<int>(error);
  }
  *argument = {static_cast<BlackBox*>(mapped), static_cast<unsigned long long*>(claims), 0, 0};
  return 0;
}

int fastcheck_cuda_workspace(const TensorArgument* tensors, int count, const Tuning* tuning,
                             WorkspaceSize* size) {
  const Request request{tensors, count, *tuning};
  if (!readable(request)) return kErrorArgument;
  *size = {0, 0, 0};
  return for_each_group(request, [&](const Group& group) {
    const int n = group.size();
    size->counters = std::max<std::int64_t>(size->counters, n);
    size->partials_bytes = std::max(size->partials_bytes, group.cut().chunks * kChunkBytes);
    if (n > kInlineEntries) size->table_bytes += n * static_cast<std::int64_t>(sizeof(Entry));
    return 0;
  });
}

int fastcheck_cuda_records(const TensorArgument* tensors, int count, int depth,
                           fastcheck::Record* slots, const Workspace* workspace,
                           const Tuning* tuning, void* stream) {
  const Request request{tensors, count, *tuning};
  if (!readable(request) || depth < 1 || depth > 3) return kErrorArgument;
  return records(request, static_cast<fastcheck::Depth>(depth), slots, *workspace,
                 static_cast<cudaStream_t>(stream));
}

int fastcheck_cuda_found_nonfinite(const TensorArgument* tensors, int count, float* found,
                                   const Workspace* workspace, const Tuning* tuning, void* stream) {
  const Request request{tensors, count, *tuning};
  if (!readable(request)) return kErrorArgument;
  return found_nonfinite(request, found, *workspace, static_cast<cudaStream_t>(stream));
}

const char* fastcheck_cuda_error_name(int error) {
  if (error == kErrorArgument) return "an argument that no kernel takes";
  if (error == kErrorWorkspace) return "a workspace that is too small";
  if (error == kErrorAbsent) return "a build without the kernels";
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

// True for the errors of which the CUDA runtime's reference reads that the process has to be
// terminated, and for those that memory and links report. CUDA 12.0 does not name all of them.
int fastcheck_cuda_is_device_lost(int error) {
  switch (error) {
    case 226:  // cudaErrorContained
    case 721:  // cudaErrorTensorMemoryLeak
    case 810:  // cudaErrorMpsClientTerminated
    case 911:  // cudaErrorExternalDevice
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure: return 1;
    default: return 0;
  }
}
}
