// One warp reads one tile: every statistic in registers, memory read once.
//
// Cost on a whole ordinary tile, in instructions per thread and 32-bit word: two bfloat16 take 2 to
// widen, 6 for the sums, 3 for the extremes, 1 for the signs and 4 for the checksum; a float32
// takes 3, 3, 1 and 4. Zeros and subnormals are counted again from the registers of their batch (5
// a word). What is not finite sends the tile through a second reading with those values as zero,
// and so does the scale rule. A partial tile goes the same way, with zeros in the vector that it
// ends in.
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

// What a warp keeps out of its registers: what is written once a tile or hardly ever.
template <class Component>
struct WarpShared {
  Stage<Component> stage;
  FoldShared<Component> fold;
  double leaf[3][kWarp];  // the sums of the tiles of the warp's share, each written by its lane
  std::uint32_t rare[4];  // nan, posinf, neginf, saturated, each counted by its lane
};

// Reads tiles with a whole warp and keeps, per thread, everything that merges in any order.
template <class Component, Depth kDepth>
class TileReader {
  using S = Shape<Component>;
  using Accumulator = typename Component::Accumulator;
  using Values = typename ExtremesOf<Component>::Type;
  using Rows = Row<Component>[kBatchRows];
  using Runs = LaneSums<Accumulator>[S::kVectorLanes];
  static constexpr bool kSums = kDepth >= Depth::kStats;

 public:
  explicit FASTCHECK_DEVICE_MEMBER TileReader(WarpShared<Component>& shared) : shared_(shared) {}

  // `n` components are there from the tile's first to the tensor's end. Every lane gets the sums.
  FASTCHECK_DEVICE_MEMBER Sums read(const std::byte* data, const Layout* layout, std::int64_t tile,
                                    int n) {
    Values extremes;
    TileFold<Component> fold(shared_.fold);
    NarrowSums narrow;
    const bool plain = is_plain<Component>(data, layout, n);
    const Place<Component> place;
    float largest = 1.0f;  // of a tile that is scaled
    bool again = false;    // a second reading, for the sums alone
    FASTCHECK_ROLLED
    for (;;) {
      bool finite = true;
      FASTCHECK_ROLLED
      for (int pass = 0; pass < S::kPasses; ++pass) {
        Runs runs;
        Chains<Component> chains;
        if constexpr (kDepth == Depth::kFull) {
          chains.start(tile, pass * S::kRunsPerPass + place.run, place.column);
        }
        if (plain && !again) {
          FASTCHECK_ROLLED
          for (int batch = 0; batch < kBatches; ++batch) {
            Rows rows;
            load_plain(batch_begin(data, tile, pass, batch, place), rows);
            finite = take_whole(rows, true, runs, narrow, chains, extremes) && finite;
          }
        } else {
          FASTCHECK_ROLLED
          for (int batch = 0; batch < kBatches; ++batch) {
            const int left = n - place.row(pass, batch) * kLanes - place.column * S::kVectorLanes;
            if (!any_lane(left > 0)) break;
            Rows rows;
            load_batch(data, layout, tile, pass, batch, n, place, shared_.stage, rows);
            if (again) {
              add_carefully(rows, left, tile_scale(largest).factor, runs);
            } else {
              finite = take_partly(rows, left, runs, narrow, chains, extremes) && finite;
            }
          }
        }
        if constexpr (kDepth == Depth::kFull) {
          if (!again) {
            const int first = place.row(pass, 0) * kLanes + place.column * S::kVectorLanes;
            chains.finish((n - first) * S::kSize, terms_);
          }
        }
        if constexpr (kSums && !kNarrowInteger<Component>) fold.add(pass, runs);
      }
      if constexpr (kSums && Component::kIsFloat) {
        if (!again && needs_care(finite, extremes, largest)) {
          again = true;
          continue;
        }
      }
      break;
    }
    if constexpr (Component::kIsFloat) {
      extremes_.include(extremes);
    } else {
      extremes_ = merge(extremes_, extremes.range());
    }
    if constexpr (!kSums) {
      return {};
    } else if constexpr (kNarrowInteger<Component>) {
      return total<Component>(narrow);
    } else {
      const Sums sums = fold.finish();
      const TileScale scale = tile_scale(largest);
      return {sums.sum * scale.undo, sums.abs_sum * scale.undo, sums.sum_sq * scale.undo_square};
    }
  }

