// The layout of a tensor's elements in memory, from its sizes and strides alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "cpu/reduce.h"

namespace fastcheck {

// Row-major, without gaps. A dimension of one element may have any stride.
inline bool is_contiguous(int ndim, const std::int64_t* sizes, const std::int64_t* strides) {
  std::int64_t expected = 1;
  for (int d = ndim - 1; d >= 0; --d) {
    if (sizes[d] != 1 && strides[d] != expected) return false;
    expected *= sizes[d];
  }
  return true;
}

// Without gaps and overlaps in some permutation of the dimensions.
inline bool is_dense(int ndim, const std::int64_t* sizes, const std::int64_t* strides) {
  int order[cpu::kMaxDims];
  std::iota(order, order + ndim, 0);
  int* const end = std::remove_if(order, order + ndim, [&](int d) { return sizes[d] == 1; });
  std::sort(order, end, [&](int a, int b) { return strides[a] < strides[b]; });
  std::int64_t expected = 1;
  for (const int* d = order; d != end; ++d) {
    if (strides[*d] != expected) return false;
    expected *= sizes[*d];
  }
  return true;
}

// `sizes` and `strides`, of at most cpu::kMaxDims dimensions, must outlive the view.
inline cpu::TensorView view_of(const std::byte* data, DType dtype, int ndim,
                               const std::int64_t* sizes, const std::int64_t* strides) {
  const std::int64_t numel =
      std::accumulate(sizes, sizes + ndim, std::int64_t{1}, std::multiplies<>());
  const bool contiguous = numel == 0 || is_contiguous(ndim, sizes, strides);
  const bool dense = contiguous || is_dense(ndim, sizes, strides);
  return {data, dtype, numel, ndim, sizes, strides, dense, contiguous};
}

}  // namespace fastcheck
