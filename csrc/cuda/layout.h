// The memory addresses of a traversal, for tensors that are not contiguous.
#pragma once

#include <cstdint>

namespace fastcheck::cuda {

constexpr int kMaxDims = 64;  // torch's own limit

// The traversal is cut in stretches of `inner_bytes` consecutive bytes; `outer` dimensions, the
// last one fastest, say where each stretch begins. The host makes it (plan.h).
struct Layout {
  std::int64_t inner_bytes;
  std::int32_t outer_dims;
  // The largest power of two, up to 16, that divides the address and the length of every stretch:
  // a piece of the traversal of that size, at a multiple of it, is aligned and in one stretch.
  std::int32_t granule_bytes;
  std::int64_t below_4gib;  // positions fit 32 bits: a division costs a third
  std::int64_t sizes[kMaxDims];
  std::int64_t stride_bytes[kMaxDims];
};

}  // namespace fastcheck::cuda
