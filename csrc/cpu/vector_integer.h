// Integer and bool tiles. Their sums are in float64, which leaves them bound by arithmetic: the
// passes over a tile are kept apart.
#pragma once

#include <limits>

#include "cpu/vector_checksum.h"
#include "cpu/vector_sums.h"

namespace fastcheck::cpu {
namespace {

template <class Component, Depth kDepth>
class IntegerTiles {
  using T = typename Component::Bits;
  static constexpr int kRaw = kLanes / kVectorLanes<T>;
  static constexpr int kDoubles = kVectorLanes<double>;

 public:
  Sums whole(const std::byte* data, std::uint64_t tile) { return partial(data, kTile, tile); }

  Sums partial(const std::byte* data, int n, std::uint64_t tile) {
    constexpr int kRowBytes = kLanes * sizeof(T);
    const int rows = n / kLanes;
    LastRow<Component> last(data + rows * kRowBytes, n % kLanes);
    census(data, rows * kRaw);
    census(last.data(), last.vectors());
    last.subtract_padding(counts_);
    if constexpr (kDepth == Depth::kHealth) return {};
    last.pad_with_zeros();
    if constexpr (kDepth == Depth::kFull) {
      checksum_rows<sizeof(T)>(data, rows, last.data(), last.words(), tile, terms_);
    }
    TileLanes<double> lanes = {};
    for (int run = 0; run * kRunRows < rows; ++run) {
      const int end = rows < (run + 1) * kRunRows ? rows : (run + 1) * kRunRows;
      add_rows(data + run * kRunRows * kRowBytes, end - run * kRunRows, lanes.run[run]);
    }
    if (last.exists()) add_rows(last.data(), 1, lanes.run[rows / kRunRows]);
    return fold_tile<LaneLayout::kContiguous>(lanes);
  }

  Partial finish() const {
    Partial part;
    part.counts = counts_;
    for (int i = 0; i < kVectorLanes<T>; ++i) {
      if (min_[i] > max_[i]) continue;
      include(part.range, key_of<Component>(min_[i]));
      include(part.range, key_of<Component>(max_[i]));
    }
    part.checksum = terms_.total();
    return part;
  }

 private:
  void census(const std::byte* data, int vectors) {
    int zero = 0, negative = 0, saturated = 0;
    for (int i = 0; i < vectors; ++i) {
      const auto x = load<T>(data + i * kVectorBytes);
      zero += count_equal<T>(x, splat<T>(0));
      if constexpr (Component::kSigned) negative += count_top_bit<T>(x);
      if constexpr (Component::kCountsSaturation) {
        saturated += count_equal<T>(x, splat<T>(Component::kMax));
        if constexpr (Component::kSigned) saturated += count_equal<T>(x, splat<T>(Component::kMin));
      }
      min_ = vmin<T>(min_, x);
      max_ = vmax<T>(max_, x);
    }
    counts_.zero += zero;
    counts_.negative += negative;
    counts_.saturated += saturated;
  }

  FASTCHECK_FN_MEMBER static Vec<double> values(const T* p) {
    const Vec<double> x = to_double(p);
    if constexpr (Component::kCountsSaturation) return x;
    return x > 0.0 ? splat(1.0) : splat(0.0);  // bool
  }

  static void add_rows(const std::byte* data, int rows, LaneVector<double>* lanes) {
    for (int block = 0; block < TileLanes<double>::kVectors; block += kBlockSums) {
      LaneVector<double> sums[kBlockSums];
      for (int k = 0; k < kBlockSums; ++k) sums[k] = lanes[block + k];
      const auto* at = reinterpret_cast<const T*>(data) + block * kDoubles;
      for (int row = 0; row < rows; ++row, at += kLanes) {
#pragma GCC unroll 4
        for (int k = 0; k < kBlockSums; ++k) sums[k].add(values(at + k * kDoubles));
      }
      for (int k = 0; k < kBlockSums; ++k) lanes[block + k] = sums[k];
    }
  }

  Counts counts_;
  Vec<T> min_ = splat<T>(std::numeric_limits<T>::max());
  Vec<T> max_ = splat<T>(std::numeric_limits<T>::min());
  ChecksumTerms terms_;
};

}  // namespace
}  // namespace fastcheck::cpu
