// Folds a warp's runs to the three sums of its tile, along the canonical tree (core/order.h).
//
// The four runs of a lane meet first, in the precision of the lane: where they lie in different
// groups of threads, each exchange also shares the lanes out, until every thread has two
// neighbouring lanes. From there on it is float64: the pair inside the thread, then five exchanges.
// A tile costs a thread 18 exchanges of the runs (16 bits; 6 for 32 bits) and 15 of the tree.
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

FASTCHECK_DEVICE double fold_step(double x, int mask) { return x + from_lane_xor(x, mask); }

// The two lanes of each thread between passes, kept out of the registers: sum, abs_sum, sum_sq.
template <class Component>
struct FoldShared {
  static constexpr int kKept = Shape<Component>::kPasses == 4 ? 2 : 1;
  typename Component::Accumulator kept[kKept][3][2][kWarp];
};

template <class Component>
class TileFold {
  using Accumulator = typename Component::Accumulator;
  static constexpr int kHeld = Shape<Component>::kVectorLanes;

 public:
  explicit FASTCHECK_DEVICE_MEMBER TileFold(FoldShared<Component>& shared) : shared_(shared) {}

  // One pass's runs; every pass in turn.
  FASTCHECK_DEVICE_MEMBER void add(int pass, const LaneSums<Accumulator> (&runs)[kHeld]) {
    const int lane = lane_index();
    FASTCHECK_UNROLL
    for (int i = 0; i < 3; ++i) {
      Accumulator pair[kHeld];
      FASTCHECK_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        pair[k] = i == 0 ? runs[k].sum : i == 1 ? runs[k].abs_sum : runs[k].sum_sq;
      }
      if constexpr (kHeld == 8) share_out<8>(pair, 8, (lane & 8) != 0);
      if constexpr (kHeld >= 4) share_out<4>(pair, 16, (lane & 16) != 0);
      FASTCHECK_UNROLL
      for (int k = 0; k < 2; ++k) {
        Accumulator& first = shared_.kept[0][i][k][lane];
        if constexpr (Shape<Component>::kPasses == 4) {
          Accumulator& second = shared_.kept[1][i][k][lane];
          if (pass == 0) first = pair[k];
          if (pass == 1) first += pair[k];
          if (pass == 2) second = pair[k];
          if (pass == 3) first += second + pair[k];
        } else {
          first = pass == 0 ? pair[k] : first + pair[k];
        }
      }
    }
  }

  FASTCHECK_DEVICE_MEMBER Sums finish() const {
    const int lane = lane_index();
    double v[3];
    FASTCHECK_UNROLL
    for (int i = 0; i < 3; ++i) {
      const auto& pair = shared_.kept[0][i];
      v[i] = static_cast<double>(pair[0][lane]) + static_cast<double>(pair[1][lane]);
    }
    FASTCHECK_UNROLL
    for (int level = 0; level < 5; ++level) {
      FASTCHECK_UNROLL
      for (int i = 0; i < 3; ++i) v[i] = fold_step(v[i], neighbour(level));
    }
    return {v[0], v[1], v[2]};
  }

 private:
  // Which thread has the neighbouring pair of lanes: the bits that share_out dealt out are the
  // lowest of the pair's number, the last one dealt first.
  static FASTCHECK_DEVICE_MEMBER constexpr int neighbour(int level) {
    if (kHeld == 8) return level < 2 ? 16 >> level : 1 << (level - 2);
    if (kHeld == 4) return level < 1 ? 16 : 1 << (level - 1);
    return 1 << level;
  }

  FoldShared<Component>& shared_;
};

// The sums of `count` neighbouring nodes of the tree, one in each lane, in order, and zeros behind
// them; lane 0 gets the result. A sum of zero leaves another as it is, so that what is above the
// nodes costs nothing.
FASTCHECK_DEVICE Sums fold_lanes(Sums leaf, int count) {
  FASTCHECK_UNROLL
  for (int mask = 1; mask < kWarp; mask *= 2) {
    if (mask >= count) break;
    leaf = {fold_step(leaf.sum, mask), fold_step(leaf.abs_sum, mask), fold_step(leaf.sum_sq, mask)};
  }
  return leaf;
}

// The same of a node in every lane; lanes 0 to 2 get one sum each, in their order. 6 exchanges
// where one sum after the other would take 15.
FASTCHECK_DEVICE double fold_all_lanes(const Sums& node) {
  const int lane = lane_index();
  double sums[4] = {node.sum, node.sum_sq, node.abs_sum, 0.0};
  share_out<4>(sums, 1, (lane & 1) != 0);
  share_out<2>(sums, 2, (lane & 2) != 0);
  FASTCHECK_UNROLL
  for (int mask = 4; mask < kWarp; mask *= 2) sums[0] = fold_step(sums[0], mask);
  return sums[0];
}

// The range of all lanes; lane 0 gets it. Even lanes look for the smallest key, odd ones for the
// largest, as the smallest complement.
FASTCHECK_DEVICE KeyRange fold_range(KeyRange range) {
  const bool is_odd = lane_index() % 2 != 0;
  std::uint64_t mine = is_odd ? ~range.max : range.min;
  std::uint64_t other = from_lane_xor(is_odd ? range.min : ~range.max, 1);
  FASTCHECK_ROLLED
  for (int mask = 2; mask <= kWarp; mask *= 2) {
    mine = other < mine ? other : mine;
    other = from_lane_xor(mine, mask < kWarp ? mask : 1);
  }
  return {mine, ~other};
}

}  // namespace fastcheck::cuda
