// The exponent counts of a tensor: docs/record-format.md, section 10.
//
// A kernel adds to totals with a bin for each binade that the component's format has. Nothing is
// rounded and order does not matter, so any split of the tensor at blocks of 32 gives the same.
// finalise() keeps 63 bins below the largest of each histogram, and one for all others.
#pragma once

#include <cstdint>

#include "core/dtypes.h"
#include "core/element.h"
#include "core/platform.h"

namespace fastcheck {

constexpr int kExponentBins = 64;  // of a histogram as it is stored
constexpr int kBlock = 32;         // components that share a scale in the MX formats
constexpr int kHalfBlock = 16;     // and in NVFP4

// Words (int64) of the block of counts, and what each holds.
enum ExponentWord : int {
  kWordComponents = 0,
  kWordNonfinite = 1,
  kWordZero = 2,
  kWordTop = 3,       // of the elements' first bin: ceil(log2) of the largest magnitude
  kWordBlockTop = 4,  // of the maxima's first bin: floor(log2) of it
  kWordAbsMax = 5,    // its bits as a float64
  kWordBottom = 6,    // ceil(log2) of the smallest magnitude that is not zero
  kWordElements = 8,
  kWordMaxima32 = kWordElements + kExponentBins,
  kWordMaxima16 = kWordMaxima32 + kExponentBins,
  kWordBelow32 = kWordMaxima16 + kExponentBins,
  kWordBelow16 = kWordBelow32 + kExponentBins,
  kExponentWords = kWordBelow16 + kExponentBins,
};

// Exponents of a format: from that of its smallest subnormal to that of its largest number, rounded
// up, a bin for each.
template <class Format>
constexpr int kLowestExponent = 1 - Format::kExponentBias - Format::kMantissaBits;
template <class Format>
constexpr int kBinades = 2 * Format::kExponentBias + Format::kMantissaBits + 2;

// Totals of a kernel, in int64 words: the counts of docs/record-format.md before the cut to 64
// bins, elements, maxima32 and maxima16 with kBinades each.
enum ExponentTotal : int {
  kTotalNonfinite = 0,
  kTotalZero = 1,
  kTotalLargest = 2,  // bits of the largest finite magnitude, in the component's own format
  kTotalBelow32 = 3,
  kTotalBelow16 = kTotalBelow32 + kExponentBins,
  kTotalBins = kTotalBelow16 + kExponentBins,
};
constexpr int kMaxBinades = kBinades<Float64>;
constexpr int kMaxTotals = kTotalBins + 3 * kMaxBinades;

// floor(log2(x)) of a finite magnitude that is not zero, given by its bits.
template <class Format>
FASTCHECK_FN int floor_exponent(typename Format::Bits magnitude) {
  const auto bits = static_cast<std::uint64_t>(magnitude);
  if (bits >= Format::kMinNormal) {
    return static_cast<int>(bits >> Format::kMantissaBits) - Format::kExponentBias;
  }
#if defined(__CUDA_ARCH__)
  const int top = 63 - __clzll(static_cast<long long>(bits));
#else
  const int top = 63 - __builtin_clzll(bits);
#endif
  return kLowestExponent<Format> + top;
}

// ceil(log2(x)): one more, unless x is a power of two.
template <class Format>
FASTCHECK_FN int ceil_exponent(typename Format::Bits magnitude) {
  const auto bits = static_cast<std::uint64_t>(magnitude);
  const std::uint64_t rest =
      bits >= Format::kMinNormal ? bits & (Format::kMinNormal - 1) : bits & (bits - 1);
  return floor_exponent<Format>(magnitude) + (rest != 0 ? 1 : 0);
}

// Adds `from` to `to`, totals of one format.
FASTCHECK_FN void merge_exponents(std::int64_t* to, const std::int64_t* from, int binades) {
  const std::int64_t largest =
      to[kTotalLargest] > from[kTotalLargest] ? to[kTotalLargest] : from[kTotalLargest];
  for (int i = 0; i < kTotalBins + 3 * binades; ++i) to[i] += from[i];
  to[kTotalLargest] = largest;
}

// The block of kExponentWords words, which must be zeroed.
template <class Format>
FASTCHECK_FN void finalise_exponents(const std::int64_t* totals, std::int64_t components,
                                     std::int64_t* words) {
  words[kWordComponents] = components;
  words[kWordNonfinite] = totals[kTotalNonfinite];
  words[kWordZero] = totals[kTotalZero];
  for (int k = 0; k < kExponentBins; ++k) {
    words[kWordBelow32 + k] = totals[kTotalBelow32 + k];
    words[kWordBelow16 + k] = totals[kTotalBelow16 + k];
  }
  const auto largest = static_cast<typename Format::Bits>(totals[kTotalLargest]);
  if (largest == 0) return;
  words[kWordTop] = ceil_exponent<Format>(largest);
  words[kWordBlockTop] = floor_exponent<Format>(largest);
  words[kWordAbsMax] = static_cast<std::int64_t>(
      bit_cast<std::uint64_t>(static_cast<double>(value<Format>(largest))));
  int lowest = 0;
  while (totals[kTotalBins + lowest] == 0) ++lowest;
  words[kWordBottom] = kLowestExponent<Format> + lowest;
  for (int part = 0; part < 3; ++part) {
    const std::int64_t top = words[part == 0 ? kWordTop : kWordBlockTop];
    const std::int64_t* bins = totals + kTotalBins + part * kBinades<Format>;
    std::int64_t* out = words + kWordElements + part * kExponentBins;
    for (int exponent = kLowestExponent<Format>; exponent <= top; ++exponent) {
      const std::int64_t below = top - exponent;
      out[below < kExponentBins ? below : kExponentBins - 1] +=
          bins[exponent - kLowestExponent<Format>];
    }
  }
}

}  // namespace fastcheck
