// The checksum as the collision search uses it: core/checksum.h by chains, and by runs of chains
// side by side.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/checksum.h"

using u32 = std::uint32_t;
using u64 = std::uint64_t;
using fastcheck::ChecksumA;
using fastcheck::ChecksumB;

constexpr int kChainWords = fastcheck::kRunRows;

// -DSEPARATE_FINALISERS: the first draft, whose halves never met. Kept so that the search can be
// seen to fail.
inline void finish_chain(u32& a, u32& b) {
#if defined(SEPARATE_FINALISERS)
  a = fastcheck::fmix(a), b = fastcheck::fmix(b);
#else
  fastcheck::finish_chain(a, b);
#endif
}

// Both halves in one word, b above a.
inline u64 combine(u32 a, u32 b) { return u64(b) << 32 | a; }
inline u64 add_halves(u64 x, u64 y) {
  return combine(u32(x) + u32(y), u32(x >> 32) + u32(y >> 32));
}
inline u64 subtract_halves(u64 x, u64 y) {
  return combine(u32(x) - u32(y), u32(x >> 32) - u32(y >> 32));
}
inline u64 length_terms(u64 nbytes) { return fastcheck::finalise({}, nbytes); }

struct Chain {
  Chain() = default;
  explicit Chain(u64 id)
      : a(fastcheck::checksum_seed<ChecksumA>(id)), b(fastcheck::checksum_seed<ChecksumB>(id)) {}
  void add(u32 word) {
    a = fastcheck::checksum_step<ChecksumA>(a, word);
    b = fastcheck::checksum_step<ChecksumB>(b, word);
  }
  u64 term() const {
    u32 x = a, y = b;
    finish_chain(x, y);
    return combine(x, y);
  }
  u32 a = 0, b = 0;
};

// The terms of one run: `count` words, `width` chains side by side (the compiler makes vectors of
// them).
inline u64 run_terms(const u32* word, size_t count, size_t width, u64 first_id) {
  u32 a[128], b[128], sum_a = 0, sum_b = 0;
  const size_t lanes = std::min(count, width);
  for (size_t i = 0; i < lanes; ++i) {
    a[i] = fastcheck::checksum_seed<ChecksumA>(first_id + i);
    b[i] = fastcheck::checksum_seed<ChecksumB>(first_id + i);
  }
  for (size_t at = 0; at < count; at += width) {
    const size_t n = std::min(width, count - at);
    for (size_t i = 0; i < n; ++i) {
      a[i] = fastcheck::checksum_step<ChecksumA>(a[i], word[at + i]);
      b[i] = fastcheck::checksum_step<ChecksumB>(b[i], word[at + i]);
    }
  }
  for (size_t i = 0; i < lanes; ++i) {
    finish_chain(a[i], b[i]);
    sum_a += a[i], sum_b += b[i];
  }
  return combine(sum_a, sum_b);
}
