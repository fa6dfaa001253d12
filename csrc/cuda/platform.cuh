// The CUDA language constructs that the kernels use, for nvcc and for a host compiler.
//
// tests/fakes/cuda_on_cpu compiles the same kernels with a host compiler, over a shim that gives
// every thread a fiber; the launch syntax and shared memory are all that has to be spelt
// differently.
#pragma once

#include <cstddef>
#include <type_traits>

namespace fastcheck::cuda {

// Shared memory of a block of `threads`: T without the warps that the block does not have. They are
// T's last member, an array. No more than a launch may take without asking for it.
template <class T>
constexpr unsigned shared_bytes(unsigned threads) {
  using Warps = decltype(T::warps);
  constexpr unsigned kWarpBytes = sizeof(std::remove_extent_t<Warps>);
  static_assert(sizeof(T) <= 48 * 1024);
  static_assert(offsetof(T, warps) + sizeof(Warps) == sizeof(T));
  return static_cast<unsigned>(offsetof(T, warps)) + threads / 32 * kWarpBytes;
}

}  // namespace fastcheck::cuda

#if defined(__CUDACC__)

#include <cuda_runtime.h>

#define FASTCHECK_DEVICE static __device__ __forceinline__
#define FASTCHECK_DEVICE_MEMBER __device__ __forceinline__
// For what runs once a chunk or less: one copy for all kernels of a file.
#define FASTCHECK_DEVICE_CALLED [[maybe_unused]] static __device__ __noinline__
#define FASTCHECK_KERNEL(threads, blocks_per_sm) \
  __global__ void __launch_bounds__(threads, blocks_per_sm)
// A kernel argument that stays in constant memory although its address is taken.
#define FASTCHECK_ARGUMENT const __grid_constant__
#define FASTCHECK_UNROLL _Pragma("unroll")
#define FASTCHECK_ROLLED _Pragma("unroll 1")

namespace fastcheck::cuda {

// The T of a block, uninitialised, as far as shared_bytes() goes.
template <class T>
__device__ __forceinline__ T& block_shared() {
  extern __shared__ __align__(16) unsigned char block_memory[];
  return *reinterpret_cast<T*>(block_memory);
}

// cudaGetLastError() has its error.
template <class Arguments>
void put_on_stream(void (*kernel)(Arguments), unsigned grid, unsigned block, unsigned shared,
                   cudaStream_t stream, const Arguments& arguments) {
  kernel<<<grid, block, shared, stream>>>(arguments);
}

// Tells if the current device has code for a kernel, which is loaded if it has.
template <class Arguments>
cudaError_t find_kernel(void (*kernel)(Arguments)) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}

}  // namespace fastcheck::cuda

#else

#include "cuda_on_cpu/cuda_on_cpu.h"

#define FASTCHECK_DEVICE [[maybe_unused]] static inline
#define FASTCHECK_DEVICE_MEMBER inline
#define FASTCHECK_DEVICE_CALLED [[maybe_unused]] static
#define FASTCHECK_KERNEL(threads, blocks_per_sm) void
#define FASTCHECK_ARGUMENT const
#define FASTCHECK_UNROLL
#define FASTCHECK_ROLLED

namespace fastcheck::cuda {

template <class T>
T& block_shared() {
  return *static_cast<T*>(cuda_on_cpu::block_memory(shared_bytes<T>(blockDim.x)));
}

template <class Arguments>
void put_on_stream(void (*kernel)(Arguments), unsigned grid, unsigned block, unsigned shared,
                   cudaStream_t stream, const Arguments& arguments) {
  cuda_on_cpu::launch(kernel, grid, block, shared, stream, arguments);
}

template <class Arguments>
cudaError_t find_kernel(void (*kernel)(Arguments)) {
  cuda_on_cpu::note_found(reinterpret_cast<const void*>(kernel));
  return cudaSuccess;
}

}  // namespace fastcheck::cuda

#endif

namespace fastcheck::cuda {

// `Shared` is what the kernel has in shared memory.
template <class Shared, class Arguments>
cudaError_t launch(void (*kernel)(Arguments), unsigned grid, unsigned block, cudaStream_t stream,
                   const Arguments& arguments) {
  // An error that an earlier call left behind is not this launch's. The CUDA runtime is linked into
  // the extension: nobody else looks for errors here.
  static_cast<void>(cudaGetLastError());
  put_on_stream(kernel, grid, block, shared_bytes<Shared>(block), stream, arguments);
  return cudaGetLastError();
}

}  // namespace fastcheck::cuda
