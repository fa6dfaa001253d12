// The C interface of the CUDA kernels for a build without them: every call returns kErrorAbsent.
#include "cuda/exponents.h"
#include "cuda/launch.h"

using namespace fastcheck::cuda;

extern "C" {

int fastcheck_cuda_device(std::int32_t*) { return kErrorAbsent; }
int fastcheck_cuda_is_capturing(void*, int*) { return kErrorAbsent; }
int fastcheck_cuda_workspace(const TensorArgument*, int, const Tuning*, WorkspaceSize*) {
  return kErrorAbsent;
}
int fastcheck_cuda_records(const TensorArgument*, int, int, fastcheck::Record*, const Workspace*,
                           const Tuning*, void*) {
  return kErrorAbsent;
}
int fastcheck_cuda_found_nonfinite(const TensorArgument*, int, float*, const Workspace*,
                                   const Tuning*, void*) {
  return kErrorAbsent;
}
int fastcheck_cuda_stream_number(void*, std::uint64_t*) { return kErrorAbsent; }
int fastcheck_cuda_exchange_capture_mode(int) { return kErrorAbsent; }
int fastcheck_cuda_find_exponents() { return kErrorAbsent; }
int fastcheck_cuda_exponents_workspace(const TensorArgument*, WorkspaceSize*) {
  return kErrorAbsent;
}
int fastcheck_cuda_exponents(const TensorArgument*, std::int64_t*, const Workspace*, const Tuning*,
                             void*) {
  return kErrorAbsent;
}
int fastcheck_cuda_record_and_exponents_workspace(const TensorArgument*, const Tuning*,
                                                  WorkspaceSize*) {
  return kErrorAbsent;
}
int fastcheck_cuda_record_and_exponents(const TensorArgument*, fastcheck::Record*, std::int64_t*,
                                        const Workspace*, const Tuning*, void*) {
  return kErrorAbsent;
}
int fastcheck_cuda_new_box(BlackBox**, BoxArgument*) { return kErrorAbsent; }
const char* fastcheck_cuda_error_name(int) { return "a build without the kernels"; }
int fastcheck_cuda_is_device_lost(int) { return 0; }
}
