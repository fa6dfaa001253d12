// The kernels that count exponents in the pass of a record.
#include "cuda/record_and_exponents.cuh"

#include "cuda/start.h"

namespace fastcheck::cuda {

template <class Format>
cudaError_t find_record_and_exponents() {
  return find_kernel(record_and_exponents_kernel<Format>);
}

template <class Format>
cudaError_t start_record_and_exponents(unsigned grid, unsigned block, cudaStream_t stream,
                                       const RecordAndExponentsLaunch& arguments) {
  return launch<RecordAndExponentsShared<Format>>(record_and_exponents_kernel<Format>, grid, block,
                                                  stream, arguments);
}

#define FASTCHECK_START_BOTH(format)                                                        \
  template cudaError_t find_record_and_exponents<format>();                                 \
  template cudaError_t start_record_and_exponents<format>(unsigned, unsigned, cudaStream_t, \
                                                          const RecordAndExponentsLaunch&);

FASTCHECK_START_BOTH(Float64)
FASTCHECK_START_BOTH(Float32)
FASTCHECK_START_BOTH(Float16)
FASTCHECK_START_BOTH(BFloat16)
FASTCHECK_START_BOTH(Float8E4M3FN)
FASTCHECK_START_BOTH(Float8E5M2)

}  // namespace fastcheck::cuda
