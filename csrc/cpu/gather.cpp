#include "cpu/gather.h"

#include <cstring>

namespace fastcheck::cpu {
namespace {

template <int kSize>
void copy_row(const std::byte* from, std::int64_t stride, std::int64_t count, std::byte* to) {
  if (stride == kSize) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * kSize);
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) std::memcpy(to + i * kSize, from + i * stride, kSize);
}

void copy_row(std::int64_t size, const std::byte* from, std::int64_t stride, std::int64_t count,
              std::byte* to) {
  switch (size) {
    case 1: return copy_row<1>(from, stride, count, to);
    case 2: return copy_row<2>(from, stride, count, to);
    case 4: return copy_row<4>(from, stride, count, to);
    case 8: return copy_row<8>(from, stride, count, to);
    default: return copy_row<16>(from, stride, count, to);
  }
}

}  // namespace

RowMajorWalk::RowMajorWalk(const TensorView& tensor, std::int64_t element_size)
    : data_(tensor.data), element_size_(element_size) {
  for (int d = 0; d < tensor.ndim; ++d) {
    const std::int64_t size = tensor.sizes[d];
    const std::int64_t stride = tensor.strides[d] * element_size;
    if (size == 1) continue;
    if (ndim_ > 0 && strides_[ndim_ - 1] == size * stride) {
      sizes_[ndim_ - 1] *= size;
      strides_[ndim_ - 1] = stride;
    } else {
      sizes_[ndim_] = size;
      strides_[ndim_] = stride;
      ++ndim_;
    }
  }
  if (ndim_ == 0) {
    sizes_[0] = 1;
    strides_[0] = element_size;
    ndim_ = 1;
  }
}

void RowMajorWalk::copy(std::int64_t first, std::int64_t count, std::byte* out) const {
  std::int64_t index[kMaxDims];
  const std::byte* at = data_;
  for (int d = ndim_ - 1; d >= 0; --d) {
    index[d] = first % sizes_[d];
    first /= sizes_[d];
    at += index[d] * strides_[d];
  }
  const int inner = ndim_ - 1;
  while (count > 0) {
    const std::int64_t left = sizes_[inner] - index[inner];
    const std::int64_t n = left < count ? left : count;
    copy_row(element_size_, at, strides_[inner], n, out);
    out += n * element_size_;
    count -= n;
    at -= index[inner] * strides_[inner];
    index[inner] = 0;
    for (int d = inner - 1; d >= 0; --d) {
      at += strides_[d];
      if (++index[d] < sizes_[d]) break;
      at -= index[d] * strides_[d];
      index[d] = 0;
    }
  }
}

}  // namespace fastcheck::cpu
