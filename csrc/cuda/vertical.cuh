// Counters that lie across the bits of words: bit b of plane p is bit p of the counter of bin b.
//
// A component is a word with one bit set, that of its bin. Adding three words of one weight gives a
// sum of that weight and a carry of the next, two instructions for 32 bins; so a component costs
// two instructions and a thread touches no memory. After W. Mula, N. Kurz, D. Lemire, "Faster
// Population Counts Using AVX2 Instructions" (2018), and M. Klarqvist, W. Mula, D. Lemire,
// "Efficient Computation of Positional Population Counts Using SIMD Instructions" (2021).
#pragma once

#include <cstdint>

#include "cuda/intrinsics.cuh"
#include "cuda/platform.cuh"

namespace fastcheck::cuda {

// The word with bit n; 0 if n, as an unsigned number, is above 31.
FASTCHECK_DEVICE std::uint32_t bit_at(std::uint32_t n) {
#if FASTCHECK_DEVICE_ARCH
  std::uint32_t out;
  asm("shl.b32 %0, %1, %2;" : "=r"(out) : "r"(1u), "r"(n));
  return out;
#else
  return n < 32 ? 1u << n : 0;
#endif
}

FASTCHECK_DEVICE int population(std::uint32_t x) {
#if FASTCHECK_DEVICE_ARCH
  return __popc(x);
#else
  return __builtin_popcount(x);
#endif
}

// Adds a and b to a plane; the carry is of the next weight.
FASTCHECK_DEVICE std::uint32_t carry_save(std::uint32_t& plane, std::uint32_t a, std::uint32_t b) {
  const std::uint32_t carry = (plane & a) | (b & (plane | a));
  plane ^= a ^ b;
  return carry;
}

// A transposition of the bits of a warp: lane b gets bit b of every lane's word, lane l's at bit l.
// Five exchanges, each of the halves of twice as many blocks.
class Transposition {
 public:
  FASTCHECK_DEVICE_MEMBER Transposition() {
    const int lane = lane_index();
    halves_ = (lane & 16) != 0 ? 0x3276u : 0x5410u;
    bytes_ = (lane & 8) != 0 ? 0x3715u : 0x6240u;
    FASTCHECK_UNROLL
    for (int i = 0; i < 3; ++i) {
      const unsigned width = 4u >> i;
      const bool is_upper = (static_cast<unsigned>(lane) & width) != 0;
      turn_[i] = is_upper ? width : 32 - width;
      const std::uint32_t low = i == 0 ? 0x0f0f0f0fu : i == 1 ? 0x33333333u : 0x55555555u;
      kept_[i] = is_upper ? ~low : low;
    }
  }

  FASTCHECK_DEVICE_MEMBER std::uint32_t operator()(std::uint32_t x) const {
    x = permute_bytes(x, from_lane_xor(x, 16), halves_);
    x = permute_bytes(x, from_lane_xor(x, 8), bytes_);
    FASTCHECK_UNROLL
    for (int i = 0; i < 3; ++i) {
      const std::uint32_t y = from_lane_xor(x, 4 >> i);
      x = (x & kept_[i]) | (__funnelshift_r(y, y, turn_[i]) & ~kept_[i]);
    }
    return x;
  }

 private:
  std::uint32_t halves_, bytes_, turn_[3], kept_[3];
};

template <int kPlanes>
struct Vertical {
  std::uint32_t plane[kPlanes];

  FASTCHECK_DEVICE_MEMBER void clear() {
    FASTCHECK_UNROLL
    for (int p = 0; p < kPlanes; ++p) plane[p] = 0;
  }

  // Adds word(first), ..., of which there are 2^(kLevel + 1); returns what they carry over.
  template <int kLevel, class Word>
  FASTCHECK_DEVICE_MEMBER std::uint32_t carry(int first, const Word& word) {
    if constexpr (kLevel == 0) {
      return carry_save(plane[0], word(first), word(first + 1));
    } else {
      const std::uint32_t a = carry<kLevel - 1>(first, word);
      const std::uint32_t b = carry<kLevel - 1>(first + (1 << kLevel), word);
      return carry_save(plane[kLevel], a, b);
    }
  }

  // Adds a word of the weight of a plane.
  FASTCHECK_DEVICE_MEMBER void ripple(int from, std::uint32_t word) {
    FASTCHECK_UNROLL
    for (int p = 0; p < kPlanes; ++p) {
      if (p < from) continue;
      const std::uint32_t carry = plane[p] & word;
      plane[p] ^= word;
      word = carry;
    }
  }

  // Adds word(0), ..., word(kWords - 1).
  template <int kWords, class Word>
  FASTCHECK_DEVICE_MEMBER void add(const Word& word) {
    constexpr int kLevel = kWords == 8 ? 2 : kWords == 16 ? 3 : 4;
    static_assert(kWords == 8 << (kLevel - 2));
    ripple(kLevel + 1, carry<kLevel>(0, word));
  }

  // The warp's count of the bin of this lane; the counters are 0 again.
  FASTCHECK_DEVICE_MEMBER unsigned take(const Transposition& transposed) {
    unsigned count = 0;
    FASTCHECK_UNROLL
    for (int p = 0; p < kPlanes; ++p) {
      count += static_cast<unsigned>(population(transposed(plane[p]))) << p;
    }
    clear();
    return count;
  }
};

}  // namespace fastcheck::cuda
