// Distributes a tile over the threads of a warp, and reads it.
//
// A warp has one tile. A row of 64 lanes is read by a group of neighbouring threads, one vector
// each; the groups of the warp take different runs of 16 rows, so that no sum leaves its thread
// before its run is over. Formats of up to 16 bits have all four runs under way at once, 32 bits
// two at a time, 64 bits one at a time (a pass). Four loads per thread are under way before the
// first is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/dtypes.h"
#include "core/order.h"
#include "cuda/layout.h"
#include "cuda/platform.cuh"

namespace fastcheck::cuda {

// ---- policy -------------------------------------------------------------------------------------

constexpr int kBatchRows = 4;  // loads in flight per thread
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

// ---- where a thread stands in its warp's tile ---------------------------------------------------

template <class Component>
struct Place {
  int lane;    // in the warp
  int column;  // the thread's vector in the row
  int run;     // within the pass

  FASTCHECK_DEVICE_MEMBER Place()
      : lane(static_cast<int>(threadIdx.x) % kWarpThreads),
        column(lane % Shape<Component>::kThreadsPerRow),
        run(lane / Shape<Component>::kThreadsPerRow) {}

  // The thread's first row of a batch, in the tile.
  FASTCHECK_DEVICE_MEMBER int row(int pass, int batch) const {
    return (pass * Shape<Component>::kRunsPerPass + run) * kRunRows + batch * kBatchRows;
  }

 private:
  static constexpr int kWarpThreads = 32;
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
FASTCHECK_DEVICE Row<Component> load_vector(const std::byte* at) {
  return unpack<Component>(__ldg(reinterpret_cast<const typename Shape<Component>::Vector*>(at)));
}

// Of the byte at `position` in the traversal, from the first element's address.
template <class Index>
FASTCHECK_DEVICE std::int64_t walk(const Layout& layout, Index position) {
  const auto inner = static_cast<Index>(layout.inner_bytes);
  Index stretch = position / inner;
  std::int64_t offset = position - stretch * inner;
  FASTCHECK_ROLLED
  for (int d = layout.outer_dims - 1; d > 0; --d) {
    const auto size = static_cast<Index>(layout.sizes[d]);
    const Index next = stretch / size;
    offset += static_cast<std::int64_t>(stretch - next * size) * layout.stride_bytes[d];
    stretch = next;
  }
  // The outermost needs no division: there is nothing above it.
  if (layout.outer_dims > 0) offset += static_cast<std::int64_t>(stretch) * layout.stride_bytes[0];
  return offset;
}

FASTCHECK_DEVICE std::int64_t offset_in(const Layout& layout, std::int64_t position) {
  return layout.below_4gib != 0 ? walk(layout, static_cast<std::uint32_t>(position))
                                : walk(layout, static_cast<std::uint64_t>(position));
}

// A batch of the whole warp in shared memory, run by run: what cannot be loaded as it is needed.
template <class Component>
struct Stage {
  static constexpr int kRunBytes = kBatchRows * Shape<Component>::kRowBytes;
  static constexpr int kBytes = Shape<Component>::kRunsPerPass * kRunBytes;
  uint4 vectors[kBytes / 16];

