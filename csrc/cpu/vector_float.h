// The vector kernel's floating-point tiles: widening, extremes, sums, and the second reading of
// tiles with special values.
#pragma once

#include "cpu/vector_checksum.h"
#include "cpu/vector_sums.h"

namespace fastcheck::cpu {
namespace {

// ---- widening: one raw vector to lane-sum vectors, exactly -------------------------------------

template <class Format>
constexpr int kWide = sizeof(typename Format::Accumulator) / sizeof(typename Format::Bits);

template <class Format>
constexpr LaneLayout kLayout =
    std::is_same_v<Format, BFloat16> || sizeof(typename Format::Bits) == 1
        ? LaneLayout::kEvenOdd
        : LaneLayout::kContiguous;

// Floats of eight bits become float16, whose upper byte e5m2 is. e4m3fn has an exponent of a bit
// less: it comes out 2^8 too small, which is undone in float64 as that of a scaled tile is.
template <class Format>
constexpr TileScale kUnscaled =
    std::is_same_v<Format, Float8E4M3FN> ? TileScale{1.0f, 0x1p8, 0x1p16}
                                         : TileScale{1.0f, 1.0, 1.0};

// The upper bytes of 16-bit words as float16: an arithmetic shift leaves the sign where it is.
template <class Format>
FASTCHECK_FN Vec<std::uint16_t> upper_to_half(Vec<std::uint16_t> words) {
  if constexpr (std::is_same_v<Format, Float8E5M2>) return words & splat<std::uint16_t>(0xff00);
  return (Vec<std::uint16_t>)((Vec<std::int16_t>)words >> 1) & splat<std::uint16_t>(0xbf80);
}
template <class Format>
FASTCHECK_FN Vec<std::uint16_t> lower_to_half(Vec<std::uint16_t> words) {
  if constexpr (std::is_same_v<Format, Float8E5M2>) return words << 8;
  return upper_to_half<Format>(words << 8);
}

template <class Format>
FASTCHECK_FN void widen(Vec<typename Format::Bits> x,
                        Vec<typename Format::Accumulator> (&out)[kWide<Format>]) {
  if constexpr (kWide<Format> == 1) {
    out[0] = (Vec<typename Format::Accumulator>)x;
  } else if constexpr (std::is_same_v<Format, BFloat16>) {
    out[0] = (Vec<float>)((Words)x << 16);
    out[1] = (Vec<float>)((Words)x & splat(0xffff0000u));
  } else if constexpr (std::is_same_v<Format, Float16>) {
    half_to_float(x, out[0], out[1]);
  } else {
    const auto pairs = (Vec<std::uint16_t>)x;
    half_to_float(lower_to_half<Format>(pairs), out[0], out[2]);
    half_to_float(upper_to_half<Format>(pairs), out[1], out[3]);
  }
}

// The same of the vector x at `data`. Conversions from memory take no shuffle of the upper half.
template <class Format>
FASTCHECK_FN void widen_at(const std::byte* data, Vec<typename Format::Bits> x,
                           Vec<typename Format::Accumulator> (&out)[kWide<Format>]) {
  if constexpr (std::is_same_v<Format, Float16>) {
    half_to_float(data, out[0], out[1]);
  } else {
    widen<Format>(x, out);
  }
}

// ---- extremes ---------------------------------------------------------------------------------

// Three integer extremes of the raw bits hold everything. Read as unsigned, the negative numbers
// come last and grow in magnitude: the largest is the most negative. Read as signed, the positive
// ones do so. The smallest magnitude is the other end of a lane that has one sign only, and tells
// whether there are zeros or subnormals to count.
template <class Format>
struct Extremes {
  using Bits = typename Format::Bits;
  using Signed = std::make_signed_t<Bits>;
  Vec<Signed> most_positive = splat(static_cast<Signed>(Format::kSign));
  Vec<Bits> most_negative = splat<Bits>(0);
  Vec<Bits> smallest = splat(Format::kMagnitude);

