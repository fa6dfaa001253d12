// Single instructions that CUDA C++ has no operator for, each with the plain code that it equals.
//
// The plain code serves older GPUs and tests/fakes/cuda_on_cpu; tests/fakes/test_ptx_machine.py
// holds the instruction to it, as the PTX ISA defines it.
#pragma once

#include <cstdint>

#include "core/element.h"
#include "cuda/platform.cuh"

#if defined(__CUDA_ARCH__)
#define FASTCHECK_DEVICE_ARCH __CUDA_ARCH__
#else
#define FASTCHECK_DEVICE_ARCH 0
#endif

namespace fastcheck::cuda {

constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr int kWarp = 32;

// The same number, but the compiler does not know it: what follows from it in a loop is computed
// there, not ahead of it and kept in registers.
FASTCHECK_DEVICE int opaque(int x) {
#if FASTCHECK_DEVICE_ARCH
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// warp_index(), computed where it is needed.
FASTCHECK_DEVICE int opaque_warp_index() {
  return static_cast<int>(static_cast<unsigned>(opaque(static_cast<int>(threadIdx.x))) / 32);
}

// Has the compiler compute x ahead of the votes and volatile instructions that follow.
FASTCHECK_DEVICE void compute_here([[maybe_unused]] std::uint32_t x) {
#if FASTCHECK_DEVICE_ARCH
  asm volatile("" ::"r"(x));
#endif
}
FASTCHECK_DEVICE void compute_here([[maybe_unused]] float x) {
#if FASTCHECK_DEVICE_ARCH
  asm volatile("" ::"f"(x));
#endif
}
FASTCHECK_DEVICE void compute_here([[maybe_unused]] double x) {
#if FASTCHECK_DEVICE_ARCH
  asm volatile("" ::"d"(x));
#endif
}

// ---- bytes --------------------------------------------------------------------------------------

// PTX prmt: each nibble of `selector`, from the lowest, picks a byte of low (0-3) or high (4-7);
// with 8 added, that byte's sign bit eight times.
FASTCHECK_DEVICE std::uint32_t permute_bytes(std::uint32_t low, std::uint32_t high,
                                             std::uint32_t selector) {
#if FASTCHECK_DEVICE_ARCH
  std::uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
  return out;
#else
  const std::uint64_t both = static_cast<std::uint64_t>(high) << 32 | low;
  std::uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t nibble = selector >> (4 * i) & 15;
    std::uint32_t byte = static_cast<std::uint32_t>(both >> (8 * (nibble & 7))) & 0xff;
    if ((nibble & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;
    out |= byte << (8 * i);
  }
  return out;
#endif
}

// 0xff for each byte whose top bit is set.
FASTCHECK_DEVICE std::uint32_t top_bits(std::uint32_t bytes) {
  return permute_bytes(bytes, 0, 0xba98);
}

// 0xff for each half-word of two words whose top bit is set.
FASTCHECK_DEVICE std::uint32_t top_bits_of_halves(std::uint32_t first, std::uint32_t second) {
  return permute_bytes(first, second, 0xfdb9);
}

FASTCHECK_DEVICE std::uint32_t dot_unsigned(std::uint32_t x, std::uint32_t y, std::uint32_t sum) {
  return __dp4a(x, y, sum);
}
FASTCHECK_DEVICE std::int32_t dot_signed(std::uint32_t x, std::uint32_t y, std::int32_t sum) {
  return __dp4a(static_cast<int>(x), static_cast<int>(y), sum);
}

// Adds the number of bytes that are 0xff; the others are 0.
FASTCHECK_DEVICE std::uint32_t add_mask(std::uint32_t mask, std::uint32_t sum) {
  return static_cast<std::uint32_t>(dot_signed(mask, 0xffffffffu, static_cast<std::int32_t>(sum)));
}

// ---- 16-bit floats, two to a word ---------------------------------------------------------------

// Order of the numbers as order of signed integers; -0 comes just before +0.
FASTCHECK_DEVICE std::int32_t half_order(std::uint32_t half) {
  const auto magnitude = static_cast<std::int32_t>(half & 0x7fff);
  return (half & 0x8000) != 0 ? -1 - magnitude : magnitude;
}

template <class Pick>
FASTCHECK_DEVICE std::uint32_t each_half(std::uint32_t x, std::uint32_t y, Pick pick) {
  return pick(x & 0xffff, y & 0xffff) | pick(x >> 16, y >> 16) << 16;
}

// kBrain: bfloat16, else float16. A NaN in either gives the NaN 0x7fff.
template <bool kBrain>
FASTCHECK_DEVICE std::uint32_t max_or_nan(std::uint32_t x, std::uint32_t y) {
#if FASTCHECK_DEVICE_ARCH >= 800
  std::uint32_t out;
  if constexpr (kBrain) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(x), "r"(y));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(out) : "r"(x), "r"(y));
  }
  return out;
#else
  constexpr std::uint32_t kInf = kBrain ? 0x7f80 : 0x7c00;
  return each_half(x, y, [](std::uint32_t a, std::uint32_t b) -> std::uint32_t {
    if ((a & 0x7fff) > kInf || (b & 0x7fff) > kInf) return 0x7fff;
    return half_order(a) > half_order(b) ? a : b;
  });
#endif
}

