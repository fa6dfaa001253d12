// The kernels that count exponents in the pass of a record, and their launcher.
#include "cuda/record_and_exponents.cuh"

#include "cuda/count.cuh"
#include "cuda/exponents.h"
#include "cuda/start.h"

namespace fastcheck::cuda {
namespace {

Cut cut_of(const TensorArgument& tensor, const Tuning& tuning) {
  const int most_warps =
      with_format(tensor.dtype, [](auto format) { return kCountingWarps<decltype(format)>; });
  return cut([&](const auto& body) { body(tile_count(tensor)); }, tuning,
             kRecordAndExponentsWarpsPerMultiprocessor, most_warps);
}

}  // namespace

int find_record_and_exponents() {
  return for_each_format([](auto format) -> int {
    return find_kernel(record_and_exponents_kernel<decltype(format)>);
  });
}

}  // namespace fastcheck::cuda

using namespace fastcheck::cuda;

extern "C" {

int fastcheck_cuda_record_and_exponents_workspace(const TensorArgument* tensor,
                                                  const Tuning* tuning, WorkspaceSize* size) {
  if (!has_exponents(*tensor) || !valid(*tuning)) return kErrorArgument;
  *size = {counters_of(tensor->dtype), cut_of(*tensor, *tuning).chunks * kChunkBytes, 0};
  return 0;
}

int fastcheck_cuda_record_and_exponents(const TensorArgument* tensor, fastcheck::Record* slots,
                                        std::int64_t* words, const Workspace* workspace,
                                        const Tuning* tuning, void* stream) {
  if (!has_exponents(*tensor) || !valid(*tuning)) return kErrorArgument;
  const Cut planned = cut_of(*tensor, *tuning);
  if (planned.chunks * kChunkBytes > workspace->partials_bytes) return kErrorWorkspace;
  RecordAndExponentsLaunch arguments;
  RecordsLaunch& record = arguments.record;
  record.list.table = nullptr;
  record.list.chunks = planned.chunks;
  record.list.count = 1;
  record.list.tiles_per_warp = planned.tiles_per_warp;
  record.list.entries[0] = entry_of(*tensor, 0);
  if (record.list.entries[0].strided != 0) record.list.layout = layout_of(*tensor);
  record.slots = slots;
  record.counters = workspace->counters + 1;
  record.box = workspace->box;
  record.box.slots = reinterpret_cast<std::uintptr_t>(slots);
  record.partials = static_cast<fastcheck::Partial*>(workspace->partials);
  record.levels = reinterpret_cast<fastcheck::Sums*>(record.partials + planned.chunks);
  arguments.counts = counts_of(*workspace, words);
  return with_format(tensor->dtype, [&](auto format) -> int {
    using Format = decltype(format);
    return launch<RecordAndExponentsShared<Format>>(
        record_and_exponents_kernel<Format>, planned.blocks,
        static_cast<unsigned>(planned.warps * kWarp), static_cast<cudaStream_t>(stream), arguments);
  });
}
}
