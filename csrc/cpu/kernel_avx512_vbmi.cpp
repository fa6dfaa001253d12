// The vector kernel for float8_e4m3fn, compiled with AVX-512, VNNI and VBMI: tables of 128 bytes
// instead of conversions. Other dtypes have the functions of AVX-512 and VNNI.
//
// Values are multiples of 2^-9 up to 448, so float32 has the sums of a lane's 64 values exactly,
// and the sums of a tile may be those of integers, in any order. Squares are exact as bfloat16, and
// are added in float32 in the canonical order.
#include "cpu/kernel.h"
//
#include "cpu/vector_avx512.h"
//
#include "cpu/vector_kernel.h"

namespace fastcheck::cpu {
namespace {

using Format = Float8E4M3FN;
using Byte = std::uint8_t;

constexpr double kUnit = 0x1p-9;
// Magnitudes from here on, 32 and above, count in units of kUnit * 2^kLargeShift.
constexpr Byte kLarge = 12 << Format::kMantissaBits;
constexpr int kLargeShift = 11;

// By magnitude. A NaN is zero in all of them.
struct Tables {
  Byte square_low[128] = {}, square_high[128] = {};  // the bytes of the square as bfloat16
  Byte factor[128] = {}, power[128] = {};            // their product is a value below 32
  Byte large[128] = {};
  Byte small[128] = {1};  // 1 for zero, 128 for a subnormal

  constexpr Tables() {
    for (int bits = 1; bits < Format::kFirstNonfinite; ++bits) {
      if (bits < Format::kMinNormal) small[bits] = 128;
      const int exponent = bits >> Format::kMantissaBits;
      const int mantissa = bits % Format::kMinNormal + (exponent > 0 ? Format::kMinNormal : 0);
      const int shift = exponent > 0 ? exponent - 1 : 0;
      if (bits < kLarge) {
        const int most = shift < 4 ? shift : 4;
        factor[bits] = static_cast<Byte>(mantissa << most);
        power[bits] = static_cast<Byte>(1 << (shift - most));
      } else {
        large[bits] = static_cast<Byte>(mantissa << (shift - kLargeShift));
      }
      unsigned square = static_cast<unsigned>(mantissa * mantissa);
      unsigned square_exponent = static_cast<unsigned>(127 - 18 + 7 + 2 * shift);
      for (; square < 128; square *= 2) --square_exponent;
      const unsigned word = square_exponent << 7 | (square & 127);
      square_low[bits] = static_cast<Byte>(word & 255);
      square_high[bits] = static_cast<Byte>(word >> 8);
    }
  }
};
alignas(64) constexpr Tables kTables;

FASTCHECK_FN Vec<Byte> look_up(const Byte (&table)[128], Vec<Byte> x) {
  const __m512i low = _mm512_load_si512(table), high = _mm512_load_si512(table + kVectorBytes);
  return (Vec<Byte>)_mm512_permutex2var_epi8(low, (__m512i)x, high);  // the sign takes no part
}

// The sums of all values and of the negative ones alone, by magnitude.
struct ByteSums {
  Vec<std::int32_t> all{}, negative{}, all_large{}, negative_large{};

  template <bool kHasLarge>
  FASTCHECK_FN_MEMBER void add(Vec<Byte> x, __mmask64 is_negative) {
    const auto factor = look_up(kTables.factor, x);
    const auto power = (Vec<std::int8_t>)look_up(kTables.power, x);
    all = add_products(all, factor, power);
    negative = add_products(negative, only(is_negative, factor), power);
    if constexpr (kHasLarge) {
      const auto large = look_up(kTables.large, x);
      all_large = add_bytes(all_large, large);
      negative_large = add_bytes(negative_large, only(is_negative, large));
    }
  }

  FASTCHECK_FN_MEMBER static Vec<Byte> only(__mmask64 mask, Vec<Byte> x) {
    return (Vec<Byte>)_mm512_maskz_mov_epi8(mask, (__m512i)x);
  }
};

// Squares as float32. Of each eight neighbours every other one is in a quarter of a vector: those
// of the even eights in the first two vectors, even lanes and odd ones, those of the odd eights in
// the others.
struct SquareSums {
  Vec<float> lanes[4] = {};

  FASTCHECK_FN_MEMBER void add(Vec<Byte> x) {
    const auto low = (__m512i)look_up(kTables.square_low, x);
    const auto high = (__m512i)look_up(kTables.square_high, x);
    const auto first = (Words)_mm512_unpacklo_epi8(low, high);
    const auto second = (Words)_mm512_unpackhi_epi8(low, high);
    lanes[0] += (Vec<float>)(first << 16);
    lanes[1] += (Vec<float>)(first & splat(0xffff0000u));
    lanes[2] += (Vec<float>)(second << 16);
    lanes[3] += (Vec<float>)(second & splat(0xffff0000u));
  }
};

FASTCHECK_FN double fold_squares(const SquareSums (&runs)[kRuns]) {
  Vec<double> fours[2];
  for (int half = 0; half < 2; ++half) {
    Vec<double> pairs[2] = {};
    for (int k = 2 * half; k < 2 * half + 2; ++k) {
      Vec<double> low, high;
      float_to_double((runs[0].lanes[k] + runs[1].lanes[k]) + (runs[2].lanes[k] + runs[3].lanes[k]),
                      low, high);
      pairs[0] += low;
      pairs[1] += high;
    }
    fours[half] = add_pairs(pairs[0], pairs[1]);
  }
  const Vec<double> x = add_pairs(fours[0], fours[1]);  // eights 0, 2, 4, 6, 1, 3, 5, 7
  return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]));
}

