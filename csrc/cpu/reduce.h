// reduce(): the value fields of a tensor's record from its memory, by threads, for any strides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "core/dtypes.h"
#include "core/record.h"

namespace fastcheck::cpu {

// Below this a second thread costs more than it reads.
constexpr std::int64_t kSerialBytes = 512 * 1024;

constexpr int kMaxDims = 64;  // torch's own limit on tensor dimensions

// Strides are in elements and not negative. `dense` says that the elements occupy numel
// consecutive places in some permutation of the dimensions.
struct TensorView {
  const std::byte* data;
  DType dtype;
  std::int64_t numel;
  int ndim;
  const std::int64_t* sizes;
  const std::int64_t* strides;
  bool dense;
  bool contiguous;  // dense, and row-major: logical order is storage order
};

// Calls body(begin, end) over disjoint ranges that cover [0, count), possibly on several threads.
using ParallelFor = std::function<void(
    std::int64_t count, const std::function<void(std::int64_t, std::int64_t)>& body)>;

// Fills the value fields and dtype, order, depth, version and flags of `record`, which must be
// zeroed. `logical` asks for row-major traversal whatever the strides. Deterministic: the bits do
// not depend on the kernel, the threads or the alignment. Memory: one tile per thread when the
// elements must be gathered.
void reduce(const TensorView& tensor, Depth depth, bool logical, int threads,
            const ParallelFor& parallel_for, Record& record);

// The checksum alone, to the bit that of a record.
std::uint64_t checksum(const TensorView& tensor, bool logical, int threads,
                       const ParallelFor& parallel_for);

}  // namespace fastcheck::cpu
