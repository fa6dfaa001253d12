// The vector vocabulary of cpu/vector_kernel.h, in AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/dtypes.h"
#include "core/platform.h"

namespace fastcheck::cpu {
namespace {

constexpr int kVectorBytes = 32;
// Vectors of lane sums kept in registers at once, of three sums each: 6 of 16 registers.
constexpr int kBlockSums = 2;
// A comparison gives a vector, which is counted with the next one.
constexpr bool kCountsInLanes = true;

// Sixteen registers hold either a tile's sums or its checksum chains: each has a reading of its
// own.
constexpr bool kChecksumApart = true;

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vec = typename VectorOf<T>::type;

template <class T>
FASTCHECK_FN Vec<T> vmin(Vec<T> a, Vec<T> b) {
  [[maybe_unused]] const __m256i x = (__m256i)a, y = (__m256i)b;
  if constexpr (std::is_same_v<T, std::uint8_t>) return (Vec<T>)_mm256_min_epu8(x, y);
  if constexpr (std::is_same_v<T, std::uint16_t>) return (Vec<T>)_mm256_min_epu16(x, y);
  if constexpr (std::is_same_v<T, std::uint32_t>) return (Vec<T>)_mm256_min_epu32(x, y);
  if constexpr (std::is_same_v<T, std::int8_t>) return (Vec<T>)_mm256_min_epi8(x, y);
  if constexpr (std::is_same_v<T, std::int16_t>) return (Vec<T>)_mm256_min_epi16(x, y);
  if constexpr (std::is_same_v<T, std::int32_t>) return (Vec<T>)_mm256_min_epi32(x, y);
  if constexpr (sizeof(T) == 8) return a < b ? a : b;  // a comparison and a blend
}

template <class T>
FASTCHECK_FN Vec<T> vmax(Vec<T> a, Vec<T> b) {
  [[maybe_unused]] const __m256i x = (__m256i)a, y = (__m256i)b;
  if constexpr (std::is_same_v<T, std::uint8_t>) return (Vec<T>)_mm256_max_epu8(x, y);
  if constexpr (std::is_same_v<T, std::uint16_t>) return (Vec<T>)_mm256_max_epu16(x, y);
  if constexpr (std::is_same_v<T, std::uint32_t>) return (Vec<T>)_mm256_max_epu32(x, y);
  if constexpr (std::is_same_v<T, std::int8_t>) return (Vec<T>)_mm256_max_epi8(x, y);
  if constexpr (std::is_same_v<T, std::int16_t>) return (Vec<T>)_mm256_max_epi16(x, y);
  if constexpr (std::is_same_v<T, std::int32_t>) return (Vec<T>)_mm256_max_epi32(x, y);
  if constexpr (sizeof(T) == 8) return a > b ? a : b;  // a comparison and a blend
}

// The number of lanes with their top bit set. AVX2 has no 16-bit mask: the top bits move to byte
// masks, two bits a lane, of which one is cleared.
template <class T>
FASTCHECK_FN int count_top_bit(Vec<T> x) {
  unsigned mask = 0;
  if constexpr (sizeof(T) == 1) mask = _mm256_movemask_epi8((__m256i)x);
  if constexpr (sizeof(T) == 2) mask = _mm256_movemask_epi8((__m256i)x) & 0xaaaaaaaau;
  if constexpr (sizeof(T) == 4) mask = _mm256_movemask_ps((__m256)x);
  if constexpr (sizeof(T) == 8) mask = _mm256_movemask_pd((__m256d)x);
  return __builtin_popcount(mask);
}

template <class T, int kVectors>
FASTCHECK_FN int count_top_bits(const Vec<T> (&x)[kVectors]) {
  int count = 0;
  for (int j = 0; j < kVectors; ++j) count += count_top_bit<T>(x[j]);
  return count;
}

template <class T>
FASTCHECK_FN int count_equal(Vec<T> x, Vec<T> y) {
  const __m256i a = (__m256i)x, b = (__m256i)y;
  if constexpr (sizeof(T) == 1) return count_top_bit<T>((Vec<T>)_mm256_cmpeq_epi8(a, b));
  if constexpr (sizeof(T) == 2) return count_top_bit<T>((Vec<T>)_mm256_cmpeq_epi16(a, b));
  if constexpr (sizeof(T) == 4) return count_top_bit<T>((Vec<T>)_mm256_cmpeq_epi32(a, b));
  if constexpr (sizeof(T) == 8) return count_top_bit<T>((Vec<T>)_mm256_cmpeq_epi64(a, b));
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
  const __m256i a = (__m256i)x, b = (__m256i)y;
  if constexpr (sizeof(T) == 1) return count_top_bit<T>((Vec<T>)_mm256_cmpgt_epi8(b, a));
  if constexpr (sizeof(T) == 2) return count_top_bit<T>((Vec<T>)_mm256_cmpgt_epi16(b, a));
  if constexpr (sizeof(T) == 4) return count_top_bit<T>((Vec<T>)_mm256_cmpgt_epi32(b, a));
  if constexpr (sizeof(T) == 8) return count_top_bit<T>((Vec<T>)_mm256_cmpgt_epi64(b, a));
}

FASTCHECK_FN Vec<float> vfma(Vec<float> x, Vec<float> y, Vec<float> z) {
  return _mm256_fmadd_ps(x, y, z);
}
FASTCHECK_FN Vec<double> vfma(Vec<double> x, Vec<double> y, Vec<double> z) {
  return _mm256_fmadd_pd(x, y, z);
}

template <int kBits>
FASTCHECK_FN Vec<std::uint32_t> rotate_left(Vec<std::uint32_t> x) {
  return (x << kBits) | (x >> (32 - kBits));
}

// 16 float16 to 2 x 8 float32, in order.
FASTCHECK_FN void half_to_float(Vec<std::uint16_t> x, Vec<float>& low, Vec<float>& high) {
  low = _mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)x));
  high = _mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)x, 1));
}

