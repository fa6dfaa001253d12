// The kernels that count exponents.
#include "cuda/exponents.cuh"

#include "cuda/start.h"

namespace fastcheck::cuda {

template <class Format>
cudaError_t find_exponents() {
  return find_kernel(exponents_kernel<Format>);
}

template <class Format>
cudaError_t start_exponents(unsigned grid, unsigned block, cudaStream_t stream,
                            const ExponentsLaunch& arguments) {
  return launch<ExponentShared<Format>>(exponents_kernel<Format>, grid, block, stream, arguments);
}

#define FASTCHECK_START_EXPONENTS(format)                                        \
  template cudaError_t find_exponents<format>();                                 \
  template cudaError_t start_exponents<format>(unsigned, unsigned, cudaStream_t, \
                                               const ExponentsLaunch&);

FASTCHECK_START_EXPONENTS(Float64)
FASTCHECK_START_EXPONENTS(Float32)
FASTCHECK_START_EXPONENTS(Float16)
FASTCHECK_START_EXPONENTS(BFloat16)
FASTCHECK_START_EXPONENTS(Float8E4M3FN)
FASTCHECK_START_EXPONENTS(Float8E5M2)

}  // namespace fastcheck::cuda
