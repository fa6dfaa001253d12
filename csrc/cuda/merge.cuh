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
  template <int kWord, class T>
  static FASTCHECK_DEVICE_MEMBER void load(const Partial* at, T& out) {
    load_from_block<kWord>(at, out);
  }
};
struct FromShared {
  template <int kWord, class T>
  static FASTCHECK_DEVICE_MEMBER void load(const Partial* at, T& out) {
    out = static_cast<T>(reinterpret_cast<const std::uint64_t*>(at)[kWord]);
  }
};

// Everything but the sums, of the partials that a thread has met. Count: 32 bits where no count of
// the warp passes them, else 64.
template <class Count>
struct Met {
  static constexpr int kCounts = sizeof(Counts) / 8;
  Count counts[kCounts] = {};
  KeyRange range;
  Checksum checksum;

  template <class From>
  FASTCHECK_DEVICE_MEMBER void add(const Partial* at) {
    add_counts<From>(at, std::make_integer_sequence<int, kCounts>());
    constexpr int kRange = offsetof(Partial, range) / 8;
    KeyRange other;
    From::template load<kRange>(at, other.min);
    From::template load<kRange + 1>(at, other.max);
    range = merge(range, other);
    std::uint64_t both;
    From::template load<offsetof(Partial, checksum) / 8>(at, both);
    checksum =
        merge(checksum, {static_cast<std::uint32_t>(both), static_cast<std::uint32_t>(both >> 32)});
  }

  // Writes the counts of the whole warp.
  FASTCHECK_DEVICE_MEMBER void put(Partial& out) const {
    Count all[kCounts];
    FASTCHECK_UNROLL
    for (int i = 0; i < kCounts; ++i) all[i] = warp_sum(counts[i]);
    const KeyRange of_all = fold_range(range);
    const Checksum terms{warp_sum(checksum.a), warp_sum(checksum.b)};
    if (lane_index() != 0) return;
    FASTCHECK_UNROLL
    for (int i = 0; i < kCounts; ++i) reinterpret_cast<std::uint64_t*>(&out)[i] = all[i];
    out.range = of_all;
    out.checksum = terms;
  }

 private:
  template <class From, int kWord>
  FASTCHECK_DEVICE_MEMBER void add_count(const Partial* at) {
    Count other;
    From::template load<kWord>(at, other);
    counts[kWord] += other;
  }
  template <class From, int... kWords>
  FASTCHECK_DEVICE_MEMBER void add_counts(const Partial* at,
                                          std::integer_sequence<int, kWords...>) {
    (add_count<From, kWords>(at), ...);
  }
};

// ---- warps --------------------------------------------------------------------------------------

// Every warp has put its part in `parts`; parts[0] is their tree once the first warp is back, for
// all of it. All threads of the block take part. The caller puts a barrier between two merges of
// the same memory.
template <class Count>
FASTCHECK_DEVICE void merge_warps(Partial (&parts)[kMaxWarps]) {
  __syncthreads();
  const int count = warp_count();
  if (count == 1 || warp_index() != 0) return;
  const int lane = lane_index();
  static_assert(kMaxWarps == kSharers);
  const int sharer = lane % kSharers;
  Met<Count> met;
  if (lane < count) met.template add<FromShared>(&parts[lane]);
  double sum = 0.0;
  if (sharer < count) sum = reinterpret_cast<const double*>(&parts[sharer].sums)[which_sum()];
  sum = fold_sharers(sum);
  __syncwarp();
  met.put(parts[0]);
  put_sums(sum, parts[0].sums);
  __syncwarp();
}

// ---- chunks -------------------------------------------------------------------------------------

constexpr int kLeastOfSharer = 4;
constexpr int kMostOfSharer = 32;
constexpr int kGroup = kSharers * kMostOfSharer;  // nodes that a warp folds at once

// A node's sum; zero if it is none of the `left` nodes from `at` on, where not all are there.
template <bool kAll, int kStride, int kNode>
FASTCHECK_DEVICE double load_node(const double* at, int left) {
  double sum;
  if constexpr (kAll) {
    load_from_block<kStride * kNode>(at, sum);
  } else {
    sum = load_from_block_if<kStride * kNode, kNode>(at, left);
  }
  return sum;
}

// Four neighbours from the kFirst-th node on, kStride doubles apart.
template <bool kAll, int kStride, int kFirst>
FASTCHECK_DEVICE double fold_four(const double* at, int left) {
  const double x[4] = {load_node<kAll, kStride, kFirst>(at, left),
                       load_node<kAll, kStride, kFirst + 1>(at, left),
                       load_node<kAll, kStride, kFirst + 2>(at, left),
                       load_node<kAll, kStride, kFirst + 3>(at, left)};
  return (x[0] + x[1]) + (x[2] + x[3]);
}

