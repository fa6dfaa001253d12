// The checksum of what a thread reads: its chains through the rows of a run.
#pragma once

#include "core/checksum.h"
#include "cuda/rows.cuh"

namespace fastcheck::cuda {

// Checksum chains of the words of one vector, through the rows of one run.
template <class Component>
struct Chains {
  static constexpr int kWords = Shape<Component>::kWords;
  std::uint32_t a[kWords];
  std::uint32_t b[kWords];

  FASTCHECK_DEVICE_MEMBER void start(std::int64_t tile, int run, int column) {
    constexpr int kWidth = words_per_row(Shape<Component>::kSize);
    const std::uint64_t chain =
        (static_cast<std::uint64_t>(tile) * kRuns + run) * kWidth + column * kWords;
    // The first of a row is a multiple of the row: going on from it never carries.
    const auto seed_a = checksum_seed<ChecksumA>(chain);
    const auto seed_b = checksum_seed<ChecksumB>(chain);
    FASTCHECK_UNROLL
    for (int w = 0; w < kWords; ++w) {
      a[w] = seed_a + w * ChecksumA::kPlaceLow;
      b[w] = seed_b + w * ChecksumB::kPlaceLow;
    }
  }
  FASTCHECK_DEVICE_MEMBER void add(const Row<Component>& row) {
    FASTCHECK_UNROLL
    for (int w = 0; w < kWords; ++w) step(w, row.word[w]);
  }
  // Of a row of which `bytes` exist from the vector's first on.
  FASTCHECK_DEVICE_MEMBER void add(const Row<Component>& row, int bytes) {
    FASTCHECK_UNROLL
    for (int w = 0; w < kWords; ++w) {
      if (4 * w < bytes) step(w, row.word[w]);
    }
  }
  // `bytes` exist from the vector's first row on.
  FASTCHECK_DEVICE_MEMBER void finish(int bytes, Checksum& terms) {
    FASTCHECK_UNROLL
    for (int w = 0; w < kWords; ++w) {
      finish_chain(a[w], b[w]);
      if (4 * w < bytes) terms = merge(terms, {a[w], b[w]});
    }
  }

 private:
  FASTCHECK_DEVICE_MEMBER void step(int w, std::uint32_t word) {
    a[w] = checksum_step<ChecksumA>(a[w], word);
    b[w] = checksum_step<ChecksumB>(b[w], word);
  }
};

}  // namespace fastcheck::cuda
