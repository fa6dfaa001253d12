// Lane sums in registers, and the fold of a tile's lanes, as core/accumulator.h states them.
#pragma once

#include "cpu/vector_common.h"

namespace fastcheck::cpu {
namespace {

// The places of the lanes of a row: in vectors one behind the other, or split into vectors of even
// and of odd lanes in turn (what widening 16-bit halves of a word by shifts gives).
enum class LaneLayout { kContiguous, kEvenOdd };

template <class T>
FASTCHECK_FN Vec<T> absolute(Vec<T> x) {
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  return (Vec<T>)((Vec<Bits>)x & splat(static_cast<Bits>(static_cast<Bits>(~Bits(0)) >> 1)));
}

template <class Accumulator>
struct LaneVector {  // without initialisers: a whole tile overwrites all of a TileLanes
  Vec<Accumulator> sum;
  Vec<Accumulator> abs_sum;
  Vec<Accumulator> sum_sq;

  FASTCHECK_FN_MEMBER void add(Vec<Accumulator> x) {
    sum += x;
    abs_sum += absolute<Accumulator>(x);
    sum_sq = vfma(x, x, sum_sq);
  }
};

template <class Accumulator>
struct TileLanes {
  static constexpr int kVectors = kLanes / kVectorLanes<Accumulator>;
  LaneVector<Accumulator> run[kRuns][kVectors];
};

FASTCHECK_FN Vec<double> fold_to_vector(Vec<double>* lanes, int vectors) {
  for (; vectors > 1; vectors /= 2) {
    for (int k = 0; k < vectors / 2; ++k) lanes[k] = add_pairs(lanes[2 * k], lanes[2 * k + 1]);
  }
  return lanes[0];
}

// Folds one of the three sums from 64 lanes to one vector of them.
template <LaneLayout kLayout, class Accumulator, class Field>
FASTCHECK_FN Vec<double> fold_lanes(const TileLanes<Accumulator>& tile, Field field) {
  constexpr int kVectors = TileLanes<Accumulator>::kVectors;
  Vec<Accumulator> folded[kVectors];
  for (int k = 0; k < kVectors; ++k) {
    folded[k] = (field(tile.run[0][k]) + field(tile.run[1][k])) +
                (field(tile.run[2][k]) + field(tile.run[3][k]));
  }
  if constexpr (std::is_same_v<Accumulator, double>) {
    return fold_to_vector(folded, kVectors);
  } else {
    Vec<double> wide[2 * kVectors];
    for (int k = 0; k < kVectors; ++k) {
      float_to_double(folded[k], wide[2 * k], wide[2 * k + 1]);
    }
    if constexpr (kLayout == LaneLayout::kContiguous) {
      return fold_to_vector(wide, 2 * kVectors);
    } else {
      for (int k = 0; k < kVectors / 2; ++k) {
        wide[2 * k] = wide[4 * k] + wide[4 * k + 2];
        wide[2 * k + 1] = wide[4 * k + 1] + wide[4 * k + 3];
      }
      return fold_to_vector(wide, kVectors);
    }
  }
}

template <LaneLayout kLayout, class Accumulator>
FASTCHECK_FN Sums fold_tile(const TileLanes<Accumulator>& tile) {
  using Lanes = LaneVector<Accumulator>;
  const Vec<double> sum = fold_lanes<kLayout>(tile, [](const Lanes& v) { return v.sum; });
  const Vec<double> abs_sum = fold_lanes<kLayout>(tile, [](const Lanes& v) { return v.abs_sum; });
  const Vec<double> sum_sq = fold_lanes<kLayout>(tile, [](const Lanes& v) { return v.sum_sq; });
  constexpr int kWidth = kVectorLanes<double>;
  Vec<double> all = add_pairs(sum, abs_sum);
  if constexpr (kWidth == 2) return {all[0], all[1], add_pairs(sum_sq, sum_sq)[0]};
  all = add_pairs(all, add_pairs(sum_sq, Vec<double>{}));
  for (int lanes = kWidth; lanes > 4; lanes /= 2) all = add_pairs(all, all);
  return {all[0], all[1], all[2 % kWidth]};
}

}  // namespace
}  // namespace fastcheck::cpu
