// What a thread takes from a batch of rows: sums, chains, extremes and counts.
//
// A batch is read as if all of it were finite: the sums, the extremes and the count of minus signs
// of a tile are only used if its extremes show that it was so. Zeros and subnormals are counted
// from the registers of the batch that has any.
#pragma once

#include "core/accumulator.h"
#include "core/record.h"
#include "cuda/chains.cuh"
#include "cuda/floats.cuh"
#include "cuda/fold.cuh"
#include "cuda/integers.cuh"
#include "cuda/rows.cuh"

namespace fastcheck::cuda {

template <class Component, bool kIsFloat = Component::kIsFloat>
struct ExtremesOf {
  using Type = Extremes<Component>;
};
template <class Component>
struct ExtremesOf<Component, false> {
  using Type = IntegerExtremes<Component>;
};

// The part of a warp's state that is not in registers: what is written once a tile or hardly ever.
template <class Component>
struct WarpShared {
  Stage<Component> stage;
  FoldShared<Component> fold;
  alignas(16) double leaf[3][kWarp];  // the sums of the tiles of the warp's share
  std::uint32_t rare[4];              // nan, posinf, neginf, saturated, each counted by its lane
};

// The sums of a tile, one in each thread (which_sum).
template <class Component>
FASTCHECK_DEVICE void set_leaf(WarpShared<Component>& shared, int leaf, double sum) {
  if (has_sum_to_store()) shared.leaf[which_sum()][leaf] = sum;
}

// The same, of which every thread has all.
template <class Component>
FASTCHECK_DEVICE void set_leaf(WarpShared<Component>& shared, int leaf, const Sums& sums) {
  if (lane_index() != leaf) return;
  shared.leaf[0][leaf] = sums.sum;
  shared.leaf[1][leaf] = sums.abs_sum;
  shared.leaf[2][leaf] = sums.sum_sq;
}

// The scale of a tile: its largest magnitude, the same in every lane, or 1 for no scale.
template <class Component, Depth kDepth>
FASTCHECK_DEVICE float scaled_by(const typename ExtremesOf<Component>::Type& extremes) {
  if constexpr (kDepth >= Depth::kStats && kMayScale<Component>) {
    float largest = extremes.largest_value();
    const bool above = any_lane(largest > kScaleDownAbove);
    const bool below = all_lanes(largest < kScaleUpBelow) && any_lane(largest > 0.0f);
    if (above || below) {
      FASTCHECK_ROLLED
      for (int mask = 1; mask < kWarp; mask *= 2) {
        largest = fmaxf(largest, from_lane_xor(largest, mask));
      }
      return largest;
    }
  }
  return 1.0f;
}

// The thread's sum of a tile that is scaled so.
FASTCHECK_DEVICE double unscaled(double sum, float scaled) {
  const TileScale scale = tile_scale(scaled);
  return sum * (which_sum() < 2 ? scale.undo : scale.undo_square);
}

// A row of which `n` components are there, and the first of them in place of the others.
template <class Component>
FASTCHECK_DEVICE Row<Component> filled_up(const Row<Component>& row, int n) {
  using S = Shape<Component>;
  Row<Component> full;
  FASTCHECK_UNROLL
  for (int w = 0; w < S::kWords; ++w) {
    const int bits = 8 * (n * S::kSize - 4 * w);
    const std::uint32_t there = bits <= 0 ? 0 : bits >= 32 ? ~0u : (1u << bits) - 1;
    std::uint32_t first = row.word[S::kSize == 8 ? w % 2 : 0];
    if constexpr (S::kSize == 1) first = (first & 0xff) * kEachByte;
    if constexpr (S::kSize == 2) first = (first & 0xffff) * 0x10001u;
    full.word[w] = (row.word[w] & there) | (first & ~there);
  }
  return full;
}

template <class Component>
FASTCHECK_DEVICE void row_values(
    const Row<Component>& row,
    typename Component::Accumulator (&x)[Shape<Component>::kVectorLanes]) {
  if constexpr (Component::kIsFloat) {
    values_of(row, x);
  } else {
    FASTCHECK_UNROLL
    for (int k = 0; k < Shape<Component>::kVectorLanes; ++k)
      x[k] = value<Component>(bits_of(row, k));
  }
}

// Counts and checksum of the batches that a thread took.
template <class Component, Depth kDepth>
class Tally {
  using S = Shape<Component>;
  using Accumulator = typename Component::Accumulator;
  static constexpr bool kSums = kDepth >= Depth::kStats;

