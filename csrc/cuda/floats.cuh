// Floating-point rows: extremes, the decision whether a batch is ordinary, its zeros and
// subnormals.
//
// A whole batch is read under the assumption that nothing in it is out of the ordinary. Its largest
// number, its smallest and its smallest magnitude show whether that was so. 8 and 16-bit formats
// are compared two at a time as float16 or bfloat16, 8-bit ones as the float16 of equal value: e5m2
// is its upper byte, e4m3fn is converted.
#pragma once

#include <type_traits>

#include "core/accumulator.h"
#include "cuda/intrinsics.cuh"
#include "cuda/rows.cuh"

namespace fastcheck::cuda {

// The integers of core's Counts, as wide as a chunk of tiles needs.
struct Counters {
  std::uint32_t nan = 0;
  std::uint32_t posinf = 0;
  std::uint32_t neginf = 0;
  std::uint32_t zero = 0;
  std::uint32_t subnormal = 0;
  std::uint32_t negative = 0;
  std::uint32_t saturated = 0;
};

// Only these reach the limits of the scale rule.
template <class Format>
constexpr bool kMayScale =
    std::is_same_v<typename Format::Accumulator, float> && Format::kExponentBias == 127;

// ---- 8 and 16 bits ------------------------------------------------------------------------------

template <class Format>
struct Halves {
  static constexpr bool kBrain = std::is_same_v<Format, BFloat16>;
  static constexpr int kPerWord = sizeof(typename Format::Bits) == 1 ? 2 : 1;  // pairs of halves
  // From the format's magnitudes, if they are normal numbers, to those of the halves.
  static constexpr bool kIsE4M3 = std::is_same_v<Format, Float8E4M3FN>;
  static constexpr int kShift = kIsE4M3 ? 7 : sizeof(typename Format::Bits) == 1 ? 8 : 0;
  static constexpr std::uint32_t kRebias = kIsE4M3 ? (15 - Format::kExponentBias) << 10 : 0;
  static constexpr std::uint32_t kInf = kBrain ? 0x7f807f80u : 0x7c007c00u;
  static constexpr std::uint32_t kSigns = 0x80008000u;
  // Added to two magnitudes, leaves the top bits of those that are at least `limit`.
  static FASTCHECK_DEVICE_MEMBER constexpr std::uint32_t reach(std::uint32_t limit) {
    return (0x8000u - (limit << kShift) - kRebias) * 0x10001u;
  }

  static FASTCHECK_DEVICE_MEMBER std::uint32_t pair(std::uint32_t word, int i) {
    if constexpr (sizeof(typename Format::Bits) == 2) return word;
    if constexpr (kIsE4M3) return i == 0 ? halves_of_e4m3<0>(word) : halves_of_e4m3<1>(word);
    return permute_bytes(word, 0, i == 0 ? 0x1404 : 0x3424);
  }

  static FASTCHECK_DEVICE_MEMBER float value(std::uint32_t half) {
    if constexpr (kBrain) return bit_cast<float>(half << 16);
    return half_to_float(half);
  }

  static FASTCHECK_DEVICE_MEMBER void widen(std::uint32_t pair, float* out) {
    if constexpr (kBrain) {
      out[0] = bit_cast<float>(pair << 16);
      out[1] = bit_cast<float>(pair & 0xffff0000u);
    } else {
      out[0] = value(pair & 0xffff);
      out[1] = value(pair >> 16);
    }
  }
};

// ---- extremes -----------------------------------------------------------------------------------

template <class Format, class Bits = typename Format::Bits>
struct Extremes {  // 8 and 16 bits; wider ones below
  using H = Halves<Format>;
  std::uint32_t high = H::kInf | H::kSigns;
  std::uint32_t low = H::kInf;
  std::uint32_t near = H::kInf;  // the smallest magnitude; its sign bits mean nothing

