// The vector vocabulary of cpu/vector_kernel.h, in AVX-512 (F, BW, DQ, VL).
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/dtypes.h"
#include "core/platform.h"

namespace fastcheck::cpu {
namespace {

constexpr int kVectorBytes = 64;
// Vectors of lane sums kept in registers at once, of three sums each: 12 of 32 registers.
constexpr int kBlockSums = 4;
// A comparison gives a mask, whose bits are counted at once.
constexpr bool kCountsInLanes = false;

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
  [[maybe_unused]] const __m512i x = (__m512i)a, y = (__m512i)b;
  if constexpr (std::is_same_v<T, std::uint8_t>) return (Vec<T>)_mm512_min_epu8(x, y);
  if constexpr (std::is_same_v<T, std::uint16_t>) return (Vec<T>)_mm512_min_epu16(x, y);
  if constexpr (std::is_same_v<T, std::uint32_t>) return (Vec<T>)_mm512_min_epu32(x, y);
  if constexpr (std::is_same_v<T, std::uint64_t>) return (Vec<T>)_mm512_min_epu64(x, y);
  if constexpr (std::is_same_v<T, std::int8_t>) return (Vec<T>)_mm512_min_epi8(x, y);
  if constexpr (std::is_same_v<T, std::int16_t>) return (Vec<T>)_mm512_min_epi16(x, y);
  if constexpr (std::is_same_v<T, std::int32_t>) return (Vec<T>)_mm512_min_epi32(x, y);
  if constexpr (std::is_same_v<T, std::int64_t>) return (Vec<T>)_mm512_min_epi64(x, y);
}

template <class T>
FASTCHECK_FN Vec<T> vmax(Vec<T> a, Vec<T> b) {
  [[maybe_unused]] const __m512i x = (__m512i)a, y = (__m512i)b;
  if constexpr (std::is_same_v<T, std::uint8_t>) return (Vec<T>)_mm512_max_epu8(x, y);
  if constexpr (std::is_same_v<T, std::uint16_t>) return (Vec<T>)_mm512_max_epu16(x, y);
  if constexpr (std::is_same_v<T, std::uint32_t>) return (Vec<T>)_mm512_max_epu32(x, y);
  if constexpr (std::is_same_v<T, std::uint64_t>) return (Vec<T>)_mm512_max_epu64(x, y);
  if constexpr (std::is_same_v<T, std::int8_t>) return (Vec<T>)_mm512_max_epi8(x, y);
  if constexpr (std::is_same_v<T, std::int16_t>) return (Vec<T>)_mm512_max_epi16(x, y);
  if constexpr (std::is_same_v<T, std::int32_t>) return (Vec<T>)_mm512_max_epi32(x, y);
  if constexpr (std::is_same_v<T, std::int64_t>) return (Vec<T>)_mm512_max_epi64(x, y);
}

FASTCHECK_FN int popcount(std::uint64_t mask) { return __builtin_popcountll(mask); }

// The number of lanes with their top bit set.
template <class T>
FASTCHECK_FN int count_top_bit(Vec<T> x) {
  if constexpr (sizeof(T) == 1) return popcount(_mm512_movepi8_mask((__m512i)x));
  if constexpr (sizeof(T) == 2) return popcount(_mm512_movepi16_mask((__m512i)x));
  if constexpr (sizeof(T) == 4) return popcount(_mm512_movepi32_mask((__m512i)x));
  if constexpr (sizeof(T) == 8) return popcount(_mm512_movepi64_mask((__m512i)x));
}

template <class T>
FASTCHECK_FN int count_equal(Vec<T> x, Vec<T> y) {
  const __m512i a = (__m512i)x, b = (__m512i)y;
  if constexpr (sizeof(T) == 1) return popcount(_mm512_cmpeq_epi8_mask(a, b));
  if constexpr (sizeof(T) == 2) return popcount(_mm512_cmpeq_epi16_mask(a, b));
  if constexpr (sizeof(T) == 4) return popcount(_mm512_cmpeq_epi32_mask(a, b));
  if constexpr (sizeof(T) == 8) return popcount(_mm512_cmpeq_epi64_mask(a, b));
}

// The same of the vectors of a row. Narrowing with saturation keeps top bits and zeros, and one
// mask of 64 bytes leaves the vector registers cheaper than four of 16 words.
template <class T>
FASTCHECK_FN __m512i narrowed(const Vec<T> (&x)[sizeof(T)]) {
  if constexpr (sizeof(T) == 1) return (__m512i)x[0];
  if constexpr (sizeof(T) == 2) return _mm512_packs_epi16((__m512i)x[0], (__m512i)x[1]);
  if constexpr (sizeof(T) == 4) {
    return _mm512_packs_epi16(_mm512_packs_epi32((__m512i)x[0], (__m512i)x[1]),
                              _mm512_packs_epi32((__m512i)x[2], (__m512i)x[3]));
  }
}

template <class T, int kVectors>
FASTCHECK_FN int count_top_bits(const Vec<T> (&x)[kVectors]) {
  if constexpr (sizeof(T) == kVectors) {
    return popcount(_mm512_movepi8_mask(narrowed<T>(x)));
  } else {
    int count = 0;
    for (int j = 0; j < kVectors; ++j) count += count_top_bit<T>(x[j]);
    return count;
  }
}

template <class T, int kVectors>
FASTCHECK_FN int count_zeros(const Vec<T> (&x)[kVectors]) {
  if constexpr (sizeof(T) == kVectors) {
    const __m512i bytes = narrowed<T>(x);
    return popcount(_mm512_testn_epi8_mask(bytes, bytes));
  } else {
    int count = 0;
    for (int j = 0; j < kVectors; ++j) count += count_equal<T>(x[j], Vec<T>{});
    return count;
  }
}

// The number of lanes of x that are below y, both without their top bit.
template <class T>
FASTCHECK_FN int count_less(Vec<T> x, Vec<T> y) {
  const __m512i a = (__m512i)x, b = (__m512i)y;
  if constexpr (sizeof(T) == 1) return popcount(_mm512_cmplt_epi8_mask(a, b));
  if constexpr (sizeof(T) == 2) return popcount(_mm512_cmplt_epi16_mask(a, b));
  if constexpr (sizeof(T) == 4) return popcount(_mm512_cmplt_epi32_mask(a, b));
  if constexpr (sizeof(T) == 8) return popcount(_mm512_cmplt_epi64_mask(a, b));
}

FASTCHECK_FN Vec<float> vfma(Vec<float> x, Vec<float> y, Vec<float> z) {
  return _mm512_fmadd_ps(x, y, z);
}
FASTCHECK_FN Vec<double> vfma(Vec<double> x, Vec<double> y, Vec<double> z) {
  return _mm512_fmadd_pd(x, y, z);
}

template <int kBits>
FASTCHECK_FN Vec<std::uint32_t> rotate_left(Vec<std::uint32_t> x) {
  return (Vec<std::uint32_t>)_mm512_rol_epi32((__m512i)x, kBits);
}

// 32 float16 to 2 x 16 float32, in order.
FASTCHECK_FN void half_to_float(Vec<std::uint16_t> x, Vec<float>& low, Vec<float>& high) {
  low = _mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)x));
  high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)x, 1));
}

