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
  alignas(16) uint4 vectors[kBytes / 16];

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

// ---- any address --------------------------------------------------------------------------------

// How far an address is past an aligned one: the same for all of a tensor.
template <class Component>
FASTCHECK_DEVICE int bytes_past(const std::byte* data) {
  constexpr std::uintptr_t kVectorBytes = Shape<Component>::kVectorBytes;
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(data) % kVectorBytes);
}

// Half a vector, aligned, to its place among words.
template <class Component>
FASTCHECK_DEVICE void load_half(const std::byte* at, std::uint32_t* words) {
  if constexpr (Shape<Component>::kWords == 4) {
    const uint2 half = __ldg(reinterpret_cast<const uint2*>(at));
    words[0] = half.x, words[1] = half.y;
  } else {
    words[0] = __ldg(reinterpret_cast<const std::uint32_t*>(at));
  }
}

// A vector that lies anywhere, out of two aligned halves; out of three if it is `past` bytes behind
// the first of them.
template <class Component>
FASTCHECK_DEVICE Row<Component> load_halves(const std::byte* at) {
  constexpr int kHalf = Shape<Component>::kWords / 2;
  Row<Component> row;
  load_half<Component>(at, row.word);
  load_half<Component>(at + Shape<Component>::kHalfBytes, row.word + kHalf);
  return row;
}

template <class Component>
FASTCHECK_DEVICE Row<Component> load_shifted(const std::byte* at, int past) {
  constexpr int kWords = Shape<Component>::kWords;
  std::uint32_t words[kWords + kWords / 2 + 1];
  FASTCHECK_UNROLL
  for (int i = 0; i < 3; ++i) {
    load_half<Component>(at + i * Shape<Component>::kHalfBytes, words + i * kWords / 2);
  }
  if constexpr (kWords == 4) {
    FASTCHECK_UNROLL
    for (int w = 0; w <= kWords; ++w) words[w] = (past & 4) != 0 ? words[w + 1] : words[w];
  }
  Row<Component> row;
  FASTCHECK_UNROLL
  for (int w = 0; w < kWords; ++w) {
    row.word[w] = __funnelshift_r(words[w], words[w + 1], 8 * (past & 3));
  }
  return row;
}

// The first `bytes` of a vector, and zeros: word by word, and of a word what can be read.
template <class Component>
FASTCHECK_DEVICE Row<Component> load_part(const std::byte* at, int bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(at);
  const int step = Shape<Component>::kSize >= 2 && address % 2 == 0 ? 2 : 1;
  Row<Component> row{};
  FASTCHECK_UNROLL
  for (int w = 0; w < Shape<Component>::kWords; ++w) {
    const int there = bytes - 4 * w < 4 ? bytes - 4 * w : 4;
    const std::byte* word = at + 4 * w;
    if (there == 4 && address % 4 == 0) {
      row.word[w] = __ldg(reinterpret_cast<const std::uint32_t*>(word));
    } else {
      FASTCHECK_ROLLED
      for (int i = there - step; i >= 0; i -= step) {
        row.word[w] = row.word[w] << (8 * step) | load_piece(word + i, step).v.x;
      }
    }
  }
  return row;
}

