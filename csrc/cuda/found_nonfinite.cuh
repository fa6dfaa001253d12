// The kernel that finds out whether any tensor of a list is not finite.
//
// Three instructions a word and one store at most per warp: it runs as fast as memory is read.
#pragma once

#include "cuda/other_rows.cuh"
#include "cuda/plan.h"
#include "cuda/records.cuh"

namespace fastcheck::cuda {

// ---- policy -------------------------------------------------------------------------------------

constexpr int kFoundBlocksPerSm = 3;  // leaves a thread 80 registers
static_assert(kFoundBlocksPerSm * kMaxWarps == kFoundWarpsPerMultiprocessor);

// A magnitude plus `kReach` has its top bit set when it is not finite; several to a word.
template <class Format>
struct NonfiniteTest {
  static constexpr int kSize = Shape<Format>::kSize;
  static constexpr std::uint32_t kEach = kSize == 1 ? 0x01010101u : kSize == 2 ? 0x00010001u : 1u;
  // The upper word of a double is enough.
  static constexpr int kDropped = kSize == 8 ? 32 : 0;
  static constexpr std::uint32_t kTop =
      kEach * static_cast<std::uint32_t>(Format::kSign >> kDropped);
  static constexpr std::uint32_t kReach =
      kEach * static_cast<std::uint32_t>((Format::kSign - Format::kFirstNonfinite) >> kDropped);
  static constexpr int kStep = kSize == 8 ? 2 : 1;
};

template <class Format>
struct FoundShared {
  Stage<Format> warps[kMaxWarps];
};

// ---- tile ---------------------------------------------------------------------------------------

// This thread's part of a tile; `n` components are there from its first to the tensor's end.
template <class Format>
FASTCHECK_DEVICE bool tile_nonfinite(const Entry& entry, const Layout* layout, std::int64_t tile,
                                     int n, Stage<Format>& stage) {
  using S = Shape<Format>;
  using Test = NonfiniteTest<Format>;
  const Place<Format> place(opaque(lane_index()));
  std::uint32_t seen = 0;
  FASTCHECK_ROLLED
  for (int pass = 0; pass < S::kPasses; ++pass) {
    FASTCHECK_ROLLED
    for (int batch = 0; batch < kBatches; ++batch) {
      Row<Format> rows[kBatchRows];
      if (is_plain<Format>(entry.data, layout, n)) {
        load_plain(batch_begin(entry.data, tile, pass, batch, place), rows);
      } else {
        load_batch(entry.data, layout, tile, pass, batch, n, left_of(n, place, pass, batch), stage,
                   rows);
      }
      FASTCHECK_UNROLL
      for (int j = 0; j < kBatchRows; ++j) {
        if (left_of(n, place, pass, batch) <= j * kLanes) break;
        FASTCHECK_UNROLL
        for (int w = Test::kStep - 1; w < S::kWords; w += Test::kStep) {
          seen |= (rows[j].word[w] & ~Test::kTop) + Test::kReach;
        }
      }
    }
  }
  return (seen & Test::kTop) != 0;
}

// ---- kernel -------------------------------------------------------------------------------------

template <class Format>
FASTCHECK_KERNEL(kMaxThreads, kFoundBlocksPerSm)
found_nonfinite_kernel(FASTCHECK_ARGUMENT FoundLaunch launch) {
  const List& list = launch.list;
  Stage<Format>& stage = block_shared<FoundShared<Format>>().warps[warp_index()];
  for (std::int64_t chunk = blockIdx.x; chunk < list.chunks; chunk += gridDim.x) {
    const Entry& entry = entries_of(list)[find_entry(list, chunk)];
    const std::int64_t first_tile =
        ((chunk - entry.first_chunk) * warp_count() + warp_index()) * list.tiles_per_warp;
    bool found = false;
    FASTCHECK_ROLLED
    for (int k = 0; k < list.tiles_per_warp; ++k) {
      const std::int64_t left = entry.components - (first_tile + k) * kTile;
      if (left <= 0) break;
      found = tile_nonfinite<Format>(entry, layout_in(list, entry), first_tile + k,
                                     components_from(left), stage) ||
              found;
    }
    if (any_lane(found) && lane_index() == 0) *launch.found = 1.0f;
  }
}

}  // namespace fastcheck::cuda
