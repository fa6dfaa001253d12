// Tiles of bool and of integers of 8 and 16 bits, counted and added up as integers.
//
// Each sum of such a tile is an integer below 2^53: additions in float64, in the canonical order or
// any other, give it exactly. A last row is padded with copies of its first component, which are
// subtracted from the tile's totals.
#pragma once

#include <limits>

#include "cpu/vector_checksum.h"

namespace fastcheck::cpu {
namespace {

template <class Component>
constexpr bool kIsNarrow = !Component::kIsFloat && sizeof(typename Component::Bits) <= 2;

// The totals of a tile, lane by lane: sums of pairs in 32 or 64 bits, counts in those of a
// component.
template <class T>
struct NarrowLanes {
  Vec<T> zero{}, negative{}, saturated{};
  Vec<std::int32_t> sum{};
  Vec<std::int32_t> abs_sum{};  // of 16 bits: of the negative components alone
  Vec<std::int32_t> sum_sq{};   // of 8 bits: negated, of the bytes as signed ones
  Vec<std::uint64_t> square_low{}, square_high{};  // of 16 bits: low has high's 2^32-fold in it
};

template <class Component, Depth kDepth>
class NarrowTiles {
  using T = typename Component::Bits;
  using Signed = std::make_signed_t<T>;
  static constexpr int kRaw = kLanes / kVectorLanes<T>;
  static constexpr bool kIsBool = !Component::kCountsSaturation;
  static constexpr Signed kShift = std::numeric_limits<Signed>::min();
  static_assert(kTile / kVectorLanes<T> < (1 << (8 * sizeof(T))), "a lane's counts fit");

 public:
  Sums whole(const std::byte* data, std::uint64_t tile) {
    NarrowLanes<T> lanes;
    add(data, kRows * kRaw, lanes);
    if constexpr (kDepth == Depth::kFull) checksum_tile<sizeof(T)>(data, tile, terms_);
    return end_tile(lanes, kTile, 0, T());
  }

  Sums partial(const std::byte* data, int n, std::uint64_t tile) {
    constexpr int kRowBytes = kLanes * sizeof(T);
    const int rows = n / kLanes;
    LastRow<Component> last(data + rows * kRowBytes, n % kLanes);
    NarrowLanes<T> lanes;
    add(data, rows * kRaw, lanes);
    add(last.data(), last.vectors(), lanes);
    T first = T();
    if (last.exists()) memcpy(&first, last.data(), sizeof(first));
    const int padding = last.vectors() * kVectorLanes<T> - n % kLanes;
    last.pad_with_zeros();
    if constexpr (kDepth == Depth::kFull) {
      checksum_rows<sizeof(T)>(data, rows, last.data(), last.words(), tile, terms_);
    }
    return end_tile(lanes, n, padding, first);
  }

  Partial finish() const {
    Partial part;
    part.counts = counts_;
    if constexpr (kIsBool) {
      if (counts_.zero > 0) include(part.range, key_of<Component>(0));
      if (counts_.zero < components_) include(part.range, key_of<Component>(1));
    } else {
      for (int i = 0; i < kVectorLanes<T>; ++i) {
        if (min_[i] > max_[i]) continue;
        include(part.range, key_of<Component>(min_[i]));
        include(part.range, key_of<Component>(max_[i]));
      }
    }
    part.checksum = terms_.total();
    return part;
  }

 private:
  FASTCHECK_FN_MEMBER void add(const std::byte* data, int vectors, NarrowLanes<T>& to) {
    NarrowLanes<T> lanes = to;
    Vec<T> min = min_, max = max_;
    for (int i = 0; i < vectors; ++i) {
      const auto x = load<T>(data + i * kVectorBytes);
      count_where_equal<T>(lanes.zero, x, splat<T>(0));
      if constexpr (!kIsBool) {
        if constexpr (Component::kSigned) {
          count_where_less<T>(lanes.negative, x, splat<T>(0));
          // The largest value is the smallest with 1 added, and the smallest comes next.
          const auto next = (Vec<T>)((Vec<std::make_unsigned_t<T>>)x + 1);
          count_where_less<T>(lanes.saturated, next, splat<T>(Component::kMin + 2));
        } else {
          count_where_equal<T>(lanes.saturated, x, splat<T>(Component::kMax));
        }
        if constexpr (kDepth >= Depth::kStats) {
          min = vmin<T>(min, x);
          max = vmax<T>(max, x);
          add_values(lanes, x);
        }
      }
    }
    to = lanes;
    min_ = min;
    max_ = max;
  }