  FASTCHECK_DEVICE_MEMBER void include(const Row<Format>& row) {
    FASTCHECK_UNROLL
    for (int w = 0; w < Shape<Format>::kWords; ++w) {
      FASTCHECK_UNROLL
      for (int i = 0; i < H::kPerWord; ++i) include_pair(H::pair(row.word[w], i));
    }
  }
  // One finite component. Its neighbour in the pair is what is already known.
  FASTCHECK_DEVICE_MEMBER void include(Bits bits) {
    const auto upper = static_cast<std::uint32_t>(bits);
    std::uint32_t half = upper;
    if constexpr (sizeof(Bits) == 1) half = H::pair(upper, 0) & 0xffff;
    high = max_or_nan<H::kBrain>(high, (high & 0xffff0000u) | half);
    low = min_number<H::kBrain>(low, (low & 0xffff0000u) | half);
    near = min_magnitude<H::kBrain>(near, (near & 0xffff0000u) | half);
  }
  FASTCHECK_DEVICE_MEMBER void include(const Extremes& other) {
    high = max_or_nan<H::kBrain>(high, other.high);
    low = min_number<H::kBrain>(low, other.low);
  }
  FASTCHECK_DEVICE_MEMBER std::uint32_t largest() const {
    return max_or_nan<H::kBrain>(high, low ^ H::kSigns);
  }
  // True if something is not finite, or the largest finite magnitude.
  FASTCHECK_DEVICE_MEMBER bool beyond() const {
    const std::uint32_t both = largest();  // negative only where nothing was included
    return ((both + H::reach(Format::kMaxFinite)) & ~both & H::kSigns) != 0;
  }
  // True if something since the last call is zero or subnormal.
  FASTCHECK_DEVICE_MEMBER bool take_small() {
    const std::uint32_t smallest = near & ~H::kSigns;
    near = H::kInf;
    return (~(smallest + H::reach(Format::kMinNormal)) & H::kSigns) != 0;
  }
  // The largest finite magnitude, when nothing else is included; zero for nothing.
  FASTCHECK_DEVICE_MEMBER float largest_value() const {
    const std::uint32_t both = largest();
    const float x = H::value(both & 0xffff);
    const float y = H::value(both >> 16);
    return fmaxf(fmaxf(x, y), 0.0f);
  }
  FASTCHECK_DEVICE_MEMBER KeyRange range() const {
    KeyRange keys;
    FASTCHECK_UNROLL
    for (int shift = 0; shift < 32; shift += 16) {
      if ((low >> shift & 0xffff) == (H::kInf & 0xffff)) continue;  // saw nothing finite
      keys = merge(keys, {key(static_cast<double>(H::value(low >> shift & 0xffff))),
                          key(static_cast<double>(H::value(high >> shift & 0xffff)))});
    }
    return keys;
  }

 private:
  FASTCHECK_DEVICE_MEMBER void include_pair(std::uint32_t pair) {
    high = max_or_nan<H::kBrain>(high, pair);
    low = min_number<H::kBrain>(low, pair);
    near = min_magnitude<H::kBrain>(near, pair);
  }
};

template <class Format>
struct Extremes<Format, std::uint32_t> {
  float high = -kInfinity();
  float low = kInfinity();
  float near = kInfinity();

  FASTCHECK_DEVICE_MEMBER void include(const Row<Format>& row) {
    FASTCHECK_UNROLL
    for (int k = 0; k < Shape<Format>::kWords; ++k) include(row.word[k]);
  }
  FASTCHECK_DEVICE_MEMBER void include(std::uint32_t bits) {
    const float x = bit_cast<float>(bits);
    high = max_or_nan(high, x);
    low = min_number(low, x);
    near = min_number(near, fabsf(x));
  }
  FASTCHECK_DEVICE_MEMBER void include(const Extremes& other) {
    high = max_or_nan(high, other.high);
    low = min_number(low, other.low);
  }
  FASTCHECK_DEVICE_MEMBER bool beyond() const {
    // The comparison is of signed numbers: negative only where nothing was included.
    return bit_cast<std::int32_t>(max_or_nan(high, -low)) >=
           static_cast<std::int32_t>(Format::kMaxFinite);
  }
  FASTCHECK_DEVICE_MEMBER bool take_small() {
    const auto smallest = bit_cast<std::uint32_t>(near);
    near = kInfinity();
    return smallest < Format::kMinNormal;
  }
  FASTCHECK_DEVICE_MEMBER float largest_value() const { return fmaxf(fmaxf(high, -low), 0.0f); }
  FASTCHECK_DEVICE_MEMBER KeyRange range() const {
    return {key(static_cast<double>(low)), key(static_cast<double>(high))};
  }

 private:
  static FASTCHECK_DEVICE_MEMBER float kInfinity() { return bit_cast<float>(0x7f800000u); }
};

// No instruction takes the maximum of two doubles; their upper words alone show what is unusual.
template <class Format>
struct Extremes<Format, std::uint64_t> {
  double high = -kInfinity();
  double low = kInfinity();
  std::uint32_t top_high = 0;
  std::uint32_t top_low = 0x7fffffffu;