FASTCHECK_FN void half_to_float(const std::byte* data, Vec<float>& low, Vec<float>& high) {
  const auto half = reinterpret_cast<const __m256i*>(data);
  low = _mm512_cvtph_ps(_mm256_loadu_si256(half));
  high = _mm512_cvtph_ps(_mm256_loadu_si256(half + 1));
}

FASTCHECK_FN void float_to_double(Vec<float> x, Vec<double>& low, Vec<double>& high) {
  low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
  high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
}

// Adjacent pairs: a0+a1, a2+a3, ... b0+b1, ...
FASTCHECK_FN Vec<double> add_pairs(Vec<double> a, Vec<double> b) {
  const __m512i even = _mm512_set_epi64(14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_set_epi64(15, 13, 11, 9, 7, 5, 3, 1);
  return _mm512_permutex2var_pd(a, even, b) + _mm512_permutex2var_pd(a, odd, b);
}

// ---- narrow integers (cpu/vector_narrow.h) -----------------------------------------------------

// One more where the mask has a bit.
template <class T>
FASTCHECK_FN void count_where(Vec<T>& counter, __mmask64 mask) {
  const __m512i c = (__m512i)counter, minus_one = _mm512_set1_epi32(-1);
  if constexpr (sizeof(T) == 1) {
    counter = (Vec<T>)_mm512_mask_sub_epi8(c, mask, c, minus_one);
  } else {
    counter = (Vec<T>)_mm512_mask_sub_epi16(c, static_cast<__mmask32>(mask), c, minus_one);
  }
}
template <class T>
FASTCHECK_FN void count_where_equal(Vec<T>& counter, Vec<T> x, Vec<T> y) {
  const __m512i a = (__m512i)x, b = (__m512i)y;
  if constexpr (sizeof(T) == 1) count_where<T>(counter, _mm512_cmpeq_epi8_mask(a, b));
  if constexpr (sizeof(T) == 2) count_where<T>(counter, _mm512_cmpeq_epi16_mask(a, b));
}
// Signed.
template <class T>
FASTCHECK_FN void count_where_less(Vec<T>& counter, Vec<T> x, Vec<T> y) {
  const __m512i a = (__m512i)x, b = (__m512i)y;
  if constexpr (sizeof(T) == 1) count_where<T>(counter, _mm512_cmplt_epi8_mask(a, b));
  if constexpr (sizeof(T) == 2) count_where<T>(counter, _mm512_cmplt_epi16_mask(a, b));
}

FASTCHECK_FN Vec<std::uint8_t> absolute_bytes(Vec<std::int8_t> x) {
  return (Vec<std::uint8_t>)_mm512_abs_epi8((__m512i)x);
}

#ifdef __AVX512VNNI__

// Products of bytes, added to sums of four neighbours each.
FASTCHECK_FN Vec<std::int32_t> add_products(Vec<std::int32_t> sums, Vec<std::uint8_t> x,
                                            Vec<std::int8_t> y) {
  return (Vec<std::int32_t>)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)x, (__m512i)y);
}

