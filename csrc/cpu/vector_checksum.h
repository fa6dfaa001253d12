// Checksum chains (core/checksum.h), a vector of neighbouring word-lanes at a time.
#pragma once

#include "cpu/vector_common.h"

namespace fastcheck::cpu {
namespace {

using Words = Vec<std::uint32_t>;
constexpr int kWordLanes = kVectorLanes<std::uint32_t>;

FASTCHECK_FN Words word_iota() {
  Words v;
  for (int i = 0; i < kWordLanes; ++i) v[i] = static_cast<std::uint32_t>(i);
  return v;
}

// The chains of word-lanes [lane, lane + kWordLanes). `row` is the id of the run's first chain, a
// multiple of the words in a row, so that adding a lane never carries into the upper half.
template <class Half>
FASTCHECK_FN Words seeds(std::uint64_t row, int lane) {
  return splat(checksum_seed<Half>(row)) +
         (word_iota() + static_cast<std::uint32_t>(lane)) * Half::kPlaceLow;
}

template <class Half>
FASTCHECK_FN Words step(Words h, Words word) {
  return rotate_left<Half::kRotation>(h) * Half::kMultiplier + word;
}

// Sums of terms, lane by lane; which lane a term falls into does not matter.
struct ChecksumTerms {
  Words a{};
  Words b{};

  Checksum total() const {
    Checksum sums;
    for (int i = 0; i < kWordLanes; ++i) sums = merge(sums, {a[i], b[i]});
    return sums;
  }
};

// The chains of kVectors neighbouring vectors, in registers while a run is read.
template <int kVectors>
struct Chains {
  Words a[kVectors];
  Words b[kVectors];

  FASTCHECK_FN_MEMBER void start(std::uint64_t row, int lane) {
    for (int j = 0; j < kVectors; ++j) {
      a[j] = seeds<ChecksumA>(row, lane + j * kWordLanes);
      b[j] = seeds<ChecksumB>(row, lane + j * kWordLanes);
    }
  }
  FASTCHECK_FN_MEMBER void add(int j, Words word) {
    a[j] = step<ChecksumA>(a[j], word);
    b[j] = step<ChecksumB>(b[j], word);
  }
  FASTCHECK_FN_MEMBER void end(ChecksumTerms& terms) {
    for (int j = 0; j < kVectors; ++j) {
      finish_chain(a[j], b[j]);
      terms.a += a[j];
      terms.b += b[j];
    }
  }
};

// The first `words` words of a tile, in memory that may be read up to the end of their row.
template <int kComponentSize>
void checksum_words(const std::byte* data, int words, std::uint64_t tile, ChecksumTerms& terms) {
  constexpr int kWidth = words_per_row(kComponentSize);
  const int whole_rows = words / kWidth;
  const int rest = words % kWidth;  // the lanes that reach one row further
  for (int run = 0; run * kRunRows * kWidth < words; ++run) {
    const int left = whole_rows - run * kRunRows;
    const int rows = left < kRunRows ? left : kRunRows;
    for (int lane = 0; lane < kWidth; lane += kWordLanes) {
      Chains<1> chains;
      chains.start((tile * kRuns + run) * kWidth, lane);
      const std::byte* at = data + 4 * (run * kRunRows * kWidth + lane);
      for (int row = 0; row < rows; ++row, at += 4 * kWidth) {
        chains.add(0, load<std::uint32_t>(at));
      }
      Words alive = splat(rows > 0 ? ~0u : 0u);
      if (left < kRunRows && lane < rest) {
        const Words further = (Words)(word_iota() < splat(static_cast<std::uint32_t>(rest - lane)));
        const Chains<1> before = chains;
        chains.add(0, load<std::uint32_t>(at));
        chains.a[0] = select<std::uint32_t>(further, chains.a[0], before.a[0]);
        chains.b[0] = select<std::uint32_t>(further, chains.b[0], before.b[0]);
        alive |= further;
      }
      finish_chain(chains.a[0], chains.b[0]);
      terms.a += chains.a[0] & alive;
      terms.b += chains.b[0] & alive;
    }
  }
}

}  // namespace
}  // namespace fastcheck::cpu