// Neither may be a NaN that matters: it is dropped.
template <bool kBrain>
FASTCHECK_DEVICE std::uint32_t min_number(std::uint32_t x, std::uint32_t y) {
#if FASTCHECK_DEVICE_ARCH >= 800
  std::uint32_t out;
  if constexpr (kBrain) {
    asm("min.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(x), "r"(y));
  } else {
    asm("min.f16x2 %0, %1, %2;" : "=r"(out) : "r"(x), "r"(y));
  }
  return out;
#else
  constexpr std::uint32_t kInf = kBrain ? 0x7f80 : 0x7c00;
  return each_half(x, y, [](std::uint32_t a, std::uint32_t b) -> std::uint32_t {
    if ((a & 0x7fff) > kInf) return b;
    if ((b & 0x7fff) > kInf) return a;
    return half_order(a) < half_order(b) ? a : b;
  });
#endif
}

// The smaller magnitude; the sign bits of the result mean nothing. NaNs are dropped.
template <bool kBrain>
FASTCHECK_DEVICE std::uint32_t min_magnitude(std::uint32_t x, std::uint32_t y) {
#if FASTCHECK_DEVICE_ARCH >= 860
  std::uint32_t out;
  if constexpr (kBrain) {
    asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(x), "r"(y));
  } else {
    asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(out) : "r"(x), "r"(y));
  }
  return out;
#else
  return min_number<kBrain>(x & 0x7fff7fffu, y & 0x7fff7fffu);
#endif
}

// The value of a finite float16 in the lower half of `bits`.
FASTCHECK_DEVICE float half_to_float(std::uint32_t bits) {
#if FASTCHECK_DEVICE_ARCH
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(static_cast<unsigned short>(bits)));
  return out;
#else
  return value<Float16>(static_cast<std::uint16_t>(bits));
#endif
}

// Two float16 times 2^8; the magnitude of each is 0 or from 2^-17 to 2^7.
FASTCHECK_DEVICE std::uint32_t halves_times_256(std::uint32_t halves) {
#if FASTCHECK_DEVICE_ARCH
  std::uint32_t out;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(halves), "r"(0x5c005c00u));
  return out;
#else
  return each_half(halves, 0, [](std::uint32_t half, std::uint32_t) {
    const auto bits = bit_cast<std::uint32_t>(half_to_float(half) * 256.0f);
    const std::uint32_t magnitude = bits << 1 == 0 ? 0 : (bits << 1 >> 14) - (112u << 10);
    return (bits >> 16 & 0x8000) | magnitude;
  });
#endif
}

