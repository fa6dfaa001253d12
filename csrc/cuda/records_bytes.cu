// Record kernels of the one-byte formats.
#include "cuda/start_records.cuh"

namespace fastcheck::cuda {

FASTCHECK_START_RECORDS(Float8E4M3FN)
FASTCHECK_START_RECORDS(Float8E5M2)
FASTCHECK_START_RECORDS(Integer<std::int8_t>)
FASTCHECK_START_RECORDS(Integer<std::uint8_t>)
FASTCHECK_START_RECORDS(Boolean)

}  // namespace fastcheck::cuda