  // Everything but the sums, of the whole warp; every lane gets it.
  FASTCHECK_DEVICE_MEMBER Partial finish() const {
    Partial part;
    __syncwarp();  // the lanes that counted what is rare: an exchange does not order memory
    part.counts.zero = warp_sum(counts_.zero);
    part.counts.negative = warp_sum(counts_.negative);
    if constexpr (Component::kIsFloat) {
      part.counts.subnormal = warp_sum(counts_.subnormal);
      part.counts.nan = shared_.rare[0];
      part.counts.posinf = shared_.rare[1];
      part.counts.neginf = shared_.rare[2];
      part.counts.saturated = shared_.rare[3];
    } else {
      part.counts.saturated = warp_sum(counts_.saturated);
    }
    if constexpr (kSums) {
      if constexpr (Component::kIsFloat) {
        part.range = extremes_.range();
      } else {
        part.range = extremes_;
      }
      FASTCHECK_UNROLL
      for (int mask = 1; mask < kWarp; mask *= 2) {
        part.range = merge(
            part.range, {from_lane_xor(part.range.min, mask), from_lane_xor(part.range.max, mask)});
      }
    }
    if constexpr (kDepth == Depth::kFull) {
      part.checksum = {warp_sum(terms_.a), warp_sum(terms_.b)};
    }
    return part;
  }

 private:
  FASTCHECK_DEVICE_MEMBER static void add_plainly(const Row<Component>& row, Runs& runs,
                                                  NarrowSums& narrow) {
    if constexpr (kNarrowInteger<Component>) {
      cuda::add(narrow, row);
    } else {
      Accumulator x[S::kVectorLanes];
      row_values(row, x);
      FASTCHECK_UNROLL
      for (int k = 0; k < S::kVectorLanes; ++k) fastcheck::add(runs[k], x[k]);
    }
  }

  // Non-finite values as zero, and every value scaled.
  FASTCHECK_DEVICE_MEMBER static void add_carefully(const Rows& rows, int left, float factor,
                                                    Runs& runs) {
    if constexpr (Component::kIsFloat) {
      FASTCHECK_UNROLL
      for (int j = 0; j < kBatchRows; ++j) {
        if (left <= j * kLanes) continue;
        Accumulator x[S::kVectorLanes];
        row_values(rows[j], x);
        FASTCHECK_UNROLL
        for (int k = 0; k < S::kVectorLanes; ++k) {
          const bool finite = is_finite<Component>(bits_of(rows[j], k));
          Accumulator y = finite ? x[k] : Accumulator(0);
          if constexpr (kMayScale<Component>) y *= factor;
          fastcheck::add(runs[k], y);
        }
      }
    }
  }

  FASTCHECK_DEVICE_MEMBER static void row_values(const Row<Component>& row,
                                                 Accumulator (&x)[S::kVectorLanes]) {
    if constexpr (Component::kIsFloat) {
      values_of(row, x);
    } else {
      FASTCHECK_UNROLL
      for (int k = 0; k < S::kVectorLanes; ++k) x[k] = value<Component>(bits_of(row, k));
    }
  }

  // Sums, chains, extremes and counts of a batch, if all of it is there for this thread; whether
  // all that was read of it is finite. The whole warp comes here together.
  FASTCHECK_DEVICE_MEMBER bool take_whole(const Rows& rows, bool there, Runs& runs,
                                          NarrowSums& narrow, Chains<Component>& chains,
                                          Values& extremes) {
    Values batch;
    std::uint32_t signs = 0;
    if (there) {
      FASTCHECK_UNROLL
      for (int j = 0; j < kBatchRows; ++j) {
        if constexpr (kSums) add_plainly(rows[j], runs, narrow);
        if constexpr (kDepth == Depth::kFull) chains.add(rows[j]);
        include(rows[j], rows[j], batch, signs, extremes);
      }
    }
    return settle(rows, there ? kTile : 0, 0, batch, signs, extremes);
  }

  // The same for a batch of a partial tile, of which `left` components are there.
  FASTCHECK_DEVICE_MEMBER bool take_partly(const Rows& rows, int left, Runs& runs,
                                           NarrowSums& narrow, Chains<Component>& chains,
                                           Values& extremes) {
    const bool there = left >= (kBatchRows - 1) * kLanes + S::kVectorLanes;
    if (!any_lane(!there && left > 0)) {
      return take_whole(rows, there, runs, narrow, chains, extremes);
    }
    // The batch that the tensor ends in, a row at a time. Zeros add nothing to a sum.
    Values batch;
    std::uint32_t signs = 0;
    int missing = 0;  // components of the vector that the tensor ends in: read as zeros
    FASTCHECK_ROLLED
    for (int j = 0; j < kBatchRows; ++j) {
      const Row<Component> row = row_at(rows, j);
      const int of_row = left - j * kLanes;
      if (of_row <= 0) continue;
      if constexpr (kSums) add_plainly(row, runs, narrow);
      if (of_row >= S::kVectorLanes) {
        if constexpr (kDepth == Depth::kFull) chains.add(row);
        include(row, row, batch, signs, extremes);
      } else {
        if constexpr (kDepth == Depth::kFull) chains.add(row, of_row * S::kSize);
        include(row, filled_up(row, of_row), batch, signs, extremes);
        missing = S::kVectorLanes - of_row;
      }
    }
    if constexpr (!Component::kIsFloat) counts_.zero -= missing;
    return settle(rows, left, missing, batch, signs, extremes);
  }

