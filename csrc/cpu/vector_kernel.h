// The vector kernel: one reading of memory, every statistic in registers.
//
// Included once by each kernel_<isa>.cpp after its vector vocabulary. A whole tile is read once:
// extremes, sign bits, lane sums and checksum chains together, under the assumption that nothing in
// it is out of the ordinary. The extremes then tell whether that was so; if not (a zero, a
// subnormal, a non-finite or saturated value, a tile to be scaled) the tile, still in the L1 cache,
// is read again by the routine that the case needs. Zeros are counted in the first reading where
// the tile before had some, and a tile is scaled in it where the two before were.
//
// Cost on a whole ordinary tile, in vector instructions per vector read of a 32-bit format: 3 for
// the extremes, 1 for the signs, 4 for the sums and 6 for the checksum.
#pragma once

#include "cpu/vector_checksum.h"
#include "cpu/vector_float.h"
#include "cpu/vector_integer.h"
#if defined(__x86_64__)
#include "cpu/vector_narrow.h"
#endif

namespace fastcheck::cpu {
namespace {

// Tiles of which the checksum alone is wanted.
template <class Component>
class ChecksumTiles {
  static constexpr int kSize = sizeof(typename Component::Bits);

 public:
  // Row by row: here memory is the limit, and the processor foresees what is read next.
  Sums whole(const std::byte* data, std::uint64_t tile) {
    checksum_rows<kSize>(data, kRows, nullptr, 0, tile, terms_);
    return {};
  }

  Sums partial(const std::byte* data, int n, std::uint64_t tile) {
    const int rows = n / kLanes;
    LastRow<Component> last(data + rows * kLanes * kSize, n % kLanes);
    last.pad_with_zeros();
    checksum_rows<kSize>(data, rows, last.data(), last.words(), tile, terms_);
    return {};
  }

  Partial finish() const {
    Partial part;
    part.checksum = terms_.total();
    return part;
  }

 private:
  ChecksumTerms terms_;
};

template <class Component, Depth kDepth>
struct TilesOf {
#if defined(__x86_64__)
  using Integers = std::conditional_t<kIsNarrow<Component>, NarrowTiles<Component, kDepth>,
                                      IntegerTiles<Component, kDepth>>;
#else
  using Integers = IntegerTiles<Component, kDepth>;
#endif
  using Type = std::conditional_t<Component::kIsFloat, FloatTiles<Component, kDepth>, Integers>;
};
template <class Component>
struct TilesOf<Component, Depth::kChecksum> {
  using Type = ChecksumTiles<Component>;
};

template <class Component, Depth kDepth>
struct Reduce {
  static void run(const std::byte* data, std::int64_t components, std::uint64_t tile,
                  Partial* out) {
    constexpr int kSize = sizeof(typename Component::Bits);
    typename TilesOf<Component, kDepth>::Type tiles;
    SumTree tree;
    for (; components >= kTile; components -= kTile, data += kTile * kSize) {
      const Sums sums = tiles.whole(data, tile++);
      if constexpr (kDepth >= Depth::kStats) push(tree, sums);
    }
    if (components > 0) {
      const Sums sums = tiles.partial(data, static_cast<int>(components), tile);
      if constexpr (kDepth >= Depth::kStats) push(tree, sums);
    }
    *out = tiles.finish();
    if constexpr (kDepth >= Depth::kStats) out->sums = finish(tree);
  }
};

}  // namespace
}  // namespace fastcheck::cpu
