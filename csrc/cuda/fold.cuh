// Folds a warp's runs to the three sums of its tile, along the canonical tree (core/order.h).
//
// The four runs of a lane meet first, in the precision of the lane: where they lie in different
// groups of threads, each exchange also shares the lanes out, until every thread has two
// neighbouring lanes. From there on it is float64, by way of shared memory: eight threads have a
// sum, eight neighbouring lanes each. A tile costs a thread 18 exchanges of the runs (16 bits; 6
// for 32 bits), and one of the three trees: 7 additions and 3 exchanges.
#pragma once

#include "core/accumulator.h"
#include "cuda/intrinsics.cuh"
#include "cuda/rows.cuh"

namespace fastcheck::cuda {

// The first kCount values become kCount / 2: the halves of two threads added up, one half each.
template <int kCount, class T>
FASTCHECK_DEVICE void share_out(T* values, int mask, bool upper) {
  FASTCHECK_UNROLL
  for (int k = 0; k < kCount / 2; ++k) {
    const T low = values[k];
    const T high = values[k + kCount / 2];
    values[k] = (upper ? high : low) + from_lane_xor(upper ? low : high, mask);
  }
}

// ---- three sums over the threads of a warp ------------------------------------------------------

constexpr int kSharers = 8;  // threads that have a sum: neighbours, and so are the nodes they have

// The number of the sum of the three that a thread has; behind the last ones, the last sum again.
FASTCHECK_DEVICE int which_sum(int lane = lane_index()) {
  const unsigned which = static_cast<unsigned>(lane) / kSharers;
  return static_cast<int>(which < 2 ? which : 2);
}

FASTCHECK_DEVICE double fold_sharers(double x) {
  FASTCHECK_UNROLL
  for (int mask = 1; mask < kSharers; mask *= 2) x += from_lane_xor(x, mask);
  return x;
}

// Stores the three sums, one to each of `out`.
FASTCHECK_DEVICE bool has_sum_to_store() {
  return lane_index() % kSharers == 0 && lane_index() < 3 * kSharers;
}

FASTCHECK_DEVICE void put_sums(double sum, Sums& out) {
  static_assert(sizeof(Sums) == 3 * sizeof(double));
  if (has_sum_to_store()) reinterpret_cast<double*>(&out)[which_sum()] = sum;
}

// ---- the tree of a tile -------------------------------------------------------------------------

// The lanes between passes and for the fold, in their order, kept out of the registers: sum,
// abs_sum, sum_sq.
template <class Component>
struct FoldShared {
  using Accumulator = typename Component::Accumulator;
  static constexpr int kKept = Shape<Component>::kPasses == 4 ? 2 : 1;
  struct alignas(2 * sizeof(Accumulator)) Pair {
    Accumulator lane[2];
  };
  alignas(16) Pair kept[kKept][3][kWarp];
};

template <class Component>
class TileFold {
  using Accumulator = typename Component::Accumulator;
  using Pair = typename FoldShared<Component>::Pair;
  static constexpr int kHeld = Shape<Component>::kVectorLanes;

 public:
  explicit FASTCHECK_DEVICE_MEMBER TileFold(FoldShared<Component>& shared) : shared_(shared) {}

  // One pass's runs; every pass in turn.
  FASTCHECK_DEVICE_MEMBER void add(int pass, const LaneSums<Accumulator> (&runs)[kHeld]) {
    const int lane = lane_here();
    const int at = pair_of(lane);
    FASTCHECK_UNROLL
    for (int i = 0; i < 3; ++i) {
      Accumulator pair[kHeld];
      FASTCHECK_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        pair[k] = i == 0 ? runs[k].sum : i == 1 ? runs[k].abs_sum : runs[k].sum_sq;
      }
      if constexpr (kHeld == 8) share_out<8>(pair, 8, (lane & 8) != 0);
      if constexpr (kHeld >= 4) share_out<4>(pair, 16, (lane & 16) != 0);
      const Pair mine{{pair[0], pair[1]}};
      Pair& first = shared_.kept[0][i][at];
      if constexpr (Shape<Component>::kPasses == 4) {
        Pair& second = shared_.kept[1][i][at];
        if (pass == 0) first = mine;
        if (pass == 1) first = both(first, mine);
        if (pass == 2) second = mine;
        if (pass == 3) first = both(first, both(second, mine));
      } else {
        first = pass == 0 ? mine : both(first, mine);
      }
    }
  }

  // The sum of the thread (which_sum).
  FASTCHECK_DEVICE_MEMBER double finish() const {
    __syncwarp();
    const int lane = lane_here();
    const Pair* const from = &shared_.kept[0][which_sum(lane)][lane % kSharers * 4];
    double x[4];
    FASTCHECK_UNROLL
    for (int k = 0; k < 4; ++k) {
      const Pair pair = from[k];
      x[k] = static_cast<double>(pair.lane[0]) + static_cast<double>(pair.lane[1]);
    }
    const double sum = fold_sharers((x[0] + x[1]) + (x[2] + x[3]));
    // The next tile's are written by other threads.
    __syncwarp();
    return sum;
  }

 private:
  // For sm_70 all kernels are tight; elsewhere a lane that is computed anew costs instructions.
  static FASTCHECK_DEVICE_MEMBER int lane_here() {
    constexpr bool kIsTightHere = kIsTight<Component> || FASTCHECK_DEVICE_ARCH < 750;
    return kIsTightHere ? opaque(lane_index()) : lane_index();
  }

  static FASTCHECK_DEVICE_MEMBER Pair both(const Pair& l, const Pair& r) {
    return {{l.lane[0] + r.lane[0], l.lane[1] + r.lane[1]}};
  }

  // The pair of neighbouring lanes that a thread has: the bits that share_out dealt out are the
  // lowest of the pair's number, the last one dealt first.
  static FASTCHECK_DEVICE_MEMBER int pair_of(int lane) {
    if (kHeld == 8) return (lane >> 4) | (lane & 8) >> 2 | (lane & 7) << 2;
    if (kHeld == 4) return (lane >> 4) | (lane & 15) << 1;
    return lane;
  }

  FoldShared<Component>& shared_;
};

// ---- other trees --------------------------------------------------------------------------------

// The tree over the tiles of a share, of which there are `count`, zeros behind them; each thread
// gets its sum. A sum of zero leaves another as it is, so that what is above the tiles costs
// nothing.
FASTCHECK_DEVICE double fold_leaves(const double (&leaf)[3][kWarp], int count) {
  const double* const from = &leaf[which_sum()][lane_index() % kSharers * 4];
  double sum = from[0];
  if (count > 1) {
    sum = (sum + from[1]) + (from[2] + from[3]);
    if (count > 4) sum = fold_sharers(sum);
  }
  return sum;
}

// The range of all lanes.
FASTCHECK_DEVICE KeyRange fold_range(const KeyRange& range) {
  return {~warp_max(~range.min), warp_max(range.max)};
}

}  // namespace fastcheck::cuda
