// Counts exponents with AVX-512.
#include <immintrin.h>

#include <cstdint>

#define FASTCHECK_COUNTS_POSITIONS 1

namespace fastcheck::cpu {
namespace {

constexpr int kVectorBytes = 64;
typedef std::uint8_t Bytes __attribute__((vector_size(kVectorBytes)));

inline Bytes look_up(Bytes table, Bytes index) {
  return (Bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)index);
}
inline Bytes add_saturated(Bytes x, Bytes y) {
  return (Bytes)_mm512_adds_epu8((__m512i)x, (__m512i)y);
}
inline Bytes larger(Bytes x, Bytes y) { return (Bytes)_mm512_max_epu8((__m512i)x, (__m512i)y); }
inline Bytes smaller(Bytes x, Bytes y) { return (Bytes)_mm512_min_epu8((__m512i)x, (__m512i)y); }
// Adds to a plane of sums; what carries over.
inline Bytes carry(Bytes& sum, Bytes x, Bytes y) {
  const auto a = (__m512i)sum, b = (__m512i)x, c = (__m512i)y;
  sum = (Bytes)_mm512_ternarylogic_epi64(a, b, c, 0x96);
  return (Bytes)_mm512_ternarylogic_epi64(a, b, c, 0xe8);
}
// Bytes with this bit.
inline int population(Bytes x, int bit) {
  const auto only = _mm512_set1_epi8(static_cast<char>(1 << bit));
  return __builtin_popcountll(_mm512_test_epi8_mask((__m512i)x, only));
}

}  // namespace
}  // namespace fastcheck::cpu
//
#include "cpu/vector_exponents.h"

namespace fastcheck::cpu {

const ExponentKernels* avx512_exponents() {
  static constexpr ExponentKernels kKernels{{FASTCHECK_FOR_EACH_DTYPE(FASTCHECK_EXPONENT_ROW)}};
  return &kKernels;
}

}  // namespace fastcheck::cpu
