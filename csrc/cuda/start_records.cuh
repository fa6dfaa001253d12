// The launcher of one component type's kernels; each records_*.cu instantiates some of them.
#pragma once

#include "cuda/records.cuh"
#include "cuda/start.h"

namespace fastcheck::cuda {

template <class Tensors>
using RecordsKernel = void (*)(RecordsLaunch<Tensors>);

template <class Component, class Tensors>
RecordsKernel<Tensors> kernel_of(Depth depth) {
  switch (depth) {
    case Depth::kHealth: return records_kernel<Component, Depth::kHealth, Tensors>;
    case Depth::kStats: return records_kernel<Component, Depth::kStats, Tensors>;
    case Depth::kFull:
    case Depth::kChecksum: break;  // the latter is read by the CPU's kernels alone
  }
  return records_kernel<Component, Depth::kFull, Tensors>;
}

template <class Component>
cudaError_t find_records() {
  cudaError_t error = cudaSuccess;
  for (const Depth depth : {Depth::kHealth, Depth::kStats, Depth::kFull}) {
    if (error == cudaSuccess) error = find_kernel(kernel_of<Component, List>(depth));
    if constexpr (kHasKernelsOfOne<Component>) {
      if (error == cudaSuccess) error = find_kernel(kernel_of<Component, OneTensor>(depth));
    }
  }
  return error;
}

template <class Component, class Tensors>
cudaError_t start_records(Depth depth, unsigned grid, unsigned block, cudaStream_t stream,
                          const RecordsLaunch<Tensors>& arguments) {
  return launch<BlockShared<Component>>(kernel_of<Component, Tensors>(depth), grid, block, stream,
                                        arguments);
}

#define FASTCHECK_START_RECORDS(component)                                               \
  template cudaError_t find_records<component>();                                        \
  template cudaError_t start_records<component>(Depth, unsigned, unsigned, cudaStream_t, \
                                                const RecordsLaunch<List>&);
#define FASTCHECK_START_RECORDS_OF_ONE(component)                                        \
  template cudaError_t start_records<component>(Depth, unsigned, unsigned, cudaStream_t, \
                                                const RecordsLaunch<OneTensor>&);

}  // namespace fastcheck::cuda
