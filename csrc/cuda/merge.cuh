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

// Everything but the sums, of all lanes. The counts are shared out, so that each exchange halves
// what a lane has left of them: 9 exchanges where one count after the other would take 35.
FASTCHECK_DEVICE void merge_lanes_but_sums(const Partial& part, Partial& out) {
  const int lane = lane_index();
  const Counts& c = part.counts;
  std::int64_t counts[8] = {c.nan,       c.posinf,   c.neginf,    c.zero,
                            c.subnormal, c.negative, c.saturated, 0};
  share_out<8>(counts, 16, (lane & 16) != 0);
  share_out<4>(counts, 8, (lane & 8) != 0);
  share_out<2>(counts, 4, (lane & 4) != 0);
  counts[0] += from_lane_xor(counts[0], 2);
  counts[0] += from_lane_xor(counts[0], 1);
  static_assert(sizeof(Counts) == 7 * sizeof(std::int64_t));
  if (lane % 4 == 0 && lane < 28) {
    reinterpret_cast<std::int64_t*>(&out.counts)[lane / 4] = counts[0];
  }
  const KeyRange range = fold_range(part.range);
  const Checksum checksum{warp_sum(part.checksum.a), warp_sum(part.checksum.b)};
  if (lane == 0) {
    out.range = range;
    out.checksum = checksum;
  }
}

// Lanes 0 to 2 have one sum each.
FASTCHECK_DEVICE void put_sums(double sum, Sums& out) {
  static_assert(sizeof(Sums) == 3 * sizeof(double));
  const int lane = lane_index();
  if (lane < 3) reinterpret_cast<double*>(&out)[lane] = sum;
}

// The tree over `count` chunks, zero-padded, 32 neighbours at a time; `levels` has room for its
// inner nodes (level_count). Thread 0 finds the result in parts[0].
FASTCHECK_DEVICE_CALLED void merge_chunks(const Partial* chunks, std::int64_t count, Sums* levels,
                                          Partial (&parts)[kMaxWarps]) {
  const int lane = lane_index();
  std::int64_t groups = (count + kWarp - 1) / kWarp;
  Partial mine;
  double sum = 0.0;
  for (std::int64_t group = warp_index(); group < groups; group += warp_count()) {
    const std::int64_t chunk = group * kWarp + lane;
    Partial part;
    if (chunk < count) part = load_part(chunks + chunk);
    mine.counts = merge(mine.counts, part.counts);
    mine.range = merge(mine.range, part.range);
    mine.checksum = merge(mine.checksum, part.checksum);
    sum = fold_all_lanes(part.sums);
    if (groups > 1) put_sums(sum, levels[group]);
  }
  while (groups > 1) {
    __syncthreads();
    const Sums* from = levels;
    levels += groups;
    const std::int64_t nodes = groups;
    groups = (nodes + kWarp - 1) / kWarp;
    for (std::int64_t group = warp_index(); group < groups; group += warp_count()) {
      const std::int64_t node = group * kWarp + lane;
      sum = fold_all_lanes(node < nodes ? from[node] : Sums{});
      if (groups > 1) put_sums(sum, levels[group]);
    }
  }
  // The last group is the first warp's; a sum of zero leaves another as it is.
  Partial& out = parts[warp_index()];
  merge_lanes_but_sums(mine, out);
  put_sums(warp_index() == 0 ? sum : 0.0, out.sums);
  merge_warps(parts);
}

// Nodes of merge_chunks that lie in memory.
inline std::int64_t level_count(std::int64_t chunks) {
  std::int64_t total = 0;
  for (std::int64_t n = chunks; n > 1;) total += n = (n + kWarp - 1) / kWarp;
  return total;
}

}  // namespace fastcheck::cuda
