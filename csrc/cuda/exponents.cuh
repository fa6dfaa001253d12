// The kernel that counts the exponents of a tensor.
//
// Every component adds to three histograms: by its own exponent, and by how far it is below the
// maximum of its blocks of 32 and of 16. A warp keeps those of the 32 binades below `base` in
// registers (vertical.cuh). A batch with something else in it (a larger or much smaller number, a
// subnormal of float32, a non-finite value) moves the base, or is counted one by one in shared
// memory. All formats but float64 are counted as the float32 of equal value, where the narrower
// ones have no subnormals; float64 is counted one by one.
#pragma once

#include "core/exponents.h"
#include "cuda/exponent_arguments.h"
#include "cuda/floats.cuh"
#include "cuda/merge.cuh"
#include "cuda/other_rows.cuh"
#include "cuda/vertical.cuh"

namespace fastcheck::cuda {

// The format as which a format's components are counted, and its totals (core/exponents.h).
template <class Format>
using CountedAs = std::conditional_t<std::is_same_v<Format, Float64>, Float64, Float32>;
template <class Format>
constexpr int kTotals = kTotalBins + 3 * kBinades<CountedAs<Format>>;

// A block's own counts.
template <class Format>
struct CountsShared {
  // kTotalLargest is not used; no count of a block passes 2^32.
  unsigned totals[kTotals<Format>];
  unsigned last;
  int bottom;
  unsigned long long largest;
  unsigned long long words[kExponentWords];
};

template <class Format>
struct ExponentShared {
  CountsShared<Format> counts;
  Stage<Format> warps[kMaxWarps];
};

// The magnitudes of a row in the format that they are counted in. One that is not finite becomes
// one of float32 that is not, or the next above the largest.
template <class Format>
FASTCHECK_DEVICE void counted_bits(
    const Row<Format>& row, typename CountedAs<Format>::Bits (&out)[Shape<Format>::kVectorLanes]) {
  using S = Shape<Format>;
  Row<Format> magnitudes = row;
  if constexpr (S::kSize < 4) {
    constexpr std::uint32_t kEach = S::kSize == 1 ? 0x01010101u : 0x00010001u;
    FASTCHECK_UNROLL
    for (auto& word : magnitudes.word) word &= kEach * Format::kMagnitude;
  }
  typename Format::Accumulator values[S::kVectorLanes];
  values_of(magnitudes, values);
  FASTCHECK_UNROLL
  for (int k = 0; k < S::kVectorLanes; ++k) {
    const auto bits = bit_cast<typename CountedAs<Format>::Bits>(values[k]);
    out[k] = S::kSize < 4 ? bits : magnitude<CountedAs<Format>>(bits);
  }
}

// The smallest one that is not finite.
template <class Format>
constexpr typename CountedAs<Format>::Bits first_nonfinite() {
  using As = CountedAs<Format>;
  using Bits = typename As::Bits;
  if constexpr (sizeof(typename Format::Bits) >= 4 || Format::kExponentBias == 127) {
    return As::kFirstNonfinite;
  } else {
    // It would be a normal number of the format, were it finite.
    return (static_cast<Bits>(Format::kFirstNonfinite) << (23 - Format::kMantissaBits)) +
           (static_cast<Bits>(127 - Format::kExponentBias) << 23);
  }
}

template <class T>
FASTCHECK_DEVICE T larger(T a, T b) {
  return a > b ? a : b;
}
template <class T>
FASTCHECK_DEVICE T smaller(T a, T b) {
  return a < b ? a : b;
}

template <class Format>
class ExponentCounter {
  using S = Shape<Format>;
  using As = CountedAs<Format>;
  using Bits = typename As::Bits;
  static constexpr int kHeld = S::kVectorLanes;
  static constexpr int kComponents = kBatchRows * kHeld;
  // Threads that have a block of 16 of a row.
  static constexpr int kSharers = kHalfBlock / kHeld;
  static constexpr Bits kNonfinite = first_nonfinite<Format>();
  static constexpr bool kIsVertical = sizeof(Bits) == 4;
  static constexpr int kPlanes = 10;
  static constexpr int kMaximaPlanes = 6;
  static constexpr int kMostBatches = ((1 << kPlanes) - 1) / kComponents;
  static_assert(!kIsVertical || kMostBatches * (kSharers < kBatchRows ? kBatchRows / kSharers : 1) <
                                    1 << kMaximaPlanes);
  static constexpr int kWindow = 32;
  static constexpr int kSlack = 3;  // binades above the largest number so far
  static constexpr std::uint32_t kField = 1u << 23;
  // The bin of float32's field 0, and those of the totals.
  static constexpr int kFieldBin = -127 - kLowestExponent<Float32>;
  static constexpr int kElements = kTotalBins;
  static constexpr int kMaxima32 = kElements + kBinades<As>;
  static constexpr int kMaxima16 = kMaxima32 + kBinades<As>;