  FASTCHECK_FN_MEMBER void include(Vec<Bits> x) {
    most_positive = vmax<Signed>(most_positive, (Vec<Signed>)x);
    most_negative = vmax<Bits>(most_negative, x);
    smallest = vmin<Bits>(smallest, x & splat(Format::kMagnitude));
  }

  // Includes a vector whose zeros are counted: the smallest magnitude is that of other numbers, and
  // less by one until end_without_zeros(). Returns each magnitude less one, of a zero all ones.
  FASTCHECK_FN_MEMBER Vec<Bits> include_without_zeros(Vec<Bits> x) {
    most_positive = vmax<Signed>(most_positive, (Vec<Signed>)x);
    most_negative = vmax<Bits>(most_negative, x);
    const auto less_one = (x & splat(Format::kMagnitude)) - splat<Bits>(1);
    smallest = vmin<Bits>(smallest, less_one);
    return less_one;
  }
  FASTCHECK_FN_MEMBER void end_without_zeros() {
    const Bits most = Format::kMagnitude - 1;  // kMagnitude where there was nothing but zeros
    smallest = vmin<Bits>(smallest, splat(most)) + splat<Bits>(1);
  }

  // x counts as absent where the mask is zero.
  FASTCHECK_FN_MEMBER void include(Vec<Bits> x, Vec<Bits> mask) {
    const auto positive = select<Bits>(mask, x, splat(Format::kSign));
    most_positive = vmax<Signed>(most_positive, (Vec<Signed>)positive);
    most_negative = vmax<Bits>(most_negative, x & mask);
    smallest = vmin<Bits>(smallest, (x | ~mask) & splat(Format::kMagnitude));
  }

  FASTCHECK_FN_MEMBER void include(const Extremes& other) {
    most_positive = vmax<Signed>(most_positive, other.most_positive);
    most_negative = vmax<Bits>(most_negative, other.most_negative);
    smallest = vmin<Bits>(smallest, other.smallest);
  }

  // The largest magnitude that each lane saw; 0 where it saw nothing.
  FASTCHECK_FN_MEMBER Vec<Bits> largest() const {
    const auto positive = (Vec<Bits>)vmax<Signed>(most_positive, splat<Signed>(0));
    return vmax<Bits>(positive, most_negative & splat(Format::kMagnitude));
  }

