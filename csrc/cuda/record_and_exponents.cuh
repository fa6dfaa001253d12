// The kernel that makes the Record of a tensor at full depth and counts its exponents, in one pass.
//
// A warp counts a batch of a plain tile from the registers that the record was taken from. Of other
// tiles (a partial one, those of a strided tensor) it loads the rows again, from the cache. What a
// thread counts stays in registers for a share of a chunk, next to what the record needs: 255 of
// them, so that one block of 8 warps is resident. A batch takes longer than its load, which the
// other warp of a scheduler hides.
#pragma once

#include "cuda/exponents.cuh"
#include "cuda/records.cuh"

namespace fastcheck::cuda {

constexpr int kRecordAndExponentsBlocksPerSm = 1;

// The counts of float64 are so many that shared memory holds fewer warps beside them.
template <class Format>
constexpr int kCountingWarps = sizeof(typename Format::Bits) == 8 ? 2 : kMaxWarps;

template <class Format>
struct RecordAndExponentsShared {
  MergeShared merge;
  CountsShared<Format> counts;
  WarpShared<Format> warps[kCountingWarps<Format>];
};

template <class Format>
FASTCHECK_KERNEL(kCountingWarps<Format>* kWarp, kRecordAndExponentsBlocksPerSm)
record_and_exponents_kernel(FASTCHECK_ARGUMENT RecordAndExponentsLaunch launch) {
  auto& shared = block_shared<RecordAndExponentsShared<Format>>();
  begin_counts(shared.counts);
  const List& list = launch.record.list;
  const Entry& entry = list.entries[0];
  const Layout* const layout = layout_in(list, entry);
  for (std::int64_t chunk = blockIdx.x; chunk < list.chunks; chunk += gridDim.x) {
    const int warp = opaque(static_cast<int>(threadIdx.x)) / kWarp;
    const std::int64_t first_tile = (chunk * warp_count() + warp) * list.tiles_per_warp;
    ExponentCounter<Format> counter(shared.counts.totals, shared.warps[warp].stage);
    int k = read_share<Format, Depth::kFull>(
        entry, layout, first_tile, list.tiles_per_warp, shared.warps[warp], shared.merge.parts,
        [&](const Row<Format>(&rows)[kBatchRows]) { counter.count(rows); });
    FASTCHECK_ROLLED
    for (; k < tiles_of_share(entry, first_tile, list.tiles_per_warp); ++k) {
      const std::int64_t tile = first_tile + k;
      counter.tile(entry.data, layout, tile, components_from(entry.components - tile * kTile));
    }
    counter.finish(shared.counts);
    finish_chunk(launch.record, 0, chunk, Shape<Format>::kSize, Format::kExtreme, Depth::kFull,
                 shared.merge);
  }
  finish_counts<Format>(launch.counts, entry.components, shared.counts);
}

}  // namespace fastcheck::cuda
