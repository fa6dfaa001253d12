// The CUDA language as csrc/cuda uses it, for a host compiler.
//
// Every thread of a kernel is a fiber; barriers, shuffles, votes, fences and atomics are where one
// fiber may give way to another (fibers.h). Threads run one at a time, in an order drawn from a
// seed, so that a missing barrier or a result that depends on the order shows as a wrong result,
// and a barrier that only some threads reach as an error.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "cuda_on_cpu/device.h"
#include "cuda_on_cpu/fibers.h"

// ---- types --------------------------------------------------------------------------------------

struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};

using cudaStream_t = void*;
enum cudaError_t : int {
  cudaSuccess = 0,
  cudaErrorECCUncorrectable = 214,
  cudaErrorNvlinkUncorrectable = 220,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchTimeout = 702,
  cudaErrorAssert = 710,
  cudaErrorHardwareStackError = 714,
  cudaErrorIllegalInstruction = 715,
  cudaErrorMisalignedAddress = 716,
  cudaErrorInvalidAddressSpace = 717,
  cudaErrorInvalidPc = 718,
  cudaErrorLaunchFailure = 719
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice };

enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                                   cudaStream_t stream) {
  cuda_on_cpu::copy_on(stream, to, from, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 2;
  return cudaSuccess;
}

inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = cuda_on_cpu::is_capturing(stream) ? cudaStreamCaptureStatusActive
                                              : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal,
  cudaStreamCaptureModeThreadLocal,
  cudaStreamCaptureModeRelaxed
};

inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  *mode = static_cast<cudaStreamCaptureMode>(cuda_on_cpu::exchange_capture_mode(*mode));
  return cudaSuccess;
}

inline cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = cuda_on_cpu::number_of(stream);
  return cudaSuccess;
}

enum { cudaHostAllocMapped = 2 };

inline cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  *memory = std::malloc(bytes);
  return cudaSuccess;
}

inline cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}

// Not the device's memory: kernels find it without locate().
inline cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  *memory = std::memset(std::malloc(bytes), 0xa5, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}

// Such a stream runs its work at once.
enum { cudaStreamNonBlocking = 1 };
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t*, unsigned) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

inline cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return cudaSuccess;
}

inline cudaError_t cudaGetLastError() {
  return static_cast<cudaError_t>(cuda_on_cpu::take_error());
}

inline const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorIllegalAddress) return "an illegal memory access was encountered";
  return error == cudaSuccess ? "no error" : cuda_on_cpu::error_message();
}

// ---- a thread's place ---------------------------------------------------------------------------

#define threadIdx (::cuda_on_cpu::current_thread().thread)
#define blockIdx (::cuda_on_cpu::current_thread().block)
#define blockDim (::cuda_on_cpu::current_thread().block_size)
#define gridDim (::cuda_on_cpu::current_thread().grid_size)

namespace cuda_on_cpu {

inline cudaError_t run(unsigned grid, unsigned block, const std::function<void()>& kernel) {
  return run_grid(grid, block, kernel) ? cudaSuccess : cudaErrorLaunchFailure;
}

template <class Arguments>
void launch(void (*kernel)(Arguments), unsigned grid, unsigned block, unsigned shared,
            cudaStream_t stream, const Arguments& arguments) {
  if (has_lasting_error()) return;
  if (!launch_on(stream, kernel, grid, block, shared, arguments)) {
    set_error(cudaErrorLaunchFailure, false);
  }
}

// The bits of a value of up to 64 bits, and back.
template <class T>
std::uint64_t to_bits(T x) {
  static_assert(sizeof(T) <= 8);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof(T));
  return bits;
}
template <class T>
T from_bits(std::uint64_t bits) {
  T x;
  std::memcpy(&x, &bits, sizeof(T));
  return x;
}

}  // namespace cuda_on_cpu

// ---- barriers, shuffles, votes ------------------------------------------------------------------

inline void __syncthreads(int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  cuda_on_cpu::block_barrier({file, line});
}

inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE(),
                       const char* file = __builtin_FILE()) {
  cuda_on_cpu::warp_exchange(mask, 0, {file, line});
}

template <class T>
T __shfl_xor_sync(unsigned mask, T x, int lane_mask, int line = __builtin_LINE(),
                  const char* file = __builtin_FILE()) {
  const auto& lanes = cuda_on_cpu::warp_exchange(mask, cuda_on_cpu::to_bits(x), {file, line});
  return cuda_on_cpu::from_bits<T>(lanes[(cuda_on_cpu::current_thread().lane ^ lane_mask) & 31]);
}

template <class T>
T __shfl_sync(unsigned mask, T x, int lane, int line = __builtin_LINE(),
              const char* file = __builtin_FILE()) {
  const auto& lanes = cuda_on_cpu::warp_exchange(mask, cuda_on_cpu::to_bits(x), {file, line});
  return cuda_on_cpu::from_bits<T>(lanes[lane & 31]);
}

