// One warp reads one plain tile: every statistic in registers, memory read once.
//
// Cost on an ordinary tile, in instructions per thread and 32-bit word: two bfloat16 take 2 to
// widen, 8 for the sums, 3 for the extremes, 1 for the signs and 4 for the checksum; a float32
// takes 4, 3, 1 and 4. Zeros and subnormals are counted again from the registers of their batch (5
// a word). The loads of a batch are issued before the batch in front of it is taken: they are on
// their way meanwhile (32 KiB of a multiprocessor), and both batches while it is waited for. What
// is not finite sends the tile to another reading (other_tiles.cuh), with those values as zero.
// Elements are scaled where the two tiles before had to be; a tile that has another scale than them
// is read again too, from memory: no cache holds a share.
#pragma once

#include "cuda/batch.cuh"

namespace fastcheck::cuda {

// What else is done with the rows of a batch: nothing.
struct NoVisit {};

// Reads whole aligned tiles with a whole warp and keeps, per thread, everything that merges in any
// order.
template <class Component, Depth kDepth>
class PlainTiles {
  using S = Shape<Component>;
  using Taken = Tally<Component, kDepth>;
  static constexpr bool kSums = kDepth >= Depth::kStats;

 public:
  explicit FASTCHECK_DEVICE_MEMBER PlainTiles(WarpShared<Component>& shared)
      : shared_(shared), tally_(shared) {}

  // False if the tile must be read again; leaf[0] then has what it is scaled by, or 0 if something
  // in it is not finite (or the largest finite number, which is counted). Calls visit(rows) with
  // each batch, which is then loaded when the one before is done with: a visit takes longer than a
  // load.
  template <class Visit>
  FASTCHECK_DEVICE_MEMBER bool read(const std::byte* data, std::int64_t tile, int leaf,
                                    const Visit& visit) {
    constexpr int kBatchBytes = kBatchRows * S::kRowBytes;
    typename Taken::Values extremes;
    TileFold<Component> fold(shared_.fold);
    NarrowSums narrow;
    const Place<Component> place;
    FASTCHECK_ROLLED
    for (int pass = 0; pass < S::kPasses; ++pass) {
      typename Taken::Runs runs;
      Chains<Component> chains;
      if constexpr (kDepth == Depth::kFull) {
        chains.start(tile, pass * S::kRunsPerPass + place.run, place.column);
      }
      const std::byte* at = batch_begin(data, tile, pass, 0, place);
      Row<Component> rows[kBatchRows];
      if constexpr (std::is_same_v<Visit, NoVisit>) {
        Row<Component> next[kBatchRows];
        load_plain(at, rows);
        FASTCHECK_ROLLED
        for (int batch = 0; batch < kBatches; batch += 2) {
          load_plain(at + kBatchBytes, next);
          tally_.take_whole(rows, true, factor_, runs, narrow, chains, extremes);
          at += 2 * kBatchBytes;
          if (batch + 2 < kBatches) load_plain(at, rows);
          tally_.take_whole(next, true, factor_, runs, narrow, chains, extremes);
        }
      } else {
        FASTCHECK_ROLLED
        for (int batch = 0; batch < kBatches; ++batch) {
          load_plain(at, rows);
          at += kBatchBytes;
          tally_.take_whole(rows, true, factor_, runs, narrow, chains, extremes);
          visit(rows);
        }
      }
      tally_.finish_chains(chains, S::kVectorBytes);
      if constexpr (kSums && !kNarrowInteger<Component>) fold.add(pass, runs);
    }
    [[maybe_unused]] float scaled = 1.0f;
    if constexpr (Component::kIsFloat) {
      if (any_lane(extremes.beyond())) return false;
      scaled = scaled_by<Component, kDepth>(extremes);
      tally_.include(extremes);
      const float factor = tile_scale(scaled).factor;
      const bool is_added = factor == factor_;
      factor_ = factor == last_factor_ ? factor : 1.0f;
      last_factor_ = factor;
      if (!is_added) {
        if (lane_index() == leaf) shared_.leaf[0][leaf] = scaled;
        return false;
      }
    }
    if constexpr (kSums && kNarrowInteger<Component>) {
      set_leaf(shared_, leaf, total<Component>(narrow));
    } else if constexpr (kSums) {
      double sum = fold.finish();
      if (scaled != 1.0f) sum = unscaled(sum, scaled);
      set_leaf(shared_, leaf, sum);
    }
    if constexpr (!Component::kIsFloat) tally_.include(extremes);
    return true;
  }

  FASTCHECK_DEVICE_MEMBER Partial finish() const { return tally_.finish(); }

 private:
  WarpShared<Component>& shared_;
  Tally<Component, kDepth> tally_;
  float factor_ = 1.0f;  // of the next tile, if it is as the two before
  float last_factor_ = 1.0f;
};

}  // namespace fastcheck::cuda
