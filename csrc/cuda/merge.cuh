// Merges partials: of warps to that of a block, and of all chunks to that of a tensor.
//
// Both follow the canonical tree: warps, and then chunks, hold aligned groups of tiles. The merge
// of chunks costs one block a reading of 104 bytes per chunk; of up to 256 chunks, one warp.
#pragma once

#include "core/accumulator.h"
#include "cuda/fold.cuh"
#include "cuda/intrinsics.cuh"

namespace fastcheck::cuda {

constexpr int kMaxWarps = 8;

// ---- many partials ------------------------------------------------------------------------------

// What other blocks wrote is read from the L2 cache, which blocks share.
struct FromBlocks {
  template <class T>
  static FASTCHECK_DEVICE_MEMBER T load(const T* at) {
    return __ldcg(at);
  }
};
struct FromShared {
  template <class T>
  static FASTCHECK_DEVICE_MEMBER T load(const T* at) {
    return *at;
  }
};

// Everything but the sums, of the partials that a thread has met.
struct Met {
  static constexpr int kCounts = 7;
  unsigned long long counts[kCounts] = {};
  unsigned long long min = ~0ull, max = 0;
  unsigned int a = 0, b = 0;

  template <class From>
  FASTCHECK_DEVICE_MEMBER void add(const Partial& part) {
    static_assert(sizeof(Counts) == kCounts * 8 && offsetof(Partial, counts) == 0);
    const auto* words = reinterpret_cast<const unsigned long long*>(&part);
    FASTCHECK_UNROLL
    for (int i = 0; i < kCounts; ++i) counts[i] += From::load(words + i);
    const auto* range = words + offsetof(Partial, range) / 8;
    const unsigned long long least = From::load(range), most = From::load(range + 1);
    min = least < min ? least : min;
    max = most > max ? most : max;
    a += From::load(&part.checksum.a);
    b += From::load(&part.checksum.b);
  }

  // Those of the whole warp, which counted below 2^32, or far more.
  FASTCHECK_DEVICE_MEMBER void put(bool is_far_more, Partial& out) const {
    unsigned long long all[kCounts];
    if (is_far_more) {
      FASTCHECK_UNROLL
      for (int i = 0; i < kCounts; ++i) all[i] = warp_sum(std::uint64_t{counts[i]});
    } else {
      FASTCHECK_UNROLL
      for (int i = 0; i < kCounts; ++i) all[i] = warp_sum(static_cast<std::uint32_t>(counts[i]));
    }
    const KeyRange range = fold_range({min, max});
    const Checksum checksum{warp_sum(a), warp_sum(b)};
    if (lane_index() != 0) return;
    FASTCHECK_UNROLL
    for (int i = 0; i < kCounts; ++i) reinterpret_cast<unsigned long long*>(&out)[i] = all[i];
    out.range = range;
    out.checksum = checksum;
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
  if (lane < count) met.add<FromShared>(parts[lane]);
  double sum = 0.0;
  if (sharer < count) sum = reinterpret_cast<const double*>(&parts[sharer].sums)[which_sum()];
  sum = fold_sharers(sum);
  __syncwarp();
  met.put(are_large, parts[0]);
  put_sums(sum, parts[0].sums);
  __syncwarp();
}

// ---- chunks -------------------------------------------------------------------------------------

constexpr int kMostOfSharer = 32;
constexpr int kGroup = kSharers * kMostOfSharer;  // nodes that a warp folds at once

// Four neighbours of `left` nodes, kStride doubles apart.
template <int kStride>
FASTCHECK_DEVICE double fold_four(const double* at, int left) {
  double x[4];
  FASTCHECK_UNROLL
  for (int k = 0; k < 4; ++k) {
    x[k] = 0.0;
    if (k < left) x[k] = __ldcg(at + k * kStride);
  }
  return (x[0] + x[1]) + (x[2] + x[3]);
}

// The tree over `count` nodes, up to kGroup; each thread gets its sum.
template <int kStride>
FASTCHECK_DEVICE double fold_group(const Sums* nodes, int count) {
  const int mine = count <= 32 ? 4 : count <= 64 ? 8 : count <= 128 ? 16 : kMostOfSharer;
  const int first = lane_index() % kSharers * mine;
  const double* at = reinterpret_cast<const double*>(nodes) + which_sum() + first * kStride;
  const int left = count - first;
  const auto four = [&](int k) { return fold_four<kStride>(at + k * kStride, left - k); };
  double sum = four(0);
  if (mine > 4) sum += four(4);
  if (mine > 8) sum += four(8) + four(12);
  if (mine > 16) sum += (four(16) + four(20)) + (four(24) + four(28));
  return fold_sharers(sum);
}

// The tree over `count` chunks, zero-padded, up to kGroup neighbours at a time; `levels` has room
// for its inner nodes (level_count). The first warp finds the result in parts[0]; if there is one
// group, no other one takes part. A chunk counts below 2^24.
FASTCHECK_DEVICE void merge_chunks(const Partial* chunks, std::int64_t count, Sums* levels,
                                   Partial (&parts)[kMaxWarps]) {
  static_assert(sizeof(Partial) % 8 == 0 && sizeof(Sums) % 8 == 0);
  const int warp = warp_index();
  std::int64_t groups = (count + kGroup - 1) / kGroup;
  const bool has_levels = groups > 1;
  if (warp != 0 && !has_levels) return;
  const auto of_group = [](std::int64_t group, std::int64_t nodes) {
    const std::int64_t left = nodes - group * kGroup;
    return left < kGroup ? static_cast<int>(left) : kGroup;
  };
  Met met;
  double sum = 0.0;
  for (std::int64_t group = warp; group < groups; group += warp_count()) {
    const Partial* const from = chunks + group * kGroup;
    const int here = of_group(group, count);
    FASTCHECK_ROLLED
    for (int k = lane_index(); k < here; k += kWarp) met.add<FromBlocks>(from[k]);
    sum = fold_group<sizeof(Partial) / 8>(&from->sums, here);
    if (has_levels) put_sums(sum, levels[group]);
  }
  while (groups > 1) {
    __syncthreads();
    const Sums* from = levels;
    levels += groups;
    const std::int64_t nodes = groups;
    groups = (nodes + kGroup - 1) / kGroup;
    for (std::int64_t group = warp; group < groups; group += warp_count()) {
      sum = fold_group<sizeof(Sums) / 8>(from + group * kGroup, of_group(group, nodes));
      if (groups > 1) put_sums(sum, levels[group]);
    }
  }
  // The last group is the first warp's; a sum of zero leaves another as it is.
  met.put(has_levels, parts[warp]);
  put_sums(warp == 0 ? sum : 0.0, parts[warp].sums);
  if (has_levels) {
    merge_warps(parts, true);
  } else {
    __syncwarp();
  }
}

// Nodes of merge_chunks that lie in memory.
inline std::int64_t level_count(std::int64_t chunks) {
  std::int64_t total = 0;
  for (std::int64_t n = chunks; n > 1;) total += n = (n + kGroup - 1) / kGroup;
  return total;
}

}  // namespace fastcheck::cuda
