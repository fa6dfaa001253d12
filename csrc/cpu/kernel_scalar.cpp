// The scalar kernel: the canonical order and the checksum as core/ defines them, one component at a
// time. It runs on every CPU, and is the reference for the vector kernels.
#include "cpu/kernel.h"

namespace fastcheck::cpu {
namespace {

template <class Component>
typename Component::Bits load(const std::byte* data, std::int64_t index) {
  typename Component::Bits bits;
  memcpy(&bits, data + index * sizeof(bits), sizeof(bits));
  return bits;
}

template <class Component>
Sums tile_sums(const std::byte* data, int n) {
  using Accumulator = typename Component::Accumulator;
  TileScale scale{1.0f, 1.0, 1.0};
  if constexpr (sizeof(Accumulator) == sizeof(float)) {
    float largest = 0.0f;
    for (int i = 0; i < n; ++i) {
      const auto bits = load<Component>(data, i);
      if (!is_finite<Component>(bits)) continue;
      const float x = fabsf(value<Component>(bits));
      if (x > largest) largest = x;
    }
    scale = tile_scale(largest);
  }
  double lanes[3][kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    LaneSums<Accumulator> runs[kRuns];
    for (int i = lane; i < n; i += kLanes) {
      const auto bits = load<Component>(data, i);
      if constexpr (Component::kIsFloat) {
        if (!is_finite<Component>(bits)) continue;
      }
      auto x = value<Component>(bits);
      if constexpr (sizeof(Accumulator) == sizeof(float)) x *= scale.factor;
      add(runs[i / (kLanes * kRunRows)], x);
    }
    const LaneSums<Accumulator> folded = fold_runs(runs);
    lanes[0][lane] = static_cast<double>(folded.sum) * scale.undo;
    lanes[1][lane] = static_cast<double>(folded.abs_sum) * scale.undo;
    lanes[2][lane] = static_cast<double>(folded.sum_sq) * scale.undo_square;
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (auto& lane : lanes) {
      for (int k = 0; k < width; ++k) lane[k] = lane[2 * k] + lane[2 * k + 1];
    }
  }
  return {lanes[0][0], lanes[1][0], lanes[2][0]};
}

Checksum tile_checksum(const std::byte* data, int bytes, int component_size, std::uint64_t tile) {
  const int width = words_per_row(component_size);
  const int words = (bytes + 3) / 4;
  Checksum sums;
  for (int run = 0; run < kRuns; ++run) {
    for (int lane = 0; lane < width; ++lane) {
      const int first = run * kRunRows * width + lane;
      if (first >= words) break;
      const std::uint64_t chain = (tile * kRuns + run) * width + lane;
      std::uint32_t a = checksum_seed<ChecksumA>(chain);
      std::uint32_t b = checksum_seed<ChecksumB>(chain);
      for (int row = 0; row < kRunRows && first + row * width < words; ++row) {
        const int at = 4 * (first + row * width);
        std::uint32_t word = 0;
        memcpy(&word, data + at, bytes - at < 4 ? bytes - at : 4);
        a = checksum_step<ChecksumA>(a, word);
        b = checksum_step<ChecksumB>(b, word);
      }
      finish_chain(a, b);
      sums = merge(sums, {a, b});
    }
  }
  return sums;
}

template <class Component, Depth kDepth>
struct Reduce {
  static void run(const std::byte* data, std::int64_t components, std::uint64_t first_tile,
                  Partial* out) {
    constexpr int kSize = sizeof(typename Component::Bits);
    PartialFold fold;
    for (std::uint64_t tile = first_tile; components > 0; ++tile) {
      const int n = static_cast<int>(components < kTile ? components : kTile);
      Partial part;
      for (int i = 0; i < n; ++i) {
        const auto bits = load<Component>(data, i);
        count<Component>(part.counts, bits);
        if constexpr (kDepth >= Depth::kStats) {
          if constexpr (Component::kIsFloat) {
            if (!is_finite<Component>(bits)) continue;
          }
          include(part.range, key_of<Component>(bits));
        }
      }
      if constexpr (kDepth >= Depth::kStats) part.sums = tile_sums<Component>(data, n);
      if constexpr (kDepth >= Depth::kFull) {
        part.checksum = tile_checksum(data, n * kSize, kSize, tile);
      }
      push(fold, part);
      data += n * kSize;
      components -= n;
    }
    *out = finish(fold);
  }
};

}  // namespace

const KernelSet* scalar_kernels() {
  static constexpr KernelSet kSet{
      "scalar", scalar_exponents, {FASTCHECK_FOR_EACH_DTYPE(FASTCHECK_KERNEL_ROW)}};
  return &kSet;
}

}  // namespace fastcheck::cpu