FASTCHECK_FN void half_to_float(const std::byte* data, Vec<float>& low, Vec<float>& high) {
  const auto half = reinterpret_cast<const __m128i*>(data);
  low = _mm256_cvtph_ps(_mm_loadu_si128(half));
  high = _mm256_cvtph_ps(_mm_loadu_si128(half + 1));
}

FASTCHECK_FN void float_to_double(Vec<float> x, Vec<double>& low, Vec<double>& high) {
  low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
  high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
}

// Adjacent pairs: a0+a1, a2+a3, b0+b1, b2+b3.
FASTCHECK_FN Vec<double> add_pairs(Vec<double> a, Vec<double> b) {
  return _mm256_permute4x64_pd(_mm256_hadd_pd(a, b), _MM_SHUFFLE(3, 1, 2, 0));
}

// ---- narrow integers (cpu/vector_narrow.h) -----------------------------------------------------

template <class T>
FASTCHECK_FN void count_where_equal(Vec<T>& counter, Vec<T> x, Vec<T> y) {
  using Count = std::make_unsigned_t<T>;  // a signed one may not pass 127
  counter = (Vec<T>)((Vec<Count>)counter - (Vec<Count>)(x == y));
}
template <class T>
FASTCHECK_FN void count_where_less(Vec<T>& counter, Vec<T> x, Vec<T> y) {
  using Count = std::make_unsigned_t<T>;  // a signed one may not pass 127
  counter = (Vec<T>)((Vec<Count>)counter - (Vec<Count>)(x < y));
}

FASTCHECK_FN Vec<std::uint8_t> absolute_bytes(Vec<std::int8_t> x) {
  return (Vec<std::uint8_t>)_mm256_abs_epi8((__m256i)x);
}

// Bytes, added to sums of eight neighbours each.
FASTCHECK_FN Vec<std::int32_t> add_bytes(Vec<std::int32_t> sums, Vec<std::uint8_t> x) {
  return (Vec<std::int32_t>)_mm256_add_epi64((__m256i)sums,
                                             _mm256_sad_epu8((__m256i)x, _mm256_setzero_si256()));
}

// Products of bytes, added to sums of four neighbours each; two neighbours must fit 16 bits.
FASTCHECK_FN Vec<std::int32_t> add_products(Vec<std::int32_t> sums, Vec<std::uint8_t> x,
                                            Vec<std::int8_t> y) {
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)x, (__m256i)y);
  return sums + (Vec<std::int32_t>)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

// The sums of products of two neighbours each.
FASTCHECK_FN Vec<std::int32_t> sum_of_products(Vec<std::int16_t> x, Vec<std::int16_t> y) {
  return (Vec<std::int32_t>)_mm256_madd_epi16((__m256i)x, (__m256i)y);
}

// ---- wider integers ----------------------------------------------------------------------------

// Four integers as doubles, rounded to nearest.
FASTCHECK_FN Vec<double> to_double(const std::int8_t* p) {
  return _mm256_cvtepi32_pd(_mm_cvtepi8_epi32(_mm_loadu_si32(p)));
}
FASTCHECK_FN Vec<double> to_double(const std::uint8_t* p) {
  return _mm256_cvtepi32_pd(_mm_cvtepu8_epi32(_mm_loadu_si32(p)));
}
FASTCHECK_FN Vec<double> to_double(const std::int16_t* p) {
  return _mm256_cvtepi32_pd(_mm_cvtepi16_epi32(_mm_loadu_si64(p)));
}
FASTCHECK_FN Vec<double> to_double(const std::uint16_t* p) {
  return _mm256_cvtepi32_pd(_mm_cvtepu16_epi32(_mm_loadu_si64(p)));
}
FASTCHECK_FN Vec<double> to_double(const std::int32_t* p) {
  return _mm256_cvtepi32_pd(_mm_loadu_si128((const __m128i*)p));
}
// AVX2 converts nothing wider: the compiler's scalar conversions round to nearest as well.
template <class T>
FASTCHECK_FN Vec<double> to_double(const T* p) {
  T x[4];
  memcpy(x, p, sizeof(x));  // of any alignment
  return Vec<double>{static_cast<double>(x[0]), static_cast<double>(x[1]),
                     static_cast<double>(x[2]), static_cast<double>(x[3])};
}

}  // namespace
}  // namespace fastcheck::cpu
