// One warp reads one tile: every statistic in registers, memory read once.
//
// Cost on a whole ordinary tile, in instructions per thread and 32-bit word: two bfloat16 take 2 to
// widen, 6 for the sums, 3 for the extremes, 1 for the signs and 4 for the checksum; a float32
// takes 3, 3, 1 and 4. Zeros and subnormals are counted again from the registers of their batch (5
// a word). What is not finite sends the tile through a second reading with those values as zero,
// and so does the scale rule. The last, partial tile is read as a whole one with zeros behind it,
// but counted component by component.
#pragma once

#include "core/accumulator.h"
#include "core/record.h"
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

// Checksum chains of the words of one vector, through the rows of one run.
template <class Component>
struct Chains {
  static constexpr int kWords = Shape<Component>::kWords;
  std::uint32_t a[kWords];
  std::uint32_t b[kWords];

  FASTCHECK_DEVICE_MEMBER void start(std::int64_t tile, int run, int column) {
    constexpr int kWidth = words_per_row(Shape<Component>::kSize);
    const std::uint64_t chain =
        (static_cast<std::uint64_t>(tile) * kRuns + run) * kWidth + column * kWords;
    // The first of a row is a multiple of the row: going on from it never carries.
    const auto seed_a = checksum_seed<ChecksumA>(chain);
    const auto seed_b = checksum_seed<ChecksumB>(chain);
    FASTCHECK_UNROLL
    for (int w = 0; w < kWords; ++w) {
      a[w] = seed_a + w * ChecksumA::kPlaceLow;
      b[w] = seed_b + w * ChecksumB::kPlaceLow;
    }
  }
  FASTCHECK_DEVICE_MEMBER void add(const Row<Component>& row) {
    FASTCHECK_UNROLL
    for (int w = 0; w < kWords; ++w) step(w, row.word[w]);
  }
  // Of a row of which `bytes` exist from the vector's first on.
  FASTCHECK_DEVICE_MEMBER void add(const Row<Component>& row, int bytes) {
    FASTCHECK_UNROLL
    for (int w = 0; w < kWords; ++w) {
      if (4 * w < bytes) step(w, row.word[w]);
    }
  }
  // `bytes` exist from the vector's first row on.
  FASTCHECK_DEVICE_MEMBER void finish(int bytes, Checksum& terms) {
    FASTCHECK_UNROLL
    for (int w = 0; w < kWords; ++w) {
      finish_chain(a[w], b[w]);
      if (4 * w < bytes) terms = merge(terms, {a[w], b[w]});
    }
  }

 private:
  FASTCHECK_DEVICE_MEMBER void step(int w, std::uint32_t word) {
    a[w] = checksum_step<ChecksumA>(a[w], word);
    b[w] = checksum_step<ChecksumB>(b[w], word);
  }
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
  static constexpr bool kSums = kDepth >= Depth::kStats;

 public:
  explicit FASTCHECK_DEVICE_MEMBER TileReader(WarpShared<Component>& shared) : shared_(shared) {}

