// Traversal: the tiles of a tensor in the order of its record, and their groups for threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/accumulator.h"
#include "cpu/fp_environment.h"
#include "cpu/gather.h"

namespace fastcheck::cpu {

class Traversal {
 public:
  Traversal(const TensorView& tensor, bool logical)
      : data_(tensor.data),
        info_(kDTypes[static_cast<int>(tensor.dtype)]),
        components_(tensor.numel * info_.components),
        is_row_major_(logical || !tensor.dense) {
    if (is_row_major_ && !tensor.contiguous) {
      walk_.emplace(tensor, info_.component_size * info_.components);
    }
  }

  std::int64_t components() const { return components_; }
  std::int64_t tiles() const { return (components_ + kTile - 1) / kTile; }
  Order order() const { return is_row_major_ ? Order::kLogical : Order::kStorage; }

  // The number of `threads` that are of use.
  int useful(int threads) const {
    return components_ * info_.component_size < kSerialBytes ? 1 : threads;
  }

  // Calls visit(data, components, first tile) over the tiles [first, last), in order: `most` of
  // them at a time where the traversal is the memory itself, else one, gathered.
  template <class Visit>
  void visit(std::int64_t first, std::int64_t last, std::int64_t most, const Visit& visit) const {
    if (walk_) return gather(first, last, visit);
    const std::int64_t end = std::min(last * kTile, components_);
    for (std::int64_t tile = first; tile < last; tile += most) {
      const std::int64_t begin = tile * kTile;
      visit(data_ + begin * info_.component_size, std::min(most * kTile, end - begin), tile);
    }
  }

 private:
  template <class Visit>
  void gather(std::int64_t first, std::int64_t last, const Visit& visit) const {
    alignas(64) std::byte buffer[kTile * sizeof(double)];
    const std::int64_t per_tile = kTile / info_.components;
    for (std::int64_t tile = first; tile < last; ++tile) {
      const std::int64_t components = std::min<std::int64_t>(kTile, components_ - tile * kTile);
      walk_->copy(tile * per_tile, components / info_.components, buffer);
      visit(buffer, components, tile);
    }
  }

  const std::byte* data_;
  const DTypeInfo& info_;
  std::int64_t components_;
  bool is_row_major_;
  std::optional<RowMajorWalk> walk_;
};

// Threads take groups of tiles: a power of two, so that a group is a subtree of the canonical tree.
constexpr std::int64_t kGroupsPerThread = 8;
constexpr std::int64_t kMaxGroupTiles = 256;

inline std::int64_t group_tiles(std::int64_t tiles, int threads) {
  std::int64_t group = 1;
  while (group < kMaxGroupTiles && group * 2 * threads * kGroupsPerThread <= tiles) group *= 2;
  return group;
}

// The Partial of all tiles, of which read(first, last) returns that of a range.
template <class Read>
Partial reduce_groups(std::int64_t tiles, int threads, const ParallelFor& parallel_for,
                      const Read& read) {
  if (threads <= 1) return read(0, tiles);
  const std::int64_t group = group_tiles(tiles, threads);
  const std::int64_t groups = (tiles + group - 1) / group;
  std::vector<Partial> parts(static_cast<std::size_t>(groups));
  parallel_for(groups, [&](std::int64_t begin, std::int64_t end) {
    const FpEnvironment environment;
    for (std::int64_t g = begin; g < end; ++g) {
      parts[static_cast<std::size_t>(g)] = read(g * group, std::min((g + 1) * group, tiles));
    }
  });
  PartialFold fold;
  for (const Partial& part : parts) push(fold, part);
  return finish(fold);
}

}  // namespace fastcheck::cpu
