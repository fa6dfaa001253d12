// Integer and bool rows: extremes, counts, and sums that are exact.
//
// The sums of a tile of integers of up to 16 bits are integers below 2^53, the same in any order:
// they are added up as integers, four bytes in one instruction. Wider ones go the way of the
// floats.
#pragma once

#include "core/accumulator.h"
#include "cuda/floats.cuh"
#include "cuda/intrinsics.cuh"
#include "cuda/rows.cuh"

namespace fastcheck::cuda {

template <class Component>
constexpr bool kNarrowInteger = !Component::kIsFloat && sizeof(typename Component::Bits) <= 2;

constexpr std::uint32_t kEachByte = 0x01010101u;

// Top bits of the bytes that are not zero.
FASTCHECK_DEVICE std::uint32_t nonzero_bytes(std::uint32_t word) {
  return ((word & ~(kEachByte * 0x80)) + kEachByte * 0x7f) | word;
}

// A bool's bytes as 0 and 1; other words as they are.
template <class Component>
FASTCHECK_DEVICE std::uint32_t as_counted(std::uint32_t word) {
  if constexpr (!Component::kCountsSaturation) return nonzero_bytes(word) >> 7 & kEachByte;
  return word;
}

// ---- extremes -----------------------------------------------------------------------------------

template <class Component, bool kNarrow = kNarrowInteger<Component>>
struct IntegerExtremes {  // 32 and 64 bits
  using T = typename Component::Bits;
  T high = Component::kMin;
  T low = Component::kMax;

  FASTCHECK_DEVICE_MEMBER void include(const Row<Component>& row) {
    FASTCHECK_UNROLL
    for (int k = 0; k < Shape<Component>::kVectorLanes; ++k) include(bits_of(row, k));
  }
  FASTCHECK_DEVICE_MEMBER void include(T x) {
    high = x > high ? x : high;
    low = x < low ? x : low;
  }
  FASTCHECK_DEVICE_MEMBER KeyRange range() const {
    if (low > high) return {};
    return {key_of<Component>(low), key_of<Component>(high)};
  }
};

// Two to a word, each as a 16-bit integer of the same sign.
template <class Component>
struct IntegerExtremes<Component, true> {
  using T = typename Component::Bits;
  static constexpr bool kByte = sizeof(T) == 1;
  // Bytes always fit a signed half-word.
  static constexpr bool kSignedHalves = kByte || Component::kSigned;
  static constexpr std::uint32_t kLowest = kSignedHalves ? 0x80008000u : 0;
  std::uint32_t high = kLowest;
  std::uint32_t low = ~kLowest;

  FASTCHECK_DEVICE_MEMBER void include(const Row<Component>& row) {
    FASTCHECK_UNROLL
    for (int w = 0; w < Shape<Component>::kWords; ++w) {
      const std::uint32_t word = as_counted<Component>(row.word[w]);
      if constexpr (kByte) {
        include_pair(permute_bytes(word, 0, Component::kSigned ? 0x9180 : 0x4140));
        include_pair(permute_bytes(word, 0, Component::kSigned ? 0xb3a2 : 0x4342));
      } else {
        include_pair(word);
      }
    }
  }
  FASTCHECK_DEVICE_MEMBER void include(T x) {
    int number = static_cast<int>(x);
    if constexpr (!Component::kCountsSaturation) number = x != 0;
    include_pair((static_cast<std::uint32_t>(number) & 0xffff) * 0x10001u);
  }
  FASTCHECK_DEVICE_MEMBER KeyRange range() const {
    KeyRange keys;
    FASTCHECK_UNROLL
    for (int shift = 0; shift < 32; shift += 16) {
      const auto least = static_cast<std::uint16_t>(low >> shift);
      const auto most = static_cast<std::uint16_t>(high >> shift);
      if (kSignedHalves ? static_cast<std::int16_t>(least) > static_cast<std::int16_t>(most)
                        : least > most) {
        continue;
      }
      keys = merge(keys, {key_of<Component>(static_cast<T>(least)),
                          key_of<Component>(static_cast<T>(most))});
    }
    return keys;
  }

