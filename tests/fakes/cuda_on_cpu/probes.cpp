// Small kernels that show properties of the shim itself (faults that it must find), and two that
// run a part of the kernels: one reads a single tile anywhere in a tensor that would be too large
// to be read whole, one merges more chunks than tests could read.
#include "cuda_on_cpu/cuda_on_cpu.h"

#include <cmath>
#include <limits>
#include <vector>

#include "cuda/plan.h"
#include "cuda/records.cuh"

namespace {

unsigned* shared_words() {
  static const char key = 0;
  return static_cast<unsigned*>(cuda_on_cpu::shared_memory(&key, 1024 * sizeof(unsigned)));
}

void reverse(unsigned* out, bool barrier) {
  unsigned* words = shared_words();
  words[threadIdx.x] = threadIdx.x;
  if (barrier) __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = words[blockDim.x - 1 - threadIdx.x];
}

void half_the_block_waits() {
  if (threadIdx.x < 32) __syncthreads();
}

void two_barriers() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

void half_the_warp_shuffles() {
  if (threadIdx.x < 16) __shfl_xor_sync(0xffffffffu, 1, 1);
  __syncthreads();
}

void sum_in_any_order(float* out) {
  atomicAdd(out, threadIdx.x == 0 ? 1e8f : threadIdx.x == 1 ? -1e8f : 1.0f);
}

using fastcheck::cuda::Layout;
using fastcheck::cuda::TensorArgument;

template <class Component>
int read_tile(const TensorArgument& tensor, std::int64_t tile, double* sums, unsigned* checksum) {
  const Layout layout = fastcheck::cuda::layout_of(tensor);
  const bool direct = fastcheck::cuda::reads_directly(tensor);
  fastcheck::cuda::Entry entry{};
  entry.data = static_cast<const std::byte*>(tensor.data);
  entry.components = fastcheck::cuda::component_count(tensor);
  return cuda_on_cpu::run(1, 32, [&] {
    using Shared = fastcheck::cuda::WarpShared<Component>;
    static const char key = 0, part_key = 0;
    auto& shared = *static_cast<Shared*>(cuda_on_cpu::shared_memory(&key, sizeof(Shared)));
    using Parts = fastcheck::Partial[fastcheck::cuda::kMaxWarps];
    auto& parts = *static_cast<Parts*>(cuda_on_cpu::shared_memory(&part_key, sizeof(Parts)));
    fastcheck::cuda::read_share<Component, fastcheck::Depth::kFull>(
        entry, direct ? nullptr : &layout, tile, 1, shared, parts);
    __syncwarp();  // of several lanes
    if (threadIdx.x != 0) return;
    const fastcheck::Partial& part = parts[0];
    sums[0] = part.sums.sum, sums[1] = part.sums.abs_sum, sums[2] = part.sums.sum_sq;
    checksum[0] = part.checksum.a, checksum[1] = part.checksum.b;
  });
}

// Groups of chunks, groups of those, and so on, but the last.
std::size_t level_count(std::int64_t nodes) {
  constexpr auto kGroup = fastcheck::cuda::kGroup;
  std::int64_t total = 0;
  while ((nodes = (nodes + kGroup - 1) / kGroup) > 1) total += nodes;
  return static_cast<std::size_t>(total);
}

}  // namespace

extern "C" {

int probe_reverse(unsigned* out, int blocks, int barrier) {
  return cuda_on_cpu::run(blocks, 128, [=] { reverse(out, barrier != 0); });
}
int probe_tile(const TensorArgument* tensor, std::int64_t tile, double* sums, unsigned* checksum) {
  return tensor->dtype == static_cast<int>(fastcheck::DType::k_bfloat16)
             ? read_tile<fastcheck::BFloat16>(*tensor, tile, sums, checksum)
             : read_tile<fastcheck::Float32>(*tensor, tile, sums, checksum);
}
int probe_merge(const fastcheck::Partial* chunks, std::int64_t count, int warps,
                fastcheck::Partial* out) {
  // A node that nobody wrote makes the sum that reads it a NaN; the one behind the last must stay.
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const std::size_t size = level_count(count);
  std::vector<fastcheck::Sums> levels(size + 1, {kNan, kNan, kNan});
  const int code = cuda_on_cpu::run(1, 32 * warps, [&] {
    using Parts = fastcheck::Partial[fastcheck::cuda::kMaxWarps];
    static const char key = 0;
    auto& parts = *static_cast<Parts*>(cuda_on_cpu::shared_memory(&key, sizeof(Parts)));
    fastcheck::cuda::merge_chunks(chunks, count, levels.data(), parts);
    if (threadIdx.x == 0) *out = parts[0];
  });
  return std::isnan(levels[size].sum) ? code : cudaErrorIllegalAddress;
}
int probe_block_memory(unsigned needed, unsigned launched) {
  const auto kernel = [=] { cuda_on_cpu::block_memory(needed); };
  return cuda_on_cpu::run_grid(1, 32, kernel, launched) ? 0 : cudaErrorLaunchFailure;
}
int probe_half_the_block_waits() { return cuda_on_cpu::run(1, 64, half_the_block_waits); }
int probe_two_barriers() { return cuda_on_cpu::run(1, 64, two_barriers); }
int probe_half_the_warp_shuffles() { return cuda_on_cpu::run(1, 64, half_the_warp_shuffles); }
int probe_sum_in_any_order(float* out) {
  return cuda_on_cpu::run(1, 32, [=] { sum_in_any_order(out); });
}
}