  KeyRange range() const {
    Signed positive = most_positive[0];
    Bits negative = most_negative[0], small = smallest[0];
    for (int i = 1; i < kVectorLanes<Bits>; ++i) {
      positive = most_positive[i] > positive ? most_positive[i] : positive;
      negative = most_negative[i] > negative ? most_negative[i] : negative;
      small = smallest[i] < small ? smallest[i] : small;
    }
    KeyRange keys;
    const bool has_negative = (negative & Format::kSign) != 0;
    const bool has_positive = positive >= 0;
    if (!has_negative && !has_positive) return keys;
    fastcheck::include(keys, key_of<Format>(has_negative ? negative : small));
    fastcheck::include(keys,
                       key_of<Format>(has_positive ? static_cast<Bits>(positive)
                                                   : static_cast<Bits>(small | Format::kSign)));
    return keys;
  }
};

// ---- counts of what is out of the ordinary -----------------------------------------------------

// Zeros and subnormals of a tile that has no non-finite value; returns the zeros with a minus.
template <class Format>
int count_small(const std::byte* data, int vectors, Counts& counts) {
  using Bits = typename Format::Bits;
  int minus_zeros = 0;
  while (vectors > 0) {
    const int some = vectors < LaneCounter<Bits>::kMost ? vectors : LaneCounter<Bits>::kMost;
    LaneCounter<Bits> small, zero, minus_zero;
    for (int i = 0; i < some; ++i, data += kVectorBytes) {
      const auto x = load<Bits>(data);
      const auto absolute = x & splat(Format::kMagnitude);
      small.add_less(absolute, splat(Format::kMinNormal));
      zero.add_equal(absolute, splat<Bits>(0));
      minus_zero.add_equal(x, splat(Format::kSign));
    }
    counts.zero += zero.total();
    counts.subnormal += small.total() - zero.total();
    minus_zeros += minus_zero.total();
    vectors -= some;
  }
  return minus_zeros;
}

template <class Format>
int count_saturated(const std::byte* data, int vectors) {
  using Bits = typename Format::Bits;
  int n = 0;
  for (int i = 0; i < vectors; ++i) {
    const auto x = load<Bits>(data + i * kVectorBytes);
    n += count_equal<Bits>(x & splat(Format::kMagnitude), splat(Format::kMaxFinite));
  }
  return n;
}

template <class Format>
FASTCHECK_FN Vec<typename Format::Bits> finite_mask(Vec<typename Format::Bits> x) {
  using Bits = typename Format::Bits;
  return (Vec<Bits>)((x & splat(Format::kMagnitude)) < splat(Format::kFirstNonfinite));
}

// Every count, and the extremes of the finite values alone.
template <class Format>
Extremes<Format> census(const std::byte* data, int vectors, Counts& counts) {
  using Bits = typename Format::Bits;
  constexpr Bits kInf = Format::kFirstNonfinite;
  Extremes<Format> extremes;
  int not_nan = 0, posinf = 0, neginf = 0, negative = 0, saturated = 0, small = 0, zero = 0;
  for (int i = 0; i < vectors; ++i) {
    const auto x = load<Bits>(data + i * kVectorBytes);
    const auto absolute = x & splat(Format::kMagnitude);
    not_nan += count_less<Bits>(absolute, splat(Format::kFirstNaN));
    if constexpr (Format::kHasInf) {
      posinf += count_equal<Bits>(x, splat(kInf));
      neginf += count_equal<Bits>(x, splat(static_cast<Bits>(kInf | Format::kSign)));
    }
    const auto finite = finite_mask<Format>(x);
    const auto kept = x & finite;
    negative += count_top_bit<Bits>(kept) - count_equal<Bits>(kept, splat(Format::kSign));
    saturated += count_equal<Bits>(absolute, splat(Format::kMaxFinite));
    small += count_less<Bits>(absolute, splat(Format::kMinNormal));
    zero += count_equal<Bits>(absolute, splat<Bits>(0));
    extremes.include(x, finite);
  }
  counts.nan += vectors * kVectorLanes<Bits> - not_nan;
  counts.posinf += posinf;
  counts.neginf += neginf;
  counts.negative += negative;
  counts.saturated += saturated;
  counts.zero += zero;
  counts.subnormal += small - zero;
  return extremes;
}

// ---- sums of a tile that needs care ------------------------------------------------------------

template <class Format>
FASTCHECK_FN TileScale scale_of(const Extremes<Format>& extremes) {
  using Bits = typename Format::Bits;
  // Only float32 and bfloat16 reach the limits.
  if constexpr (Format::kExponentBias != 127) return kUnscaled<Format>;
  const auto largest = extremes.largest();
  Bits top = 0;
  for (int i = 0; i < kVectorLanes<Bits>; ++i) top = largest[i] > top ? largest[i] : top;
  return tile_scale(value<Format>(top));
}

// True unless the plain sums of a tile stand, decided lane by lane: no search for the largest.
template <class Format>
FASTCHECK_FN bool needs_scale(Vec<typename Format::Bits> largest) {
  using Bits = typename Format::Bits;
  if constexpr (Format::kExponentBias != 127) return false;
  constexpr Bits kAbove = static_cast<Bits>(Bits(127 + 60) << Format::kMantissaBits);
  constexpr Bits kBelow = static_cast<Bits>(Bits(127 - 40) << Format::kMantissaBits);
  const bool large = count_less<Bits>(splat(kAbove), largest) != 0;
  const bool small = count_less<Bits>(largest, splat(kBelow)) == kVectorLanes<Bits>;
  const bool zero = count_equal<Bits>(largest, splat<Bits>(0)) == kVectorLanes<Bits>;
  return large || (small && !zero);
}

// Adds one row with non-finite values as 0 and every element scaled.
template <class Format>
FASTCHECK_FN void add_row(const std::byte* data, const TileScale& scale,
                          LaneVector<typename Format::Accumulator>* lanes) {
  using Bits = typename Format::Bits;
  using Accumulator = typename Format::Accumulator;
  for (int j = 0; j < kLanes / kVectorLanes<Bits>; ++j) {
    const auto x = load<Bits>(data + j * kVectorBytes);
    Vec<Accumulator> wide[kWide<Format>];
    widen<Format>(x & finite_mask<Format>(x), wide);
    for (int k = 0; k < kWide<Format>; ++k) {
      lanes[j * kWide<Format> + k].add(wide[k] * static_cast<Accumulator>(scale.factor));
    }
  }
}

FASTCHECK_FN Sums unscaled(const Sums& sums, const TileScale& scale) {
  return {sums.sum * scale.undo, sums.abs_sum * scale.undo, sums.sum_sq * scale.undo_square};
}

// The sums of a tile of `rows` whole rows and perhaps a last one.
template <class Format>
Sums careful_sums(const std::byte* data, int rows, const LastRow<Format>& last,
                  const TileScale& scale) {
  constexpr int kRowBytes = kLanes * sizeof(typename Format::Bits);
  TileLanes<typename Format::Accumulator> lanes = {};
  for (int row = 0; row < rows; ++row) {
    add_row<Format>(data + row * kRowBytes, scale, lanes.run[row / kRunRows]);
  }
  if (last.exists()) add_row<Format>(last.data(), scale, lanes.run[rows / kRunRows]);
  return unscaled(fold_tile<kLayout<Format>>(lanes), scale);
}

// ---- tiles -------------------------------------------------------------------------------------

template <class Format, Depth kDepth>
class FloatTiles {
  using Bits = typename Format::Bits;
  using Accumulator = typename Format::Accumulator;
  static constexpr int kRaw = kLanes / kVectorLanes<Bits>;  // raw vectors in a row
  static constexpr int kBlock = kBlockSums > kWide<Format> ? kBlockSums / kWide<Format> : 1;
  static constexpr int kBlockRaw = kBlock < kRaw ? kBlock : kRaw;
  static constexpr int kBlockBytes = kBlockRaw * kVectorBytes;
  static constexpr int kRunBytes = kRunRows * kRaw * kVectorBytes;

