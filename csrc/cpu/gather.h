// Copies a run of elements, in row-major order, out of a strided tensor.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/reduce.h"

namespace fastcheck::cpu {

// A row-major walk over the elements, dimensions that lie one behind the other merged into one.
class RowMajorWalk {
 public:
  RowMajorWalk(const TensorView& tensor, std::int64_t element_size);

  // Copies elements [first, first + count) to `out`.
  void copy(std::int64_t first, std::int64_t count, std::byte* out) const;

 private:
  const std::byte* data_;
  std::int64_t element_size_;
  int ndim_ = 0;
  std::int64_t sizes_[kMaxDims];
  std::int64_t strides_[kMaxDims];  // in bytes
};

}  // namespace fastcheck::cpu
