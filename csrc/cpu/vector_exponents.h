// Counts exponents with vectors of bytes, for all formats but float64.
//
// Included by each exponents_<isa>.cpp behind its kVectorBytes. There are no instructions of one
// machine here: the loops are for the compiler to vectorize. Where every component of a tile is
// zero or a normal number, its exponents are bytes: one array is rounded down (for the maxima of
// blocks), one rounded up. A tensor's tile has some 15 binades, and adding to a table in memory
// makes equal neighbours wait for each other: bytes are counted by positional population counts
// (cpu/positional.h), and where there are no instructions for these, or few bytes, by comparing
// every byte with each binade. All other tiles, and all other formats, are counted one by one.
#pragma once

#include <type_traits>

#include "core/order.h"
#include "cpu/exponent_kernel.h"
#if defined(FASTCHECK_COUNTS_POSITIONS)
#include "cpu/positional.h"
#endif

namespace fastcheck::cpu {
namespace {

using Byte = std::uint8_t;
#if !defined(FASTCHECK_COUNTS_POSITIONS)
typedef Byte Bytes __attribute__((vector_size(kVectorBytes)));
#endif

constexpr int kPart = 2048;  // bytes counted at once: no lane's count passes 255
static_assert(kPart / kVectorBytes <= 255 && kTile % kPart == 0);

FASTCHECK_FN Bytes load(const Byte* p) {
  Bytes x;
  std::memcpy(&x, p, kVectorBytes);
  return x;
}

// Adds how often each of the bytes [low, high] is among `n`, a multiple of kVectorBytes, to
// out[byte].
void count_bytes(const Byte* bytes, int n, int low, int high, std::int64_t* out) {
#if defined(FASTCHECK_COUNTS_POSITIONS)
  if (n >= kPart / 2 && high > low) return count_positions(bytes, n, low, high, out);
#endif
  constexpr int kAtOnce = 4;
  for (int first = 0; first < n; first += kPart) {
    const int vectors = (n - first < kPart ? n - first : kPart) / kVectorBytes;
    for (int byte = low; byte <= high; byte += kAtOnce) {
      Bytes counts[kAtOnce] = {};
      Bytes wanted[kAtOnce];
      for (int k = 0; k < kAtOnce; ++k) wanted[k] = Bytes{} + static_cast<Byte>(byte + k);
      for (int i = 0; i < vectors; ++i) {
        const Bytes x = load(bytes + first + i * kVectorBytes);
        for (int k = 0; k < kAtOnce; ++k) counts[k] -= (Bytes)(x == wanted[k]);
      }
      const int last = high - byte < kAtOnce - 1 ? high - byte : kAtOnce - 1;
      for (int k = 0; k <= last; ++k) {
        int sum = 0;
        for (int i = 0; i < kVectorBytes; ++i) sum += counts[k][i];
        out[byte + k] += sum;
      }
    }
  }
}

// The exponent fields of a tile: those of float32, or of a table.
struct TileExponents {
  alignas(64) Byte up[kTile];    // 0: a zero
  alignas(64) Byte down[kTile];  // 0: a zero
  Byte low = 255, high = 0;      // of `up`, zeros left out
};

// A table for a format of one byte, which has fewer binades than a byte has values: its bin of each
// magnitude and 1, 0 for a zero, rounded up and down.
template <class Format>
struct ByteTable {
  Byte up[256], down[256];
  constexpr ByteTable() : up{}, down{} {
    for (int m = 1; m < Format::kFirstNonfinite; ++m) {
      int top = 0;
      while (m >> (top + 1) != 0) ++top;
      const bool is_normal = m >= Format::kMinNormal;
      const int rest = is_normal ? m & (Format::kMinNormal - 1) : m & (m - 1);
      const int bin = is_normal ? (m >> Format::kMantissaBits) + Format::kMantissaBits - 1 : top;
      down[m] = down[m | Format::kSign] = static_cast<Byte>(bin + 1);
      up[m] = up[m | Format::kSign] = static_cast<Byte>(bin + 1 + (rest != 0 ? 1 : 0));
    }
  }
};

// True for a format whose subnormals have exponents of their own there, and the bin of field 0.
template <class Format>
constexpr bool kHasTable = sizeof(typename Format::Bits) == 1;
template <class Format>
constexpr int kFieldBase = kHasTable<Format> ? -1 : -127 - kLowestExponent<Format>;

template <class Format>
typename Format::Bits fields(const std::byte* data, int n, TileExponents& out) {
  using Bits = typename Format::Bits;
  typedef Bits Unaligned __attribute__((aligned(1), may_alias));
  const Unaligned* const p = reinterpret_cast<const Unaligned*>(data);
  constexpr int kShift = Format::kMantissaBits;
  constexpr Bits kUp = Format::kMinNormal - 1;
  Bits largest = 0;
  for (int i = 0; i < n; ++i) {
    const Bits m = p[i] & Format::kMagnitude;
    largest = m > largest ? m : largest;
    if constexpr (kHasTable<Format>) {
      static constexpr ByteTable<Format> kTable;
      out.up[i] = kTable.up[p[i]];
      out.down[i] = kTable.down[p[i]];
    } else if constexpr (Format::kExponentBias == 127) {
      out.up[i] = static_cast<Byte>((m + kUp) >> kShift);
      out.down[i] = static_cast<Byte>(m >> kShift);
    } else {
      // Computed as float32, in which a half's subnormal is the difference of two normals.
      constexpr std::uint32_t kRebias = (127u - Format::kExponentBias) << 23;
      constexpr std::uint32_t kOne = kRebias + (1u << 23);
      const std::uint32_t wide = m;
      const std::uint32_t shifted = wide << (23 - kShift);
      const float tiny = bit_cast<float>(shifted + kOne) - bit_cast<float>(kOne);
      // Not a conditional, which the compiler will not vectorize around a subtraction.
      const std::uint32_t is_normal = 0u - (wide >= Format::kMinNormal ? 1u : 0u);
      const std::uint32_t bits =
          (is_normal & (shifted + kRebias)) | (~is_normal & bit_cast<std::uint32_t>(tiny));
      out.up[i] = static_cast<Byte>((bits + 0x7fffffu) >> 23);
      out.down[i] = static_cast<Byte>(bits >> 23);
    }
  }
  Byte low = 255, high = 0;
  for (int i = 0; i < n; ++i) {
    const Byte below = static_cast<Byte>(out.up[i] - 1);  // of a zero: 255
    low = below < low ? below : low;
    high = out.up[i] > high ? out.up[i] : high;
  }
  out.low = static_cast<Byte>(low + 1);
  out.high = high;
  return largest;
}

// to[i] = the larger of from[2i] and from[2i + 1].
[[maybe_unused]] void fold_pairs(const Byte* __restrict from, Byte* __restrict to, int n) {
  for (int i = 0; i < n; ++i) {
    const Byte a = from[2 * i], b = from[2 * i + 1];
    to[i] = a > b ? a : b;
  }
}

// Adds the bytes that are not zero to out[byte], of an array that has room behind for a whole
// vector. They are few, and nearly equal.
void count_maxima(Byte* maxima, int n, std::int64_t* out) {
  const int padded = (n + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
  std::memset(maxima + n, 0, padded - n);
  Byte low = 255, high = 0;
  for (int i = 0; i < n; ++i) {
    const Byte below = static_cast<Byte>(maxima[i] - 1);  // of a zero: 255
    low = below < low ? below : low;
    high = maxima[i] > high ? maxima[i] : high;
  }
  if (high != 0) count_bytes(maxima, padded, low + 1, high, out);
}

// Writes the number of binades that each component is below the maximum of its block into `out`;
// returns the largest of them.
template <int kSize>
[[maybe_unused]] int distances(const Byte* __restrict up, const Byte* maxima, int n,
                               Byte* __restrict out) {
  constexpr Byte kMost = kExponentBins - 1;
  for (int block = 0; block < n / kSize; ++block) {
    std::memset(out + block * kSize, maxima[block] + 1, kSize);
  }
  Bytes highest{};
  for (int i = 0; i < n; i += kVectorBytes) {
    const Bytes x = load(up + i);
    const Bytes far = load(out + i) - x;
    const Bytes below = far < kMost ? far : Bytes{} + kMost;
    const Bytes found = below | (Bytes)(x == 0);  // of a zero: 255
    std::memcpy(out + i, &found, kVectorBytes);
    const Bytes next = found + 1;  // of a zero: 0
    highest = next > highest ? next : highest;
  }
  Byte high = 0;
  for (int i = 0; i < kVectorBytes; ++i) high = highest[i] > high ? highest[i] : high;
  return high - 1;
}

// Up to a tile, a multiple of 64 components. False: it is not one that bytes can describe, and
// nothing was counted.
template <class Format>
bool count_tile(const std::byte* data, int n, std::int64_t* totals) {
  TileExponents tile;
  const typename Format::Bits largest = fields<Format>(data, n, tile);
  if (largest >= Format::kFirstNonfinite) return false;
  if (largest == 0) {
    totals[kTotalZero] += n;
    return true;
  }
  // Field 1, rounded up, holds the subnormals, whose exponents differ.
  if (!kHasTable<Format> && tile.low < 2) return false;
  std::int64_t* const elements = totals + kTotalBins;
  std::int64_t* const maxima32 = elements + kBinades<Format>;
  std::int64_t* const maxima16 = maxima32 + kBinades<Format>;
  if (static_cast<std::int64_t>(largest) > totals[kTotalLargest]) {
    totals[kTotalLargest] = static_cast<std::int64_t>(largest);
  }
  std::int64_t by_field[256 + 4] = {};
  count_bytes(tile.up, n, tile.low, tile.high, by_field);
  std::int64_t zeros = n;
  for (int field = tile.low; field <= tile.high; ++field) {
    elements[kFieldBase<Format> + field] += by_field[field];
    zeros -= by_field[field];
  }
  totals[kTotalZero] += zeros;
#if defined(FASTCHECK_COUNTS_POSITIONS)
  Blocks blocks;
  find_blocks(tile.up, tile.down, n, kExponentBins - 1, blocks);
  count_maxima(blocks.maxima16, n / kHalfBlock, maxima16 + kFieldBase<Format>);
  count_maxima(blocks.maxima32, n / kBlock, maxima32 + kFieldBase<Format>);
  count_bytes(blocks.below32, n, 0, blocks.high32, totals + kTotalBelow32);
  count_bytes(blocks.below16, n, 0, blocks.high16, totals + kTotalBelow16);
#else
  alignas(64) Byte pairs[kTile / 2], fours[kTile / 4], eights[kTile / 8];
  alignas(64) Byte blocks16[kTile / kHalfBlock + kVectorBytes];
  alignas(64) Byte blocks32[kTile / kBlock + kVectorBytes];
  fold_pairs(tile.down, pairs, n / 2);
  fold_pairs(pairs, fours, n / 4);
  fold_pairs(fours, eights, n / 8);
  fold_pairs(eights, blocks16, n / kHalfBlock);
  fold_pairs(blocks16, blocks32, n / kBlock);
  count_maxima(blocks16, n / kHalfBlock, maxima16 + kFieldBase<Format>);
  count_maxima(blocks32, n / kBlock, maxima32 + kFieldBase<Format>);
  alignas(64) Byte below[kTile];
  int high = distances<kBlock>(tile.up, blocks32, n, below);
  count_bytes(below, n, 0, high, totals + kTotalBelow32);
  high = distances<kHalfBlock>(tile.up, blocks16, n, below);
  count_bytes(below, n, 0, high, totals + kTotalBelow16);
#endif
  return true;
}

template <class Format>
void count_vector(const std::byte* data, std::int64_t components, std::int64_t* totals) {
  constexpr std::int64_t kSize = sizeof(typename Format::Bits);
  while (components > 0) {
    int n = static_cast<int>(components < kTile ? components / 64 * 64 : kTile);
    if (n == 0 || !count_tile<Format>(data, n, totals)) {
      n = static_cast<int>(components < kTile ? components : kTile);
      count_scalar<Format>(data, n, totals);
    }
    components -= n;
    data += n * kSize;
  }
}

template <class Component>
constexpr CountExponents counter() {
  if constexpr (!Component::kIsFloat) {
    return nullptr;
  } else if constexpr (std::is_same_v<Component, Float64>) {
    return count_scalar<Component>;
  } else {
    return count_vector<Component>;
  }
}

}  // namespace
}  // namespace fastcheck::cpu
