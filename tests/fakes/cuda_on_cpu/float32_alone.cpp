// The record kernel of float32 at depth `full` and nothing else: compiles in a second, for tests
// that change a line.
#include "cuda/start_records.cuh"

namespace fastcheck::cuda {

#define FASTCHECK_NO_START(component, tensors)                                  \
  template <>                                                                   \
  cudaError_t start_records<component>(Depth, unsigned, unsigned, cudaStream_t, \
                                       const RecordsLaunch<tensors>&) {         \
    return cudaErrorLaunchFailure;                                              \
  }
#define FASTCHECK_NO_RECORDS(component)   \
  template <>                             \
  cudaError_t find_records<component>() { \
    return cudaSuccess;                   \
  }                                       \
  FASTCHECK_NO_START(component, List)
#define FASTCHECK_FULL_ALONE(tensors)                                                           \
  template <>                                                                                   \
  cudaError_t start_records<Float32>(Depth, unsigned grid, unsigned block, cudaStream_t stream, \
                                     const RecordsLaunch<tensors>& arguments) {                 \
    return launch<BlockShared<Float32>>(records_kernel<Float32, Depth::kFull, tensors>, grid,   \
                                        block, stream, arguments);                              \
  }
#define FASTCHECK_NO_FOUND(format)                                            \
  template <>                                                                 \
  cudaError_t find_found_nonfinite<format>() {                                \
    return cudaSuccess;                                                       \
  }                                                                           \
  template <>                                                                 \
  cudaError_t start_found_nonfinite<format>(unsigned, unsigned, cudaStream_t, \
                                            const FoundLaunch&) {             \
    return cudaErrorLaunchFailure;                                            \
  }

FASTCHECK_NO_RECORDS(Float64)
FASTCHECK_NO_RECORDS(Float16)
FASTCHECK_NO_RECORDS(BFloat16)
FASTCHECK_NO_RECORDS(Float8E4M3FN)
FASTCHECK_NO_RECORDS(Float8E5M2)
FASTCHECK_NO_RECORDS(Integer<std::int8_t>)
FASTCHECK_NO_RECORDS(Integer<std::int16_t>)
FASTCHECK_NO_RECORDS(Integer<std::int32_t>)
FASTCHECK_NO_RECORDS(Integer<std::int64_t>)
FASTCHECK_NO_RECORDS(Integer<std::uint8_t>)
FASTCHECK_NO_RECORDS(Integer<std::uint16_t>)
FASTCHECK_NO_RECORDS(Integer<std::uint32_t>)
FASTCHECK_NO_RECORDS(Integer<std::uint64_t>)
FASTCHECK_NO_RECORDS(Boolean)
FASTCHECK_NO_START(Float16, OneTensor)
FASTCHECK_NO_START(BFloat16, OneTensor)
FASTCHECK_NO_FOUND(Float64)
FASTCHECK_NO_FOUND(Float32)
FASTCHECK_NO_FOUND(Float16)
FASTCHECK_NO_FOUND(BFloat16)
FASTCHECK_NO_FOUND(Float8E4M3FN)
FASTCHECK_NO_FOUND(Float8E5M2)

template <>
cudaError_t find_records<Float32>() {
  return cudaSuccess;
}
FASTCHECK_FULL_ALONE(List)
FASTCHECK_FULL_ALONE(OneTensor)

}  // namespace fastcheck::cuda
