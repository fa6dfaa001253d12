// Merges partials: of warps to that of a block, and of all chunks to that of a tensor.
//
// Both follow the canonical tree: warps, and then chunks, hold aligned groups of tiles. The merge
// of chunks costs one block a reading of 104 bytes per chunk.
#pragma once

#include <utility>

#include "core/accumulator.h"
#include "cuda/fold.cuh"
#include "cuda/intrinsics.cuh"

namespace fastcheck::cuda {

constexpr int kMaxWarps = 8;
constexpr std::int64_t kChunkComponents = kMaxWarps * 32 * kTile;  // of a chunk, at most

// ---- many partials ------------------------------------------------------------------------------

// A word of a partial that another block wrote, or that is in shared memory.
struct FromBlock {
  template <int kWord>
  static FASTCHECK_DEVICE_MEMBER std::uint64_t load(const Partial* at) {
    return load_from_block<kWord>(at);
  }
};
struct FromShared {
  template <int kWord>
  static FASTCHECK_DEVICE_MEMBER std::uint64_t load(const Partial* at) {
    return reinterpret_cast<const std::uint64_t*>(at)[kWord];
  }
};

// Everything but the sums, of the partials that a thread has met.
struct Met {
  static constexpr int kCounts = sizeof(Counts) / 8;
  std::uint64_t counts[kCounts] = {};
  KeyRange range;
  Checksum checksum;

  template <class From>
  FASTCHECK_DEVICE_MEMBER void add(const Partial* at) {
    add_counts<From>(at, std::make_integer_sequence<int, kCounts>());
    constexpr int kRange = offsetof(Partial, range) / 8;
    range = merge(range, {From::template load<kRange>(at), From::template load<kRange + 1>(at)});
    const std::uint64_t both = From::template load<offsetof(Partial, checksum) / 8>(at);
    checksum =
        merge(checksum, {static_cast<std::uint32_t>(both), static_cast<std::uint32_t>(both >> 32)});
  }

  // Those of the whole warp, which counted below 2^32, or far more.
  FASTCHECK_DEVICE_MEMBER void put(bool is_far_more, Partial& out) const {
    std::uint64_t all[kCounts];
    if (is_far_more) {
      FASTCHECK_UNROLL
      for (int i = 0; i < kCounts; ++i) all[i] = warp_sum(counts[i]);
    } else {
      FASTCHECK_UNROLL
      for (int i = 0; i < kCounts; ++i) all[i] = warp_sum(static_cast<std::uint32_t>(counts[i]));
    }
    const KeyRange of_all = fold_range(range);
    const Checksum terms{warp_sum(checksum.a), warp_sum(checksum.b)};
    if (lane_index() != 0) return;
    FASTCHECK_UNROLL
    for (int i = 0; i < kCounts; ++i) reinterpret_cast<std::uint64_t*>(&out)[i] = all[i];
    out.range = of_all;
    out.checksum = terms;
  }

