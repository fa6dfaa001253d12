// The vector kernel, compiled with AVX2, FMA and F16C.
#include "cpu/kernel.h"

#if defined(__AVX2__)

#include "cpu/vector_avx2.h"
//
#include "cpu/vector_kernel.h"

namespace fastcheck::cpu {

const KernelSet* avx2_kernels() {
  static constexpr KernelSet kSet{"avx2", {FASTCHECK_FOR_EACH_DTYPE(FASTCHECK_KERNEL_ROW)}};
  return &kSet;
}

}  // namespace fastcheck::cpu

#else

namespace fastcheck::cpu {
const KernelSet* avx2_kernels() { return nullptr; }
}  // namespace fastcheck::cpu

#endif
