// The kernel that makes Records of a list of tensors of one component type.
//
// A block takes chunks of neighbouring tiles, an equal aligned share for each warp, and leaves one
// partial per chunk; the block that finishes a tensor's last chunk merges them in the fixed tree
// and writes the Record. Nothing is added up by atomics but integers, so that the bits depend
// neither on the grid nor on which block comes last. Memory is read once; a chunk costs 104 bytes
// written, one fence and one atomic.
#pragma once

#include "cuda/arguments.h"
#include "cuda/merge.cuh"
#include "cuda/other_tiles.cuh"
#include "cuda/tile.cuh"

namespace fastcheck::cuda {

// ---- policy -------------------------------------------------------------------------------------

constexpr int kMaxThreads = kMaxWarps * kWarp;
constexpr int kBlocksPerSm = 2;  // leaves a thread 128 registers

struct alignas(16) MergeShared {
  Partial parts[kMaxWarps];
  Record record;
  unsigned int last;
};

template <class Component>
struct BlockShared {
  MergeShared merge;
  WarpShared<Component> warps[kMaxWarps];
};

// ---- where a chunk belongs ----------------------------------------------------------------------

FASTCHECK_DEVICE const Entry* entries_of(const List& list) {
  return list.table != nullptr ? list.table : list.entries;
}

FASTCHECK_DEVICE int find_entry(const List& list, std::int64_t chunk) {
  const Entry* entries = entries_of(list);
  int low = 0, high = list.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (entries[middle].first_chunk <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

FASTCHECK_DEVICE std::int64_t end_chunk(const List& list, int index) {
  return index + 1 < list.count ? entries_of(list)[index + 1].first_chunk : list.chunks;
}

FASTCHECK_DEVICE const Layout* layout_in(const List& list, const Entry& entry) {
  return entry.strided != 0 ? &list.strided.layout : nullptr;
}

FASTCHECK_DEVICE const Entry* entries_of(const OneTensor& one) { return &one.entry; }
FASTCHECK_DEVICE int find_entry(const OneTensor&, std::int64_t) { return 0; }
FASTCHECK_DEVICE std::int64_t end_chunk(const OneTensor& one, int) { return one.chunks; }
FASTCHECK_DEVICE const Layout* layout_in(const OneTensor&, const Entry&) { return nullptr; }

// ---- the record ---------------------------------------------------------------------------------

FASTCHECK_DEVICE int components_per_element(DType dtype) {
  return dtype == DType::k_complex64 || dtype == DType::k_complex128 ? 2 : 1;
}

// Claims the row of the stretch that is this record's; one thread.
FASTCHECK_DEVICE unsigned claim_row(const BoxArgument& box) {
  unsigned long long* const claims = box.claims + box.stretch % kBoxStretches;
  const unsigned long long first = box.stretch * 256;
  unsigned long long before = first;
  for (;;) {
    // An older stretch's count, or what the memory held before, is no count of this one.
    const bool is_ours = before / 256 == box.stretch;
    const auto row = static_cast<unsigned>(is_ours ? before % 256 : 0);
    if (row >= kBoxRows) return row;
    const unsigned long long found = atomicCAS(claims, before, first + row + 1);
    if (found == before) return row;
    before = found;
  }
}

// Copies a non-finite record to the box: where the device is lost before the slots are copied, the
// host finds it there. One thread. The number of the stretch is written last, behind a fence for
// the whole system.
FASTCHECK_DEVICE void put_in_box(const BoxArgument& box, std::int64_t slot, const Record& record) {
  const unsigned row = claim_row(box);
  if (row >= kBoxRows) return;
  BoxRow& to = box.box->rows[box.stretch % kBoxStretches][row];
  to.stretch = 0;
  __threadfence_system();
  to.slot = box.slots + static_cast<std::uint64_t>(slot) * sizeof(Record);
  to.record = record;
  __threadfence_system();
  to.stretch = box.stretch;
}

// One warp, a word of the record by each lane; shared.parts[0] is the tensor's.
template <class Tensors>
FASTCHECK_DEVICE_CALLED void write_record(const RecordsLaunch<Tensors>& launch, int index,
                                          int component_size, Extreme extreme, Depth depth,
                                          MergeShared& shared) {
  constexpr int kWords = sizeof(Record) / 8;
  constexpr int kFormWord = offsetof(Record, flags) / 8;
  constexpr int kDepthWord = offsetof(Record, depth) / 8;
  static_assert(
      offsetof(Record, flags) == 8 * kFormWord && offsetof(Record, version) == 8 * kFormWord + 4 &&
      offsetof(Record, dtype) == 8 * kFormWord + 6 &&
      offsetof(Record, order) == 8 * kFormWord + 7 && offsetof(Record, depth) == 8 * kDepthWord);
  const Entry& entry = entries_of(launch.list)[index];
  const int lane = lane_index();
  std::uint64_t word = 0;
  if (lane > 0 && lane < value_words(depth)) {
    const Partial& part = shared.parts[0];
    word = reinterpret_cast<const std::uint64_t*>(&part)[lane - 1];
    if (lane >= kMinWord) {
      const auto bytes = static_cast<std::uint64_t>(entry.components) * component_size;
      word = value_word(lane, word, part.range, extreme, bytes);
    }
  }
  static_assert(offsetof(Record, nan_count) == 8 && offsetof(Record, neginf_count) == 24);
  const bool is_nonfinite = any_lane(lane <= 3 && word != 0);
  if (lane == 0) {
    const bool is_complex = components_per_element(static_cast<DType>(entry.dtype)) == 2;
    word = static_cast<std::uint64_t>(entry.components >> static_cast<int>(is_complex));
  }
  if (lane == kFormWord) {
    const std::uint32_t form = kRecordVersion | static_cast<std::uint32_t>(entry.dtype) << 16 |
                               static_cast<std::uint32_t>(entry.order) << 24;
    word =
        static_cast<std::uint64_t>(form) << 32 | (is_nonfinite ? std::uint64_t{kFlagNonfinite} : 0);
  }
  if (lane == kDepthWord) word = static_cast<std::uint64_t>(depth);
  if (lane < kWords) reinterpret_cast<std::uint64_t*>(launch.slots + entry.slot)[lane] = word;
  if (is_nonfinite && launch.box.box != nullptr) {
    FASTCHECK_ROLLED
    for (int i = 0; i < kWords; ++i) {
      const std::uint64_t other = from_lane(word, i);
      if (lane == 0) reinterpret_cast<std::uint64_t*>(&shared.record)[i] = other;
    }
    if (lane == 0) put_in_box(launch.box, entry.slot, shared.record);
  }
}

// ---- chunks -------------------------------------------------------------------------------------

FASTCHECK_DEVICE Partial& part_of_warp(Partial (&parts)[kMaxWarps]) {
  return parts[opaque_warp_index()];
}

// Everything but the sums; one thread.
template <Depth kDepth>
FASTCHECK_DEVICE void put_but_sums(const Partial& part, Partial& out) {
  out.counts = part.counts;
  out.range = part.range;
  out.checksum = part.checksum;
  if constexpr (kDepth < Depth::kStats) out.sums = {};
}

// The tiles of a share that were not read yet, from `first_left` on, and those to be read again (a
// bit each); adds what it finds to what the others came to, if there are any. One warp.
template <class Component, Depth kDepth>
FASTCHECK_DEVICE void read_others(WarpShared<Component>& shared, const Entry& entry,
                                  const Layout* layout, std::int64_t first_tile, int tiles,
                                  int first_left, std::uint32_t again,
                                  Partial (&parts)[kMaxWarps]) {
  OtherTiles<Component, kDepth> others(shared, entry, layout);
  FASTCHECK_ROLLED
  for (int k = 0; k < tiles; ++k) {
    const std::int64_t tile = first_tile + k;
    const int n = components_from(entry.components - tile * kTile);
    if (k >= first_left || (again >> k & 1) != 0) others.read(tile, n, k, k >= first_left);
  }
  Partial found = others.finish();
  if (lane_index() != 0) return;
  Partial& part = part_of_warp(parts);
  if (first_left > 0) {
    found.counts = merge(part.counts, found.counts);
    found.range = merge(part.range, found.range);
    found.checksum = merge(part.checksum, found.checksum);
  }
  put_but_sums<kDepth>(found, part);
}

// The number of tiles of a share of `most` that the tensor has.
FASTCHECK_DEVICE int tiles_of_share(const Entry& entry, std::int64_t first_tile, int most) {
  const std::int64_t components = entry.components - first_tile * kTile;
  return components >= most * kTile ? most : static_cast<int>((components + kTile - 1) / kTile);
}

// The warp's share of a chunk; one lane writes the result. Calls visit(rows) with the batches of
// the first tiles, all those that are plain, and returns their number.
template <class Component, Depth kDepth, class Visit = NoVisit>
FASTCHECK_DEVICE int read_share(const Entry& entry, const Layout* layout, std::int64_t first_tile,
                                int tiles_per_warp, WarpShared<Component>& shared,
                                Partial (&parts)[kMaxWarps], const Visit& visit = {}) {
  const int lane = opaque(lane_index());  // or what follows from it would be kept for all chunks
  FASTCHECK_UNROLL
  for (auto& leaves : shared.leaf) leaves[lane] = 0.0;
  const std::int64_t components = entry.components - first_tile * kTile;
  const int tiles = tiles_of_share(entry, first_tile, tiles_per_warp);
  const bool is_plain = layout == nullptr && bytes_past<Component>(entry.data) == 0;
  const int plain_tiles = !is_plain ? 0 : components >= tiles * kTile ? tiles : tiles - 1;
  PlainTiles<Component, kDepth> reader(shared);
  std::uint32_t again = 0;
  int k = 0;
  FASTCHECK_ROLLED
  for (; k < plain_tiles; ++k) {
    // A pointer to the beginning of the share would take two registers more.
    if (!reader.read(entry.data, first_tile + opaque(k), k, visit)) again |= 1u << k;
  }
  const bool has_others = k < tiles || again != 0;
  if (k > 0 || !has_others) {
    const Partial ordinary = reader.finish();
    if (lane == 0) put_but_sums<kDepth>(ordinary, part_of_warp(parts));
  }
  if (has_others) {
    read_others<Component, kDepth>(shared, entry, layout, first_tile, tiles, k, again, parts);
  }
  if constexpr (kDepth >= Depth::kStats) {
    __syncwarp();
    put_sums(fold_leaves(shared.leaf, tiles), part_of_warp(parts).sums);
  }
  return k;
}

// Leaves a chunk's partial where the last block finds it; lane 0 learns whether this block is the
// last. One warp: behind the next barrier, its whole block reads what the others left.
template <class Tensors>
FASTCHECK_DEVICE bool hand_in(const RecordsLaunch<Tensors>& launch, int index, std::int64_t chunk,
                              std::int64_t chunks, const Partial& part) {
  constexpr int kWords = sizeof(Partial) / 8;
  const int lane = lane_index();
  if (lane < kWords) {
    reinterpret_cast<std::uint64_t*>(launch.partials + chunk)[lane] =
        reinterpret_cast<const std::uint64_t*>(&part)[lane];
  }
  __syncwarp();
  if (lane != 0) return false;
  __threadfence();
  const auto last = static_cast<unsigned int>(chunks - 1);
  if (atomicInc(&launch.counters[index], last) != last) return false;  // and 0 again
  __threadfence();
  return true;
}

// Every warp has put its share of the chunk in shared.parts. The whole block comes here.
template <class Tensors>
FASTCHECK_DEVICE_CALLED void finish_chunk(const RecordsLaunch<Tensors>& launch, int index,
                                          std::int64_t chunk, int component_size, Extreme extreme,
                                          Depth depth, MergeShared& shared) {
  const std::int64_t first_chunk = entries_of(launch.list)[index].first_chunk;
  const std::int64_t chunks = end_chunk(launch.list, index) - first_chunk;
  const bool is_first_warp = warp_index() == 0;
  merge_warps<std::uint32_t>(shared.parts);
  bool is_last = true;
  if (chunks > 1) {
    if (is_first_warp) {
      const bool last = hand_in(launch, index, chunk, chunks, shared.parts[0]);
      if (lane_index() == 0) shared.last = last;
    }
    __syncthreads();
    is_last = shared.last != 0;
    // A tensor has fewer groups than chunks.
    if (is_last) {
      Sums* const levels = reinterpret_cast<Sums*>(launch.partials + launch.list.chunks);
      merge_chunks(launch.partials + first_chunk, chunks, levels + first_chunk, shared.parts);
    }
  }
  if (is_last && is_first_warp) {
    write_record(launch, index, component_size, extreme, depth, shared);
  }
  __syncthreads();
}

// ---- kernel -------------------------------------------------------------------------------------

template <class Component, Depth kDepth, class Tensors>
FASTCHECK_KERNEL(kMaxThreads, kBlocksPerSm)
records_kernel(FASTCHECK_ARGUMENT RecordsLaunch<Tensors> launch) {
  if (launch.gate != nullptr && *launch.gate == 0) return;
  auto& shared = block_shared<BlockShared<Component>>();
  const Tensors& list = launch.list;
  for (std::int64_t chunk = blockIdx.x; chunk < list.chunks; chunk += gridDim.x) {
    const int index = find_entry(list, chunk);
    const Entry& entry = entries_of(list)[index];
    const int warp = opaque_warp_index();
    const std::int64_t first_tile =
        ((chunk - entry.first_chunk) * warp_count() + warp) * list.tiles_per_warp;
    read_share<Component, kDepth>(entry, layout_in(list, entry), first_tile, list.tiles_per_warp,
                                  shared.warps[warp], shared.merge.parts);
    finish_chunk(launch, index, chunk, Shape<Component>::kSize, Component::kExtreme, kDepth,
                 shared.merge);
  }
}

}  // namespace fastcheck::cuda
