#include "cpu/reduce.h"

#include "core/accumulator.h"
#include "cpu/dispatch.h"
#include "cpu/fp_environment.h"
#include "cpu/traversal.h"

namespace fastcheck::cpu {

void reduce(const TensorView& tensor, Depth depth, bool logical, int threads,
            const ParallelFor& parallel_for, Record& record) {
  const FpEnvironment environment;
  const Traversal traversal(tensor, logical);
  Partial total;
  if (tensor.numel > 0) {
    const ReduceTiles kernel = active_kernels().at(tensor.dtype, depth);
    const auto read = [&](std::int64_t first, std::int64_t last) {
      PartialFold fold;
      traversal.visit(first, last, last - first,
                      [&](const std::byte* data, std::int64_t components, std::int64_t tile) {
                        Partial part;
                        kernel(data, components, static_cast<std::uint64_t>(tile), &part);
                        push(fold, part);
                      });
      return finish(fold);
    };
    total = reduce_groups(traversal.tiles(), traversal.useful(threads), parallel_for, read);
  }
  finalise(total, tensor.dtype, kDTypes[static_cast<int>(tensor.dtype)], tensor.numel, depth,
           traversal.order(), record);
}

std::uint64_t checksum(const TensorView& tensor, bool logical, int threads,
                       const ParallelFor& parallel_for) {
  Record record{};
  reduce(tensor, Depth::kChecksum, logical, threads, parallel_for, record);
  return record.checksum;
}

}  // namespace fastcheck::cpu
