// The macros that let a function be compiled for the host and for a device.
//
// Every function in core/ has internal linkage and is always inlined: the same header is compiled
// with different instruction sets into one library, and a shared symbol could leave AVX-512 code
// where a plain x86-64 caller finds it.
#pragma once

#if defined(__CUDACC__)
#define FASTCHECK_FN static __host__ __device__ __forceinline__
#define FASTCHECK_FN_MEMBER __host__ __device__ __forceinline__
#else
#define FASTCHECK_FN [[maybe_unused]] static inline __attribute__((always_inline))
#define FASTCHECK_FN_MEMBER inline __attribute__((always_inline))
#endif