  // `n` components exist from the tile's first on. Every lane gets the sums.
  FASTCHECK_DEVICE_MEMBER Sums read(const std::byte* data, const Layout* layout, std::int64_t tile,
                                    int n) {
    Values extremes;
    TileFold<Component> fold(shared_.fold);
    NarrowSums narrow;
    const bool whole = n == kTile;
    const Place<Component> place;
    float largest = 1.0f;  // of a tile that is scaled
    bool again = false;    // a second reading, for the sums alone
    FASTCHECK_ROLLED
    for (;;) {
      bool finite = true;
      FASTCHECK_ROLLED
      for (int pass = 0; pass < S::kPasses; ++pass) {
        LaneSums<Accumulator> runs[S::kVectorLanes];
        Chains<Component> chains;
        if constexpr (kDepth == Depth::kFull) {
          chains.start(tile, pass * S::kRunsPerPass + place.run, place.column);
        }
        FASTCHECK_ROLLED
        for (int batch = 0; batch < kBatches; ++batch) {
          const int at = place.row(pass, batch) * kLanes + place.column * S::kVectorLanes;
          const int left = n - at;
          Rows rows;
          load_batch(data, layout, tile, pass, batch, n, place, shared_.stage, rows);
          if (again) {
            add_carefully(rows, tile_scale(largest).factor, runs);
            continue;
          }
          if constexpr (kSums) {
            if constexpr (kNarrowInteger<Component>) {
              FASTCHECK_UNROLL
              for (int j = 0; j < kBatchRows; ++j) cuda::add(narrow, rows[j]);
            } else {
              add_plainly(rows, runs);
            }
          }
          if constexpr (kDepth == Depth::kFull) {
            if (whole) {
              FASTCHECK_UNROLL
              for (int j = 0; j < kBatchRows; ++j) chains.add(rows[j]);
            } else {
              FASTCHECK_UNROLL
              for (int j = 0; j < kBatchRows; ++j) {
                chains.add(rows[j], (left - j * kLanes) * S::kSize);
              }
            }
          }
          finite = take_in(rows, left, whole, extremes) && finite;
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
      FASTCHECK_ROLLED
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
  FASTCHECK_DEVICE_MEMBER static void add_plainly(const Rows& rows,
                                                  LaneSums<Accumulator> (&runs)[S::kVectorLanes]) {
    FASTCHECK_UNROLL
    for (int j = 0; j < kBatchRows; ++j) {
      Accumulator x[S::kVectorLanes];
      row_values(rows[j], x);
      FASTCHECK_UNROLL
      for (int k = 0; k < S::kVectorLanes; ++k) fastcheck::add(runs[k], x[k]);
    }
  }

  // Non-finite values as zero, and every value scaled.
  FASTCHECK_DEVICE_MEMBER static void add_carefully(
      const Rows& rows, float factor, LaneSums<Accumulator> (&runs)[S::kVectorLanes]) {
    if constexpr (Component::kIsFloat) {
      FASTCHECK_UNROLL
      for (int j = 0; j < kBatchRows; ++j) {
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

  // Counts and extremes of a batch; whether all of it is finite, of what this thread has read.
  FASTCHECK_DEVICE_MEMBER bool take_in(const Rows& rows, int left, bool whole, Values& extremes) {
    if constexpr (Component::kIsFloat) {
      if (whole) {
        Values batch;
        std::uint32_t signs = 0;
        FASTCHECK_UNROLL
        for (int j = 0; j < kBatchRows; ++j) {
          batch.include(rows[j]);
          signs = count_top_bits(rows[j], signs);
        }
        // The vote keeps the warp together; threads with nothing unusual find nothing.
        const bool beyond = any_lane(batch.beyond());
        if (!beyond) {
          counts_.negative += signs;
          extremes.include(batch);
          if (any_lane(batch.small())) {
            FASTCHECK_UNROLL
            for (int j = 0; j < kBatchRows; ++j) count_small(rows[j], counts_);
          }
          return true;
        }
      }
    } else if (whole) {
      FASTCHECK_UNROLL
      for (int j = 0; j < kBatchRows; ++j) {
        count_row(rows[j], counts_);
        if constexpr (kSums) extremes.include(rows[j]);
      }
      return true;
    }
    return census(rows, left, extremes);
  }

  // One component at a time. The whole warp comes here together.
  FASTCHECK_DEVICE_MEMBER bool census(const Rows& batch, int left, Values& extremes) {
    bool all_finite = true;
    Counters counts;
    Rows rows;
    FASTCHECK_UNROLL
    for (int j = 0; j < kBatchRows; ++j) rows[j] = batch[j];
    FASTCHECK_ROLLED
    for (int j = 0; j < kBatchRows; ++j) {
      const Row<Component> row = rows[0];
      FASTCHECK_UNROLL
      for (int i = 1; i < kBatchRows; ++i) rows[i - 1] = rows[i];
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