 public:
  FASTCHECK_DEVICE_MEMBER ExponentCounter(unsigned* totals, Stage<Format>& stage)
      : totals_(totals), stage_(stage) {
    elements_.clear(), below32_.clear(), below16_.clear();
    maxima32_.clear(), maxima16_.clear();
  }

  // One tile; `n` components are there from its first to the tensor's end.
  FASTCHECK_DEVICE_MEMBER void tile(const std::byte* data, const Layout* layout, std::int64_t tile,
                                    int n) {
    FASTCHECK_ROLLED
    for (int i = 0; i < S::kPasses * kBatches; ++i) {
      const int pass = i / kBatches, batch = i % kBatches;
      Row<Format> rows[kBatchRows];
      if (is_plain<Format>(data, layout, n)) {
        load_plain(batch_begin(data, tile, pass, batch, place_), rows);
      } else {
        FASTCHECK_UNROLL
        for (int j = 0; j < kBatchRows; ++j) rows[j] = {};
        load_batch(data, layout, tile, pass, batch, n, left_of(n, place_, pass, batch), stage_,
                   rows);
      }
      count(rows);
    }
  }

  // A batch of whole rows, or of rows whose missing components are zeros.
  FASTCHECK_DEVICE_MEMBER void count(const Row<Format> (&rows)[kBatchRows]) {
    if constexpr (kIsVertical) {
      count_in_window(rows);
    } else {
      count_one_by_one(rows);
    }
  }

  // Adds what is in registers to the block's counts.
  FASTCHECK_DEVICE_MEMBER void finish(CountsShared<Format>& shared) {
    if constexpr (kIsVertical) flush();
    const auto largest = static_cast<unsigned long long>(warp_max(largest_));
    if (place_.lane == 0) atomicMax(&shared.largest, largest);
  }

 private:
  static FASTCHECK_DEVICE_MEMBER Bits warp_max(Bits x) {
    FASTCHECK_ROLLED
    for (int mask = 1; mask < kWarp; mask *= 2) x = larger(x, from_lane_xor(x, mask));
    return x;
  }

  // The maxima of the blocks of 16 and 32 of a row, from the thread's own.
  static FASTCHECK_DEVICE_MEMBER void block_maxima(Bits mine, Bits& of16, Bits& of32) {
    FASTCHECK_UNROLL
    for (int mask = 1; mask < kSharers; mask *= 2) mine = larger(mine, from_lane_xor(mine, mask));
    of16 = mine;
    of32 = larger(mine, from_lane_xor(mine, kSharers));
  }

  FASTCHECK_DEVICE_MEMBER void count_in_window(const Row<Format> (&rows)[kBatchRows]) {
    if constexpr (kIsVertical) {
      std::uint32_t w[kBatchRows][kHeld];
      std::uint32_t mine[kBatchRows];
      std::uint32_t top = 0, low = ~0u;
      FASTCHECK_UNROLL
      for (int j = 0; j < kBatchRows; ++j) {
        mine[j] = 0;
        std::uint32_t x[kHeld];
        counted_bits(rows[j], x);
        FASTCHECK_UNROLL
        for (int k = 0; k < kHeld; ++k) {
          mine[j] = larger(mine[j], x[k]);
          w[j][k] = x[k] - 1;  // of a zero the largest number
          low = smaller(low, w[j][k]);
        }
        top = larger(top, mine[j]);
      }
      if (any_lane(top >= end_ || low < least_) && !admit(top, low)) {
        return count_one_by_one(rows);
      }
      largest_ = larger(largest_, top);
      std::uint32_t of16[kBatchRows], of32[kBatchRows];
      FASTCHECK_UNROLL
      for (int j = 0; j < kBatchRows; ++j) block_maxima(mine[j], of16[j], of32[j]);
      count_maxima<kSharers>(of16, maxima16_);
      count_maxima<2 * kSharers>(of32, maxima32_);
      // Rounded up, the exponent field is one more than that of the number below.
      elements_.template add<kComponents>(
          [&](int i) { return bit_at(base_ - (w[i / kHeld][i % kHeld] >> 23)); });
      below16_.template add<kComponents>(
          [&](int i) { return bit_at((of16[i / kHeld] >> 23) - (w[i / kHeld][i % kHeld] >> 23)); });
      below32_.template add<kComponents>(
          [&](int i) { return bit_at((of32[i / kHeld] >> 23) - (w[i / kHeld][i % kHeld] >> 23)); });
      if (++batches_ == kMostBatches) flush();
    }
  }