// Two e4m3fn of a word, its lower ones (0) or its upper ones (1), as float16. What becomes of a NaN
// is above the largest number, or a NaN.
template <int kWhich>
FASTCHECK_DEVICE std::uint32_t halves_of_e4m3(std::uint32_t word) {
#if FASTCHECK_DEVICE_ARCH >= 900  // for sm_89 CUDA 12.0 does not have it
  std::uint32_t out;
  asm("{\n"
      "\t.reg .b16 pair0;\n"
      "\t.reg .b16 pair1;\n"
      "\tmov.b32 {pair0, pair1}, %1;\n"
      "\tcvt.rn.f16x2.e4m3x2 %0, pair%2;\n"
      "}"
      : "=r"(out)
      : "r"(word), "n"(kWhich));
  return out;
#else
  // Moved to where float16 has its sign and exponent, it is 2^8 too small.
  const std::uint32_t upper = permute_bytes(word, 0, kWhich == 0 ? 0x1404 : 0x3424);
  return halves_times_256((upper & 0x80008000u) | ((upper & 0x7fff7fffu) >> 1));
#endif
}

// ---- float32 ------------------------------------------------------------------------------------

// Two float32 at a time: the packed instructions of sm_100 and sm_103 (FADD2, FMUL2, FFMA2). nvcc
// makes none of them by itself, and for other architectures two of each.
#define FASTCHECK_HAS_TWO_FLOATS (FASTCHECK_DEVICE_ARCH / 100 == 10)
constexpr bool kHasTwoFloats = FASTCHECK_HAS_TWO_FLOATS;

// Two results, in the place of a and b, each of its own operands alone.
#if FASTCHECK_HAS_TWO_FLOATS
#define FASTCHECK_TWO_FLOATS(name, instruction, plain)               \
  FASTCHECK_DEVICE void name(float& a, float& b, float x, float y) { \
    asm("{\n"                                                        \
        "\t.reg .b64 both;\n"                                        \
        "\t.reg .b64 with;\n"                                        \
        "\tmov.b64 both, {%0, %1};\n"                                \
        "\tmov.b64 with, {%2, %3};\n"                                \
        "\t" instruction                                             \
        ";\n"                                                        \
        "\tmov.b64 {%0, %1}, both;\n"                                \
        "}"                                                          \
        : "+f"(a), "+f"(b)                                           \
        : "f"(x), "f"(y));                                           \
  }
#else
#define FASTCHECK_TWO_FLOATS(name, instruction, plain)               \
  FASTCHECK_DEVICE void name(float& a, float& b, float x, float y) { \
    const auto one = [](float a, float x) { return plain; };         \
    a = one(a, x);                                                   \
    b = one(b, y);                                                   \
  }
#endif
FASTCHECK_TWO_FLOATS(add_two, "add.rn.f32x2 both, both, with", a + x)
FASTCHECK_TWO_FLOATS(multiply_two, "mul.rn.f32x2 both, both, with", a* x)
FASTCHECK_TWO_FLOATS(add_two_squares, "fma.rn.f32x2 both, with, with, both", fmaf(x, x, a))
#undef FASTCHECK_TWO_FLOATS

FASTCHECK_DEVICE float max_or_nan(float x, float y) {
#if FASTCHECK_DEVICE_ARCH >= 800
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(x), "f"(y));
  return out;
#else
  if (x != x || y != y) return bit_cast<float>(0x7fffffffu);
  return fmaxf(x, y);
#endif
}

// A NaN is dropped; a signaling one too, which C's fminf may return.
FASTCHECK_DEVICE float min_number(float x, float y) {
#if !FASTCHECK_DEVICE_ARCH
  if (x != x) return y;
  if (y != y) return x;
#endif
  return fminf(x, y);
}

// ---- what other blocks wrote --------------------------------------------------------------------

