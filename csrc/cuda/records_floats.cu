// Record kernels of the wider floating-point formats; complex dtypes are read by them too.
#include "cuda/start_records.cuh"

namespace fastcheck::cuda {

FASTCHECK_START_RECORDS(Float64)
FASTCHECK_START_RECORDS(Float32)
FASTCHECK_START_RECORDS(Float16)
FASTCHECK_START_RECORDS(BFloat16)
FASTCHECK_START_RECORDS_OF_ONE(Float32)
FASTCHECK_START_RECORDS_OF_ONE(Float16)
FASTCHECK_START_RECORDS_OF_ONE(BFloat16)

}  // namespace fastcheck::cuda
