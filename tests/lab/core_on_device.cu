// Uses all of csrc/core in device code; tests/backends/cuda/test_core.py compiles it.
#include "core/accumulator.h"

using namespace fastcheck;

template <class Component>
__device__ Partial tile_of(const typename Component::Bits* data, int n) {
  Partial part;
  LaneSums<typename Component::Accumulator> runs[kRuns];
  for (int i = 0; i < n; ++i) {
    const auto bits = data[i];
    count<Component>(part.counts, bits);
    include(part.range, key_of<Component>(bits));
    add(runs[i % kRuns], value<Component>(bits));
  }
  const auto lane = fold_runs(runs);
  const TileScale scale = tile_scale(static_cast<float>(lane.abs_sum));
  part.sums = {lane.sum * scale.undo, lane.abs_sum * scale.undo, lane.sum_sq * scale.undo_square};
  std::uint32_t a = checksum_step<ChecksumA>(checksum_seed<ChecksumA>(7), 1u);
  std::uint32_t b = checksum_step<ChecksumB>(checksum_seed<ChecksumB>(7), 1u);
  finish_chain(a, b);
  part.checksum = merge(part.checksum, {a, b});
  return part;
}

template <class Component>
__global__ void fold(const typename Component::Bits* data, int n, DType dtype, DTypeInfo info,
                     Record* out) {
  PartialFold parts;
  push(parts, tile_of<Component>(data, n));
  push(parts, tile_of<Component>(data + n, n));
  finalise(finish(parts), dtype, info, 2 * n, Depth::kFull, Order::kStorage, *out);
}

#define INSTANTIATE(code, name, component, components) \
  template __global__ void fold<component>(const component::Bits*, int, DType, DTypeInfo, Record*);
INSTANTIATE(0, float64, Float64, 1)
INSTANTIATE(1, float32, Float32, 1)
INSTANTIATE(2, float16, Float16, 1)
INSTANTIATE(3, bfloat16, BFloat16, 1)
INSTANTIATE(4, float8_e4m3fn, Float8E4M3FN, 1)
INSTANTIATE(5, float8_e5m2, Float8E5M2, 1)
INSTANTIATE(11, int64, Integer<std::int64_t>, 1)
INSTANTIATE(12, uint8, Integer<std::uint8_t>, 1)
INSTANTIATE(16, bool, Boolean, 1)
