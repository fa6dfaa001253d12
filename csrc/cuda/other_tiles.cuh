// The tiles of a warp's share that are not plain and ordinary: strided, not aligned or partial
// ones, and those that are read again because something in them is not finite or they are scaled.
//
// They come after the plain ones, in a loop of their own, so that neither way takes registers from
// the other. What one needs only now and then is computed where it is needed (opaque).
#pragma once

#include "cuda/arguments.h"
#include "cuda/batch.cuh"
#include "cuda/other_rows.cuh"

namespace fastcheck::cuda {

// Every value scaled, and non-finite ones as zero where there may be any.
template <bool kMayBeNonfinite, class Component>
FASTCHECK_DEVICE void add_scaled(
    const Row<Component>& row, float factor,
    LaneSums<typename Component::Accumulator> (&runs)[Shape<Component>::kVectorLanes]) {
  using S = Shape<Component>;
  using Accumulator = typename Component::Accumulator;
  Accumulator x[S::kVectorLanes];
  row_values(row, x);
  FASTCHECK_UNROLL
  for (int k = 0; k < S::kVectorLanes; ++k) {
    Accumulator y = x[k];
    if (kMayBeNonfinite && !is_finite<Component>(bits_of(row, k))) y = 0;
    if constexpr (kMayScale<Component>) y *= factor;
    fastcheck::add(runs[k], y);
  }
}

// Of a row of which `n` components are there. The sign of a NaN was taken for a minus.
template <class Component>
FASTCHECK_DEVICE void count_again(const Row<Component>& row, int n, Counters& counts,
                                  std::uint32_t& signs, Extremes<Component>& extremes) {
  FASTCHECK_UNROLL
  for (int k = 0; k < Shape<Component>::kVectorLanes; ++k) {
    if (k >= n) continue;
    const auto bits = bits_of(row, k);
    count<Component>(counts, bits);
    if (is_finite<Component>(bits)) {
      extremes.include(bits);
    } else if ((bits & Component::kSign) != 0) {
      ++signs;
    }
  }
}

enum class Reading {
  kFirst,
  kCensus,  // of what is not finite; and the sums, not scaled
  kSums,    // scaled by the largest finite magnitude, which another reading found
};

template <class Component, Depth kDepth>
class OtherTiles {
  using S = Shape<Component>;
  using Taken = Tally<Component, kDepth>;
  using Values = typename Taken::Values;
  static constexpr bool kSums = kDepth >= Depth::kStats;

 public:
  FASTCHECK_DEVICE_MEMBER OtherTiles(WarpShared<Component>& shared, const Entry& entry,
                                     const Layout* layout)
      : shared_(shared), entry_(entry), layout_(layout), tally_(shared) {
    if constexpr (Component::kIsFloat) tally_.start_census();
    __syncwarp();  // leaf[0] is read by other lanes
  }

