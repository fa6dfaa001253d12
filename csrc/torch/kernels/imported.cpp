// The functions of cpu/reduce.h, cuda/launch.h and cuda/exponents.h, as
// fastcheck._kernels has them.
#include "torch/kernels/imported.h"

#include <Python.h>

#include <stdexcept>

#include "cpu/reduce.h"
#include "cuda/exponents.h"
#include "cuda/launch.h"
#include "kernels/table.h"

namespace fastcheck {
namespace {

const KernelTable* table = nullptr;

void call(const void* self, std::int64_t count, PlainParallelFor::Body body, void* context) {
  const auto& parallel_for = *static_cast<const cpu::ParallelFor*>(self);
  parallel_for(
      count, [body, context](std::int64_t begin, std::int64_t end) { body(context, begin, end); });
}

}  // namespace

void import_kernels() {
  const auto* const found = static_cast<const KernelTable*>(PyCapsule_Import(kTableName, 0));
  if (found == nullptr) {
    PyErr_Clear();
    throw std::runtime_error("fastcheck._kernels, which has the kernels, can't be imported");
  }
  if (found->bytes != sizeof(KernelTable) || found->record_bytes != sizeof(Record)) {
    throw std::runtime_error("fastcheck._kernels is of another build; install fastcheck again");
  }
  table = found;
}

namespace cpu {

void reduce(const TensorView& tensor, Depth depth, bool logical, int threads,
            const ParallelFor& parallel_for, Record& record) {
  table->reduce(tensor, depth, logical, threads, {call, &parallel_for}, record);
}

}  // namespace cpu

namespace cuda {

extern "C" {

int fastcheck_cuda_device(std::int32_t* multiprocessors) {
  return table->cuda_device(multiprocessors);
}

int fastcheck_cuda_is_capturing(void* stream, int* is_capturing) {
  return table->cuda_is_capturing(stream, is_capturing);
}

int fastcheck_cuda_stream_number(void* stream, std::uint64_t* number) {
  return table->cuda_stream_number(stream, number);
}

int fastcheck_cuda_exchange_capture_mode(int mode) {
  return table->cuda_exchange_capture_mode(mode);
}

int fastcheck_cuda_new_box(BlackBox** host, BoxArgument* argument) {
  return table->cuda_new_box(host, argument);
}

int fastcheck_cuda_workspace(const TensorArgument* tensors, int count, const Tuning* tuning,
                             WorkspaceSize* size) {
  return table->cuda_workspace(tensors, count, tuning, size);
}

int fastcheck_cuda_records(const TensorArgument* tensors, int count, int depth, Record* slots,
                           const Workspace* workspace, const Tuning* tuning, void* stream) {
  return table->cuda_records(tensors, count, depth, slots, workspace, tuning, stream);
}

int fastcheck_cuda_found_nonfinite(const TensorArgument* tensors, int count, float* found,
                                   const Workspace* workspace, const Tuning* tuning, void* stream) {
  return table->cuda_found_nonfinite(tensors, count, found, workspace, tuning, stream);
}

int fastcheck_cuda_find_exponents() { return table->cuda_find_exponents(); }

int fastcheck_cuda_exponents_workspace(const TensorArgument* tensor, WorkspaceSize* size) {
  return table->cuda_exponents_workspace(tensor, size);
}

int fastcheck_cuda_exponents(const TensorArgument* tensor, std::int64_t* words,
                             const Workspace* workspace, const Tuning* tuning, void* stream) {
  return table->cuda_exponents(tensor, words, workspace, tuning, stream);
}

int fastcheck_cuda_record_and_exponents_workspace(const TensorArgument* tensor,
                                                  const Tuning* tuning, WorkspaceSize* size) {
  return table->cuda_record_and_exponents_workspace(tensor, tuning, size);
}

int fastcheck_cuda_record_and_exponents(const TensorArgument* tensor, Record* slots,
                                        std::int64_t* words, const Workspace* workspace,
                                        const Tuning* tuning, void* stream) {
  return table->cuda_record_and_exponents(tensor, slots, words, workspace, tuning, stream);
}

const char* fastcheck_cuda_error_name(int error) { return table->cuda_error_name(error); }

int fastcheck_cuda_is_device_lost(int error) { return table->cuda_is_device_lost(error); }
}

}  // namespace cuda
}  // namespace fastcheck
