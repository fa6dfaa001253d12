// Partial results of a part of a tensor, and how two of them are merged.
//
// Counts, extremes and checksum merge in any order. The three sums merge only along the canonical
// tree (core/order.h): SumTree is that tree, one leaf at a time.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/checksum.h"
#include "core/dtypes.h"
#include "core/element.h"
#include "core/order.h"
#include "core/platform.h"
#include "core/record.h"

namespace fastcheck {

struct Counts {
  std::int64_t nan = 0;
  std::int64_t posinf = 0;
  std::int64_t neginf = 0;
  std::int64_t zero = 0;
  std::int64_t subnormal = 0;
  std::int64_t negative = 0;
  std::int64_t saturated = 0;
};

struct KeyRange {
  std::uint64_t min = ~0ull;  // the identity: min > max, no finite component
  std::uint64_t max = 0;
};

struct Sums {  // without initialisers: a SumTree of them must cost nothing to begin
  double sum;
  double abs_sum;
  double sum_sq;
};

struct Partial {
  Counts counts;
  KeyRange range;
  Sums sums{};
  Checksum checksum;
};

// ---- one component -----------------------------------------------------------------------------

// `Counters` is Counts, or the like with narrower integers.
template <class Component, class Counters>
FASTCHECK_FN void count(Counters& counts, typename Component::Bits bits, std::int64_t times = 1) {
  if constexpr (Component::kIsFloat) {
    const auto absolute = magnitude<Component>(bits);
    const bool minus = (bits & Component::kSign) != 0;
    if (absolute >= Component::kFirstNaN) {
      counts.nan += times;
    } else if (absolute >= Component::kFirstNonfinite) {
      (minus ? counts.neginf : counts.posinf) += times;
    } else {
      if (absolute == 0) {
        counts.zero += times;
      } else {
        if (absolute < Component::kMinNormal) counts.subnormal += times;
        if (minus) counts.negative += times;
        if (absolute == Component::kMaxFinite) counts.saturated += times;
      }
    }
  } else {
    if (bits == 0) counts.zero += times;
    if constexpr (Component::kSigned) {
      if (bits < 0) counts.negative += times;
    }
    if constexpr (Component::kCountsSaturation) {
      if (bits == Component::kMax || (Component::kSigned && bits == Component::kMin)) {
        counts.saturated += times;
      }
    }
  }
}

FASTCHECK_FN void include(KeyRange& range, std::uint64_t key) {
  if (key < range.min) range.min = key;
  if (key > range.max) range.max = key;
}

// One lane's run: `Accumulator` is float for formats of up to 32 bits, double otherwise.
template <class Accumulator>
struct LaneSums {
  Accumulator sum = 0;
  Accumulator abs_sum = 0;
  Accumulator sum_sq = 0;
};

FASTCHECK_FN float magnitude_of(float x) { return fabsf(x); }
FASTCHECK_FN double magnitude_of(double x) { return fabs(x); }
FASTCHECK_FN float fused_multiply_add(float x, float y, float z) { return fmaf(x, y, z); }
FASTCHECK_FN double fused_multiply_add(double x, double y, double z) { return fma(x, y, z); }

template <class Accumulator>
FASTCHECK_FN void add(LaneSums<Accumulator>& run, Accumulator x) {
  run.sum += x;
  run.abs_sum += magnitude_of(x);
  run.sum_sq = fused_multiply_add(x, x, run.sum_sq);
}

template <class Accumulator>
FASTCHECK_FN LaneSums<Accumulator> fold_runs(const LaneSums<Accumulator> (&r)[kRuns]) {
  return {(r[0].sum + r[1].sum) + (r[2].sum + r[3].sum),
          (r[0].abs_sum + r[1].abs_sum) + (r[2].abs_sum + r[3].abs_sum),
          (r[0].sum_sq + r[1].sum_sq) + (r[2].sum_sq + r[3].sum_sq)};
}

// ---- parts -------------------------------------------------------------------------------------

FASTCHECK_FN Counts merge(const Counts& l, const Counts& r) {
  return {l.nan + r.nan,
          l.posinf + r.posinf,
          l.neginf + r.neginf,
          l.zero + r.zero,
          l.subnormal + r.subnormal,
          l.negative + r.negative,
          l.saturated + r.saturated};
}

FASTCHECK_FN KeyRange merge(const KeyRange& l, const KeyRange& r) {
  return {l.min < r.min ? l.min : r.min, l.max > r.max ? l.max : r.max};
}

FASTCHECK_FN Sums merge(const Sums& l, const Sums& r) {
  return {l.sum + r.sum, l.abs_sum + r.abs_sum, l.sum_sq + r.sum_sq};
}

// The canonical tree over leaves that come in order: adjacent pairs, padded with zeros on the
// right. A stack of the subtrees that wait for their right neighbour, one at most per level.
struct SumTree {
  Sums pending[48];
  std::uint64_t leaves = 0;
};

FASTCHECK_FN void push(SumTree& tree, Sums leaf) {
  int level = 0;
  for (std::uint64_t n = tree.leaves; (n & 1) != 0; n >>= 1) {
    leaf = merge(tree.pending[level++], leaf);
  }
  tree.pending[level] = leaf;
  ++tree.leaves;
}

// Padding with zeros leaves a subtree's value as it is, so what waits folds from the right.
FASTCHECK_FN Sums finish(const SumTree& tree) {
  Sums total{};
  bool first = true;
  int level = 0;
  for (std::uint64_t n = tree.leaves; n != 0; n >>= 1, ++level) {
    if ((n & 1) == 0) continue;
    total = first ? tree.pending[level] : merge(tree.pending[level], total);
    first = false;
  }
  return total;
}

// Accumulates consecutive parts: everything but the sums at once, the sums along the tree.
struct PartialFold {
  Partial total;
  SumTree tree;
};

FASTCHECK_FN void push(PartialFold& fold, const Partial& part) {
  fold.total.counts = merge(fold.total.counts, part.counts);
  fold.total.range = merge(fold.total.range, part.range);
  fold.total.checksum = merge(fold.total.checksum, part.checksum);
  push(fold.tree, part.sums);
}

FASTCHECK_FN Partial finish(const PartialFold& fold) {
  Partial total = fold.total;
  total.sums = finish(fold.tree);
  return total;
}

// ---- the end -----------------------------------------------------------------------------------

FASTCHECK_FN double canonical_nan(double x) {
  return x == x ? x : bit_cast<double>(0x7ff8000000000000ull);
}

// The value fields as 64-bit words: `numel`, then a word for each of a Partial, in their order.
constexpr int kMinWord = offsetof(Record, min) / 8;
constexpr int kSumWord = offsetof(Record, sum) / 8;
constexpr int kChecksumWord = offsetof(Record, checksum) / 8;
static_assert(sizeof(Partial) == 8 * kChecksumWord);
static_assert(offsetof(Partial, range) + 8 == offsetof(Record, min));
static_assert(offsetof(Partial, sums) + 8 == offsetof(Record, sum));
static_assert(offsetof(Partial, checksum) + 8 == offsetof(Record, checksum));

// Such a word behind the counts, of the Partial's; `bytes` are all components'.
FASTCHECK_FN std::uint64_t value_word(int index, std::uint64_t word, const KeyRange& range,
                                      Extreme extreme, std::uint64_t bytes) {
  if (index == kChecksumWord) {
    return finalise(
        Checksum{static_cast<std::uint32_t>(word), static_cast<std::uint32_t>(word >> 32)}, bytes);
  }
  if (index >= kSumWord) return bit_cast<std::uint64_t>(canonical_nan(bit_cast<double>(word)));
  if (range.min > range.max && extreme == Extreme::kFloat64) {
    word = key(bit_cast<double>(index == kMinWord ? 0x7ff0000000000000ull : 0xfff0000000000000ull));
  }
  return extreme_bits(word, extreme);
}

// The number of them that a depth covers.
FASTCHECK_FN constexpr int value_words(Depth depth) {
  return depth >= Depth::kFull    ? kChecksumWord + 1
         : depth == Depth::kStats ? kChecksumWord
                                  : kMinWord;
}

// Writes the value fields, and the fields that say how to read them; identity fields are the
// caller's. `info` is the dtype's row of the table.
FASTCHECK_FN void finalise(const Partial& partial, DType dtype, const DTypeInfo& info,
                           std::int64_t numel, Depth depth, Order order, Record& record) {
  const auto bytes = static_cast<std::uint64_t>(numel) * info.components * info.component_size;
  std::uint64_t words[kChecksumWord + 1] = {static_cast<std::uint64_t>(numel)};
  memcpy(words + 1, &partial, sizeof(partial));
  for (int i = kMinWord; i <= kChecksumWord; ++i) {
    const bool is_covered = i < value_words(depth);
    words[i] = is_covered ? value_word(i, words[i], partial.range, info.extreme, bytes) : 0;
  }
  memcpy(&record, words, sizeof(words));
  const Counts& c = partial.counts;
  if (c.nan + c.posinf + c.neginf != 0) record.flags |= kFlagNonfinite;
  record.version = kRecordVersion;
  record.dtype = static_cast<std::uint8_t>(dtype);
  record.order = static_cast<std::uint8_t>(order);
  record.depth = static_cast<std::uint8_t>(depth);
}

}  // namespace fastcheck