 private:
  template <class From, int... kWords>
  FASTCHECK_DEVICE_MEMBER void add_counts(const Partial* at,
                                          std::integer_sequence<int, kWords...>) {
    ((counts[kWords] += From::template load<kWords>(at)), ...);
  }
};

// ---- warps --------------------------------------------------------------------------------------

// Every warp has put its part in `parts`; parts[0] is their tree once the first warp is back, for
// all of it. All threads of the block take part. The caller puts a barrier between two merges of
// the same memory. `are_large`: a count may pass 2^32.
FASTCHECK_DEVICE void merge_warps(Partial (&parts)[kMaxWarps], bool are_large = false) {
  __syncthreads();
  const int count = warp_count();
  if (count == 1 || warp_index() != 0) return;
  const int lane = lane_index();
  static_assert(kMaxWarps == kSharers);
  const int sharer = lane % kSharers;
  Met met;
  if (lane < count) met.add<FromShared>(&parts[lane]);
  double sum = 0.0;
  if (sharer < count) sum = reinterpret_cast<const double*>(&parts[sharer].sums)[which_sum()];
  sum = fold_sharers(sum);
  __syncwarp();
  met.put(are_large, parts[0]);
  put_sums(sum, parts[0].sums);
  __syncwarp();
}

// ---- chunks -------------------------------------------------------------------------------------

constexpr int kLeastOfSharer = 4;
constexpr int kMostOfSharer = 32;
constexpr int kGroup = kSharers * kMostOfSharer;  // nodes that a warp folds at once

// Four neighbours from the kFirst-th of `left` nodes on, kStride doubles apart.
template <int kStride, int kFirst>
FASTCHECK_DEVICE double fold_four(const double* at, int left) {
  const double x[4] = {load_from_block_if<kStride * kFirst, kFirst>(at, left),
                       load_from_block_if<kStride*(kFirst + 1), kFirst + 1>(at, left),
                       load_from_block_if<kStride*(kFirst + 2), kFirst + 2>(at, left),
                       load_from_block_if<kStride*(kFirst + 3), kFirst + 3>(at, left)};
  return (x[0] + x[1]) + (x[2] + x[3]);
}

// The tree over `count` nodes, `each` of them to a sharer: a power of two from kLeastOfSharer to
// kMostOfSharer. Each thread gets its sum.
template <int kStride>
FASTCHECK_DEVICE double fold_group(const Sums* nodes, int count, int each) {
  const int first = lane_index() % kSharers * each;
  const double* at = reinterpret_cast<const double*>(nodes) + (which_sum() + first * kStride);
  const int left = count - first;
  double sum = fold_four<kStride, 0>(at, left);
  if (each > 4) {
    sum += fold_four<kStride, 4>(at, left);
    if (each > 8) {
      sum += fold_four<kStride, 8>(at, left) + fold_four<kStride, 12>(at, left);
      if (each > 16) {
        sum += (fold_four<kStride, 16>(at, left) + fold_four<kStride, 20>(at, left)) +
               (fold_four<kStride, 24>(at, left) + fold_four<kStride, 28>(at, left));
      }
    }
  }
  return fold_sharers(sum);
}

// `count` neighbouring chunks, by one warp; adds what is not a sum, each thread gets its sum.
FASTCHECK_DEVICE double read_group(const Partial* chunks, int count, int each, Met& met) {
  FASTCHECK_ROLLED
  for (int k = lane_index(); k < count; k += kWarp) met.add<FromBlock>(chunks + k);
  return fold_group<sizeof(Partial) / 8>(&chunks->sums, count, each);
}

// The `group`-th `size` of `nodes`, or fewer, or none.
FASTCHECK_DEVICE int size_of_group(std::int64_t group, int size, std::int64_t nodes) {
  const std::int64_t left = nodes - group * size;
  return left < size ? static_cast<int>(left) : size;
}

// merge_chunks for more of them than the warps of a block can fold at once: as long as there is
// more than one group, its sums are a node in `levels`.
FASTCHECK_DEVICE_CALLED void merge_levels(const Partial* chunks, std::int64_t count, Sums* levels,
                                          Partial (&parts)[kMaxWarps]) {
  const int warp = warp_index();
  std::int64_t groups = (count + kGroup - 1) / kGroup;
  Met met;
  double sum = 0.0;
  for (std::int64_t group = warp; group < groups; group += warp_count()) {
    const int here = size_of_group(group, kGroup, count);
    put_sums(read_group(chunks + group * kGroup, here, kMostOfSharer, met), levels[group]);
  }
  while (groups > 1) {
    __syncthreads();
    const Sums* from = levels;
    levels += groups;
    const std::int64_t nodes = groups;
    groups = (nodes + kGroup - 1) / kGroup;
    for (std::int64_t group = warp; group < groups; group += warp_count()) {
      const int here = size_of_group(group, kGroup, nodes);
      sum = fold_group<sizeof(Sums) / 8>(from + group * kGroup, here, kMostOfSharer);
      if (groups > 1) put_sums(sum, levels[group]);
    }
  }
  // The last group is the first warp's; a sum of zero leaves another as it is.
  met.put(true, parts[warp]);
  put_sums(warp == 0 ? sum : 0.0, parts[warp].sums);
  merge_warps(parts, true);
}

// The tree over `count` chunks, zero-padded; `levels` has room for its inner nodes (level_count).
// The first warp finds the result in parts[0]. All threads of the block take part.
FASTCHECK_DEVICE void merge_chunks(const Partial* chunks, std::int64_t count, Sums* levels,
                                   Partial (&parts)[kMaxWarps]) {
  static_assert(kChunkComponents <= (std::int64_t{1} << 32) / (kMaxWarps * kGroup));
  const int warps = warp_count();
  if (count > warps * kGroup) return merge_levels(chunks, count, levels, parts);
  const int nodes = static_cast<int>(count);
  int each = kLeastOfSharer;
  while (each * kSharers * warps < nodes) each *= 2;
  const int size = each * kSharers;
  const int warp = warp_index();
  if (warp > 0 && nodes <= size) return;
  Met met;
  const int here = size_of_group(warp, size, nodes);
  const double sum = read_group(chunks + warp * size, here, each, met);
  met.put(false, parts[warp]);
  put_sums(sum, parts[warp].sums);
  if (nodes > size) {
    merge_warps(parts);
  } else {
    __syncwarp();
  }
}

// Nodes of merge_levels that lie in memory.
inline std::int64_t level_count(std::int64_t chunks) {
  std::int64_t total = 0;
  for (std::int64_t n = chunks; n > 1;) total += n = (n + kGroup - 1) / kGroup;
  return total;
}

}  // namespace fastcheck::cuda