 public:
  using Values = typename ExtremesOf<Component>::Type;
  using Rows = Row<Component>[kBatchRows];
  using Runs = LaneSums<Accumulator>[S::kVectorLanes];

  explicit FASTCHECK_DEVICE_MEMBER Tally(WarpShared<Component>& shared) : shared_(shared) {}

  // Includes the extremes of a tile, once all of it is taken.
  FASTCHECK_DEVICE_MEMBER void include(const Values& of_tile) {
    if constexpr (Component::kIsFloat) {
      extremes_.include(of_tile);
    } else {
      extremes_ = merge(extremes_, of_tile.range());
    }
  }

  FASTCHECK_DEVICE_MEMBER void finish_chains(Chains<Component>& chains, int bytes) {
    if constexpr (kDepth == Depth::kFull) chains.finish(bytes, terms_);
  }

  // Everything but the sums and what add_census counted, of the whole warp.
  FASTCHECK_DEVICE_MEMBER Partial finish() const {
    Partial part;
    part.counts.zero = warp_sum(counts_.zero);
    // Below zero where signs were counted by another reading of the tile.
    part.counts.negative = static_cast<std::int32_t>(warp_sum(counts_.negative));
    if constexpr (Component::kIsFloat) {
      part.counts.subnormal = warp_sum(counts_.subnormal);
    } else {
      part.counts.saturated = warp_sum(counts_.saturated);
    }
    if constexpr (kSums) {
      if constexpr (Component::kIsFloat) {
        part.range = extremes_.range();
      } else {
        part.range = extremes_;
      }
      part.range = fold_range(part.range);
    }
    if constexpr (kDepth == Depth::kFull) {
      part.checksum = {warp_sum(terms_.a), warp_sum(terms_.b)};
    }
    return part;
  }

  FASTCHECK_DEVICE_MEMBER void start_census() {
    if (lane_index() < 4) shared_.rare[lane_index()] = 0;
  }

  FASTCHECK_DEVICE_MEMBER void finish_census(Counts& counts) const {
    // The writes of lanes to shared memory are not ordered by an exchange.
    __syncwarp();
    counts.nan = shared_.rare[0];
    counts.posinf = shared_.rare[1];
    counts.neginf = shared_.rare[2];
    counts.saturated = shared_.rare[3];
  }

  // Adds the result of a census: signs of what is not finite were taken for minus signs.
  FASTCHECK_DEVICE_MEMBER void add_census(const Counters& counts, std::uint32_t signs) {
    counts_.negative -= signs;
    const std::uint32_t rare[4] = {counts.nan, counts.posinf, counts.neginf, counts.saturated};
    FASTCHECK_UNROLL
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t sum = warp_sum(rare[i]);
      if (lane_index() == i && sum != 0) shared_.rare[i] += sum;
    }
  }

  // Sums, chains, extremes and counts of a batch, if all of it is there for this thread. The whole
  // warp comes here together. The sums are of components times `factor`.
  FASTCHECK_DEVICE_MEMBER void take_whole(const Rows& rows, bool there, float factor, Runs& runs,
                                          NarrowSums& narrow, Chains<Component>& chains,
                                          Values& extremes) {
    if (there) {
      FASTCHECK_UNROLL
      for (int j = 0; j < kBatchRows; ++j) {
        if constexpr (kSums) add_plainly(rows[j], factor, runs, narrow);
        if constexpr (kDepth == Depth::kFull) chains.add(rows[j]);
        include(rows[j], rows[j], extremes);
      }
    }
    if constexpr (Component::kIsFloat) finish_here(runs, chains);
    count_small_of(rows, there ? kTile : 0, 0, extremes);
  }

