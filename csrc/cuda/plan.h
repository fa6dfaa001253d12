// On the host: how tensors are cut into chunks for a launch, and how strided ones are addressed.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/dtypes.h"
#include "core/order.h"
#include "cuda/arguments.h"

namespace fastcheck::cuda {

// ---- tensors ------------------------------------------------------------------------------------

inline std::int64_t element_bytes(const TensorArgument& tensor) {
  const DTypeInfo& info = kDTypes[tensor.dtype];
  return static_cast<std::int64_t>(info.components) * info.component_size;
}

inline std::int64_t component_count(const TensorArgument& tensor) {
  return tensor.numel * kDTypes[tensor.dtype].components;
}

inline std::int64_t tile_count(const TensorArgument& tensor) {
  return (component_count(tensor) + kTile - 1) / kTile;
}

// True if the traversal is the memory from `data` on, whatever its alignment.
inline bool reads_directly(const TensorArgument& tensor) {
  return tensor.numel == 0 || tensor.dense != 0;
}

// The largest power of two up to 16 that divides x.
inline std::int32_t power_of_two_in(std::uint64_t x) {
  return static_cast<std::int32_t>((x | 16) & (~(x | 16) + 1));
}

inline Layout layout_of(const TensorArgument& tensor) {
  Layout layout{};
  const std::int64_t element = element_bytes(tensor);
  layout.inner_bytes = element * tensor.numel;
  layout.below_4gib = layout.inner_bytes < (std::int64_t{1} << 32);
  if (tensor.dense == 0) {
    layout.inner_bytes = element;
    int dims = 0;
    for (int d = 0; d < tensor.ndim; ++d) {
      const std::int64_t size = tensor.sizes[d];
      const std::int64_t stride = tensor.strides[d] * element;
      if (size == 1) continue;
      if (dims > 0 && layout.stride_bytes[dims - 1] == size * stride) {
        layout.sizes[dims - 1] *= size;
        layout.stride_bytes[dims - 1] = stride;
      } else {
        layout.sizes[dims] = size;
        layout.stride_bytes[dims] = stride;
        ++dims;
      }
    }
    if (dims > 0 && layout.stride_bytes[dims - 1] == element) {
      layout.inner_bytes = element * layout.sizes[--dims];
    }
    layout.outer_dims = dims;
  }
  auto all = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(tensor.data));
  if (layout.outer_dims > 0) {
    all |= static_cast<std::uint64_t>(layout.inner_bytes);
    for (int d = 0; d < layout.outer_dims; ++d) {
      all |= static_cast<std::uint64_t>(layout.stride_bytes[d]);
    }
  }
  layout.granule_bytes = power_of_two_in(all);
  return layout;
}

// Its entry in a launch, with the number of its first chunk.
inline Entry entry_of(const TensorArgument& tensor, std::int64_t first_chunk) {
  return {static_cast<const std::byte*>(tensor.data),
          component_count(tensor),
          first_chunk,
          tensor.slot,
          tensor.dtype,
          tensor.order,
          static_cast<std::uint8_t>(!reads_directly(tensor)),
          {}};
}

// ---- chunks -------------------------------------------------------------------------------------

// The bytes of memory that a launch keeps of a chunk.
constexpr std::int64_t kChunkBytes = sizeof(Partial) + sizeof(Sums);

// The warps of a multiprocessor with 128 registers a thread, as the record kernels are built
// (kBlocksPerSm).
constexpr int kRecordsWarpsPerMultiprocessor = 16;
// The same with 80 registers (kFoundBlocksPerSm).
constexpr int kFoundWarpsPerMultiprocessor = 24;
// The same with up to 255 registers (kRecordAndExponentsBlocksPerSm).
constexpr int kRecordAndExponentsWarpsPerMultiprocessor = 8;

struct Cut {
  int warps;
  int tiles_per_warp;
  std::int64_t chunks;
  unsigned blocks;
};

inline std::int64_t chunks_of(std::int64_t tiles, std::int64_t chunk_tiles) {
  return std::max<std::int64_t>(1, (tiles + chunk_tiles - 1) / chunk_tiles);
}

inline bool is_power_of_two_up_to(int x, int limit) {
  return x > 0 && x <= limit && (x & (x - 1)) == 0;
}

inline bool valid(const Tuning& tuning) {
  return (tuning.warps_per_block == 0 || is_power_of_two_up_to(tuning.warps_per_block, 8)) &&
         (tuning.tiles_per_warp == 0 || is_power_of_two_up_to(tuning.tiles_per_warp, 32)) &&
         tuning.blocks >= 0;
}

// The chunks of the tensors that `each` calls its argument with, one tile count after the other.
template <class Each>
std::int64_t count_chunks(const Each& each, std::int64_t chunk_tiles) {
  std::int64_t chunks = 0;
  each([&](std::int64_t tiles) { chunks += chunks_of(tiles, chunk_tiles); });
  return chunks;
}

// Small launches are spread over the multiprocessors, a warp to a block if need be; large ones take
// the share per warp that wastes least in the last round, each chunk costing a quarter of a tile.
// `warps_per_multiprocessor`: how many of the kernel's are resident at once. `most_warps`: of a
// block.
template <class Each>
Cut cut(const Each& each, const Tuning& tuning,
        int warps_per_multiprocessor = kRecordsWarpsPerMultiprocessor, int most_warps = 8) {
  constexpr int kMaxShare = 32;
  const std::int64_t multiprocessors = tuning.multiprocessors > 0 ? tuning.multiprocessors : 64;
  std::int64_t tiles = 0, largest = 0;
  each([&](std::int64_t n) {
    tiles += n;
    largest = std::max(largest, n);
  });
  Cut best{std::min(tuning.warps_per_block, most_warps), tuning.tiles_per_warp, 0, 0};
  if (best.warps == 0) {
    best.warps = 1;
    while (best.warps < most_warps && best.warps * 2 * multiprocessors <= tiles &&
           best.warps * 2 <= largest) {
      best.warps *= 2;
    }
  }
  const std::int64_t resident = multiprocessors * warps_per_multiprocessor / best.warps;
  if (best.tiles_per_warp == 0) {
    double least = 0;
    for (int share = 1; share <= kMaxShare; share *= 2) {
      const std::int64_t chunks = count_chunks(each, std::int64_t{share} * best.warps);
      const double cost = static_cast<double>((chunks + resident - 1) / resident) * (share + 0.25);
      if (best.tiles_per_warp == 0 || cost < least) {
        best.tiles_per_warp = share;
        least = cost;
      }
    }
  }
  best.chunks = count_chunks(each, std::int64_t{best.tiles_per_warp} * best.warps);
  best.blocks = static_cast<unsigned>(
      std::min(best.chunks, tuning.blocks > 0 ? std::int64_t{tuning.blocks} : resident));
  return best;
}

}  // namespace fastcheck::cuda