  FASTCHECK_DEVICE_MEMBER void include(const Row<Format>& row) {
    FASTCHECK_UNROLL
    for (int k = 0; k < Shape<Format>::kVectorLanes; ++k) include(bits_of(row, k));
  }
  FASTCHECK_DEVICE_MEMBER void include(std::uint64_t bits) {
    const double x = bit_cast<double>(bits);
    high = x > high ? x : high;
    low = x < low ? x : low;
    const auto top = static_cast<std::uint32_t>(bits >> 32) & 0x7fffffffu;
    top_high = top > top_high ? top : top_high;
    top_low = top < top_low ? top : top_low;
  }
  FASTCHECK_DEVICE_MEMBER void include(const Extremes& other) {
    high = other.high > high ? other.high : high;
    low = other.low < low ? other.low : low;
  }
  FASTCHECK_DEVICE_MEMBER bool beyond() const {
    return top_high >= static_cast<std::uint32_t>(Format::kMaxFinite >> 32);
  }
  FASTCHECK_DEVICE_MEMBER bool take_small() {
    const std::uint32_t smallest = top_low;
    top_low = 0x7fffffffu;
    return smallest < static_cast<std::uint32_t>(Format::kMinNormal >> 32);
  }
  FASTCHECK_DEVICE_MEMBER KeyRange range() const { return {key(low), key(high)}; }

 private:
  static FASTCHECK_DEVICE_MEMBER double kInfinity() {
    return bit_cast<double>(0x7ff0000000000000ull);
  }
};

// ---- values and counts of a row -----------------------------------------------------------------

template <class Format>
FASTCHECK_DEVICE void values_of(const Row<Format>& row,
                                typename Format::Accumulator (&out)[Shape<Format>::kVectorLanes]) {
  if constexpr (sizeof(typename Format::Bits) >= 4) {
    FASTCHECK_UNROLL
    for (int k = 0; k < Shape<Format>::kVectorLanes; ++k) out[k] = value<Format>(bits_of(row, k));
  } else {
    using H = Halves<Format>;
    FASTCHECK_UNROLL
    for (int p = 0; p < Shape<Format>::kVectorLanes / 2; ++p) {
      H::widen(H::pair(row.word[p / H::kPerWord], p % H::kPerWord), out + 2 * p);
    }
  }
}

// Adds the components whose top bit is set in `words`.
template <class Component>
FASTCHECK_DEVICE std::uint32_t count_top_bits(const Row<Component>& words, std::uint32_t sum) {
  constexpr int kWords = Shape<Component>::kWords;
  if constexpr (Shape<Component>::kSize == 1) {
    FASTCHECK_UNROLL
    for (int w = 0; w < kWords; ++w) sum = add_mask(top_bits(words.word[w]), sum);
  } else if constexpr (Shape<Component>::kSize == 2) {
    FASTCHECK_UNROLL
    for (int w = 0; w < kWords; w += 2) {
      sum = add_mask(top_bits_of_halves(words.word[w], words.word[w + 1]), sum);
    }
  } else {
    constexpr int kStep = Shape<Component>::kSize / 4;
    FASTCHECK_UNROLL
    for (int w = kStep - 1; w < kWords; w += kStep) sum += words.word[w] >> 31;
  }
  return sum;
}

// Zeros and subnormals of a row whose minus signs are counted as negative already.
template <class Format>
FASTCHECK_DEVICE void count_small(const Row<Format>& row, Counters& counts) {
  using S = Shape<Format>;
  if constexpr (S::kSize >= 4) {
    FASTCHECK_UNROLL
    for (int k = 0; k < S::kVectorLanes; ++k) {
      const auto bits = bits_of(row, k);
      const auto absolute = magnitude<Format>(bits);
      if (absolute == 0) {
        ++counts.zero;
        if (bits != 0) --counts.negative;
      } else if (absolute < Format::kMinNormal) {
        ++counts.subnormal;
      }
    }
  } else {
    constexpr std::uint32_t kEach = S::kSize == 1 ? 0x01010101u : 0x00010001u;
    constexpr std::uint32_t kSigns = kEach * Format::kSign;
    Row<Format> normal, nonzero, minus_zero;
    FASTCHECK_UNROLL
    for (int w = 0; w < S::kWords; ++w) {
      const std::uint32_t absolute = row.word[w] & ~kSigns;
      normal.word[w] = absolute + kEach * (Format::kSign - Format::kMinNormal);
      nonzero.word[w] = absolute + ~kSigns;
      minus_zero.word[w] = row.word[w] & ~nonzero.word[w];
    }
    const std::uint32_t normals = count_top_bits(normal, 0);
    const std::uint32_t nonzeros = count_top_bits(nonzero, 0);
    counts.zero += S::kVectorLanes - nonzeros;
    counts.subnormal += nonzeros - normals;
    counts.negative -= count_top_bits(minus_zero, 0);
  }
}

}  // namespace fastcheck::cuda
