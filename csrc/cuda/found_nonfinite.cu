// found_nonfinite kernels and their launcher.
#include "cuda/found_nonfinite.cuh"

#include "cuda/start.h"

namespace fastcheck::cuda {

template <class Format>
cudaError_t find_found_nonfinite() {
  return find_kernel(found_nonfinite_kernel<Format>);
}

template <class Format>
cudaError_t start_found_nonfinite(unsigned grid, unsigned block, cudaStream_t stream,
                                  const FoundLaunch& arguments) {
  return launch<FoundShared<Format>>(found_nonfinite_kernel<Format>, grid, block, stream,
                                     arguments);
}

#define FASTCHECK_START_FOUND(format)                                                  \
  template cudaError_t find_found_nonfinite<format>();                                 \
  template cudaError_t start_found_nonfinite<format>(unsigned, unsigned, cudaStream_t, \
                                                     const FoundLaunch&);

FASTCHECK_START_FOUND(Float64)
FASTCHECK_START_FOUND(Float32)
FASTCHECK_START_FOUND(Float16)
FASTCHECK_START_FOUND(BFloat16)
FASTCHECK_START_FOUND(Float8E4M3FN)
FASTCHECK_START_FOUND(Float8E5M2)

}  // namespace fastcheck::cuda
