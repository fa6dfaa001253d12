// Launches of the kernels by component type, and where they are instantiated.
#pragma once

#include "cuda/arguments.h"
#include "cuda/exponent_arguments.h"
#include "cuda/platform.cuh"

namespace fastcheck::cuda {

// Tells if the current device has code for the kernels of a component type. They are loaded with
// it: with lazy loading, the first launch of a kernel that is not may wait for the device.
template <class Component>
cudaError_t find_records();
template <class Format>
cudaError_t find_found_nonfinite();
template <class Format>
cudaError_t find_exponents();
template <class Format>
cudaError_t find_record_and_exponents();

// Component -> kernel; defined by records_*.cu. Tensors: List, or OneTensor (kHasKernelsOfOne).
template <class Component, class Tensors>
cudaError_t start_records(Depth depth, unsigned grid, unsigned block, cudaStream_t stream,
                          const RecordsLaunch<Tensors>& launch);

// Formats alone; defined by found_nonfinite.cu.
template <class Format>
cudaError_t start_found_nonfinite(unsigned grid, unsigned block, cudaStream_t stream,
                                  const FoundLaunch& launch);

// Defined by exponents.cu.
template <class Format>
cudaError_t start_exponents(unsigned grid, unsigned block, cudaStream_t stream,
                            const ExponentsLaunch& launch);

// Defined by record_and_exponents.cu.
template <class Format>
cudaError_t start_record_and_exponents(unsigned grid, unsigned block, cudaStream_t stream,
                                       const RecordAndExponentsLaunch& launch);

}  // namespace fastcheck::cuda