template <Depth kDepth>
class Float8Tiles {
 public:
  Sums whole(const std::byte* data, std::uint64_t tile) {
    return expects_large_ ? read<true>(data, tile) : read<false>(data, tile);
  }

  Sums partial(const std::byte* data, int n, std::uint64_t tile) {
    return partial_.partial(data, n, tile);
  }

  Partial finish() const {
    Partial part = partial_.finish();
    part.counts = merge(part.counts, counts_);
    part.range = merge(part.range, extremes_.range());
    part.checksum = merge(part.checksum, terms_.total());
    return part;
  }

 private:
  // Large values are added up where the tile before had any.
  template <bool kHasLarge>
  FASTCHECK_FN_MEMBER Sums read(const std::byte* data, std::uint64_t tile) {
    Extremes<Format> extremes;
    ByteSums sums;
    SquareSums squares[kRuns];
    ChecksumTerms terms = terms_;
    extremes.smallest = splat<Byte>(255);
    int negative = 0;
    Vec<std::int32_t> zeros{}, subnormals{};
    const std::byte* at = data;
    for (int run = 0; run < kRuns; ++run) {
      SquareSums run_squares;
      Vec<std::int32_t> small{};
      Chains<1> chains;
      if constexpr (kDepth == Depth::kFull) chains.start((tile * kRuns + run) * kWordLanes, 0);
#pragma GCC unroll 4
      for (int row = 0; row < kRunRows; ++row, at += kVectorBytes) {
        const auto x = load<Byte>(at);
        // Magnitudes without the sign matter where all values have the same.
        extremes.most_positive = vmax<std::int8_t>(extremes.most_positive, (Vec<std::int8_t>)x);
        extremes.most_negative = vmax<Byte>(extremes.most_negative, x);
        extremes.smallest = vmin<Byte>(extremes.smallest, x);
        small = add_bytes(small, look_up(kTables.small, x));
        const auto is_negative = _mm512_cmpgt_epu8_mask((__m512i)x, (__m512i)splat(Format::kSign));
        negative += popcount(is_negative);
        sums.add<kHasLarge>(x, is_negative);
        run_squares.add(x);
        if constexpr (kDepth == Depth::kFull) chains.add(0, (Words)x);
      }
      squares[run] = run_squares;
      zeros += small & splat(127);
      subnormals += small >> 7;
      if constexpr (kDepth == Depth::kFull) chains.end(terms);
    }
    const bool has_large = is_any_from(extremes, kLarge);
    if (has_large && !kHasLarge) return read<true>(data, tile);
    expects_large_ = has_large;
    terms_ = terms;
    if (is_any_from(extremes, Format::kFirstNonfinite)) {
      extremes = census<Format>(data, kRows, counts_);
    } else {
      counts_.negative += negative;
      counts_.zero += _mm512_reduce_add_epi32((__m512i)zeros);
      counts_.subnormal += _mm512_reduce_add_epi32((__m512i)subnormals);
      if (is_any_from(extremes, Format::kMaxFinite)) {
        counts_.saturated += count_saturated<Format>(data, kRows);
      }
    }
    extremes.smallest &= splat(Format::kMagnitude);
    extremes_.include(extremes);
    const int all = _mm512_reduce_add_epi32((__m512i)(sums.all + (sums.all_large << kLargeShift)));
    const std::int64_t minus =
        _mm512_reduce_add_epi32((__m512i)(sums.negative + (sums.negative_large << kLargeShift)));
    return {kUnit * static_cast<double>(all - 2 * minus), kUnit * all, fold_squares(squares)};
  }

  FASTCHECK_FN_MEMBER static bool is_any_from(const Extremes<Format>& extremes, Byte least) {
    return count_less<Byte>(extremes.largest(), splat(least)) != kVectorLanes<Byte>;
  }

  Counts counts_;
  Extremes<Format> extremes_;
  ChecksumTerms terms_;
  bool expects_large_ = false;
  FloatTiles<Format, kDepth> partial_;  // of the last tile, where it is one
};

template <Depth kDepth>
struct TilesOf<Format, kDepth> {
  using Type = Float8Tiles<kDepth>;
};

KernelSet with_vbmi(KernelSet set) {
  set.name = "avx512_vbmi";
  ReduceTiles(&row)[kDepthCount] = set.reduce[static_cast<int>(DType::k_float8_e4m3fn)];
  row[1] = Reduce<Format, Depth::kStats>::run;
  row[2] = Reduce<Format, Depth::kFull>::run;
  return set;
}

}  // namespace

const KernelSet* avx512_vbmi_kernels() {
  static const KernelSet kSet = with_vbmi(*avx512_vnni_kernels());
  return &kSet;
}

}  // namespace fastcheck::cpu