  // The rows of a batch are dealt out to the threads that share a block.
  template <int kAmong>
  FASTCHECK_DEVICE_MEMBER void count_maxima(const std::uint32_t (&tops)[kBatchRows],
                                            Vertical<kMaximaPlanes>& maxima) {
    const int mine = place_.lane % kAmong;
    constexpr int kStep = kAmong < kBatchRows ? kAmong : kBatchRows;
    FASTCHECK_UNROLL
    for (int first = 0; first < kBatchRows; first += kStep) {
      std::uint32_t top = 0;
      FASTCHECK_UNROLL
      for (int j = 0; j < kStep; ++j) top = mine == j ? tops[first + j] : top;
      maxima.ripple(0, top != 0 ? bit_at(base_ - (top >> 23)) : 0);
    }
  }

  // True if the window holds the batch, moved if need be. The whole warp comes here, rarely.
  FASTCHECK_DEVICE_MEMBER bool admit(std::uint32_t top, std::uint32_t low) {
    top = warp_max(top);
    low = ~warp_max(~low);
    if (top == 0) return true;
    const std::uint32_t highest = top / kField, range = highest - low / kField;
    if (top >= kNonfinite || low < kField - 1 || range >= kWindow) return false;
    flush();
    const std::uint32_t room = kWindow - 1 - range;
    base_ = smaller(highest + smaller<std::uint32_t>(room, kSlack), 254u);
    end_ = smaller((base_ + 1) * kField, kNonfinite);
    least_ = base_ >= kWindow ? (base_ - (kWindow - 1)) * kField : kField - 1;
    return true;
  }

  FASTCHECK_DEVICE_MEMBER void flush() {
    const Transposition transposed;
    const int lane = place_.lane;
    const int bin = static_cast<int>(base_) - lane + kFieldBin;
    add(kElements + bin + 1, elements_.take(transposed));
    add(kMaxima32 + bin, maxima32_.take(transposed));
    add(kMaxima16 + bin, maxima16_.take(transposed));
    add(kTotalBelow32 + lane, below32_.take(transposed));
    add(kTotalBelow16 + lane, below16_.take(transposed));
    batches_ = 0;
  }

  FASTCHECK_DEVICE_MEMBER void add(int total, unsigned count) {
    if (count != 0) atomicAdd(totals_ + total, count);
  }

  // Any batch, in the warp's stage so that this is a loop.
  FASTCHECK_DEVICE_MEMBER void count_one_by_one(const Row<Format> (&rows)[kBatchRows]) {
    put_rows(rows, stage_);
    FASTCHECK_ROLLED
    for (int j = 0; j < kBatchRows; ++j) count_row(unpack<Format>(stage_.own(j)));
  }

  FASTCHECK_DEVICE_MEMBER void count_row(const Row<Format>& row) {
    Bits w[kHeld];
    Bits mine = 0;
    unsigned nonfinite = 0;
    counted_bits(row, w);
    FASTCHECK_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      const bool is_counted = w[k] < kNonfinite;
      nonfinite += is_counted ? 0 : 1;
      w[k] = is_counted ? w[k] : 0;
      mine = larger(mine, w[k]);
    }
    add(kTotalNonfinite, nonfinite);
    largest_ = larger(largest_, mine);
    Bits of16, of32;
    block_maxima(mine, of16, of32);
    const int top16 = of16 != 0 ? floor_exponent<As>(of16) : 0;
    const int top32 = of32 != 0 ? floor_exponent<As>(of32) : 0;
    if (place_.lane % kSharers == 0 && of16 != 0) add(kMaxima16 + top16 - kLowestExponent<As>, 1);
    if (place_.lane % (2 * kSharers) == 0 && of32 != 0) {
      add(kMaxima32 + top32 - kLowestExponent<As>, 1);
    }
    FASTCHECK_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      if (w[k] == 0) continue;
      const int exponent = ceil_exponent<As>(w[k]);
      add(kElements + exponent - kLowestExponent<As>, 1);
      add(kTotalBelow32 + smaller(top32 + 1 - exponent, kExponentBins - 1), 1);
      add(kTotalBelow16 + smaller(top16 + 1 - exponent, kExponentBins - 1), 1);
    }
  }

  unsigned* const totals_;
  Stage<Format>& stage_;
  const Place<Format> place_;
  Vertical<kPlanes> elements_, below32_, below16_;
  Vertical<kMaximaPlanes> maxima32_, maxima16_;
  int batches_ = 0;
  // The window: exponent fields (base - 32, base]; magnitudes from `end` on are above it, and of
  // those that are not zero, less 1, what is below `least` is below it. None at first.
  std::uint32_t base_ = 0, end_ = 0, least_ = 0;
  Bits largest_ = 0;
};

// ---- totals to words ----------------------------------------------------------------------------

