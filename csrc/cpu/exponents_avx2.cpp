// Counts exponents with AVX2.
#include <immintrin.h>

#include <cstdint>

#define FASTCHECK_COUNTS_POSITIONS 1

namespace fastcheck::cpu {
namespace {

constexpr int kVectorBytes = 32;
typedef std::uint8_t Bytes __attribute__((vector_size(kVectorBytes)));

inline Bytes look_up(Bytes table, Bytes index) {
  return (Bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);
}
inline Bytes add_saturated(Bytes x, Bytes y) {
  return (Bytes)_mm256_adds_epu8((__m256i)x, (__m256i)y);
}
inline Bytes larger(Bytes x, Bytes y) { return (Bytes)_mm256_max_epu8((__m256i)x, (__m256i)y); }
inline Bytes smaller(Bytes x, Bytes y) { return (Bytes)_mm256_min_epu8((__m256i)x, (__m256i)y); }
// Adds to a plane of sums; what carries over.
inline Bytes carry(Bytes& sum, Bytes x, Bytes y) {
  const Bytes odd = sum ^ x;
  const Bytes over = (sum & x) | (odd & y);
  sum = odd ^ y;
  return over;
}
// Bytes with this bit.
inline int population(Bytes x, int bit) {
  return __builtin_popcount(static_cast<unsigned>(
      _mm256_movemask_epi8(_mm256_sll_epi16((__m256i)x, _mm_cvtsi32_si128(7 - bit)))));
}

}  // namespace
}  // namespace fastcheck::cpu
//
#include "cpu/vector_exponents.h"

namespace fastcheck::cpu {

const ExponentKernels* avx2_exponents() {
  static constexpr ExponentKernels kKernels{{FASTCHECK_FOR_EACH_DTYPE(FASTCHECK_EXPONENT_ROW)}};
  return &kKernels;
}

}  // namespace fastcheck::cpu
