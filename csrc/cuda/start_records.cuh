// The launcher of one component type's kernels; each records_*.cu instantiates some of them.
#pragma once

#include "cuda/records.cuh"
#include "cuda/start.h"

namespace fastcheck::cuda {

template <class Component>
cudaError_t find_records() {
  cudaError_t error = find_kernel(records_kernel<Component, Depth::kHealth>);
  if (error == cudaSuccess) error = find_kernel(records_kernel<Component, Depth::kStats>);
  if (error == cudaSuccess) error = find_kernel(records_kernel<Component, Depth::kFull>);
  return error;
}

template <class Component>
cudaError_t start_records(Depth depth, unsigned grid, unsigned block, cudaStream_t stream,
                          const RecordsLaunch& arguments) {
  switch (depth) {
    case Depth::kHealth:
      return launch<BlockShared<Component>>(records_kernel<Component, Depth::kHealth>, grid, block,
                                            stream, arguments);
    case Depth::kStats:
      return launch<BlockShared<Component>>(records_kernel<Component, Depth::kStats>, grid, block,
                                            stream, arguments);
    case Depth::kFull:
    case Depth::kChecksum: break;  // the latter is read by the CPU's kernels alone
  }
  return launch<BlockShared<Component>>(records_kernel<Component, Depth::kFull>, grid, block,
                                        stream, arguments);
}

#define FASTCHECK_START_RECORDS(component)                                               \
  template cudaError_t find_records<component>();                                        \
  template cudaError_t start_records<component>(Depth, unsigned, unsigned, cudaStream_t, \
                                                const RecordsLaunch&);

}  // namespace fastcheck::cuda