  // A tile, read for the first time or again; `n` components are there from its first to the
  // tensor's end. Of a tile that is read again, leaf[0] has what PlainTiles left there.
  FASTCHECK_DEVICE_MEMBER void read(std::int64_t tile, int n, int leaf, bool is_first) {
    float scaled = is_first ? 0.0f : static_cast<float>(shared_.leaf[0][leaf]);
    Reading reading = is_first || !Component::kIsFloat ? Reading::kFirst
                      : scaled == 0.0f                 ? Reading::kCensus
                                                       : Reading::kSums;
    if (reading != Reading::kSums) scaled = 1.0f;
    NarrowSums narrow;
    TileFold<Component> fold(shared_.fold);
    FASTCHECK_ROLLED
    for (;;) {
      Values extremes;
      Counters counts;
      std::uint32_t signs = 0;
      FASTCHECK_ROLLED
      for (int pass = 0; pass < S::kPasses; ++pass) {
        typename Taken::Runs runs;
        Chains<Component> chains;
        if constexpr (kDepth == Depth::kFull) {
          const Place<Component> place(opaque(lane_index()));
          chains.start(tile, pass * S::kRunsPerPass + place.run, place.column);
        }
        int left = left_of(n, Place<Component>(opaque(lane_index())), pass, 0);
        FASTCHECK_ROLLED
        for (int batch = 0; batch < kBatches; ++batch, left -= kBatchRows * kLanes) {
          if constexpr (kIsTight<Component>) {
            left = left_of(n, Place<Component>(opaque(lane_index())), pass, batch);
          }
          if (!any_lane(left > 0)) break;
          Row<Component> rows[kBatchRows];
          load_batch(entry_.data, layout_, tile, pass, batch, n, left, shared_.stage, rows);
          if (reading == Reading::kFirst) {
            tally_.take_partly(rows, left, runs, narrow, chains, extremes);
            continue;
          }
          if constexpr (Component::kIsFloat) {
            const float factor = tile_scale(scaled).factor;
            if (add_ordinary(rows, left, factor, runs, extremes)) continue;
            put_rows(rows, shared_.stage);
            FASTCHECK_ROLLED
            for (int j = 0; j < kBatchRows; ++j) {
              const int of_row = left - j * kLanes;
              if (of_row <= 0) break;
              const Row<Component> row = unpack<Component>(shared_.stage.own(j));
              if constexpr (kSums) add_scaled<true>(row, factor, runs);
              if (reading == Reading::kCensus) count_again(row, of_row, counts, signs, extremes);
            }
          }
        }
        if (kDepth == Depth::kFull && reading == Reading::kFirst) {
          const Place<Component> place(opaque(lane_index()));
          tally_.finish_chains(chains, left_of(n, place, pass, 0) * S::kSize);
        }
        if constexpr (kSums && !kNarrowInteger<Component>) fold.add(pass, runs);
      }
      if constexpr (Component::kIsFloat) {
        if (reading == Reading::kFirst) {
          const bool beyond = any_lane(extremes.beyond());
          if (!beyond) scaled = scaled_by<Component, kDepth>(extremes);
          if (beyond || scaled != 1.0f) {
            reading = beyond ? Reading::kCensus : Reading::kSums;
            if (!beyond) tally_.include(extremes);
            continue;
          }
        } else if (reading == Reading::kCensus) {
          tally_.add_census(counts, signs);
          const float known = scaled_by<Component, kDepth>(extremes);
          if (known != scaled) {
            scaled = known;
            reading = Reading::kSums;
            tally_.include(extremes);
            continue;
          }
        } else {
          break;
        }
      }
      tally_.include(extremes);
      break;
    }
    if constexpr (kSums && kNarrowInteger<Component>) {
      set_leaf(shared_, leaf, total<Component>(narrow));
    } else if constexpr (kSums) {
      double sum = fold.finish();
      if constexpr (Component::kIsFloat) sum = unscaled(sum, scaled);
      set_leaf(shared_, leaf, sum);
    }
  }

  FASTCHECK_DEVICE_MEMBER Partial finish() const {
    Partial part = tally_.finish();
    if constexpr (Component::kIsFloat) tally_.finish_census(part.counts);
    return part;
  }

 private:
  // Sums and extremes of a batch of which every thread has all or nothing, and in which a census
  // would find nothing; false for another one. Most batches of a tile with a NaN are such.
  static FASTCHECK_DEVICE_MEMBER bool add_ordinary(const typename Taken::Rows& rows, int left,
                                                   float factor, typename Taken::Runs& runs,
                                                   Values& extremes) {
    const bool there = left >= (kBatchRows - 1) * kLanes + S::kVectorLanes;
    Values of_batch;
    if (there) {
      FASTCHECK_UNROLL
      for (int j = 0; j < kBatchRows; ++j) of_batch.include(rows[j]);
    }
    if (any_lane(there ? of_batch.beyond() : left > 0)) return false;
    if (there) {
      FASTCHECK_UNROLL
      for (int j = 0; j < kBatchRows; ++j) {
        if constexpr (kSums) add_scaled<false>(rows[j], factor, runs);
      }
    }
    extremes.include(of_batch);
    return true;
  }

  WarpShared<Component>& shared_;
  const Entry& entry_;
  const Layout* layout_;
  Tally<Component, kDepth> tally_;
};

}  // namespace fastcheck::cuda
