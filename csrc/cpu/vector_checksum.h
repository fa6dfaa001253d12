// Checksum chains (core/checksum.h), a vector of neighbouring word-lanes at a time.
#pragma once

#include "cpu/vector_common.h"

namespace fastcheck::cpu {
namespace {

using Words = Vec<std::uint32_t>;
using SignedWords = Vec<std::int32_t>;
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
  Words alive[kVectors];  // all ones where the chain has a word

  FASTCHECK_FN_MEMBER void start(std::uint64_t row, int lane) {
    for (int j = 0; j < kVectors; ++j) {
      alive[j] = splat(~0u);
      a[j] = seeds<ChecksumA>(row, lane + j * kWordLanes);
      b[j] = seeds<ChecksumB>(row, lane + j * kWordLanes);
    }
  }
  FASTCHECK_FN_MEMBER void add(int j, Words word) {
    a[j] = step<ChecksumA>(a[j], word);
    b[j] = step<ChecksumB>(b[j], word);
  }
  // One word more for the first `count` chains; the others end here, or never began.
  FASTCHECK_FN_MEMBER void add_some(const std::byte* words, int count, bool others_began) {
    for (int j = 0; j < kVectors; ++j) {
      const int here = count - j * kWordLanes;
      const Words some = (Words)((SignedWords)word_iota() < splat(here));
      const Words word = load<std::uint32_t>(words + j * kVectorBytes);
      a[j] = select<std::uint32_t>(some, step<ChecksumA>(a[j], word), a[j]);
      b[j] = select<std::uint32_t>(some, step<ChecksumB>(b[j], word), b[j]);
      if (!others_began) alive[j] = some;
    }
  }
  FASTCHECK_FN_MEMBER void end(ChecksumTerms& terms) {
    for (int j = 0; j < kVectors; ++j) {
      finish_chain(a[j], b[j]);
      terms.a += a[j] & alive[j];
      terms.b += b[j] & alive[j];
    }
  }
};

// A whole tile, which is in the cache, while memory is asked for the next one. Where a row is few
// vectors, runs are read side by side: four chains of each half are what hides the latency of a
// multiplication.
template <int kComponentSize>
FASTCHECK_FN void checksum_tile(const std::byte* data, std::uint64_t tile, ChecksumTerms& terms) {
  constexpr int kWidth = words_per_row(kComponentSize);
  constexpr int kVectors = kWidth / kWordLanes < 4 ? kWidth / kWordLanes : 4;
  constexpr int kRunBytes = 4 * kRunRows * kWidth;
  constexpr int kAtOnce = 4 / kVectors;
  [[maybe_unused]] const std::byte* next = data + kRuns * kRunBytes;
  for (int run = 0; run < kRuns; run += kAtOnce) {
    for (int lane = 0; lane < kWidth; lane += kVectors * kWordLanes) {
      Chains<kVectors> chains[kAtOnce];
      for (int k = 0; k < kAtOnce; ++k) chains[k].start((tile * kRuns + run + k) * kWidth, lane);
      const std::byte* at = data + run * kRunBytes + 4 * lane;
#pragma GCC unroll 2
      for (int row = 0; row < kRunRows; ++row, at += 4 * kWidth) {
        // Narrower components take longer to add up than to fetch.
        if constexpr (kComponentSize >= 4) {
          constexpr int kNextCache = 2;
          for (int i = 0; i < kVectors * kVectorBytes; i += kCacheLine) {
            __builtin_prefetch(next + i, 0, kNextCache);
          }
          next += kVectors * kVectorBytes;
        }
#pragma GCC unroll 4
        for (int k = 0; k < kAtOnce; ++k) {
#pragma GCC unroll 4
          for (int j = 0; j < kVectors; ++j) {
            chains[k].add(j, load<std::uint32_t>(at + k * kRunBytes + j * kVectorBytes));
          }
        }
      }
      for (int k = 0; k < kAtOnce; ++k) chains[k].end(terms);
    }
  }
}

// A tile of `rows` whole rows, and of `last_words` words of one more row, which is read from
// `last_row`: readable to its end, zero beyond its words.
template <int kComponentSize>
void checksum_rows(const std::byte* data, int rows, const std::byte* last_row, int last_words,
                   std::uint64_t tile, ChecksumTerms& terms) {
  constexpr int kWidth = words_per_row(kComponentSize);
  constexpr int kVectors = kWidth / kWordLanes < 4 ? kWidth / kWordLanes : 4;
  const int all_rows = rows + (last_words > 0);
  for (int run = 0; run * kRunRows < all_rows; ++run) {
    const int left = rows - run * kRunRows;
    const int run_rows = left < kRunRows ? left : kRunRows;
    for (int lane = 0; lane < kWidth; lane += kVectors * kWordLanes) {
      Chains<kVectors> chains;
      chains.start((tile * kRuns + run) * kWidth, lane);
      const std::byte* at = data + 4 * (run * kRunRows * kWidth + lane);
      for (int row = 0; row < run_rows; ++row, at += 4 * kWidth) {
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
          chains.add(j, load<std::uint32_t>(at + j * kVectorBytes));
        }
      }
      if (left < kRunRows && last_words > 0) {
        chains.add_some(last_row + 4 * lane, last_words - lane, run_rows > 0);
      }
      chains.end(terms);
    }
  }
}

}  // namespace
}  // namespace fastcheck::cpu
