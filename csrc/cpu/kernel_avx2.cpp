// The vector kernel, compiled with AVX2, FMA and F16C.
#include "cpu/kernel.h"
//
#include "cpu/vector_avx2.h"
//
#include "cpu/vector_kernel.h"

namespace fastcheck::cpu {

const KernelSet* avx2_kernels() {
  static constexpr KernelSet kSet{
      "avx2", avx2_exponents, {FASTCHECK_FOR_EACH_DTYPE(FASTCHECK_KERNEL_ROW)}};
  return &kSet;
}

}  // namespace fastcheck::cpu