// Up to `each` neighbours: a power of two from kLeastOfSharer to kMostOfSharer. More than
// kAtOnce loads under way would take registers that the kernel has in use.
template <bool kAll, int kStride>
FASTCHECK_DEVICE double fold_nodes(const double* at, int left, int each) {
  constexpr int kAtOnce = 16;
  static_assert(kLeastOfSharer == 4 && kMostOfSharer == 2 * kAtOnce);
  double sum = 0.0;
  FASTCHECK_ROLLED
  for (int k = 0; k < each; k += kAtOnce) {
    double part = fold_four<kAll, kStride, 0>(at, left - k);
    if (each > 4) part += fold_four<kAll, kStride, 4>(at, left - k);
    if (each > 8) {
      part +=
          fold_four<kAll, kStride, 8>(at, left - k) + fold_four<kAll, kStride, 12>(at, left - k);
    }
    sum += part;
    at += kAtOnce * kStride;
  }
  return sum;
}

// The tree over `count` nodes, `each` of them to a sharer. Each thread gets its sum.
template <int kStride>
FASTCHECK_DEVICE double fold_group(const Sums* nodes, int count, int each) {
  const int first = lane_index() % kSharers * each;
  const double* at = reinterpret_cast<const double*>(nodes) + (which_sum() + first * kStride);
  const bool are_all = count == kSharers * each;  // of every warp but one
  return fold_sharers(are_all ? fold_nodes<true, kStride>(at, 0, each)
                              : fold_nodes<false, kStride>(at, count - first, each));
}

// `count` neighbouring chunks, by one warp; adds what is not a sum, each thread gets its sum.
template <class Count>
FASTCHECK_DEVICE double read_group(const Partial* chunks, int count, int each, Met<Count>& met) {
  FASTCHECK_ROLLED
  for (int k = lane_index(); k < count; k += kWarp) met.template add<FromBlock>(chunks + k);
  return fold_group<sizeof(Partial) / 8>(&chunks->sums, count, each);
}

// Nodes of the `group`-th kGroup.
FASTCHECK_DEVICE int size_of_group(std::int64_t group, std::int64_t nodes) {
  const std::int64_t left = nodes - group * kGroup;
  return left < kGroup ? static_cast<int>(left) : kGroup;
}

// merge_chunks for more of them than the warps of a block can fold at once: as long as there is
// more than one group, its sums are a node in `levels`.
FASTCHECK_DEVICE void merge_levels(const Partial* chunks, std::int64_t count, Sums* levels,
                                   Partial (&parts)[kMaxWarps]) {
  const int warp = warp_index();
  std::int64_t groups = (count + kGroup - 1) / kGroup;
  Met<std::uint64_t> met;
  double sum = 0.0;
  for (std::int64_t group = warp; group < groups; group += warp_count()) {
    const int here = size_of_group(group, count);
    put_sums(read_group(chunks + group * kGroup, here, kMostOfSharer, met), levels[group]);
  }
  while (groups > 1) {
    __syncthreads();
    const Sums* from = levels;
    levels += groups;
    const std::int64_t nodes = groups;
    groups = (nodes + kGroup - 1) / kGroup;
    for (std::int64_t group = warp; group < groups; group += warp_count()) {
      const int here = size_of_group(group, nodes);
      sum = fold_group<sizeof(Sums) / 8>(from + group * kGroup, here, kMostOfSharer);
      if (groups > 1) put_sums(sum, levels[group]);
    }
  }
  // The last group is the first warp's; a sum of zero leaves another as it is.
  met.put(parts[warp]);
  put_sums(warp == 0 ? sum : 0.0, parts[warp].sums);
  merge_warps<std::uint64_t>(parts);
}

// The tree over `count` chunks, zero-padded; `levels` has room for the sums of all groups.
// The first warp finds the result in parts[0]. All threads of the block take part.
FASTCHECK_DEVICE_CALLED void merge_chunks(const Partial* chunks, std::int64_t count, Sums* levels,
                                          Partial (&parts)[kMaxWarps]) {
  static_assert(kChunkComponents <= (std::int64_t{1} << 32) / (kMaxWarps * kGroup));
  const int warps = warp_count();
  if (count > warps * kGroup) return merge_levels(chunks, count, levels, parts);
  // A group to each warp that has any. Their counts fit 32 bits.
  const int nodes = static_cast<int>(count);
  int each = kLeastOfSharer;
  for (int most = each * kSharers * warps; most < nodes; most *= 2) each *= 2;
  const int size = each * kSharers;
  const int warp = warp_index();
  if (warp > 0 && nodes <= size) return;
  Met<std::uint32_t> met;
  const int left = nodes - warp * size;
  const double sum = read_group(chunks + warp * size, left < size ? left : size, each, met);
  met.put(parts[warp]);
  put_sums(sum, parts[warp].sums);
  if (nodes > size) {
    merge_warps<std::uint32_t>(parts);
  } else {
    __syncwarp();
  }
}

}  // namespace fastcheck::cuda
