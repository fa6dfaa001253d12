// The kernels that count exponents, and their launcher.
#include "cuda/exponents.h"

#include "cuda/count.cuh"
#include "cuda/start.h"

using namespace fastcheck::cuda;

extern "C" {

int fastcheck_cuda_find_exponents() {
  const int error = for_each_format(
      [](auto format) -> int { return find_kernel(exponents_kernel<decltype(format)>); });
  return error == 0 ? find_record_and_exponents() : error;
}

int fastcheck_cuda_exponents_workspace(const TensorArgument* tensor, WorkspaceSize* size) {
  if (!has_exponents(*tensor)) return kErrorArgument;
  *size = {counters_of(tensor->dtype), 0, 0};
  return 0;
}

int fastcheck_cuda_exponents(const TensorArgument* tensor, std::int64_t* words,
                             const Workspace* workspace, const Tuning* tuning, void* stream) {
  if (!has_exponents(*tensor) || !valid(*tuning)) return kErrorArgument;
  ExponentsLaunch arguments;
  arguments.entry = entry_of(*tensor, 0);
  arguments.tiles = tile_count(*tensor);
  arguments.counts = counts_of(*workspace, words);
  if (arguments.entry.strided != 0) arguments.layout = layout_of(*tensor);
  const Cut planned = cut([&](const auto& body) { body(arguments.tiles); }, *tuning);
  return with_format(tensor->dtype, [&](auto format) -> int {
    using Format = decltype(format);
    return launch<ExponentShared<Format>>(exponents_kernel<Format>, planned.blocks,
                                          static_cast<unsigned>(planned.warps * kWarp),
                                          static_cast<cudaStream_t>(stream), arguments);
  });
}
}
