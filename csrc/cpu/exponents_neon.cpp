// Counts exponents with the Advanced SIMD that every AArch64 has.
namespace fastcheck::cpu {
namespace {
constexpr int kVectorBytes = 16;
}  // namespace
}  // namespace fastcheck::cpu
//
#include "cpu/vector_exponents.h"

namespace fastcheck::cpu {

const ExponentKernels* neon_exponents() {
  static constexpr ExponentKernels kKernels{{FASTCHECK_FOR_EACH_DTYPE(FASTCHECK_EXPONENT_ROW)}};
  return &kKernels;
}

}  // namespace fastcheck::cpu