  // What was included of a batch becomes part of the tile, if all of it is finite; else it is read
  // one component at a time. Whether it is.
  FASTCHECK_DEVICE_MEMBER bool settle(const Rows& rows, int left, int missing, const Values& batch,
                                      std::uint32_t signs, Values& extremes) {
    if constexpr (Component::kIsFloat) {
      // The votes keep the warp together; threads with nothing unusual find nothing.
      if (any_lane(left > 0 && batch.beyond())) return census(rows, left, extremes);
      counts_.negative += signs;
      extremes.include(batch);
      if (any_lane(batch.small())) {
        FASTCHECK_UNROLL
        for (int j = 0; j < kBatchRows; ++j) {
          if (left > j * kLanes) count_small(rows[j], counts_);
        }
        counts_.zero -= missing;
      }
    }
    return true;
  }

  // Of a row, and of the same with no component missing.
  FASTCHECK_DEVICE_MEMBER void include(const Row<Component>& row, const Row<Component>& full,
                                       Values& batch, std::uint32_t& signs, Values& extremes) {
    if constexpr (Component::kIsFloat) {
      batch.include(full);
      signs = count_top_bits(row, signs);
    } else {
      count_row(row, counts_);
      if constexpr (kSums) extremes.include(full);
    }
  }

  // A row of which `n` components are there, and the first of them in place of the others.
  FASTCHECK_DEVICE_MEMBER static Row<Component> filled_up(const Row<Component>& row, int n) {
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

  // Of a batch that stays in registers.
  FASTCHECK_DEVICE_MEMBER static Row<Component> row_at(const Rows& rows, int index) {
    Row<Component> row{};
    FASTCHECK_UNROLL
    for (int j = 0; j < kBatchRows; ++j) {
      if (j == index) row = rows[j];
    }
    return row;
  }

  // One component at a time. The whole warp comes here together.
  FASTCHECK_DEVICE_MEMBER bool census(const Rows& rows, int left, Values& extremes) {
    bool all_finite = true;
    Counters counts;
    FASTCHECK_ROLLED
    for (int j = 0; j < kBatchRows; ++j) {
      const Row<Component> row = row_at(rows, j);
      FASTCHECK_UNROLL
      for (int k = 0; k < S::kVectorLanes; ++k) {
        if (j * kLanes + k >= left) continue;
        const auto bits = bits_of(row, k);
        count<Component>(counts, bits);
        if constexpr (Component::kIsFloat) {
          if (!is_finite<Component>(bits)) {
            all_finite = false;
            continue;
          }
        }
        extremes.include(bits);
      }
    }
    counts_.zero += counts.zero;
    counts_.negative += counts.negative;
    if constexpr (Component::kIsFloat) {
      counts_.subnormal += counts.subnormal;
      const std::uint32_t rare[4] = {counts.nan, counts.posinf, counts.neginf, counts.saturated};
      FASTCHECK_UNROLL
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t sum = warp_sum(rare[i]);
        if (lane_index() == i && sum != 0) shared_.rare[i] += sum;
      }
    } else {
      counts_.saturated += counts.saturated;
    }
    return all_finite;
  }

  // Whether the sums must be taken again, and at what scale: the same answer in every lane.
  FASTCHECK_DEVICE_MEMBER static bool needs_care(bool finite, const Values& extremes,
                                                 float& tile_largest) {
    const bool broken = !all_lanes(finite);
    if constexpr (kMayScale<Component>) {
      float largest = extremes.largest_value();
      const bool above = any_lane(largest > kScaleDownAbove);
      const bool below = all_lanes(largest < kScaleUpBelow) && any_lane(largest > 0.0f);
      if (!broken && !above && !below) return false;
      FASTCHECK_ROLLED
      for (int mask = 1; mask < kWarp; mask *= 2) {
        largest = fmaxf(largest, from_lane_xor(largest, mask));
      }
      tile_largest = largest;
      return true;
    }
    return broken;
  }

  WarpShared<Component>& shared_;
  Counters counts_;
  std::conditional_t<Component::kIsFloat, Values, KeyRange> extremes_;
  Checksum terms_;
};

}  // namespace fastcheck::cuda
