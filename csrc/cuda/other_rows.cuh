// Rows of tiles that are not plain: partial, at any address, or strided.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/layout.h"
#include "cuda/rows.cuh"

namespace fastcheck::cuda {

// ---- pieces -------------------------------------------------------------------------------------

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

// A vector that is aligned for half of one.
template <class Component>
FASTCHECK_DEVICE Row<Component> load_halves(const std::byte* at) {
  Row<Component> row;
  load_half<Component>(at, row.word);
  load_half<Component>(at + Shape<Component>::kHalfBytes, row.word + Shape<Component>::kWords / 2);
  return row;
}

// A vector of four words that is aligned for a word and not for two.
template <class Component>
FASTCHECK_DEVICE Row<Component> load_words(const std::byte* at) {
  static_assert(Shape<Component>::kWords == 4);
  Row<Component> row;
  row.word[0] = __ldg(reinterpret_cast<const std::uint32_t*>(at));
  load_half<Component>(at + 4, row.word + 1);
  row.word[3] = __ldg(reinterpret_cast<const std::uint32_t*>(at + 12));
  return row;
}

// Any vector, out of three aligned halves, `past` bytes behind the first of them.
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
// end. Nothing beyond either end of the tensor is read. Zeros stand for what is not there; of a
// thread for which nothing is there, nothing is written.
template <class Component>
FASTCHECK_DEVICE void load_any(const std::byte* data, const std::byte* at, int left,
                               Stage<Component>& stage, Row<Component> (&rows)[kBatchRows]) {
  using S = Shape<Component>;
  const int past = opaque(bytes_past<Component>(data) % S::kHalfBytes);
  const bool is_shifted = past % 4 != 0;
  const int room = left * S::kSize;
  // Bytes from a vector on that are read with it. What is shifted is read from `past` bytes before.
  const int needed = S::kVectorBytes + (is_shifted ? S::kHalfBytes - past : 0);
  if (room >= needed + (kBatchRows - 1) * S::kRowBytes && !(is_shifted && at == data)) {
    if (past == 0) {
      FASTCHECK_UNROLL
      for (int j = 0; j < kBatchRows; ++j) rows[j] = load_halves<Component>(at + j * S::kRowBytes);
    } else if (is_shifted) {
      FASTCHECK_UNROLL
      for (int j = 0; j < kBatchRows; ++j) {
        rows[j] = load_shifted<Component>(at - past + j * S::kRowBytes, past);
      }
    } else if constexpr (S::kWords == 4) {
      FASTCHECK_UNROLL
      for (int j = 0; j < kBatchRows; ++j) rows[j] = load_words<Component>(at + j * S::kRowBytes);
    }
  } else if (room > 0) {
    FASTCHECK_ROLLED
    for (int j = 0; j < kBatchRows; ++j, at += S::kRowBytes) {
      const int bytes = room - j * S::kRowBytes;
      Row<Component> row{};
      if (bytes >= S::kVectorBytes + S::kHalfBytes - past && !(past != 0 && at == data)) {
        row = load_shifted<Component>(at - past, past);
      } else if (bytes > 0) {
        row = load_part<Component>(at, bytes < S::kVectorBytes ? bytes : S::kVectorBytes);
      }
      stage.own(j) = pack(row);
    }
    FASTCHECK_UNROLL
    for (int j = 0; j < kBatchRows; ++j) rows[j] = unpack<Component>(stage.own(j));
  }
}

// ---- strides ------------------------------------------------------------------------------------

// The offset of the byte at `position` in the traversal, from the first element's address.
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
  // The place in the tile where the batch's part of a run begins.
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

// Of any tile; `n` components are there from its first to the tensor's end, `left` from this
// thread's first of the batch on.
template <class Component>
FASTCHECK_DEVICE void load_batch(const std::byte* data, const Layout* layout, std::int64_t tile,
                                 int pass, int batch, int n, int left, Stage<Component>& stage,
                                 Row<Component> (&rows)[kBatchRows]) {
  using S = Shape<Component>;
  if (layout == nullptr) {
    const std::byte* const at =
        kIsTight<Component>
            ? batch_begin(data, tile, pass, batch, Place<Component>(opaque(lane_index())))
            : data + (tile * kTile + n - left) * S::kSize;
    return load_any(data, at, left, stage, rows);
  }
  __syncwarp();  // what a thread had of its own in the stage is taken
  fill_stage<Component>(data, *layout, tile, pass, batch, n, stage);
  __syncwarp();
  const Place<Component> place(opaque(lane_index()));
  FASTCHECK_UNROLL
  for (int j = 0; j < kBatchRows; ++j) {
    const std::byte* at = stage.at(place.run * Stage<Component>::kRunBytes + j * S::kRowBytes +
                                   place.column * S::kVectorBytes);
    rows[j] = unpack<Component>(*reinterpret_cast<const typename S::Vector*>(at));
  }
  __syncwarp();  // the batch is out of the stage
}

}  // namespace fastcheck::cuda
