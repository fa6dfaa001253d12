#include "cpu/exponents.h"

#include <mutex>
#include <vector>

#include "core/accumulator.h"
#include "core/exponents.h"
#include "cpu/dispatch.h"
#include "cpu/fp_environment.h"
#include "cpu/traversal.h"

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

// Totals of a part of a tensor (core/exponents.h).
class Totals {
 public:
  explicit Totals(DType dtype)
      : format_(kFormats[static_cast<int>(dtype)]),
        count_(active_kernels().exponents()->count[static_cast<int>(dtype)]),
        totals_(static_cast<std::size_t>(kTotalBins + 3 * format_.binades)) {}

  // The first of the components begins a tile.
  void add(const std::byte* data, std::int64_t components) {
    count_(data, components, totals_.data());
  }

  // Any threads.
  void merge(const Totals& part) {
    const std::lock_guard<std::mutex> lock(mutex_);
    merge_exponents(totals_.data(), part.totals_.data(), format_.binades);
  }

  void finalise(std::int64_t components, std::int64_t* words) const {
    format_.finalise(totals_.data(), components, words);
  }

 private:
  const FormatEntry& format_;
  CountExponents count_;
  std::vector<std::int64_t> totals_;
  std::mutex mutex_;
};

}  // namespace

void count_exponents(const TensorView& tensor, bool logical, int threads,
                     const ParallelFor& parallel_for, std::int64_t* words) {
  const FpEnvironment environment;
  const Traversal traversal(tensor, logical);
  Totals totals(tensor.dtype);
  const auto count = [&](std::int64_t first, std::int64_t last, Totals& part) {
    traversal.visit(first, last, last - first,
                    [&](const std::byte* data, std::int64_t components, std::int64_t) {
                      part.add(data, components);
                    });
  };
  if (traversal.useful(threads) <= 1) {
    count(0, traversal.tiles(), totals);
  } else {
    parallel_for(traversal.tiles(), [&](std::int64_t begin, std::int64_t end) {
      const FpEnvironment own;
      Totals part(tensor.dtype);
      count(begin, end, part);
      totals.merge(part);
    });
  }
  totals.finalise(traversal.components(), words);
}

void reduce_and_count(const TensorView& tensor, Depth depth, bool logical, int threads,
                      const ParallelFor& parallel_for, Record& record, std::int64_t* words) {
  // A power of two, so that what is read at a time is a subtree of the canonical tree.
  constexpr std::int64_t kTilesAtATime = 1;
  const FpEnvironment environment;
  const Traversal traversal(tensor, logical);
  const ReduceTiles reduce = active_kernels().at(tensor.dtype, depth);
  Totals totals(tensor.dtype);
  const auto read = [&](std::int64_t first, std::int64_t last) {
    Totals counts(tensor.dtype);
    PartialFold fold;
    traversal.visit(first, last, kTilesAtATime,
                    [&](const std::byte* data, std::int64_t components, std::int64_t tile) {
                      Partial part;
                      reduce(data, components, static_cast<std::uint64_t>(tile), &part);
                      push(fold, part);
                      counts.add(data, components);
                    });
    totals.merge(counts);
    return finish(fold);
  };
  Partial total;
  if (tensor.numel > 0) {
    total = reduce_groups(traversal.tiles(), traversal.useful(threads), parallel_for, read);
  }
  finalise(total, tensor.dtype, kDTypes[static_cast<int>(tensor.dtype)], tensor.numel, depth,
           traversal.order(), record);
  totals.finalise(traversal.components(), words);
}

}  // namespace fastcheck::cpu
