#include "cpu/reduce.h"

#include <algorithm>
#include <vector>

#include "core/accumulator.h"
#include "cpu/dispatch.h"
#include "cpu/fp_environment.h"
#include "cpu/gather.h"

namespace fastcheck::cpu {
namespace {

// Threads take groups of tiles: a power of two, so that a group is a subtree of the canonical tree.
constexpr std::int64_t kGroupsPerThread = 8;
constexpr std::int64_t kMaxGroupTiles = 256;

std::int64_t group_tiles(std::int64_t tiles, int threads) {
  std::int64_t group = 1;
  while (group < kMaxGroupTiles && group * 2 * threads * kGroupsPerThread <= tiles) group *= 2;
  return group;
}

// Tiles [first, last) of a traversal that is the memory itself.
class DenseTiles {
 public:
  DenseTiles(const TensorView& tensor, const DTypeInfo& info, ReduceTiles reduce)
      : data_(tensor.data),
        component_size_(info.component_size),
        components_(tensor.numel * info.components),
        reduce_(reduce) {}

  Partial operator()(std::int64_t first, std::int64_t last) const {
    Partial part;
    const std::int64_t end = std::min(last * kTile, components_);
    reduce_(data_ + first * kTile * component_size_, end - first * kTile,
            static_cast<std::uint64_t>(first), &part);
    return part;
  }

 private:
  const std::byte* data_;
  std::int64_t component_size_;
  std::int64_t components_;
  ReduceTiles reduce_;
};

// Tiles of a row-major traversal of any strides, gathered one at a time.
class GatheredTiles {
 public:
  GatheredTiles(const TensorView& tensor, const DTypeInfo& info, ReduceTiles reduce)
      : walk_(tensor, info.component_size * info.components),
        components_per_element_(info.components),
        elements_(tensor.numel),
        reduce_(reduce) {}

  Partial operator()(std::int64_t first, std::int64_t last) const {
    alignas(64) std::byte buffer[kTile * sizeof(double)];
    const std::int64_t per_tile = kTile / components_per_element_;
    PartialFold fold;
    for (std::int64_t tile = first; tile < last; ++tile) {
      const std::int64_t begin = tile * per_tile;
      const std::int64_t count = std::min(per_tile, elements_ - begin);
      walk_.copy(begin, count, buffer);
      Partial part;
      reduce_(buffer, count * components_per_element_, static_cast<std::uint64_t>(tile), &part);
      push(fold, part);
    }
    return finish(fold);
  }

 private:
  RowMajorWalk walk_;
  std::int64_t components_per_element_;
  std::int64_t elements_;
  ReduceTiles reduce_;
};

template <class Tiles>
Partial reduce_tiles(const Tiles& source, std::int64_t tiles, int threads,
                     const ParallelFor& parallel_for) {
  if (threads <= 1) return source(0, tiles);
  const std::int64_t group = group_tiles(tiles, threads);
  const std::int64_t groups = (tiles + group - 1) / group;
  std::vector<Partial> parts(static_cast<std::size_t>(groups));
  parallel_for(groups, [&](std::int64_t begin, std::int64_t end) {
    const FpEnvironment environment;
    for (std::int64_t g = begin; g < end; ++g) {
      parts[static_cast<std::size_t>(g)] = source(g * group, std::min((g + 1) * group, tiles));
    }
  });
  PartialFold fold;
  for (const Partial& part : parts) push(fold, part);
  return finish(fold);
}

}  // namespace

void reduce(const TensorView& tensor, Depth depth, bool logical, int threads,
            const ParallelFor& parallel_for, Record& record) {
  const FpEnvironment environment;
  const DTypeInfo& info = kDTypes[static_cast<int>(tensor.dtype)];
  const bool row_major = logical || !tensor.dense;
  Partial total;
  if (tensor.numel > 0) {
    const ReduceTiles kernel = active_kernels().at(tensor.dtype, depth);
    const std::int64_t components = tensor.numel * info.components;
    const std::int64_t tiles = (components + kTile - 1) / kTile;
    if (components * info.component_size < kSerialBytes) threads = 1;
    if (row_major && !tensor.contiguous) {
      total = reduce_tiles(GatheredTiles(tensor, info, kernel), tiles, threads, parallel_for);
    } else {
      total = reduce_tiles(DenseTiles(tensor, info, kernel), tiles, threads, parallel_for);
    }
  }
  finalise(total, tensor.dtype, info, tensor.numel, depth,
           row_major ? Order::kLogical : Order::kStorage, record);
}

}  // namespace fastcheck::cpu
