// Counts exponents with AVX2. The AVX-512 kernels use it too: with vectors twice as long it
// takes no less time, because their comparisons give masks.
namespace fastcheck::cpu {
namespace {
constexpr int kVectorBytes = 32;
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
