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
  Bytes add(const Bytes* words) {
    if constexpr (kLevel == 0) {
      return carry(plane[0], words[0], words[1]);
    } else {
      const Bytes a = add<kLevel - 1>(words);
      const Bytes b = add<kLevel - 1>(words + (1 << kLevel));
      return carry(plane[kLevel], a, b);
    }
  }

  void add(const Bytes (&words)[kAdded]) {
    Bytes over = add<3>(words);
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
      Bytes words[2][kAdded];
      for (int i = 0; i < kAdded; ++i) {
        Bytes index = Bytes{} + static_cast<std::uint8_t>(0x80);
        if (group + i < vectors) {
          Bytes x;
          std::memcpy(&x, bytes + (group + i) * kVectorBytes, kVectorBytes);
          index = add_saturated(x - first, most);
        }
        words[0][i] = look_up(lower, index);
        words[1][i] = look_up(upper, index);
      }
      bins[0].add(words[0]);
      bins[1].add(words[1]);
    }
    for (int k = 0; k < 16 && base + k <= high; ++k) out[base + k] += bins[k / 8].count(k % 8);
  }
}

}  // namespace
}  // namespace fastcheck::cpu