 private:
  FASTCHECK_DEVICE_MEMBER void include_pair(std::uint32_t pair) {
    if constexpr (kSignedHalves) {
      high = __vmaxs2(high, pair);
      low = __vmins2(low, pair);
    } else {
      high = __vmaxu2(high, pair);
      low = __vminu2(low, pair);
    }
  }
};

// ---- sums of narrow integers --------------------------------------------------------------------

struct NarrowSums {
  std::int32_t sum = 0;
  std::uint32_t abs_sum = 0;
  std::uint64_t sum_sq = 0;
};

template <class Component>
FASTCHECK_DEVICE void add(NarrowSums& sums, const Row<Component>& row) {
  using S = Shape<Component>;
  if constexpr (S::kSize == 1) {
    std::uint32_t squares = 0;
    FASTCHECK_UNROLL
    for (int w = 0; w < S::kWords; ++w) {
      const std::uint32_t word = as_counted<Component>(row.word[w]);
      if constexpr (Component::kSigned) {
        const std::uint32_t minus = top_bits(word);  // |x| = (x ^ minus) + 1 where it is negative
        sums.sum = dot_signed(word, kEachByte, sums.sum);
        sums.abs_sum = add_mask(minus, dot_unsigned(word ^ minus, kEachByte, sums.abs_sum));
        squares =
            static_cast<std::uint32_t>(dot_signed(word, word, static_cast<std::int32_t>(squares)));
      } else {
        sums.abs_sum = dot_unsigned(word, kEachByte, sums.abs_sum);
        squares = dot_unsigned(word, word, squares);
      }
    }
    sums.sum_sq += squares;
  } else {
    FASTCHECK_UNROLL
    for (int k = 0; k < S::kVectorLanes; ++k) {
      const auto x = static_cast<std::int32_t>(bits_of(row, k));
      const auto absolute = static_cast<std::uint32_t>(x < 0 ? -x : x);
      sums.sum += x;
      sums.abs_sum += absolute;
      sums.sum_sq += static_cast<std::uint64_t>(absolute) * absolute;
    }
  }
}

// Over the warp; exact, so that the order is free.
template <class Component>
FASTCHECK_DEVICE Sums total(const NarrowSums& sums) {
  const bool from_abs = sizeof(typename Component::Bits) == 1 && !Component::kSigned;
  Sums all{from_abs ? static_cast<double>(sums.abs_sum) : static_cast<double>(sums.sum),
           static_cast<double>(sums.abs_sum), static_cast<double>(sums.sum_sq)};
  FASTCHECK_ROLLED
  for (int mask = 1; mask < kWarp; mask *= 2) {
    all = {all.sum + from_lane_xor(all.sum, mask), all.abs_sum + from_lane_xor(all.abs_sum, mask),
           all.sum_sq + from_lane_xor(all.sum_sq, mask)};
  }
  return all;
}

// ---- counts of a row ----------------------------------------------------------------------------

template <class Component>
FASTCHECK_DEVICE void count_row(const Row<Component>& row, Counters& counts) {
  using S = Shape<Component>;
  if constexpr (S::kSize > 1) {
    FASTCHECK_UNROLL
    for (int k = 0; k < S::kVectorLanes; ++k) count<Component>(counts, bits_of(row, k));
  } else {
    counts.zero += S::kVectorLanes;
    FASTCHECK_UNROLL
    for (int w = 0; w < S::kWords; ++w) {
      const std::uint32_t word = row.word[w];
      counts.zero -= add_mask(top_bits(nonzero_bytes(word)), 0);
      if constexpr (Component::kSigned) {
        const std::uint32_t minus = top_bits(word);
        counts.negative = add_mask(minus, counts.negative);
        // Both ends of the range have 0x7f left when their sign is taken out.
        counts.saturated = add_mask(top_bits((word ^ minus) + kEachByte), counts.saturated);
      } else if constexpr (Component::kCountsSaturation) {
        counts.saturated += 4 - add_mask(top_bits(nonzero_bytes(~word)), 0);
      }
    }
  }
}

}  // namespace fastcheck::cuda
