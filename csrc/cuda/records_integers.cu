// Record kernels of the wider integers.
#include "cuda/start_records.cuh"

namespace fastcheck::cuda {

FASTCHECK_START_RECORDS(Integer<std::int16_t>)
FASTCHECK_START_RECORDS(Integer<std::uint16_t>)
FASTCHECK_START_RECORDS(Integer<std::int32_t>)
FASTCHECK_START_RECORDS(Integer<std::uint32_t>)
FASTCHECK_START_RECORDS(Integer<std::int64_t>)
FASTCHECK_START_RECORDS(Integer<std::uint64_t>)

}  // namespace fastcheck::cuda