// From the L2 cache, which blocks share: what is kWord words of 64 bits behind `at`, as the
// instruction itself adds it; of an integer, as much as there is room for.
template <int kWord>
FASTCHECK_DEVICE void load_from_block(const void* at, std::uint32_t& out) {
#if FASTCHECK_DEVICE_ARCH
  asm volatile("ld.global.cg.u32 %0, [%1+%2];" : "=r"(out) : "l"(at), "n"(8 * kWord) : "memory");
#else
  out = static_cast<std::uint32_t>(__ldcg(static_cast<const std::uint64_t*>(at) + kWord));
#endif
}
template <int kWord>
FASTCHECK_DEVICE void load_from_block(const void* at, std::uint64_t& out) {
#if FASTCHECK_DEVICE_ARCH
  unsigned long long word;
  asm volatile("ld.global.cg.u64 %0, [%1+%2];" : "=l"(word) : "l"(at), "n"(8 * kWord) : "memory");
  out = word;
#else
  out = __ldcg(static_cast<const std::uint64_t*>(at) + kWord);
#endif
}
template <int kWord>
FASTCHECK_DEVICE void load_from_block(const void* at, double& out) {
#if FASTCHECK_DEVICE_ARCH
  asm volatile("ld.global.cg.f64 %0, [%1+%2];" : "=d"(out) : "l"(at), "n"(8 * kWord) : "memory");
#else
  out = __ldcg(static_cast<const double*>(at) + kWord);
#endif
}

// A double, if `left` is more than kLeast, else zero.
template <int kWord, int kLeast>
FASTCHECK_DEVICE double load_from_block_if(const double* at, int left) {
#if FASTCHECK_DEVICE_ARCH
  double out;
  asm volatile(
      "{\n"
      " .reg .pred there;\n"
      " setp.gt.s32 there, %2, %3;\n"
      " mov.f64 %0, 0d0000000000000000;\n"
      " @there ld.global.cg.f64 %0, [%1+%4];\n"
      "}"
      : "=&d"(out)
      : "l"(at), "r"(left), "n"(kLeast), "n"(8 * kWord)
      : "memory");
  return out;
#else
  return left > kLeast ? __ldcg(at + kWord) : 0.0;
#endif
}

// ---- warps --------------------------------------------------------------------------------------

// The number of the lane, by unsigned numbers: a signed one is divided in four instructions.
FASTCHECK_DEVICE int lane_index() { return static_cast<int>(threadIdx.x % kWarp); }
FASTCHECK_DEVICE int warp_index() { return static_cast<int>(threadIdx.x / kWarp); }
FASTCHECK_DEVICE int warp_count() { return static_cast<int>(blockDim.x / kWarp); }

template <class T>
FASTCHECK_DEVICE T from_lane_xor(T x, int mask) {
  return __shfl_xor_sync(kWholeWarp, x, mask);
}

template <class T>
FASTCHECK_DEVICE T from_lane(T x, int lane) {
  return __shfl_sync(kWholeWarp, x, lane);
}

FASTCHECK_DEVICE std::uint32_t warp_sum(std::uint32_t x) {
#if FASTCHECK_DEVICE_ARCH >= 800
  return __reduce_add_sync(kWholeWarp, x);
#else
  for (int mask = kWarp / 2; mask > 0; mask /= 2) x += from_lane_xor(x, mask);
  return x;
#endif
}

FASTCHECK_DEVICE std::uint32_t warp_max(std::uint32_t x) {
#if FASTCHECK_DEVICE_ARCH >= 800
  return __reduce_max_sync(kWholeWarp, x);
#else
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const std::uint32_t other = from_lane_xor(x, mask);
    x = other > x ? other : x;
  }
  return x;
#endif
}

// The sum over a warp of numbers below 2^51.
FASTCHECK_DEVICE std::uint64_t warp_sum(std::uint64_t x) {
  const std::uint64_t high = warp_sum(static_cast<std::uint32_t>(x >> 24));
  return (high << 24) + warp_sum(static_cast<std::uint32_t>(x) & 0xffffff);
}

FASTCHECK_DEVICE std::uint64_t warp_max(std::uint64_t x) {
  const auto high = static_cast<std::uint32_t>(x >> 32);
  const std::uint32_t most = warp_max(high);
  const std::uint32_t low = warp_max(high == most ? static_cast<std::uint32_t>(x) : 0u);
  return static_cast<std::uint64_t>(most) << 32 | low;
}

FASTCHECK_DEVICE bool any_lane(bool x) { return __any_sync(kWholeWarp, x) != 0; }
FASTCHECK_DEVICE bool all_lanes(bool x) { return __all_sync(kWholeWarp, x) != 0; }

}  // namespace fastcheck::cuda