  // The same for a batch of a partial tile, of which `left` components are there.
  FASTCHECK_DEVICE_MEMBER void take_partly(const Rows& rows, int left, Runs& runs,
                                           NarrowSums& narrow, Chains<Component>& chains,
                                           Values& extremes) {
    const bool there = left >= (kBatchRows - 1) * kLanes + S::kVectorLanes;
    if (!any_lane(!there && left > 0)) {
      return take_whole(rows, there, 1.0f, runs, narrow, chains, extremes);
    }
    // The batch that the tensor ends in, a row at a time. Zeros add nothing to a sum.
    int missing = 0;  // components of the vector that the tensor ends in: read as zeros
    put_rows(rows, shared_.stage);
    FASTCHECK_ROLLED
    for (int j = 0; j < kBatchRows; ++j) {
      const int of_row = left - j * kLanes;
      if (of_row <= 0) break;
      const Row<Component> row = unpack<Component>(shared_.stage.own(j));
      if constexpr (kSums) add_plainly(row, 1.0f, runs, narrow);
      if (of_row >= S::kVectorLanes) {
        if constexpr (kDepth == Depth::kFull) chains.add(row);
        include(row, row, extremes);
      } else {
        if constexpr (kDepth == Depth::kFull) chains.add(row, of_row * S::kSize);
        include(row, filled_up(row, of_row), extremes);
        missing = S::kVectorLanes - of_row;
      }
    }
    if constexpr (!Component::kIsFloat) counts_.zero -= missing;
    count_small_of(rows, left, missing, extremes);
  }

 private:
  FASTCHECK_DEVICE_MEMBER static void add_plainly(const Row<Component>& row, float factor,
                                                  Runs& runs, NarrowSums& narrow) {
    if constexpr (kNarrowInteger<Component>) {
      cuda::add(narrow, row);
    } else {
      Accumulator x[S::kVectorLanes];
      row_values(row, x);
      constexpr bool kInTwos = kHasTwoFloats && std::is_same_v<Accumulator, float>;
      FASTCHECK_UNROLL
      for (int k = 0; k < S::kVectorLanes; k += kInTwos ? 2 : 1) {
        if constexpr (kInTwos) {
          if constexpr (kMayScale<Component>) multiply_two(x[k], x[k + 1], factor, factor);
          add_two(runs[k].sum, runs[k + 1].sum, x[k], x[k + 1]);
          add_two(runs[k].abs_sum, runs[k + 1].abs_sum, fabsf(x[k]), fabsf(x[k + 1]));
          add_two_squares(runs[k].sum_sq, runs[k + 1].sum_sq, x[k], x[k + 1]);
        } else {
          if constexpr (Component::kIsFloat) {
            if constexpr (kMayScale<Component>) x[k] *= factor;
          }
          fastcheck::add(runs[k], x[k]);
        }
      }
    }
  }

  // Has nvcc leave sums and chains of a batch ahead of its vote and the branch behind that. It
  // would move them to the next batch: rows that are needed until then leave no registers for its
  // loads.
  FASTCHECK_DEVICE_MEMBER static void finish_here(const Runs& runs,
                                                  const Chains<Component>& chains) {
    FASTCHECK_UNROLL
    for (int k = 0; k < S::kVectorLanes && kSums; ++k) {
      compute_here(runs[k].sum);
      compute_here(runs[k].abs_sum);
      compute_here(runs[k].sum_sq);
    }
    FASTCHECK_UNROLL
    for (int w = 0; w < S::kWords && kDepth == Depth::kFull; ++w) {
      compute_here(chains.a[w]);
      compute_here(chains.b[w]);
    }
  }

  // Zeros and subnormals of a batch that was included in the extremes.
  FASTCHECK_DEVICE_MEMBER void count_small_of(const Rows& rows, int left, int missing,
                                              Values& extremes) {
    if constexpr (Component::kIsFloat) {
      // The vote keeps the warp together; threads with nothing unusual find nothing.
      if (any_lane(extremes.take_small())) {
        FASTCHECK_UNROLL
        for (int j = 0; j < kBatchRows; ++j) {
          if (left > j * kLanes) count_small(rows[j], counts_);
        }
        counts_.zero -= missing;
      }
    }
  }

  // Of a row, and of the same with no component missing.
  FASTCHECK_DEVICE_MEMBER void include(const Row<Component>& row, const Row<Component>& full,
                                       Values& extremes) {
    if constexpr (Component::kIsFloat) {
      extremes.include(full);
      counts_.negative = count_top_bits(row, counts_.negative);
    } else {
      count_row(row, counts_);
      if constexpr (kSums) extremes.include(full);
    }
  }

  WarpShared<Component>& shared_;
  Counters counts_;
  std::conditional_t<Component::kIsFloat, Values, KeyRange> extremes_;
  Checksum terms_;
};

}  // namespace fastcheck::cuda