 public:
  Sums whole(const std::byte* data, std::uint64_t tile) {
    Extremes<Format> extremes;
    TileLanes<Accumulator> lanes;
    constexpr bool kIsFull = kDepth == Depth::kFull;
    constexpr bool kWithChecksum = kIsFull && !kChecksumApart;
    const Signs signs = is_plain() ? scan_whole<kWithChecksum, false>(data, tile, extremes, lanes)
                                   : scan_whole<kWithChecksum, true>(data, tile, extremes, lanes);
    if constexpr (kIsFull && kChecksumApart) checksum_tile<sizeof(Bits)>(data, tile, terms_);
    LastRow<Format> none(nullptr, 0);
    return finish_tile(data, kRows, none, signs, extremes, lanes);
  }

  Sums partial(const std::byte* data, int n, std::uint64_t tile) {
    const int rows = n / kLanes;
    LastRow<Format> last(data + rows * kRaw * kVectorBytes, n % kLanes);
    Extremes<Format> extremes;
    TileLanes<Accumulator> lanes = {};
    Signs signs = is_plain() ? scan<false, false, false>(data, rows, tile, extremes, lanes)
                             : scan<false, true, false>(data, rows, tile, extremes, lanes);
    for (int i = 0; i < last.vectors(); ++i) {
      const auto x = load<Bits>(last.data() + i * kVectorBytes);
      extremes.include(x);
      signs.negative += count_top_bit<Bits>(x);
    }
    const Sums sums = finish_tile(data, rows, last, signs, extremes, lanes);
    if constexpr (kDepth == Depth::kFull) {
      checksum_rows<sizeof(Bits)>(data, rows, last.data(), last.words(), tile, terms_);
    }
    return sums;
  }

