// The arguments of a launch, passed to the kernels by value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/accumulator.h"
#include "core/record.h"
#include "cuda/launch.h"
#include "cuda/layout.h"

namespace fastcheck::cuda {

// One tensor of a launch. Its tiles are cut into chunks of equal size; chunks of the tensors of one
// launch are numbered through.
struct Entry {
  const std::byte* data;
  std::int64_t components;
  std::int64_t first_chunk;
  std::int64_t slot;
  std::uint8_t dtype;
  std::uint8_t order;
  std::uint8_t strided;  // read through the launch's one layout
  std::uint8_t reserved[5];
};

static_assert(sizeof(Entry) == 40);

// As many as leave the arguments well below the 4 KiB that every driver takes; a longer list comes
// from device memory.
constexpr int kInlineEntries = kWithoutTable;

// A strided tensor is a launch of its own.
struct StridedEntry {
  Entry entry;
  Layout layout;
};

struct List {
  const Entry* table;  // in device memory, or null: `entries` holds them
  std::int64_t chunks;
  std::int32_t count;
  std::int32_t tiles_per_warp;
  union {
    Entry entries[kInlineEntries];
    StridedEntry strided;  // the first of them; its layout takes the place of the others
  };
};

// The only tensor of a launch, read directly: in the list's place, a tenth of the arguments.
struct OneTensor {
  Entry entry;
  std::int64_t chunks;
  std::int32_t tiles_per_warp;
};

// Component types of training have kernels for it beside those of a list.
template <class Component>
constexpr bool kHasKernelsOfOne = Component::kIsFloat && (sizeof(typename Component::Bits) == 2 ||
                                                          sizeof(typename Component::Bits) == 4);

template <class Tensors>
struct RecordsLaunch {
  Tensors list;
  Record* slots;
  Counter* counters;
  Partial* partials;  // one per chunk; behind them, the sums of the last block's tree
  BoxArgument box;
  const std::int32_t* gate;
};

struct FoundLaunch {
  List list;
  float* found;
};

// Copied by each launch.
static_assert(sizeof(RecordsLaunch<List>) <= 1400);
static_assert(sizeof(RecordsLaunch<OneTensor>) <= 120);

}  // namespace fastcheck::cuda