// Bytes, added to sums of four neighbours each.
FASTCHECK_FN Vec<std::int32_t> add_bytes(Vec<std::int32_t> sums, Vec<std::uint8_t> x) {
  return add_products(sums, x, (Vec<std::int8_t>)_mm512_set1_epi8(1));
}

#else

// Bytes, added to sums of eight neighbours each.
FASTCHECK_FN Vec<std::int32_t> add_bytes(Vec<std::int32_t> sums, Vec<std::uint8_t> x) {
  return (Vec<std::int32_t>)_mm512_add_epi64((__m512i)sums,
                                             _mm512_sad_epu8((__m512i)x, _mm512_setzero_si512()));
}

// Products of bytes, added to sums of four neighbours each; two neighbours must fit 16 bits.
FASTCHECK_FN Vec<std::int32_t> add_products(Vec<std::int32_t> sums, Vec<std::uint8_t> x,
                                            Vec<std::int8_t> y) {
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)x, (__m512i)y);
  return sums + (Vec<std::int32_t>)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}

#endif

// The sums of products of two neighbours each.
FASTCHECK_FN Vec<std::int32_t> sum_of_products(Vec<std::int16_t> x, Vec<std::int16_t> y) {
  return (Vec<std::int32_t>)_mm512_madd_epi16((__m512i)x, (__m512i)y);
}

// ---- wider integers ----------------------------------------------------------------------------

// Eight integers as doubles, rounded to nearest.
FASTCHECK_FN Vec<double> to_double(const std::int8_t* p) {
  return _mm512_cvtepi32_pd(_mm256_cvtepi8_epi32(_mm_loadu_si64(p)));
}
FASTCHECK_FN Vec<double> to_double(const std::uint8_t* p) {
  return _mm512_cvtepi32_pd(_mm256_cvtepu8_epi32(_mm_loadu_si64(p)));
}
FASTCHECK_FN Vec<double> to_double(const std::int16_t* p) {
  return _mm512_cvtepi32_pd(_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)p)));
}
FASTCHECK_FN Vec<double> to_double(const std::uint16_t* p) {
  return _mm512_cvtepi32_pd(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)));
}
FASTCHECK_FN Vec<double> to_double(const std::int32_t* p) {
  return _mm512_cvtepi32_pd(_mm256_loadu_si256((const __m256i*)p));
}
FASTCHECK_FN Vec<double> to_double(const std::uint32_t* p) {
  return _mm512_cvtepu32_pd(_mm256_loadu_si256((const __m256i*)p));
}
FASTCHECK_FN Vec<double> to_double(const std::int64_t* p) {
  return _mm512_cvtepi64_pd(_mm512_loadu_si512(p));
}
FASTCHECK_FN Vec<double> to_double(const std::uint64_t* p) {
  return _mm512_cvtepu64_pd(_mm512_loadu_si512(p));
}

}  // namespace
}  // namespace fastcheck::cpu