  FASTCHECK_FN_MEMBER static void add_values(NarrowLanes<T>& lanes, Vec<T> x) {
    // Unsigned values as signed ones, kShift lower.
    auto y = (Vec<Signed>)x;
    if constexpr (!Component::kSigned) y ^= splat<Signed>(kShift);
    if constexpr (sizeof(T) == 1) {
      // The bytes as they are: a negative one counts 256 more than it is.
      lanes.sum = add_bytes(lanes.sum, (Vec<std::uint8_t>)x);
      const auto absolute = absolute_bytes(y);
      if constexpr (Component::kSigned) lanes.abs_sum = add_bytes(lanes.abs_sum, absolute);
      // Two products make -2^15 at the least, which 16 bits hold.
      lanes.sum_sq = add_products(lanes.sum_sq, absolute, (Vec<std::int8_t>)(-absolute));
    } else {
      lanes.sum += sum_of_products(y, splat<std::int16_t>(1));
      if constexpr (Component::kSigned) lanes.abs_sum += sum_of_products(y, y >> 15);
      // Two squares make 2^31 at the most: unsigned.
      const auto squares = (Vec<std::uint64_t>)sum_of_products(y, y);
      lanes.square_low += squares;
      lanes.square_high += squares >> 32;
    }
  }

  template <class Lane>
  FASTCHECK_FN_MEMBER static std::int64_t total(Vec<Lane> lanes) {
    std::int64_t total = 0;
    for (int i = 0; i < kVectorLanes<Lane>; ++i) total += static_cast<std::int64_t>(lanes[i]);
    return total;
  }

  FASTCHECK_FN_MEMBER static std::int64_t count_of(Vec<T> lanes) {
    if constexpr (sizeof(T) == 1) {
      return total<std::int32_t>(add_bytes(Vec<std::int32_t>{}, (Vec<std::uint8_t>)lanes));
    } else {
      const auto counts = (Vec<std::int16_t>)lanes;
      return total<std::int32_t>(sum_of_products(counts, splat<std::int16_t>(1)));
    }
  }

  // `padding` components of the value `first` are to go.
  FASTCHECK_FN_MEMBER Sums end_tile(const NarrowLanes<T>& lanes, int n, int padding, T first) {
    const std::int64_t read = n + padding;
    const std::int64_t zero = count_of(lanes.zero);
    std::int64_t negative = 0;
    counts_.zero += zero;
    if constexpr (Component::kSigned) counts_.negative += negative = count_of(lanes.negative);
    if constexpr (!kIsBool) counts_.saturated += count_of(lanes.saturated);
    count<Component>(counts_, first, -padding);
    components_ += n;
    if constexpr (kDepth == Depth::kHealth) return {};
    if constexpr (kIsBool) {
      const auto ones = static_cast<double>(read - zero - (first != 0 ? padding : 0));
      return {ones, ones, ones};
    }
    std::int64_t sum = total<std::int32_t>(lanes.sum), sum_sq = 0;
    if constexpr (sizeof(T) == 1) {
      sum -= 256 * negative;
      sum_sq = -total<std::int32_t>(lanes.sum_sq);
    } else {
      sum_sq = total<std::uint64_t>(lanes.square_low - (lanes.square_high << 32)) +
               total<std::uint64_t>(lanes.square_high);
    }
    std::int64_t abs_sum = total<std::int32_t>(lanes.abs_sum);
    if constexpr (!Component::kSigned) {
      // x = y - shift: the squares of x from those of y, and 16-bit sums of x from those of y.
      constexpr std::int64_t kUp = -static_cast<std::int64_t>(kShift);
      if constexpr (sizeof(T) == 2) sum += kUp * read;
      sum_sq += 2 * kUp * sum - kUp * kUp * read;
      abs_sum = sum;
    } else if constexpr (sizeof(T) == 2) {
      abs_sum = sum + 2 * abs_sum;
    }
    const auto value = static_cast<std::int64_t>(first);
    sum -= padding * value;
    abs_sum -= padding * (value < 0 ? -value : value);
    sum_sq -= padding * value * value;
    return {static_cast<double>(sum), static_cast<double>(abs_sum), static_cast<double>(sum_sq)};
  }

  Counts counts_;
  std::int64_t components_ = 0;
  Vec<T> min_ = splat<T>(std::numeric_limits<T>::max());
  Vec<T> max_ = splat<T>(std::numeric_limits<T>::min());
  ChecksumTerms terms_;
};

}  // namespace
}  // namespace fastcheck::cpu
