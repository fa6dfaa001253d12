// The vector kernel, compiled with the Advanced SIMD that every AArch64 has.
#include "cpu/kernel.h"
//
#include "cpu/vector_neon.h"
//
#include "cpu/vector_kernel.h"

namespace fastcheck::cpu {

const KernelSet* neon_kernels() {
  static constexpr KernelSet kSet{
      "neon", neon_exponents, {FASTCHECK_FOR_EACH_DTYPE(FASTCHECK_KERNEL_ROW)}};
  return &kSet;
}

}  // namespace fastcheck::cpu
