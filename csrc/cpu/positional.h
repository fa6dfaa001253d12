// Counts how often each byte of a range occurs, 16 bytes of it at a time, by positional population
// counts: a table gives each byte a bit, and carry-save adders add up bytes of bits.
//
// Included behind kVectorBytes and four instructions: look_up(), add_saturated(), carry() and
// population(). A vector costs four of them for 8 bins, where comparing it costs two for each bin.
// After M. Klarqvist, W. Mula, D. Lemire, "Efficient Computation of Positional Population Counts
// Using SIMD Instructions" (2021).
#pragma once

#include <cstdint>
#include <cstring>

#include "core/order.h"

namespace fastcheck::cpu {
namespace {

constexpr int kAdded = 16;  // vectors at once
constexpr int kPlanes = 8;  // no lane's count of a tile passes 255
static_assert(kTile / kVectorBytes <= 255);

// Counts of 8 bins, vertically: bit k of plane p of a byte is bit p of its count of bin k.
struct Bins {
  Bytes plane[kPlanes] = {};

  template <int kLevel>
  Bytes add(Bytes table, const Bytes* index) {
    if constexpr (kLevel == 0) {
      return carry(plane[0], look_up(table, index[0]), look_up(table, index[1]));
    } else {
      const Bytes a = add<kLevel - 1>(table, index);
      const Bytes b = add<kLevel - 1>(table, index + (1 << kLevel));
      return carry(plane[kLevel], a, b);
    }
  }

  void add_all(Bytes table, const Bytes (&index)[kAdded]) {
    Bytes over = add<3>(table, index);
    for (int p = 4; p < kPlanes; ++p) {
      const Bytes next = plane[p] & over;
      plane[p] ^= over;
      over = next;
    }
  }

  std::int64_t count(int bin) const {
    std::int64_t sum = 0;
    for (int p = 0; p < kPlanes; ++p)
      sum += static_cast<std::int64_t>(population(plane[p], bin)) << p;
    return sum;
  }
};

// The table of 16 bytes that gives 1 << (i - first) to i, once for each 128 bits.
inline Bytes bits_from(int first) {
  std::uint8_t table[kVectorBytes] = {};
  for (int i = 0; i < kVectorBytes; i += 16) {
    for (int k = 0; k < 8; ++k) table[i + first + k] = static_cast<std::uint8_t>(1 << k);
  }
  Bytes x;
  std::memcpy(&x, table, kVectorBytes);
  return x;
}

// The bytes of x, each from the place whose number differs in the bits of `by`, below 32.
template <int kBy>
inline Bytes swapped(Bytes x) {
  Bytes from;
  for (int i = 0; i < kVectorBytes; ++i) from[i] = static_cast<std::uint8_t>(i ^ kBy);
#if defined(__clang__)  // has no __builtin_shuffle, and makes one of this loop
  Bytes y;
  for (int i = 0; i < kVectorBytes; ++i) y[i] = x[from[i]];
  return y;
#else
  return __builtin_shuffle(x, from);
#endif
}

inline std::uint8_t highest(Bytes x) {
  std::uint8_t high = 0;
  for (int i = 0; i < kVectorBytes; ++i) high = x[i] > high ? x[i] : high;
  return high;
}

// The number of binades that each byte of `up` is below the maximum of `down` in its block, up to
// `most`; 255 for a zero. The largest of them, and the maxima.
struct Blocks {
  alignas(64) std::uint8_t below32[kTile], below16[kTile];
  alignas(64) std::uint8_t maxima32[kTile / 32 + kVectorBytes], maxima16[kTile / 16 + kVectorBytes];
  int high32, high16;
};

inline void find_blocks(const std::uint8_t* up, const std::uint8_t* down, int n, std::uint8_t most,
                        Blocks& out) {
  const Bytes limit = Bytes{} + most;
  Bytes high[2] = {};
  const auto put = [&](Bytes top, Bytes x, std::uint8_t* to, Bytes& highest_yet) {
    const Bytes below = smaller(top + 1 - x, limit) | (Bytes)(x == 0);
    std::memcpy(to, &below, kVectorBytes);
    highest_yet = larger(highest_yet, below + 1);  // of a zero: 0
  };
  for (int i = 0; i < n; i += kVectorBytes) {
    Bytes x, m;
    std::memcpy(&x, up + i, kVectorBytes);
    std::memcpy(&m, down + i, kVectorBytes);
    m = larger(m, swapped<8>(m));
    m = larger(m, swapped<4>(m));
    m = larger(m, swapped<2>(m));
    m = larger(m, swapped<1>(m));
    const Bytes whole = larger(m, swapped<16>(m));
    put(m, x, out.below16 + i, high[0]);
    put(whole, x, out.below32 + i, high[1]);
    for (int k = 0; k < kVectorBytes; k += 16) out.maxima16[(i + k) / 16] = m[k];
    for (int k = 0; k < kVectorBytes; k += 32) out.maxima32[(i + k) / 32] = whole[k];
  }
  out.high16 = highest(high[0]) - 1;
  out.high32 = highest(high[1]) - 1;
}

// Adds how often each of [low, high] is among `n` bytes, a multiple of kVectorBytes and no more
// than a tile, to out[byte].
void count_positions(const std::uint8_t* bytes, int n, int low, int high, std::int64_t* out) {
  const Bytes lower = bits_from(0), upper = bits_from(8);
  const int vectors = n / kVectorBytes;
  for (int base = low; base <= high; base += 16) {
    // A byte that is not one of the 16 gets its top bit set, and 0 from the table.
    const Bytes first = Bytes{} + static_cast<std::uint8_t>(base);
    const Bytes most = Bytes{} + static_cast<std::uint8_t>(0x70);
    Bins bins[2];
    for (int group = 0; group < vectors; group += kAdded) {
      const int there = vectors - group < kAdded ? vectors - group : kAdded;
      Bytes index[kAdded];
      for (int i = 0; i < there; ++i) {
        Bytes x;
        std::memcpy(&x, bytes + (group + i) * kVectorBytes, kVectorBytes);
        index[i] = add_saturated(x - first, most);
      }
      for (int i = there; i < kAdded; ++i) index[i] = Bytes{} + static_cast<std::uint8_t>(0x80);
      bins[0].add_all(lower, index);
      bins[1].add_all(upper, index);
    }
    for (int k = 0; k < 16 && base + k <= high; ++k) out[base + k] += bins[k / 8].count(k % 8);
  }
}

}  // namespace
}  // namespace fastcheck::cpu