// Of the last block; `totals` are zero again. Zeros are what is left over.
template <class Format>
FASTCHECK_DEVICE_CALLED void write_words(const CountsArgument& to, std::int64_t components,
                                         CountsShared<Format>& shared) {
  using As = CountedAs<Format>;
  constexpr int kBins = kBinades<As>;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  for (int i = thread; i < kExponentWords; i += threads) shared.words[i] = 0;
  if (thread == 0) shared.bottom = kBins;
  const auto largest = static_cast<typename As::Bits>(__ldcg(to.totals + kTotalLargest));
  __syncthreads();
  const int ceiling = largest != 0 ? ceil_exponent<As>(largest) : 0;
  const int floor = largest != 0 ? floor_exponent<As>(largest) : 0;
  for (int i = thread; i < kTotals<Format>; i += threads) {
    const unsigned long long count = __ldcg(to.totals + i);
    to.totals[i] = 0;
    if (i == kTotalLargest || count == 0) continue;
    if (i < kTotalBins) {
      const int word = i == kTotalNonfinite ? kWordNonfinite : i - kTotalBelow32 + kWordBelow32;
      atomicAdd(shared.words + word, count);
      continue;
    }
    const int part = (i - kTotalBins) / kBins, bin = (i - kTotalBins) % kBins;
    const int below = (part == 0 ? ceiling : floor) - (bin + kLowestExponent<As>);
    const int kept = smaller(below, kExponentBins - 1);
    atomicAdd(shared.words + kWordElements + part * kExponentBins + kept, count);
    if (part == 0) {
      atomicAdd(shared.words + kWordZero, count);
      atomicMin(&shared.bottom, bin);
    }
  }
  __syncthreads();
  if (thread == 0) {
    const auto all = static_cast<unsigned long long>(components);
    shared.words[kWordComponents] = all;
    shared.words[kWordZero] = all - shared.words[kWordNonfinite] - shared.words[kWordZero];
    if (largest != 0) {
      shared.words[kWordTop] = static_cast<unsigned long long>(ceiling);
      shared.words[kWordBlockTop] = static_cast<unsigned long long>(floor);
      shared.words[kWordAbsMax] = bit_cast<std::uint64_t>(static_cast<double>(value<As>(largest)));
      shared.words[kWordBottom] =
          static_cast<unsigned long long>(shared.bottom + kLowestExponent<As>);
    }
  }
  __syncthreads();
  for (int i = thread; i < kExponentWords; i += threads) {
    to.words[i] = static_cast<std::int64_t>(shared.words[i]);
  }
}

// ---- a block's counts ---------------------------------------------------------------------------

template <class Format>
FASTCHECK_DEVICE void begin_counts(CountsShared<Format>& shared) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  for (int i = thread; i < kTotals<Format>; i += threads) shared.totals[i] = 0;
  if (thread == 0) shared.largest = 0;
  __syncthreads();
}

// Every counter of the block is finished. The last block of the launch writes the words.
template <class Format>
FASTCHECK_DEVICE void finish_counts(const CountsArgument& to, std::int64_t components,
                                    CountsShared<Format>& shared) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  __syncthreads();
  for (int i = thread; i < kTotals<Format>; i += threads) {
    if (shared.totals[i] != 0) {
      atomicAdd(to.totals + i, static_cast<unsigned long long>(shared.totals[i]));
    }
  }
  if (thread == 0) atomicMax(to.totals + kTotalLargest, shared.largest);
  __syncthreads();
  if (thread == 0) {
    __threadfence();  // of what the whole block added, behind the barrier
    const unsigned last = gridDim.x - 1;
    shared.last = atomicInc(to.blocks_done, last) == last;
    __threadfence();
  }
  __syncthreads();
  if (shared.last != 0) write_words<Format>(to, components, shared);
}

// ---- kernel -------------------------------------------------------------------------------------

template <class Format>
FASTCHECK_KERNEL(kMaxWarps* kWarp, 2)
exponents_kernel(FASTCHECK_ARGUMENT ExponentsLaunch launch) {
  auto& shared = block_shared<ExponentShared<Format>>();
  begin_counts(shared.counts);
  const Entry& entry = launch.entry;
  {
    ExponentCounter<Format> counter(shared.counts.totals, shared.warps[warp_index()]);
    const std::int64_t warps = std::int64_t{gridDim.x} * warp_count();
    for (std::int64_t tile = std::int64_t{blockIdx.x} * warp_count() + warp_index();
         tile < launch.tiles; tile += warps) {
      counter.tile(entry.data, entry.strided != 0 ? &launch.layout : nullptr, tile,
                   components_from(entry.components - tile * kTile));
    }
    counter.finish(shared.counts);
  }
  finish_counts<Format>(launch.counts, entry.components, shared.counts);
}

}  // namespace fastcheck::cuda
