// The exponent kernels and their launcher.
#include "cuda/exponents.cuh"

#include <algorithm>

#include "cuda/exponents.h"
#include "cuda/plan.h"

namespace fastcheck::cuda {
namespace {

// The launch's counter, and room behind it so that totals are aligned.
constexpr std::int64_t kCountersBefore = 2;

template <class Component>
cudaError_t find() {
  if constexpr (Component::kIsFloat) return find_kernel(exponents_kernel<Component>);
  return cudaSuccess;
}

template <class Component>
std::int64_t totals_of() {
  if constexpr (Component::kIsFloat) return kTotals<Component>;
  return 0;
}

template <class Component>
cudaError_t start(unsigned grid, unsigned block, cudaStream_t stream,
                  const ExponentsLaunch& arguments) {
  if constexpr (Component::kIsFloat) {
    return launch<ExponentShared<Component>>(exponents_kernel<Component>, grid, block, stream,
                                             arguments);
  }
  return cudaSuccess;
}

// 0 where the dtype has no exponents.
std::int64_t totals_of(int dtype) {
  switch (static_cast<DType>(dtype)) {
#define FASTCHECK_CASE(code, name, component, components) \
  case DType::k_##name: return totals_of<component>();
    FASTCHECK_FOR_EACH_DTYPE(FASTCHECK_CASE)
#undef FASTCHECK_CASE
  }
  return 0;
}

bool readable(const TensorArgument& tensor) {
  return tensor.dtype < kDTypeCount && totals_of(tensor.dtype) > 0 && tensor.numel >= 0 &&
         tensor.ndim <= kMaxDims;
}

}  // namespace
}  // namespace fastcheck::cuda

using namespace fastcheck::cuda;

extern "C" {

int fastcheck_cuda_find_exponents() {
  cudaError_t error = cudaSuccess;
#define FASTCHECK_FIND(code, name, component, components) \
  if (error == cudaSuccess) error = find<fastcheck::component>();
  using namespace fastcheck;
  FASTCHECK_FOR_EACH_DTYPE(FASTCHECK_FIND)
#undef FASTCHECK_FIND
  return static_cast<int>(error);
}

int fastcheck_cuda_exponents_workspace(const TensorArgument* tensor, WorkspaceSize* size) {
  if (!readable(*tensor)) return kErrorArgument;
  *size = {kCountersBefore + 2 * totals_of(tensor->dtype), 0, 0};
  return 0;
}

int fastcheck_cuda_exponents(const TensorArgument* tensor, std::int64_t* words,
                             const Workspace* workspace, const Tuning* tuning, void* stream) {
  if (!readable(*tensor) || !valid(*tuning)) return kErrorArgument;
  const bool is_strided = !reads_directly(*tensor);
  ExponentsLaunch arguments;
  arguments.entry = {static_cast<const std::byte*>(tensor->data),
                     component_count(*tensor),
                     0,
                     0,
                     tensor->dtype,
                     tensor->order,
                     static_cast<std::uint8_t>(is_strided),
                     {}};
  arguments.tiles = tile_count(*tensor);
  arguments.words = words;
  arguments.blocks_done = workspace->counters;
  arguments.totals = reinterpret_cast<unsigned long long*>(workspace->counters + kCountersBefore);
  if (is_strided) arguments.layout = layout_of(*tensor);
  const auto each = [&](const auto& body) { body(arguments.tiles); };
  const Cut planned = cut(each, *tuning);
  const auto block = static_cast<unsigned>(planned.warps * kWarp);
  switch (static_cast<fastcheck::DType>(tensor->dtype)) {
#define FASTCHECK_CASE(code, name, component, components) \
  case fastcheck::DType::k_##name:                        \
    return static_cast<int>(                              \
        start<component>(planned.blocks, block, static_cast<cudaStream_t>(stream), arguments));
    using namespace fastcheck;
    FASTCHECK_FOR_EACH_DTYPE(FASTCHECK_CASE)
#undef FASTCHECK_CASE
  }
  return kErrorArgument;
}
}