  Partial finish() const {
    Partial part;
    part.counts = counts_;
    part.range = extremes_.range();
    part.checksum = terms_.total();
    return part;
  }

 private:
  // The counts of one reading. Negative zeros are among the negative unless zeros are counted.
  struct Signs {
    int negative = 0;
    int zero = 0;
    int subnormal = 0;
    bool has_counted_zeros = false;
  };

  // Ordinary data have subnormals in every tile of a format of so few exponents.
  static constexpr bool kCountsSubnormals = std::is_same_v<Format, Float8E4M3FN>;

  // Tiles are added up with the scale of the two before them, which most have too. Of formats that
  // are never scaled the compiler knows it.
  FASTCHECK_FN_MEMBER bool is_plain() const {
    return Format::kExponentBias != 127 || kDepth == Depth::kHealth || scale_.factor == 1.0f;
  }

  // Turns one reading of a tile into its counts, extremes and sums: looks again at whatever the
  // extremes show to be out of the ordinary. `last` is not in `lanes` yet; it is left padded with
  // zeros.
  FASTCHECK_FN_MEMBER Sums finish_tile(const std::byte* data, int rows, LastRow<Format>& last,
                                       const Signs& signs, Extremes<Format>& extremes,
                                       TileLanes<Accumulator>& lanes) {
    const auto largest = extremes.largest();
    const bool finite =
        count_less<Bits>(largest, splat(Format::kFirstNonfinite)) == kVectorLanes<Bits>;
    const Counts before = counts_;
    if (!finite) {
      extremes = census<Format>(data, rows * kRaw, counts_);
      extremes.include(census<Format>(last.data(), last.vectors(), counts_));
    } else {
      counts_.negative += signs.negative;
      const bool has_small = count_less<Bits>(extremes.smallest, splat(Format::kMinNormal)) != 0;
      if (has_small && !(kCountsSubnormals && signs.has_counted_zeros)) {
        const int minus_zeros = count_small<Format>(data, rows * kRaw, counts_) +
                                count_small<Format>(last.data(), last.vectors(), counts_);
        if (!signs.has_counted_zeros) counts_.negative -= minus_zeros;
      } else {
        counts_.zero += signs.zero;
        counts_.subnormal += signs.subnormal;
        if (signs.zero != 0) extremes.smallest = splat<Bits>(0);
      }
      if (count_equal<Bits>(largest, splat(Format::kMaxFinite)) != 0) {
        counts_.saturated += count_saturated<Format>(data, rows * kRaw) +
                             count_saturated<Format>(last.data(), last.vectors());
      }
    }
    const bool has_subnormals = counts_.subnormal != before.subnormal;
    expects_zeros_ = kCountsSubnormals ? has_subnormals || counts_.zero != before.zero
                                       : !has_subnormals && counts_.zero != before.zero;
    last.subtract_padding(counts_);
    extremes_.include(extremes);
    if constexpr (kDepth == Depth::kHealth) return {};
    last.pad_with_zeros();
    const bool may_be_scaled = !finite || needs_scale<Format>(largest);
    const TileScale scale = may_be_scaled ? scale_of(extremes) : kUnscaled<Format>;
    const bool is_added = finite && scale.factor == scale_.factor;
    scale_ = scale.factor == last_factor_ ? scale : kUnscaled<Format>;
    last_factor_ = scale.factor;
    if (!is_added) return careful_sums<Format>(data, rows, last, scale);
    if (last.exists()) add_row<Format>(last.data(), scale, lanes.run[rows / kRunRows]);
    const Sums sums = fold_tile<kLayout<Format>>(lanes);
    return scale.undo == 1.0 ? sums : unscaled(sums, scale);
  }