inline int __any_sync(unsigned mask, int x, int line = __builtin_LINE(),
                      const char* file = __builtin_FILE()) {
  const auto& lanes = cuda_on_cpu::warp_exchange(mask, x != 0, {file, line});
  for (const std::uint64_t lane : lanes) {
    if (lane != 0) return 1;
  }
  return 0;
}

inline int __all_sync(unsigned mask, int x, int line = __builtin_LINE(),
                      const char* file = __builtin_FILE()) {
  const auto& lanes = cuda_on_cpu::warp_exchange(mask, x != 0, {file, line});
  for (const std::uint64_t lane : lanes) {
    if (lane == 0) return 0;
  }
  return 1;
}

// ---- memory -------------------------------------------------------------------------------------

inline void __threadfence() { cuda_on_cpu::give_way(); }
inline void __threadfence_system() { cuda_on_cpu::give_way(); }

template <class T>
T __ldg(const T* at) {
  if (reinterpret_cast<std::uintptr_t>(at) % sizeof(T) != 0) {
    cuda_on_cpu::fail("misaligned load");
  }
  return *at;
}

template <class T>
T __ldcg(const T* at) {
  cuda_on_cpu::give_way();
  return __ldg(at);
}

template <class T>
T atomicAdd(T* at, T x) {
  cuda_on_cpu::give_way();
  const T old = *at;
  *at = old + x;
  cuda_on_cpu::give_way();
  return old;
}

template <class T>
T atomicMax(T* at, T x) {
  cuda_on_cpu::give_way();
  const T old = *at;
  *at = old > x ? old : x;
  cuda_on_cpu::give_way();
  return old;
}

template <class T>
T atomicMin(T* at, T x) {
  cuda_on_cpu::give_way();
  const T old = *at;
  *at = old < x ? old : x;
  cuda_on_cpu::give_way();
  return old;
}

template <class T>
T atomicExch(T* at, T x) {
  cuda_on_cpu::give_way();
  const T old = *at;
  *at = x;
  cuda_on_cpu::give_way();
  return old;
}

template <class T>
T atomicCAS(T* at, T expected, T x) {
  cuda_on_cpu::give_way();
  const T old = *at;
  if (old == expected) *at = x;
  cuda_on_cpu::give_way();
  return old;
}

inline unsigned atomicInc(unsigned* at, unsigned limit) {
  cuda_on_cpu::give_way();
  const unsigned old = *at;
  *at = old >= limit ? 0 : old + 1;
  cuda_on_cpu::give_way();
  return old;
}

// ---- integers of two words ----

// Of high:low, shifted: the lower word of a shift to the right, by up to 31 bits.
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  const std::uint64_t both = static_cast<std::uint64_t>(high) << 32 | low;
  return static_cast<unsigned>(both >> (shift & 31));
}

// ---- packed integers ----------------------------------------------------------------------------

inline int __dp4a(int x, int y, int sum) {
  for (int shift = 0; shift < 32; shift += 8) {
    sum += static_cast<std::int8_t>(x >> shift) * static_cast<std::int8_t>(y >> shift);
  }
  return sum;
}

inline unsigned __dp4a(unsigned x, unsigned y, unsigned sum) {
  for (int shift = 0; shift < 32; shift += 8) sum += (x >> shift & 255) * (y >> shift & 255);
  return sum;
}

namespace cuda_on_cpu {

template <class Half, class Pick>
unsigned each_half(unsigned x, unsigned y, Pick pick) {
  const auto low = static_cast<Half>(pick(static_cast<Half>(x), static_cast<Half>(y)));
  const auto high = static_cast<Half>(pick(static_cast<Half>(x >> 16), static_cast<Half>(y >> 16)));
  return static_cast<std::uint16_t>(low) | static_cast<unsigned>(static_cast<std::uint16_t>(high))
                                               << 16;
}

}  // namespace cuda_on_cpu

inline unsigned __vmaxs2(unsigned x, unsigned y) {
  return cuda_on_cpu::each_half<std::int16_t>(x, y, [](auto a, auto b) { return a > b ? a : b; });
}
inline unsigned __vmins2(unsigned x, unsigned y) {
  return cuda_on_cpu::each_half<std::int16_t>(x, y, [](auto a, auto b) { return a < b ? a : b; });
}
inline unsigned __vmaxu2(unsigned x, unsigned y) {
  return cuda_on_cpu::each_half<std::uint16_t>(x, y, [](auto a, auto b) { return a > b ? a : b; });
}
inline unsigned __vminu2(unsigned x, unsigned y) {
  return cuda_on_cpu::each_half<std::uint16_t>(x, y, [](auto a, auto b) { return a < b ? a : b; });
}
