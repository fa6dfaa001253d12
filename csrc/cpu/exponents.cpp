#include "cpu/exponents.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "core/exponents.h"
#include "core/order.h"
#include "cpu/dispatch.h"
#include "cpu/fp_environment.h"
#include "cpu/gather.h"

namespace fastcheck::cpu {
namespace {

struct FormatEntry {
  int binades;
  void (*finalise)(const std::int64_t* totals, std::int64_t components, std::int64_t* words);
};

template <class Component>
constexpr FormatEntry entry() {
  if constexpr (Component::kIsFloat) {
    return {kBinades<Component>,
            [](const std::int64_t* totals, std::int64_t components, std::int64_t* words) {
              finalise_exponents<Component>(totals, components, words);
            }};
  } else {
    return {0, nullptr};
  }
}

constexpr FormatEntry kFormats[kDTypeCount] = {
#define FASTCHECK_ENTRY(code, name, component, components) entry<component>(),
    FASTCHECK_FOR_EACH_DTYPE(FASTCHECK_ENTRY)
#undef FASTCHECK_ENTRY
};

// Tiles [first, last) of the traversal.
void count_tiles(const TensorView& tensor, const DTypeInfo& info, const RowMajorWalk* walk,
                 CountExponents count, std::int64_t first, std::int64_t last,
                 std::int64_t* totals) {
  const std::int64_t components = tensor.numel * info.components;
  if (walk == nullptr) {
    const std::int64_t end = std::min(last * kTile, components);
    count(tensor.data + first * kTile * info.component_size, end - first * kTile, totals);
    return;
  }
  alignas(64) std::byte buffer[kTile * sizeof(double)];
  const std::int64_t per_tile = kTile / info.components;
  for (std::int64_t tile = first; tile < last; ++tile) {
    const std::int64_t begin = tile * per_tile;
    const std::int64_t elements = std::min(per_tile, tensor.numel - begin);
    walk->copy(begin, elements, buffer);
    count(buffer, elements * info.components, totals);
  }
}

}  // namespace

void count_exponents(const TensorView& tensor, bool logical, int threads,
                     const ParallelFor& parallel_for, std::int64_t* words) {
  const DTypeInfo& info = kDTypes[static_cast<int>(tensor.dtype)];
  const FormatEntry& format = kFormats[static_cast<int>(tensor.dtype)];
  const std::int64_t components = tensor.numel * info.components;
  const auto size = static_cast<std::size_t>(kTotalBins + 3 * format.binades);
  std::vector<std::int64_t> totals(size);
  if (tensor.numel > 0) {
    const CountExponents count =
        active_kernels().exponents()->count[static_cast<int>(tensor.dtype)];
    const bool is_gathered = (logical || !tensor.dense) && !tensor.contiguous;
    const RowMajorWalk walk(tensor, info.component_size * info.components);
    const RowMajorWalk* const source = is_gathered ? &walk : nullptr;
    const std::int64_t tiles = (components + kTile - 1) / kTile;
    if (threads <= 1 || components * info.component_size < kSerialBytes) {
      const FpEnvironment environment;
      count_tiles(tensor, info, source, count, 0, tiles, totals.data());
    } else {
      std::mutex mutex;
      parallel_for(tiles, [&](std::int64_t begin, std::int64_t end) {
        const FpEnvironment environment;
        std::vector<std::int64_t> part(size);
        count_tiles(tensor, info, source, count, begin, end, part.data());
        const std::lock_guard<std::mutex> lock(mutex);
        merge_exponents(totals.data(), part.data(), format.binades);
      });
    }
  }
  const FpEnvironment environment;
  format.finalise(totals.data(), components, words);
}

}  // namespace fastcheck::cpu
