// The functions of NVIDIA's libraries that torch's CUDA build and the kernels call, where no device
// is: they are recorded, by thread, and compute nothing.
//
// Memory of the device is memory of the host. Copies and fills are carried out at once, kernels are
// not. cuda_stub.py writes a body for every other function, which returns 0.
#include <cuda_runtime_api.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

// ---- the record of calls ------------------------------------------------------------------------

struct Thread {
  std::mutex mutex;
  long id = syscall(SYS_gettid);
  std::unordered_map<const char*, long> calls;
};

std::mutex of_threads;
std::vector<std::shared_ptr<Thread>>& threads() {
  static auto* const all = new std::vector<std::shared_ptr<Thread>>;  // outlives every thread
  return *all;
}

Thread& this_thread() {
  thread_local const std::shared_ptr<Thread> mine = [] {
    const std::lock_guard<std::mutex> lock(of_threads);
    return threads().emplace_back(std::make_shared<Thread>());
  }();
  return *mine;
}

// ---- memory and handles -------------------------------------------------------------------------

struct Range {
  std::size_t size;
  cudaMemoryType type;
};

std::mutex of_ranges;
std::map<const char*, Range>& ranges() {
  static auto* const all = new std::map<const char*, Range>;
  return *all;
}

cudaError_t allocate(void** out, std::size_t size, cudaMemoryType type) {
  constexpr std::size_t kAlignment = 512;
  const std::size_t whole = (size / kAlignment + 1) * kAlignment;
  *out = std::aligned_alloc(kAlignment, whole);
  std::memset(*out, 0, whole);
  const std::lock_guard<std::mutex> lock(of_ranges);
  ranges()[static_cast<const char*>(*out)] = {whole, type};
  return cudaSuccess;
}

cudaError_t release(void* at) {
  const std::lock_guard<std::mutex> lock(of_ranges);
  ranges().erase(static_cast<const char*>(at));
  std::free(at);
  return cudaSuccess;
}

template <class Handle>
cudaError_t make(Handle* out) {
  static char handles[1 << 16];
  static std::size_t next = 0;
  const std::lock_guard<std::mutex> lock(of_ranges);
  *out = reinterpret_cast<Handle>(handles + ++next % sizeof(handles));
  return cudaSuccess;
}

template <class T>
cudaError_t give(T* out, T value) {
  *out = value;
  return cudaSuccess;
}

thread_local int device = 0;
char context;

struct Configuration {
  dim3 grid, block;
  std::size_t shared;
  void* stream;
};
thread_local Configuration configuration;

int attribute(cudaDeviceAttr of) {
  switch (of) {
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 * 1024;
    default: return 1;
  }
}

}  // namespace

