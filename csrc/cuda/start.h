// Launches of the kernels by component type, and where they are instantiated.
#pragma once

#include "cuda/arguments.h"
#include "cuda/platform.cuh"

namespace fastcheck::cuda {

// Whether the current device has code for the kernels of a component type. They are loaded with it:
// with lazy loading, the first launch of a kernel that is not may wait for the device.
template <class Component>
cudaError_t find_records();
template <class Format>
cudaError_t find_found_nonfinite();

// Of all formats; defined by record_and_exponents.cu.
int find_record_and_exponents();

// Component -> kernel; defined by records_*.cu.
template <class Component>
cudaError_t start_records(Depth depth, unsigned grid, unsigned block, cudaStream_t stream,
                          const RecordsLaunch& launch);

// Formats alone; defined by found_nonfinite.cu.
template <class Format>
cudaError_t start_found_nonfinite(unsigned grid, unsigned block, cudaStream_t stream,
                                  const FoundLaunch& launch);

}  // namespace fastcheck::cuda