  // Zeros are counted where the tile before had any: ReLU and dropout leave some in every tile.
  template <bool kChains, bool kScaled>
  FASTCHECK_FN_MEMBER Signs scan_whole(const std::byte* data, std::uint64_t tile,
                                       Extremes<Format>& extremes, TileLanes<Accumulator>& lanes) {
    return expects_zeros_ ? scan<kChains, kScaled, true>(data, kRows, tile, extremes, lanes)
                          : scan<kChains, kScaled, false>(data, kRows, tile, extremes, lanes);
  }

  // One reading of whole rows. With kChains the rows are all of a tile. Where the registers hold
  // the sums of a part of each row only, the run is read in strides, which the processor doesn't
  // foresee: meanwhile the next run is asked for, from end to end. With kScaled the sums are those
  // of scaled elements, with kZeros zeros are counted, and subnormals of a format that has many.
  template <bool kChains, bool kScaled, bool kZeros>
  FASTCHECK_FN_MEMBER Signs scan(const std::byte* data, int rows, std::uint64_t tile,
                                 Extremes<Format>& extremes, TileLanes<Accumulator>& lanes) {
    Signs signs;
    signs.has_counted_zeros = kZeros;
    for (int run = 0; run * kRunRows < rows; ++run) {
      const int left = rows - run * kRunRows;
      const int run_rows = left < kRunRows ? left : kRunRows;
      const std::byte* next = data + (run + 1) * kRunBytes;
      for (int block = 0; block < kRaw; block += kBlockRaw) {
        const std::byte* at = data + run * kRunBytes + block * kVectorBytes;
        LaneVector<Accumulator> sums[kBlockRaw * kWide<Format>] = {};
        Chains<kBlockRaw> chains;
        if constexpr (kChains) {
          chains.start((tile * kRuns + run) * words_per_row(sizeof(Bits)), block * kWordLanes);
        }
        // All sixteen rows in one piece are more loads than the prefetcher of a Zen 5 follows.
#pragma GCC unroll 4
        for (int row = 0; row < run_rows; ++row, at += kRaw * kVectorBytes) {
          if constexpr (kBlockRaw < kRaw) next = prefetched<kBlockBytes>(next);
          Vec<Bits> row_vectors[kBlockRaw];
#pragma GCC unroll 8
          for (int j = 0; j < kBlockRaw; ++j) {
            const auto x = row_vectors[j] = load<Bits>(at + j * kVectorBytes);
            if constexpr (kZeros) {
              row_vectors[j] &= ~extremes.include_without_zeros(x);
              if constexpr (kCountsSubnormals) {
                const auto absolute = x & splat(Format::kMagnitude);
                signs.subnormal += count_less<Bits>(absolute, splat(Format::kMinNormal));
              }
            } else {
              extremes.include(x);
            }
            if constexpr (kDepth >= Depth::kStats) {
              Vec<Accumulator> wide[kWide<Format>];
              widen_at<Format>(at + j * kVectorBytes, x, wide);
              if constexpr (kScaled) {
                for (auto& v : wide) v *= static_cast<Accumulator>(scale_.factor);
              }
#pragma GCC unroll 4
              for (int k = 0; k < kWide<Format>; ++k) sums[j * kWide<Format> + k].add(wide[k]);
            }
            if constexpr (kChains) chains.add(j, (Words)x);
          }
          signs.negative += count_top_bits<Bits>(row_vectors);
          if constexpr (kZeros) signs.zero += count_zeros<Bits>(row_vectors);
        }
        if constexpr (kDepth >= Depth::kStats) {
          for (int k = 0; k < kBlockRaw * kWide<Format>; ++k) {
            lanes.run[run][block * kWide<Format> + k] = sums[k];
          }
        }
        if constexpr (kChains) chains.end(terms_);
      }
    }
    if constexpr (kZeros) {
      extremes.end_without_zeros();
      if constexpr (kCountsSubnormals) signs.subnormal -= signs.zero;
    }
    return signs;
  }

  Counts counts_;
  Extremes<Format> extremes_;
  ChecksumTerms terms_;
  bool expects_zeros_ = false;
  TileScale scale_ = kUnscaled<Format>;
  float last_factor_ = 1.0f;
};

}  // namespace
}  // namespace fastcheck::cpu
