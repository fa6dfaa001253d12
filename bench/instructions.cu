// The cost of one component on a GPU, in instructions: the core's per-component work in the form of
// a kernel, compiled to SASS and counted by bench/instructions.py. Nothing here runs.
//
// A thread reads 16 bytes of each row of one run: 4 float32 lanes or 8 lanes of 16 bits, 4 checksum
// chains either way. Rows are unrolled, so that the difference between ROWS=32 and ROWS=16 is the
// cost of 16 rows and nothing else.
//
// Two ways to the counts: COUNT_EACH takes the core's count() as it stands, for every component.
// The other keeps the four integer extremes of the raw bits and the number of sign bits: they tell
// whether a tile has anything that is not an ordinary number, and only such a tile is counted again
// (the CPU kernels work that way).
#include <cstdint>

#include "core/accumulator.h"

#ifndef ROWS
#define ROWS 16
#endif

namespace {

using namespace fastcheck;

constexpr int kWords = 4;  // of 32 bits: one 16-byte load

__device__ __forceinline__ std::uint32_t min_u(std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                               bool pairs) {
  return pairs ? __vimin3_u16x2(a, b, c) : __vimin3_u32(a, b, c);
}
__device__ __forceinline__ std::uint32_t max_u(std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                               bool pairs) {
  return pairs ? __vimax3_u16x2(a, b, c) : __vimax3_u32(a, b, c);
}
__device__ __forceinline__ std::uint32_t min_s(std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                               bool pairs) {
  return pairs ? __vimin3_s16x2(a, b, c) : __vimin3_s32(a, b, c);
}
__device__ __forceinline__ std::uint32_t max_s(std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                               bool pairs) {
  return pairs ? __vimax3_s16x2(a, b, c) : __vimax3_s32(a, b, c);
}

// The exact float32 values of the components of one word.
template <class Format>
__device__ __forceinline__ void widen(std::uint32_t word, float* x) {
  if constexpr (sizeof(typename Format::Bits) == 4) {
    x[0] = __uint_as_float(word);
  } else if constexpr (Format::kMantissaBits == 7) {
    x[0] = __uint_as_float(word << 16);
    x[1] = __uint_as_float(word & 0xffff0000u);
  } else {
    // cvt, not cuda_fp16.h: the header's inline assembly is the same instruction.
    asm("{.reg .f16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi;}"
        : "=f"(x[0]), "=f"(x[1])
        : "r"(word));
  }
}

struct Extremes {
  std::uint32_t min_u = ~0u, max_u = 0, min_s = 0x7fff7fffu, max_s = 0x80008000u;
};

template <class Format, Depth kDepth>
__device__ __forceinline__ void reduce(const uint4* in, std::uint64_t chain, int row_stride,
                                       std::uint32_t* out) {
  constexpr int kPerWord = 4 / sizeof(typename Format::Bits);
  constexpr bool kPairs = kPerWord == 2;
  LaneSums<float> sums[kWords * kPerWord];
  Extremes e;
  Counts counts;
  KeyRange range;
  std::uint32_t negative = 0, a[kWords], b[kWords];
  for (int i = 0; i < kWords; ++i) {
    a[i] = checksum_seed<ChecksumA>(chain + i);
    b[i] = checksum_seed<ChecksumB>(chain + i);
  }
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    const uint4 v = in[row * row_stride];
    const std::uint32_t word[kWords] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
#if defined(COUNT_EACH)
#pragma unroll
      for (int j = 0; j < kPerWord; ++j) {
        const auto bits = static_cast<typename Format::Bits>(word[i] >> (16 * j));
        count<Format>(counts, bits);
        if constexpr (kDepth >= Depth::kStats) {
          if (is_finite<Format>(bits)) include(range, key_of<Format>(bits));
        }
      }
#else
      if (i % 2 == 0) {
        e.min_u = min_u(e.min_u, word[i], word[i + 1], kPairs);
        e.max_u = max_u(e.max_u, word[i], word[i + 1], kPairs);
        e.min_s = min_s(e.min_s, word[i], word[i + 1], kPairs);
        e.max_s = max_s(e.max_s, word[i], word[i + 1], kPairs);
      }
      negative += kPairs ? (word[i] >> 15) & 0x00010001u : word[i] >> 31;
#endif
      if constexpr (kDepth >= Depth::kStats) {
        float x[kPerWord];
        widen<Format>(word[i], x);
#pragma unroll
        for (int j = 0; j < kPerWord; ++j) {
          LaneSums<float>& lane = sums[i * kPerWord + j];
          lane.sum += x[j];
          lane.abs_sum += fabsf(x[j]);
          lane.sum_sq = fmaf(x[j], x[j], lane.sum_sq);
        }
      }
      if constexpr (kDepth >= Depth::kFull) {
        a[i] = checksum_step<ChecksumA>(a[i], word[i]);
        b[i] = checksum_step<ChecksumB>(b[i], word[i]);
      }
    }
  }
  // Everything is stored: what is not used would not be computed.
  *reinterpret_cast<Extremes*>(out) = e;
  out[4] = negative;
  *reinterpret_cast<Counts*>(out + 8) = counts;
  *reinterpret_cast<KeyRange*>(out + 24) = range;
  for (int i = 0; i < kWords; ++i) {
    if constexpr (kDepth >= Depth::kFull) finish_chain(a[i], b[i]);
    out[32 + i] = a[i], out[36 + i] = b[i];
  }
  for (int i = 0; i < kWords * kPerWord; ++i)
    reinterpret_cast<LaneSums<float>*>(out + 40)[i] = sums[i];
}

}  // namespace

#define KERNEL(name, Format, depth)                                                     \
  extern "C" __global__ void name(const uint4* in, std::uint64_t chain, int row_stride, \
                                  std::uint32_t* out) {                                 \
    reduce<Format, depth>(in + threadIdx.x, chain + kWords * threadIdx.x, row_stride,   \
                          out + 128 * threadIdx.x);                                     \
  }
KERNEL(float32_health, Float32, Depth::kHealth)
KERNEL(float32_stats, Float32, Depth::kStats)
KERNEL(float32_full, Float32, Depth::kFull)
KERNEL(bfloat16_health, BFloat16, Depth::kHealth)
KERNEL(bfloat16_stats, BFloat16, Depth::kStats)
KERNEL(bfloat16_full, BFloat16, Depth::kFull)
KERNEL(float16_health, Float16, Depth::kHealth)
KERNEL(float16_stats, Float16, Depth::kStats)
KERNEL(float16_full, Float16, Depth::kFull)
