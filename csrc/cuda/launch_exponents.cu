// The C interface of exponents.h: plans and starts the kernels that count exponents.
#include "cuda/exponents.h"

#include "cuda/plan.h"
#include "cuda/record_and_exponents.cuh"
#include "cuda/start.h"

namespace fastcheck::cuda {
namespace {

// The words of a launch's counters before the totals: of blocks that are done, and of chunks that
// are.
constexpr std::int64_t kCountersBefore = 2;

// Calls body(Format()) with the format of a dtype's components.
template <class Body>
int with_format(int dtype, const Body& body) {
  const auto of = [&](auto component) -> int {
    if constexpr (decltype(component)::kIsFloat) return static_cast<int>(body(component));
    return kErrorArgument;
  };
  switch (static_cast<DType>(dtype)) {
#define FASTCHECK_CASE(code, name, component, components) \
  case DType::k_##name: return of(component());
    FASTCHECK_FOR_EACH_DTYPE(FASTCHECK_CASE)
#undef FASTCHECK_CASE
  }
  return kErrorArgument;
}

bool is_readable(const TensorArgument& tensor, const Tuning& tuning) {
  return tensor.dtype < kDTypeCount && tensor.numel >= 0 && tensor.ndim <= kMaxDims &&
         valid(tuning) && with_format(tensor.dtype, [](auto) { return 0; }) == 0;
}

std::int64_t counters_of(int dtype) {
  return kCountersBefore +
         2 * with_format(dtype, [](auto format) { return kTotals<decltype(format)>; });
}

CountsArgument counts_of(const Workspace& workspace, std::int64_t* words) {
  return {words, reinterpret_cast<unsigned long long*>(workspace.counters + kCountersBefore),
          workspace.counters};
}

Cut cut_with_record(const TensorArgument& tensor, const Tuning& tuning) {
  const int most_warps =
      with_format(tensor.dtype, [](auto format) { return kCountingWarps<decltype(format)>; });
  return cut([&](const auto& body) { body(tile_count(tensor)); }, tuning,
             kRecordAndExponentsWarpsPerMultiprocessor, most_warps);
}

}  // namespace
}  // namespace fastcheck::cuda

using namespace fastcheck::cuda;

extern "C" {

int fastcheck_cuda_find_exponents() {
  int error = 0;
  for (int dtype = 0; dtype < fastcheck::kDTypeCount && error == 0; ++dtype) {
    if (with_format(dtype, [](auto) { return 0; }) != 0) continue;
    error = with_format(dtype, [](auto format) {
      const cudaError_t found = find_exponents<decltype(format)>();
      return found == cudaSuccess ? find_record_and_exponents<decltype(format)>() : found;
    });
  }
  return error;
}

int fastcheck_cuda_exponents_workspace(const TensorArgument* tensor, WorkspaceSize* size) {
  if (!is_readable(*tensor, {})) return kErrorArgument;
  *size = {counters_of(tensor->dtype), 0, 0};
  return 0;
}

int fastcheck_cuda_exponents(const TensorArgument* tensor, std::int64_t* words,
                             const Workspace* workspace, const Tuning* tuning, void* stream) {
  if (!is_readable(*tensor, *tuning)) return kErrorArgument;
  ExponentsLaunch arguments;
  arguments.entry = entry_of(*tensor, 0);
  arguments.tiles = tile_count(*tensor);
  arguments.counts = counts_of(*workspace, words);
  if (arguments.entry.strided != 0) arguments.layout = layout_of(*tensor);
  const Cut planned = cut([&](const auto& body) { body(arguments.tiles); }, *tuning);
  return with_format(tensor->dtype, [&](auto format) {
    return start_exponents<decltype(format)>(planned.blocks,
                                             static_cast<unsigned>(planned.warps * kWarp),
                                             static_cast<cudaStream_t>(stream), arguments);
  });
}

int fastcheck_cuda_record_and_exponents_workspace(const TensorArgument* tensor,
                                                  const Tuning* tuning, WorkspaceSize* size) {
  if (!is_readable(*tensor, *tuning)) return kErrorArgument;
  *size = {counters_of(tensor->dtype), cut_with_record(*tensor, *tuning).chunks * kChunkBytes, 0};
  return 0;
}

int fastcheck_cuda_record_and_exponents(const TensorArgument* tensor, fastcheck::Record* slots,
                                        std::int64_t* words, const Workspace* workspace,
                                        const Tuning* tuning, void* stream) {
  if (!is_readable(*tensor, *tuning)) return kErrorArgument;
  const Cut planned = cut_with_record(*tensor, *tuning);
  if (planned.chunks * kChunkBytes > workspace->partials_bytes) return kErrorWorkspace;
  RecordAndExponentsLaunch arguments;
  RecordsLaunch<List>& record = arguments.record;
  record.list.table = nullptr;
  record.list.chunks = planned.chunks;
  record.list.count = 1;
  record.list.tiles_per_warp = planned.tiles_per_warp;
  record.list.entries[0] = entry_of(*tensor, 0);
  if (record.list.entries[0].strided != 0) record.list.strided.layout = layout_of(*tensor);
  record.slots = slots;
  record.counters = workspace->counters + 1;
  record.box = workspace->box;
  record.box.slots = reinterpret_cast<std::uintptr_t>(slots);
  record.gate = nullptr;
  record.partials = static_cast<fastcheck::Partial*>(workspace->partials);
  arguments.counts = counts_of(*workspace, words);
  return with_format(tensor->dtype, [&](auto format) {
    return start_record_and_exponents<decltype(format)>(
        planned.blocks, static_cast<unsigned>(planned.warps * kWarp),
        static_cast<cudaStream_t>(stream), arguments);
  });
}
}