// The thread's vectors of a batch, from `at` on; `left` components are there until the tensor's
// end. Nothing beyond either end of the tensor is read. Zeros stand for what is not there of a
// vector; a vector of which nothing is there is not written.
template <class Component>
FASTCHECK_DEVICE void load_any(const std::byte* data, const std::byte* at, int left,
                               Row<Component> (&rows)[kBatchRows]) {
  using S = Shape<Component>;
  const int past = opaque(bytes_past<Component>(data) % S::kHalfBytes);
  // The kernels of integers and float64 have no registers left for two ways: theirs is the longer.
  const bool in_two = Component::kIsFloat && S::kSize <= 4 && past == 0;
  const int room = left * S::kSize;
  // Bytes that must be there from a vector on to read it as such. The first of a tensor that is
  // not aligned would be read from in front of it.
  const int needed = S::kVectorBytes + (in_two ? 0 : S::kHalfBytes - past);
  const int begin = past != 0 && at == data ? 1 : 0;
  if (in_two) {
    FASTCHECK_UNROLL
    for (int j = 0; j < kBatchRows; ++j) {
      const int offset = j * S::kRowBytes;
      if (room >= needed + offset) rows[j] = load_halves<Component>(at + offset);
    }
  } else {
    FASTCHECK_UNROLL
    for (int j = 0; j < kBatchRows; ++j) {
      const int offset = j * S::kRowBytes;
      if (j >= begin && room >= needed + offset) {
        rows[j] = load_shifted<Component>(at - past + offset, past);
      }
    }
  }
  // The others that are there, at least in part: at most one at either end.
  const int over = room % S::kRowBytes;
  const bool has_end = room > 0 && room < kBatchRows * S::kRowBytes && over > 0 && over < needed;
  if (!any_lane(has_end || (begin != 0 && room > 0))) return;
  FASTCHECK_ROLLED
  for (int j = 0; j < kBatchRows; ++j) {
    const int bytes = room - j * S::kRowBytes;
    if (bytes <= 0 || (j >= begin && bytes >= needed)) continue;
    const Row<Component> row = load_part<Component>(
        at + j * S::kRowBytes, bytes < S::kVectorBytes ? bytes : S::kVectorBytes);
    FASTCHECK_UNROLL
    for (int i = 0; i < kBatchRows; ++i) {
      if (i == j) rows[i] = row;
    }
  }
}

// ---- strides ------------------------------------------------------------------------------------

// Copies a batch piece by piece, neighbouring pieces by neighbouring threads; `n` components of the
// tile exist, zeros are put past them. The pieces are as large as alignment and strides allow, down
// to a byte: that is all that a strided tensor costs more.
template <class Component>
FASTCHECK_DEVICE void fill_stage(const std::byte* data, const Layout& layout, std::int64_t tile,
                                 int pass, int batch, int n, Stage<Component>& stage) {
  using S = Shape<Component>;
  using T = Stage<Component>;
  constexpr int kInFlight = 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int step = layout.granule_bytes;
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
      const std::int64_t at = offset_in(layout, start + in_tile);
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
}

// ---- a batch ------------------------------------------------------------------------------------

// From a tile's first component to the tensor's end, as far as a tile's reader has to know: the
// next tile shows whether a vector may be read across the end of this one.
FASTCHECK_DEVICE int components_from(std::int64_t left) {
  return left < 2 * kTile ? static_cast<int>(left) : 2 * kTile;
}

// Whether vectors lie where a whole tile is read.
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

// Of any tile; `n` components are there from its first to the tensor's end.
template <class Component>
FASTCHECK_DEVICE void load_batch(const std::byte* data, const Layout* layout, std::int64_t tile,
                                 int pass, int batch, int n, const Place<Component>& place,
                                 Stage<Component>& stage, Row<Component> (&rows)[kBatchRows]) {
  using S = Shape<Component>;
  if (layout == nullptr) {
    const int first = place.row(pass, batch) * kLanes + place.column * S::kVectorLanes;
    return load_any(data, batch_begin(data, tile, pass, batch, place), n - first, rows);
  }
  __syncwarp();  // the batch before is out of the stage
  fill_stage<Component>(data, *layout, tile, pass, batch, n, stage);
  __syncwarp();
  FASTCHECK_UNROLL
  for (int j = 0; j < kBatchRows; ++j) {
    const std::byte* at = stage.at(place.run * Stage<Component>::kRunBytes + j * S::kRowBytes +
                                   place.column * S::kVectorBytes);
    rows[j] = unpack<Component>(*reinterpret_cast<const typename S::Vector*>(at));
  }
}

}  // namespace fastcheck::cuda
