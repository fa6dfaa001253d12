// Primitives that all parts of the vector kernel share: loads, prefetches, lane counts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/accumulator.h"
#include "cpu/kernel.h"

namespace fastcheck::cpu {
namespace {

template <class T>
constexpr int kVectorLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <class T>
FASTCHECK_FN Vec<T> load(const std::byte* p) {
  Vec<T> v;
  memcpy(&v, p, sizeof(v));
  return v;
}

constexpr int kCacheLine = 64;

// Asks for `kBytes` at p, which need not be there; returns what follows.
template <int kBytes>
FASTCHECK_FN const std::byte* prefetched(const std::byte* p) {
  for (int i = 0; i < kBytes; i += kCacheLine) __builtin_prefetch(p + i);
  return p + kBytes;
}

template <class T>
FASTCHECK_FN Vec<T> splat(T x) {
  return x - Vec<T>{};
}

// x where the mask's lanes are all ones, y where they are zero.
template <class T>
FASTCHECK_FN Vec<T> select(Vec<T> mask, Vec<T> x, Vec<T> y) {
  return (x & mask) | (y & ~mask);
}

// Counts how often lanes compare so, over at most kMost vectors.
template <class T>
class LaneCounter {
 public:
  static constexpr int kMost = 255;

  FASTCHECK_FN_MEMBER void add_equal(Vec<T> x, Vec<T> y) {
    if constexpr (kCountsInLanes) {
      lanes_ -= (Vec<T>)(x == y);
    } else {
      total_ += count_equal<T>(x, y);
    }
  }
  // Both without their top bit.
  FASTCHECK_FN_MEMBER void add_less(Vec<T> x, Vec<T> y) {
    if constexpr (kCountsInLanes) {
      using Signed = std::make_signed_t<T>;
      lanes_ -= (Vec<T>)((Vec<Signed>)x < (Vec<Signed>)y);
    } else {
      total_ += count_less<T>(x, y);
    }
  }
  int total() const {
    int total = total_;
    for (int i = 0; i < kVectorLanes<T>; ++i) total += static_cast<int>(lanes_[i]);
    return total;
  }

 private:
  Vec<T> lanes_{};
  int total_ = 0;
};

// The last row of a partial tile when the tile ends within it, in memory of its own so that whole
// vectors may be read: first followed by copies of its first component, which leave extremes alone
// and are easily subtracted from counts; then, for sums and checksum, by zeros.
template <class Component>
class LastRow {
 public:
  using Bits = typename Component::Bits;

  // `n` may be 0: then there is no such row.
  LastRow(const std::byte* data, int n) : n_(n), padded_((n + kStep - 1) / kStep * kStep) {
    if (n == 0) return;
    memcpy(bytes_, data, static_cast<std::size_t>(n) * sizeof(Bits));
    memcpy(&first_, data, sizeof(Bits));
    for (int i = n; i < padded_; ++i) memcpy(bytes_ + i * sizeof(Bits), &first_, sizeof(Bits));
  }

  void pad_with_zeros() {
    if (n_ == 0) return;
    memset(bytes_ + n_ * sizeof(Bits), 0, static_cast<std::size_t>(kLanes - n_) * sizeof(Bits));
  }

  bool exists() const { return n_ != 0; }
  const std::byte* data() const { return bytes_; }
  int vectors() const { return padded_ / kStep; }
  int words() const { return (n_ * static_cast<int>(sizeof(Bits)) + 3) / 4; }

  void subtract_padding(Counts& counts) const {
    if (padded_ != n_) count<Component>(counts, first_, n_ - padded_);
  }

 private:
  static constexpr int kStep = kVectorLanes<Bits>;
  int n_;
  int padded_;
  Bits first_;
  alignas(64) std::byte bytes_[kLanes * sizeof(Bits)];
};

}  // namespace
}  // namespace fastcheck::cpu