extern "C" {

int stub_note(const char* name) {
  Thread& thread = this_thread();
  const std::lock_guard<std::mutex> lock(thread.mutex);
  ++thread.calls[name];
  return 0;
}

// Writes a line "thread function calls" for each, and forgets them.
void stub_take(char* out, std::size_t size) {
  const std::lock_guard<std::mutex> lock(of_threads);
  std::string text;
  for (const auto& thread : threads()) {
    const std::lock_guard<std::mutex> lock_thread(thread->mutex);
    for (const auto& [name, calls] : thread->calls) {
      text += std::to_string(thread->id) + " " + name + " " + std::to_string(calls) + "\n";
    }
    thread->calls.clear();
  }
  std::snprintf(out, size, "%s", text.c_str());
}

#define FUNCTION(name, parameters, result) \
  cudaError_t name parameters {            \
    stub_note(#name);                      \
    return result;                         \
  }

FUNCTION(cudaGetDeviceCount, (int* out), give(out, 1))
FUNCTION(cudaGetDevice, (int* out), give(out, device))
FUNCTION(cudaSetDevice, (int to), give(&device, to))
FUNCTION(cudaRuntimeGetVersion, (int* out), give(out, CUDART_VERSION))
FUNCTION(cudaDriverGetVersion, (int* out), give(out, CUDART_VERSION))
FUNCTION(cudaDeviceGetAttribute, (int* out, cudaDeviceAttr of, int), give(out, attribute(of)))
FUNCTION(cudaDeviceCanAccessPeer, (int* out, int, int), give(out, 0))
FUNCTION(cudaDeviceGetStreamPriorityRange, (int* low, int* high), give(low, *high = 0))
FUNCTION(cudaDeviceGetPCIBusId, (char* out, int size, int),
         (std::snprintf(out, size, "0000:00:00.0"), cudaSuccess))
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int) {
  stub_note("cudaGetDeviceProperties");
  std::memset(out, 0, sizeof(*out));
  std::snprintf(out->name, sizeof(out->name), "no device");
  out->major = attribute(cudaDevAttrComputeCapabilityMajor);
  out->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  out->warpSize = attribute(cudaDevAttrWarpSize);
  out->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
  out->maxThreadsPerMultiProcessor = 2048;
  out->regsPerMultiprocessor = out->regsPerBlock = 65536;
  out->sharedMemPerBlock = 48 * 1024;
  out->sharedMemPerMultiprocessor = out->sharedMemPerBlockOptin = 227 * 1024;
  out->totalGlobalMem = std::size_t{8} << 30;
  out->l2CacheSize = 50 << 20;
  for (int i = 0; i < 3; ++i) out->maxThreadsDim[i] = 1024, out->maxGridSize[i] = 0x7fffffff;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "no error"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaSuccess"; }

FUNCTION(cudaMalloc, (void** out, std::size_t size), allocate(out, size, cudaMemoryTypeDevice))
FUNCTION(cudaHostAlloc, (void** out, std::size_t size, unsigned),
         allocate(out, size, cudaMemoryTypeHost))
FUNCTION(cudaFree, (void* at), release(at))
FUNCTION(cudaFreeHost, (void* at), release(at))
FUNCTION(cudaHostGetDevicePointer, (void** out, void* at, unsigned), give(out, at))
FUNCTION(cudaMemGetInfo, (std::size_t* free, std::size_t* all),
         give(free, *all = std::size_t{8} << 30))
FUNCTION(cudaMemcpy, (void* to, const void* from, std::size_t size, cudaMemcpyKind),
         (std::memcpy(to, from, size), cudaSuccess))
FUNCTION(cudaMemcpyAsync,
         (void* to, const void* from, std::size_t size, cudaMemcpyKind, cudaStream_t),
         (std::memcpy(to, from, size), cudaSuccess))
FUNCTION(cudaMemset, (void* to, int value, std::size_t size),
         (std::memset(to, value, size), cudaSuccess))
FUNCTION(cudaMemsetAsync, (void* to, int value, std::size_t size, cudaStream_t),
         (std::memset(to, value, size), cudaSuccess))
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* at) {
  stub_note("cudaPointerGetAttributes");
  *out = {};
  const auto address = static_cast<const char*>(at);
  const std::lock_guard<std::mutex> lock(of_ranges);
  auto range = ranges().upper_bound(address);
  if (range == ranges().begin() || address >= (--range)->first + range->second.size) {
    return cudaSuccess;
  }
  out->type = range->second.type;
  out->devicePointer = out->hostPointer = const_cast<void*>(at);
  return cudaSuccess;
}

FUNCTION(cudaStreamCreate, (cudaStream_t * out), make(out))
FUNCTION(cudaStreamCreateWithFlags, (cudaStream_t * out, unsigned), make(out))
FUNCTION(cudaStreamCreateWithPriority, (cudaStream_t * out, unsigned, int), make(out))
FUNCTION(cudaStreamGetPriority, (cudaStream_t, int* out), give(out, 0))
FUNCTION(cudaStreamGetId, (cudaStream_t stream, unsigned long long* out),
         give(out, reinterpret_cast<unsigned long long>(stream)))
FUNCTION(cudaStreamIsCapturing, (cudaStream_t, cudaStreamCaptureStatus* out),
         give(out, cudaStreamCaptureStatusNone))
FUNCTION(cudaStreamGetCaptureInfo,
         (cudaStream_t, cudaStreamCaptureStatus* out, unsigned long long*, cudaGraph_t*,
          const cudaGraphNode_t**, const cudaGraphEdgeData**, std::size_t*),
         give(out, cudaStreamCaptureStatusNone))
FUNCTION(cudaEventCreate, (cudaEvent_t * out), make(out))
FUNCTION(cudaEventCreateWithFlags, (cudaEvent_t * out, unsigned), make(out))
FUNCTION(cudaEventElapsedTime, (float* out, cudaEvent_t, cudaEvent_t), give(out, 0.0f))

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  stub_note("cudaFuncGetAttributes");
  *out = {};
  out->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
  out->numRegs = 32;
  out->binaryVersion = out->ptxVersion = 90;
  return cudaSuccess;
}
FUNCTION(cudaOccupancyMaxActiveBlocksPerMultiprocessor, (int* out, const void*, int, std::size_t),
         give(out, 2))
FUNCTION(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
         (int* out, const void*, int, std::size_t, unsigned), give(out, 2))
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** out, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  int (*const function)() = [] { return stub_note("a function of the driver"); };
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return give(out, reinterpret_cast<void*>(function));
}

// ---- launches, as nvcc writes them --------------------------------------------------------------

FUNCTION(cudaLaunchKernel, (const void*, dim3, dim3, void**, std::size_t, cudaStream_t),
         cudaSuccess)
FUNCTION(__cudaLaunchKernel, (void*, dim3, dim3, void**, std::size_t, void*), cudaSuccess)
FUNCTION(cudaLaunchKernelExC, (const cudaLaunchConfig_t*, const void*, void**), cudaSuccess)

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
char __cudaInitModule(void**) { return 1; }
cudaError_t __cudaGetKernel(void** out, const void* function) {
  return give(out, const_cast<void*>(function));
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared, void* stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  return give(static_cast<void**>(stream), configuration.stream);
}

// ---- the driver ---------------------------------------------------------------------------------

int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  stub_note("cuDevicePrimaryCtxGetState");
  *flags = 0;
  return give(active, 1);
}
int cuDevicePrimaryCtxRetain(void** out, int) {
  stub_note("cuDevicePrimaryCtxRetain");
  return give(out, static_cast<void*>(&context));
}
int cuCtxGetCurrent(void** out) {
  stub_note("cuCtxGetCurrent");
  return give(out, static_cast<void*>(&context));
}
}
