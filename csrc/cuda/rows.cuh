// Distributes a tile over the threads of a warp, and reads it.
//
// A warp has one tile. A row of 64 lanes is read by a group of neighbouring threads, one vector
// each; the groups of the warp take different runs of 16 rows, so that no sum leaves its thread
// before its run is over. Formats of up to 16 bits have all four runs under way at once, 32 bits
// two at a time, 64 bits one at a time (a pass). The loads of a batch of four rows are issued
// before the first of them is used; of a whole aligned tile, those of the next batch too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/dtypes.h"
#include "core/order.h"
#include "cuda/intrinsics.cuh"
#include "cuda/layout.h"
#include "cuda/platform.cuh"

namespace fastcheck::cuda {

// ---- policy -------------------------------------------------------------------------------------

constexpr int kBatchRows = 4;  // loads that a thread issues together
constexpr int kBatches = kRunRows / kBatchRows;

template <class Component>
struct Shape {
  using Bits = typename Component::Bits;
  static constexpr int kSize = sizeof(Bits);
  // Eight one-byte lanes rather than sixteen: a tile per warp for every dtype, half the registers.
  static constexpr int kVectorBytes = kSize == 1 ? 8 : 16;
  using Vector = std::conditional_t<kSize == 1, uint2, uint4>;
  static constexpr int kVectorLanes = kVectorBytes / kSize;
  static constexpr int kWords = kVectorBytes / 4;
  static constexpr int kThreadsPerRow = kLanes / kVectorLanes;
  static constexpr int kRunsPerPass = 32 / kThreadsPerRow;
  static constexpr int kPasses = kRuns / kRunsPerPass;
  static constexpr int kRowBytes = kLanes * kSize;
  static constexpr int kHalfBytes = kVectorBytes / 2;
};

template <class Component>
struct Row {
  std::uint32_t word[Shape<Component>::kWords];
};

// `lane` must be known at compile time, or the row would leave the registers.
template <class Component>
FASTCHECK_DEVICE typename Component::Bits bits_of(const Row<Component>& row, int lane) {
  using Bits = typename Component::Bits;
  if constexpr (sizeof(Bits) == 8) {
    return static_cast<Bits>(static_cast<std::uint64_t>(row.word[2 * lane + 1]) << 32 |
                             row.word[2 * lane]);
  } else {
    constexpr int kPerWord = 4 / sizeof(Bits);
    return static_cast<Bits>(row.word[lane / kPerWord] >> (8 * sizeof(Bits) * (lane % kPerWord)));
  }
}

// Kernels with sums in float64 have no register left for what follows from the lane: they compute
// it where it is needed.
template <class Component>
constexpr bool kIsTight = sizeof(typename Component::Accumulator) == 8;

// ---- where a thread stands in its warp's tile ---------------------------------------------------

template <class Component>
struct Place {
  int lane;    // in the warp
  int column;  // the thread's vector in the row
  int run;     // within the pass

  explicit FASTCHECK_DEVICE_MEMBER Place(int of_lane = lane_index())
      : lane(of_lane),
        column(static_cast<int>(static_cast<unsigned>(lane) % Shape<Component>::kThreadsPerRow)),
        run(static_cast<int>(static_cast<unsigned>(lane) / Shape<Component>::kThreadsPerRow)) {}

  // The thread's first row of a batch, in the tile.
  FASTCHECK_DEVICE_MEMBER int row(int pass, int batch) const {
    return (pass * Shape<Component>::kRunsPerPass + run) * kRunRows + batch * kBatchRows;
  }
};

// ---- loads --------------------------------------------------------------------------------------

template <class Component>
FASTCHECK_DEVICE Row<Component> unpack(const typename Shape<Component>::Vector& v) {
  if constexpr (Shape<Component>::kWords == 4) {
    return {{v.x, v.y, v.z, v.w}};
  } else {
    return {{v.x, v.y}};
  }
}

template <class Component>
FASTCHECK_DEVICE typename Shape<Component>::Vector pack(const Row<Component>& row) {
  typename Shape<Component>::Vector v;
  memcpy(&v, row.word, sizeof(v));
  return v;
}

template <class Component>
FASTCHECK_DEVICE Row<Component> load_vector(const std::byte* at) {
  return unpack<Component>(__ldg(reinterpret_cast<const typename Shape<Component>::Vector*>(at)));
}

// The distance of an address from an aligned one before it: the same for all of a tensor.
template <class Component>
FASTCHECK_DEVICE int bytes_past(const std::byte* data) {
  constexpr std::uintptr_t kVectorBytes = Shape<Component>::kVectorBytes;
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(data) % kVectorBytes);
}

// A batch of the whole warp in shared memory: what cannot be loaded as it is needed, run by run; or
// the rows of each thread, where a loop takes one after the other.
template <class Component>
struct Stage {
  using Vector = typename Shape<Component>::Vector;
  static constexpr int kRunBytes = kBatchRows * Shape<Component>::kRowBytes;
  static constexpr int kBytes = Shape<Component>::kRunsPerPass * kRunBytes;
  alignas(16) uint4 vectors[kBytes / 16];

  FASTCHECK_DEVICE_MEMBER std::byte* at(int offset) {
    return reinterpret_cast<std::byte*>(vectors) + offset;
  }
  // This thread's, of a row. Nothing else of the stage may be in use.
  FASTCHECK_DEVICE_MEMBER Vector& own(int row) {
    static_assert(kBytes == kBatchRows * kWarp * sizeof(Vector));
    return reinterpret_cast<Vector*>(vectors)[row * kWarp + lane_index()];
  }
};

// Puts the rows of a batch where a loop takes them one after the other.
template <class Component>
FASTCHECK_DEVICE void put_rows(const Row<Component> (&rows)[kBatchRows], Stage<Component>& stage) {
  FASTCHECK_UNROLL
  for (int j = 0; j < kBatchRows; ++j) stage.own(j) = pack(rows[j]);
}

// ---- a batch ------------------------------------------------------------------------------------

// The number of components from a tile's first to the tensor's end, as far as a tile's reader has
// to know: the next tile shows whether a vector may be read across the end of this one.
FASTCHECK_DEVICE int components_from(std::int64_t left) {
  return left < 2 * kTile ? static_cast<int>(left) : 2 * kTile;
}

// True if vectors lie where a whole tile is read.
template <class Component>
FASTCHECK_DEVICE bool is_plain(const std::byte* data, const Layout* layout, int n) {
  return layout == nullptr && n >= kTile && bytes_past<Component>(data) == 0;
}

template <class Component>
FASTCHECK_DEVICE const std::byte* batch_begin(const std::byte* data, std::int64_t tile, int pass,
                                              int batch, const Place<Component>& place) {
  using S = Shape<Component>;
  return data + (tile * kRows + place.row(pass, batch)) * S::kRowBytes +
         place.column * S::kVectorBytes;
}

// Of a plain tile.
template <class Component>
FASTCHECK_DEVICE void load_plain(const std::byte* at, Row<Component> (&rows)[kBatchRows]) {
  FASTCHECK_UNROLL
  for (int j = 0; j < kBatchRows; ++j) {
    rows[j] = load_vector<Component>(at + j * Shape<Component>::kRowBytes);
  }
}

// Components that are there from a thread's first of a batch on, where `n` are from the tile's.
template <class Component>
FASTCHECK_DEVICE int left_of(int n, const Place<Component>& place, int pass, int batch) {
  return n - place.row(pass, batch) * kLanes - place.column * Shape<Component>::kVectorLanes;
}

}  // namespace fastcheck::cuda
