// The checksum: 64 bits over the traversal's 32-bit little-endian words, sensitive to their order.
//
// A chain is the words of one run of one word-lane of one tile (16 words when the tile is full),
// mixed into a state of two 32-bit halves a and b:
//     h = seed(chain id);  h = rotl(h, R) * M + word  for each word, with constants of each half
// finish_chain() then mixes the two halves with each other, and the checksum is the sum, half by
// half mod 2^32, over all chains and a term for the length. Every step is a bijection of the state
// and of the word, so that a change of any single word changes the checksum for certain; the seed
// ties a chain to its place. One rotation and one multiplication move nothing downwards, so a half
// alone has pairs of bit flips in neighbouring rows that cancel; R and M differ between the halves
// so that no pair does in both, and finish_chain spreads what is left over all 64 bits.
// Three instructions a word and half is what leaves a 16-bit tensor at memory speed;
// docs/design.md has the measurements, bench/collisions.cpp the search for collisions.
#pragma once

#include <cstdint>

#include "core/order.h"
#include "core/platform.h"

namespace fastcheck {

// Constants as types: a device may use a static member where it may not address a host variable.
struct ChecksumA {
  static constexpr std::uint32_t kStart = 0x243f6a88u;       // S
  static constexpr std::uint32_t kPlaceLow = 0x9e3779b1u;    // P
  static constexpr std::uint32_t kPlaceHigh = 0x85ebca77u;   // Q
  static constexpr std::uint32_t kMultiplier = 0xcc9e2d51u;  // M
  static constexpr int kRotation = 13;                       // R
};

struct ChecksumB {
  static constexpr std::uint32_t kStart = 0x13198a2eu;
  static constexpr std::uint32_t kPlaceLow = 0xc2b2ae3du;
  static constexpr std::uint32_t kPlaceHigh = 0x27d4eb2fu;
  static constexpr std::uint32_t kMultiplier = 0x9e3779b9u;
  static constexpr int kRotation = 19;
};

// The number of 32-bit words in a row of 64 components.
FASTCHECK_FN constexpr int words_per_row(int component_size) { return 16 * component_size; }

// `chain` is (tile * 4 + run) * words_per_row + word-lane.
template <class Half>
FASTCHECK_FN std::uint32_t checksum_seed(std::uint64_t chain) {
  return Half::kStart + static_cast<std::uint32_t>(chain) * Half::kPlaceLow +
         static_cast<std::uint32_t>(chain >> 32) * Half::kPlaceHigh;
}

template <class Half>
FASTCHECK_FN std::uint32_t checksum_step(std::uint32_t h, std::uint32_t word) {
  return ((h << Half::kRotation) | (h >> (32 - Half::kRotation))) * Half::kMultiplier + word;
}

// A bijection of the 64 bits of a chain's state: each line adds to one half what it does not depend
// on, or multiplies by an odd number. T is std::uint32_t or a vector of them.
template <class T>
FASTCHECK_FN void finish_chain(T& a, T& b) {
  a ^= b >> 15;
  a *= 0x85ebca6bu;
  b ^= a >> 13;
  b *= 0xc2b2ae35u;
  a ^= b >> 16;
  a *= 0x27d4eb2fu;
  b ^= a >> 14;
  b *= 0x9e3779b1u;
  a ^= b >> 15;
}

// The finaliser of MurmurHash3 (Austin Appleby, public domain), for the length alone.
FASTCHECK_FN std::uint32_t fmix(std::uint32_t h) {
  h ^= h >> 16;
  h *= 0x85ebca6bu;
  h ^= h >> 13;
  h *= 0xc2b2ae35u;
  h ^= h >> 16;
  return h;
}

template <class Half>
FASTCHECK_FN std::uint32_t checksum_length(std::uint64_t bytes) {
  return fmix(Half::kStart ^ (static_cast<std::uint32_t>(bytes) * Half::kPlaceHigh +
                              static_cast<std::uint32_t>(bytes >> 32) * Half::kPlaceLow + 1u));
}

// The two running sums of terms.
struct Checksum {
  std::uint32_t a = 0;
  std::uint32_t b = 0;
};

FASTCHECK_FN Checksum merge(Checksum left, Checksum right) {
  return {left.a + right.a, left.b + right.b};
}

FASTCHECK_FN std::uint64_t finalise(Checksum sums, std::uint64_t bytes) {
  const std::uint32_t a = sums.a + checksum_length<ChecksumA>(bytes);
  const std::uint32_t b = sums.b + checksum_length<ChecksumB>(bytes);
  return static_cast<std::uint64_t>(b) << 32 | a;
}

}  // namespace fastcheck
