// KernelTable: the kernels as plain functions, for another shared library.
//
// fastcheck._kernels, which includes no torch, exports one in the capsule kTableName.
// fastcheck._C, which is built for one release of torch, reads tensors by it
// (csrc/torch/kernels/imported.cpp). Both are built from one source tree.
#pragma once

#include <cstdint>

#include "core/record.h"
#include "cpu/reduce.h"
#include "cuda/exponents.h"
#include "cuda/launch.h"

namespace fastcheck {

constexpr const char* kTableName = "fastcheck._kernels.table";

// cpu::ParallelFor as a function and what it is called with: calls body(context, begin, end).
struct PlainParallelFor {
  using Body = void (*)(void* context, std::int64_t begin, std::int64_t end);

  void (*call)(const void* self, std::int64_t count, Body body, void* context);
  const void* self;
};

struct KernelTable {
  // The table is of another build if these differ.
  std::uint32_t bytes = sizeof(KernelTable);
  std::uint32_t record_bytes = sizeof(Record);

  // cpu/reduce.h.
  void (*reduce)(const cpu::TensorView& tensor, Depth depth, bool logical, int threads,
                 const PlainParallelFor& parallel_for, Record& record);

  // cuda/launch.h and cuda/exponents.h.
  decltype(&cuda::fastcheck_cuda_device) cuda_device;
  decltype(&cuda::fastcheck_cuda_is_capturing) cuda_is_capturing;
  decltype(&cuda::fastcheck_cuda_stream_number) cuda_stream_number;
  decltype(&cuda::fastcheck_cuda_exchange_capture_mode) cuda_exchange_capture_mode;
  decltype(&cuda::fastcheck_cuda_new_box) cuda_new_box;
  decltype(&cuda::fastcheck_cuda_workspace) cuda_workspace;
  decltype(&cuda::fastcheck_cuda_records) cuda_records;
  decltype(&cuda::fastcheck_cuda_found_nonfinite) cuda_found_nonfinite;
  decltype(&cuda::fastcheck_cuda_find_exponents) cuda_find_exponents;
  decltype(&cuda::fastcheck_cuda_exponents_workspace) cuda_exponents_workspace;
  decltype(&cuda::fastcheck_cuda_exponents) cuda_exponents;
  decltype(&cuda::fastcheck_cuda_record_and_exponents_workspace)
      cuda_record_and_exponents_workspace;
  decltype(&cuda::fastcheck_cuda_record_and_exponents) cuda_record_and_exponents;
  decltype(&cuda::fastcheck_cuda_error_name) cuda_error_name;
  decltype(&cuda::fastcheck_cuda_is_device_lost) cuda_is_device_lost;
};

// The kernels of this library.
const KernelTable& kernel_table();

}  // namespace fastcheck