  FASTCHECK_DEVICE_MEMBER std::byte* at(int offset) {
    return reinterpret_cast<std::byte*>(vectors) + offset;
  }
};

// Up to 16 bytes, as they are copied.
struct Piece {
  uint4 v;
};

FASTCHECK_DEVICE Piece load_piece(const std::byte* at, int bytes) {
  Piece piece{};
  if (bytes == 16) {
    piece.v = __ldg(reinterpret_cast<const uint4*>(at));
  } else if (bytes == 8) {
    const uint2 v = __ldg(reinterpret_cast<const uint2*>(at));
    piece.v.x = v.x, piece.v.y = v.y;
  } else if (bytes == 4) {
    piece.v.x = __ldg(reinterpret_cast<const std::uint32_t*>(at));
  } else if (bytes == 2) {
    piece.v.x = __ldg(reinterpret_cast<const std::uint16_t*>(at));
  } else {
    piece.v.x = __ldg(reinterpret_cast<const std::uint8_t*>(at));
  }
  return piece;
}

FASTCHECK_DEVICE void store_piece(std::byte* at, int bytes, const Piece& piece) {
  if (bytes == 16) {
    *reinterpret_cast<uint4*>(at) = piece.v;
  } else if (bytes == 8) {
    *reinterpret_cast<uint2*>(at) = {piece.v.x, piece.v.y};
  } else if (bytes == 4) {
    *reinterpret_cast<std::uint32_t*>(at) = piece.v.x;
  } else if (bytes == 2) {
    *reinterpret_cast<std::uint16_t*>(at) = static_cast<std::uint16_t>(piece.v.x);
  } else {
    *reinterpret_cast<std::uint8_t*>(at) = static_cast<std::uint8_t>(piece.v.x);
  }
}

// Copies a batch piece by piece, neighbouring pieces by neighbouring threads; `n` components of the
// tile exist, zeros are put past them. The pieces are as large as alignment and strides allow, down
// to a byte: that is all that a misaligned or strided tensor costs more.
template <class Component>
FASTCHECK_DEVICE void fill_stage(const std::byte* data, const Layout* layout, std::int64_t tile,
                                 int pass, int batch, int n, Stage<Component>& stage) {
  using S = Shape<Component>;
  using T = Stage<Component>;
  constexpr int kInFlight = 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int step = layout == nullptr ? S::kVectorBytes : layout->granule_bytes;
  const std::int64_t start = tile * kTile * S::kSize;
  const int end = n * S::kSize;
  // Where the batch's part of a run begins, in the tile.
  const int first = (pass * S::kRunsPerPass * kRunRows + batch * kBatchRows) * S::kRowBytes;
  FASTCHECK_ROLLED
  for (int base = lane * step; base < T::kBytes; base += 32 * step * kInFlight) {
    const std::byte* from[kInFlight];
    FASTCHECK_UNROLL
    for (int k = 0; k < kInFlight; ++k) from[k] = nullptr;
    FASTCHECK_ROLLED
    for (int j = 0; j < kInFlight; ++j) {  // one copy of the address arithmetic
      const int to = base + j * 32 * step;
      const int in_tile = first + to / T::kRunBytes * (kRunRows * S::kRowBytes) + to % T::kRunBytes;
      if (to >= T::kBytes || in_tile + step > end) continue;
      std::int64_t at = start + in_tile;
      if (layout != nullptr) at = offset_in(*layout, at);
      FASTCHECK_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        if (k == j) from[k] = data + at;
      }
    }
    Piece pieces[kInFlight];
    FASTCHECK_UNROLL
    for (int k = 0; k < kInFlight; ++k) {
      pieces[k] = {};
      if (from[k] != nullptr) pieces[k] = load_piece(from[k], step);
    }
    FASTCHECK_UNROLL
    for (int k = 0; k < kInFlight; ++k) {
      const int to = base + k * 32 * step;
      if (to < T::kBytes) store_piece(stage.at(to), step, pieces[k]);
    }
  }
  __syncwarp();
  // The components in front of the end that do not fill a piece.
  const int component = end / step * step / S::kSize + lane;
  const int row = component / kLanes;
  const int run = row / kRunRows;
  if (step > S::kSize && component < n && run / S::kRunsPerPass == pass &&
      row % kRunRows / kBatchRows == batch) {
    std::int64_t at = start + component * S::kSize;
    if (layout != nullptr) at = offset_in(*layout, at);
    store_piece(stage.at(run % S::kRunsPerPass * T::kRunBytes + row % kBatchRows * S::kRowBytes +
                         component % kLanes * S::kSize),
                S::kSize, load_piece(data + at, S::kSize));
  }
}

// The thread's vectors of a batch of a tile of which `n` components exist; zeros are read past
// them.
template <class Component>
FASTCHECK_DEVICE void load_batch(const std::byte* data, const Layout* layout, std::int64_t tile,
                                 int pass, int batch, int n, const Place<Component>& place,
                                 Stage<Component>& stage, Row<Component> (&rows)[kBatchRows]) {
  using S = Shape<Component>;
  if (n == kTile && layout == nullptr) {
    const std::byte* at = data + (tile * kRows + place.row(pass, batch)) * S::kRowBytes +
                          place.column * S::kVectorBytes;
    FASTCHECK_UNROLL
    for (int j = 0; j < kBatchRows; ++j) {
      rows[j] = load_vector<Component>(at + j * S::kRowBytes);
    }
    return;
  }
  __syncwarp();  // the batch before is out of the stage
  fill_stage<Component>(data, layout, tile, pass, batch, n, stage);
  __syncwarp();
  FASTCHECK_UNROLL
  for (int j = 0; j < kBatchRows; ++j) {
    const std::byte* at = stage.at(place.run * Stage<Component>::kRunBytes + j * S::kRowBytes +
                                   place.column * S::kVectorBytes);
    rows[j] = unpack<Component>(*reinterpret_cast<const typename S::Vector*>(at));
  }
}

}  // namespace fastcheck::cuda
