// Merges partials: of warps to that of a block, and of all chunks to that of a tensor.
//
// Both follow the canonical tree: warps, and then chunks, hold aligned groups of tiles. The merge
// of chunks costs one block a reading of 104 bytes per chunk, 32 chunks per warp at a time.
#pragma once

#include "core/accumulator.h"
#include "cuda/fold.cuh"
#include "cuda/intrinsics.cuh"

namespace fastcheck::cuda {

constexpr int kMaxWarps = 8;

FASTCHECK_DEVICE Partial merge_parts(const Partial& l, const Partial& r) {
  Partial out;
  out.counts = merge(l.counts, r.counts);
  out.range = merge(l.range, r.range);
  out.sums = merge(l.sums, r.sums);
  out.checksum = merge(l.checksum, r.checksum);
  return out;
}

// Every warp has put its part in `parts`; parts[0] holds their tree once the first warp returns.
// All threads of the block take part. The caller puts a barrier between two merges of the same
// memory.
FASTCHECK_DEVICE_CALLED void merge_warps(Partial (&parts)[kMaxWarps]) {
  const int lane = lane_index();
  __syncthreads();
  if (warp_index() != 0) return;
  for (int width = warp_count() / 2; width > 0; width /= 2) {
    Partial both;
    if (lane < width) both = merge_parts(parts[2 * lane], parts[2 * lane + 1]);
    __syncwarp();
    if (lane < width) parts[lane] = both;
    __syncwarp();
  }
}

// What another block wrote: from the L2 cache, which blocks share.
FASTCHECK_DEVICE Partial load_part(const Partial* at) {
  constexpr int kWords = sizeof(Partial) / 8;
  static_assert(sizeof(Partial) == 8 * kWords);
  unsigned long long words[kWords];
  FASTCHECK_UNROLL
  for (int i = 0; i < kWords; ++i) {
    words[i] = __ldcg(reinterpret_cast<const unsigned long long*>(at) + i);
  }
  Partial part;
  memcpy(static_cast<void*>(&part), words, sizeof(part));
  return part;
}

FASTCHECK_DEVICE unsigned long long sum_of_lanes(unsigned long long x) {
  FASTCHECK_ROLLED
  for (int mask = 1; mask < kWarp; mask *= 2) x += from_lane_xor(x, mask);
  return x;
}

FASTCHECK_DEVICE Partial merge_lanes_but_sums(const Partial& part) {
  Partial out;
  out.counts.nan = sum_of_lanes(part.counts.nan);
  out.counts.posinf = sum_of_lanes(part.counts.posinf);
  out.counts.neginf = sum_of_lanes(part.counts.neginf);
  out.counts.zero = sum_of_lanes(part.counts.zero);
  out.counts.subnormal = sum_of_lanes(part.counts.subnormal);
  out.counts.negative = sum_of_lanes(part.counts.negative);
  out.counts.saturated = sum_of_lanes(part.counts.saturated);
  out.range = part.range;
  FASTCHECK_ROLLED
  for (int mask = 1; mask < kWarp; mask *= 2) {
    out.range =
        merge(out.range, {from_lane_xor(out.range.min, mask), from_lane_xor(out.range.max, mask)});
  }
  out.checksum = {warp_sum(part.checksum.a), warp_sum(part.checksum.b)};
  return out;
}

// The tree over `count` chunks, zero-padded, 32 neighbours at a time; `levels` has room for its
// inner nodes (level_count). Thread 0 finds the result in parts[0].
FASTCHECK_DEVICE_CALLED void merge_chunks(const Partial* chunks, std::int64_t count, Sums* levels,
                                          Partial (&parts)[kMaxWarps]) {
  const int lane = lane_index();
  std::int64_t groups = (count + kWarp - 1) / kWarp;
  Partial mine;
  Sums sums{};
  for (std::int64_t group = warp_index(); group < groups; group += warp_count()) {
    const std::int64_t chunk = group * kWarp + lane;
    Partial part;
    if (chunk < count) part = load_part(chunks + chunk);
    mine.counts = merge(mine.counts, part.counts);
    mine.range = merge(mine.range, part.range);
    mine.checksum = merge(mine.checksum, part.checksum);
    sums = fold_lanes(part.sums);
    if (lane == 0 && groups > 1) levels[group] = sums;
  }
  while (groups > 1) {
    __syncthreads();
    const Sums* from = levels;
    levels += groups;
    const std::int64_t nodes = groups;
    groups = (nodes + kWarp - 1) / kWarp;
    for (std::int64_t group = warp_index(); group < groups; group += warp_count()) {
      const std::int64_t node = group * kWarp + lane;
      sums = fold_lanes(node < nodes ? from[node] : Sums{});
      if (lane == 0 && groups > 1) levels[group] = sums;
    }
  }
  // The last group is the first warp's; a sum of zero leaves another as it is.
  mine = merge_lanes_but_sums(mine);
  mine.sums = warp_index() == 0 ? sums : Sums{};
  if (lane == 0) parts[warp_index()] = mine;
  merge_warps(parts);
}

// Nodes of merge_chunks that lie in memory.
inline std::int64_t level_count(std::int64_t chunks) {
  std::int64_t total = 0;
  for (std::int64_t n = chunks; n > 1;) total += n = (n + kWarp - 1) / kWarp;
  return total;
}

}  // namespace fastcheck::cuda
