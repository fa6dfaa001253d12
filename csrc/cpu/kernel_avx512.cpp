// The vector kernel, compiled with AVX-512.
#include "cpu/kernel.h"
//
#include "cpu/vector_avx512.h"
//
#include "cpu/vector_kernel.h"

namespace fastcheck::cpu {

const KernelSet* avx512_kernels() {
  static constexpr KernelSet kSet{
      "avx512", avx512_exponents, {FASTCHECK_FOR_EACH_DTYPE(FASTCHECK_KERNEL_ROW)}};
  return &kSet;
}

}  // namespace fastcheck::cpu
