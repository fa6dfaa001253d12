#include "kernels/table.h"

namespace fastcheck {
namespace {

using Range = std::function<void(std::int64_t, std::int64_t)>;

void call_range(void* range, std::int64_t begin, std::int64_t end) {
  (*static_cast<const Range*>(range))(begin, end);
}

cpu::ParallelFor as_function(const PlainParallelFor& parallel_for) {
  return [&parallel_for](std::int64_t count, const Range& range) {
    parallel_for.call(parallel_for.self, count, call_range, const_cast<Range*>(&range));
  };
}

void reduce(const cpu::TensorView& tensor, Depth depth, bool logical, int threads,
            const PlainParallelFor& parallel_for, Record& record) {
  cpu::reduce(tensor, depth, logical, threads, as_function(parallel_for), record);
}

}  // namespace

const KernelTable& kernel_table() {
  static const KernelTable table{sizeof(KernelTable),
                                 sizeof(Record),
                                 reduce,
                                 cuda::fastcheck_cuda_device,
                                 cuda::fastcheck_cuda_is_capturing,
                                 cuda::fastcheck_cuda_stream_number,
                                 cuda::fastcheck_cuda_exchange_capture_mode,
                                 cuda::fastcheck_cuda_new_box,
                                 cuda::fastcheck_cuda_workspace,
                                 cuda::fastcheck_cuda_records,
                                 cuda::fastcheck_cuda_found_nonfinite,
                                 cuda::fastcheck_cuda_find_exponents,
                                 cuda::fastcheck_cuda_exponents_workspace,
                                 cuda::fastcheck_cuda_exponents,
                                 cuda::fastcheck_cuda_record_and_exponents_workspace,
                                 cuda::fastcheck_cuda_record_and_exponents,
                                 cuda::fastcheck_cuda_error_name,
                                 cuda::fastcheck_cuda_is_device_lost};
  return table;
}

}  // namespace fastcheck
