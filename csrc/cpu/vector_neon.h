// The vector vocabulary of cpu/vector_kernel.h, in the Advanced SIMD (NEON) of AArch64.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/dtypes.h"
#include "core/platform.h"

namespace fastcheck::cpu {
namespace {

constexpr int kVectorBytes = 16;
// Vectors of lane sums kept in registers at once, of three sums each: 12 of 32 registers.
constexpr int kBlockSums = 4;
// A comparison gives a vector, which is counted with the next one.
constexpr bool kCountsInLanes = true;

// The registers hold sums and checksum chains at once.
constexpr bool kChecksumApart = false;

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vec = typename VectorOf<T>::type;

template <class T>
FASTCHECK_FN Vec<T> vmin(Vec<T> a, Vec<T> b) {
  if constexpr (std::is_same_v<T, std::uint8_t>) return (Vec<T>)vminq_u8(a, b);
  if constexpr (std::is_same_v<T, std::uint16_t>) return (Vec<T>)vminq_u16(a, b);
  if constexpr (std::is_same_v<T, std::uint32_t>) return (Vec<T>)vminq_u32(a, b);
  if constexpr (std::is_same_v<T, std::int8_t>) return (Vec<T>)vminq_s8(a, b);
  if constexpr (std::is_same_v<T, std::int16_t>) return (Vec<T>)vminq_s16(a, b);
  if constexpr (std::is_same_v<T, std::int32_t>) return (Vec<T>)vminq_s32(a, b);
  if constexpr (sizeof(T) == 8) return a < b ? a : b;  // a comparison and a select
}

template <class T>
FASTCHECK_FN Vec<T> vmax(Vec<T> a, Vec<T> b) {
  if constexpr (std::is_same_v<T, std::uint8_t>) return (Vec<T>)vmaxq_u8(a, b);
  if constexpr (std::is_same_v<T, std::uint16_t>) return (Vec<T>)vmaxq_u16(a, b);
  if constexpr (std::is_same_v<T, std::uint32_t>) return (Vec<T>)vmaxq_u32(a, b);
  if constexpr (std::is_same_v<T, std::int8_t>) return (Vec<T>)vmaxq_s8(a, b);
  if constexpr (std::is_same_v<T, std::int16_t>) return (Vec<T>)vmaxq_s16(a, b);
  if constexpr (std::is_same_v<T, std::int32_t>) return (Vec<T>)vmaxq_s32(a, b);
  if constexpr (sizeof(T) == 8) return a > b ? a : b;  // a comparison and a select
}

// The number of lanes with their top bit set, of several vectors at once. NEON has no lane masks:
// top bits move to the bottom and add up, first from vector to vector and then, once, across lanes.
// A row of 64 lanes has eight vectors at most for T of 16 bits and more, and no lane of 8 bits can
// overflow either, as 255 vectors would have to come first.
template <class T, int kVectors>
FASTCHECK_FN int count_top_bits(const Vec<T> (&x)[kVectors]) {
  static_assert(kVectors < 256);
  constexpr int kShift = 8 * sizeof(T) - 1;
  if constexpr (sizeof(T) == 1) {
    uint8x16_t sum = vshrq_n_u8((uint8x16_t)x[0], kShift);
    for (int j = 1; j < kVectors; ++j) sum = vsraq_n_u8(sum, (uint8x16_t)x[j], kShift);
    return vaddlvq_u8(sum);
  } else if constexpr (sizeof(T) == 2) {
    uint16x8_t sum = vshrq_n_u16((uint16x8_t)x[0], kShift);
    for (int j = 1; j < kVectors; ++j) sum = vsraq_n_u16(sum, (uint16x8_t)x[j], kShift);
    return vaddvq_u16(sum);
  } else if constexpr (sizeof(T) == 4) {
    uint32x4_t sum = vshrq_n_u32((uint32x4_t)x[0], kShift);
    for (int j = 1; j < kVectors; ++j) sum = vsraq_n_u32(sum, (uint32x4_t)x[j], kShift);
    return static_cast<int>(vaddvq_u32(sum));
  } else {
    uint64x2_t sum = vshrq_n_u64((uint64x2_t)x[0], kShift);
    for (int j = 1; j < kVectors; ++j) sum = vsraq_n_u64(sum, (uint64x2_t)x[j], kShift);
    return static_cast<int>(vaddvq_u64(sum));
  }
}

template <class T>
FASTCHECK_FN int count_top_bit(Vec<T> x) {
  const Vec<T> one[1] = {x};
  return count_top_bits<T>(one);
}

template <class T>
FASTCHECK_FN int count_equal(Vec<T> x, Vec<T> y) {
  return count_top_bit<T>((Vec<T>)(x == y));
}

template <class T, int kVectors>
FASTCHECK_FN int count_zeros(const Vec<T> (&x)[kVectors]) {
  Vec<T> is_zero[kVectors];
  for (int j = 0; j < kVectors; ++j) is_zero[j] = (Vec<T>)(x[j] == Vec<T>{});
  return count_top_bits<T>(is_zero);
}

// The number of lanes of x that are below y, both without their top bit.
template <class T>
FASTCHECK_FN int count_less(Vec<T> x, Vec<T> y) {
  return count_top_bit<T>((Vec<T>)(x < y));
}

FASTCHECK_FN Vec<float> vfma(Vec<float> x, Vec<float> y, Vec<float> z) {
  return (Vec<float>)vfmaq_f32(z, x, y);
}
FASTCHECK_FN Vec<double> vfma(Vec<double> x, Vec<double> y, Vec<double> z) {
  return (Vec<double>)vfmaq_f64(z, x, y);
}

// A shift, and another that inserts beside it.
template <int kBits>
FASTCHECK_FN Vec<std::uint32_t> rotate_left(Vec<std::uint32_t> x) {
  return (Vec<std::uint32_t>)vsriq_n_u32(vshlq_n_u32(x, kBits), x, 32 - kBits);
}

// 8 float16 to 2 x 4 float32, in order. Part of every AArch64, half-precision arithmetic or not.
FASTCHECK_FN void half_to_float(Vec<std::uint16_t> x, Vec<float>& low, Vec<float>& high) {
  const float16x8_t half = vreinterpretq_f16_u16((uint16x8_t)x);
  low = (Vec<float>)vcvt_f32_f16(vget_low_f16(half));
  high = (Vec<float>)vcvt_high_f32_f16(half);
}

FASTCHECK_FN void half_to_float(const std::byte* data, Vec<float>& low, Vec<float>& high) {
  Vec<std::uint16_t> x;
  std::memcpy(&x, data, kVectorBytes);
  half_to_float(x, low, high);
}

FASTCHECK_FN void float_to_double(Vec<float> x, Vec<double>& low, Vec<double>& high) {
  low = (Vec<double>)vcvt_f64_f32(vget_low_f32(x));
  high = (Vec<double>)vcvt_high_f64_f32(x);
}

// Adjacent pairs: a0+a1, b0+b1.
FASTCHECK_FN Vec<double> add_pairs(Vec<double> a, Vec<double> b) {
  return (Vec<double>)vpaddq_f64(a, b);
}

// Two integers in the low half of a register, from memory of any alignment.
template <class Half, class T>
FASTCHECK_FN Half load_two(const T* p) {
  std::uint64_t bits = 0;
  memcpy(&bits, p, 2 * sizeof(T));
  return (Half)vcreate_u64(bits);
}

// Two integers as doubles, rounded to nearest.
FASTCHECK_FN Vec<double> to_double(int32x2_t x) { return (Vec<double>)vcvtq_f64_s64(vmovl_s32(x)); }
FASTCHECK_FN Vec<double> to_double(uint32x2_t x) {
  return (Vec<double>)vcvtq_f64_u64(vmovl_u32(x));
}
FASTCHECK_FN Vec<double> to_double(const std::int8_t* p) {
  const int16x8_t x = vmovl_s8(load_two<int8x8_t>(p));
  return to_double(vget_low_s32(vmovl_s16(vget_low_s16(x))));
}
FASTCHECK_FN Vec<double> to_double(const std::uint8_t* p) {
  const uint16x8_t x = vmovl_u8(load_two<uint8x8_t>(p));
  return to_double(vget_low_u32(vmovl_u16(vget_low_u16(x))));
}
FASTCHECK_FN Vec<double> to_double(const std::int16_t* p) {
  return to_double(vget_low_s32(vmovl_s16(load_two<int16x4_t>(p))));
}
FASTCHECK_FN Vec<double> to_double(const std::uint16_t* p) {
  return to_double(vget_low_u32(vmovl_u16(load_two<uint16x4_t>(p))));
}
FASTCHECK_FN Vec<double> to_double(const std::int32_t* p) {
  return to_double(load_two<int32x2_t>(p));
}
FASTCHECK_FN Vec<double> to_double(const std::uint32_t* p) {
  return to_double(load_two<uint32x2_t>(p));
}
FASTCHECK_FN Vec<double> to_double(const std::int64_t* p) {
  int64x2_t x;
  memcpy(&x, p, sizeof(x));
  return (Vec<double>)vcvtq_f64_s64(x);
}
FASTCHECK_FN Vec<double> to_double(const std::uint64_t* p) {
  uint64x2_t x;
  memcpy(&x, p, sizeof(x));
  return (Vec<double>)vcvtq_f64_u64(x);
}

}  // namespace
}  // namespace fastcheck::cpu
