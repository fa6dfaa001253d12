#include "torch/observe.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/reduce.h"
#include "torch/tensor_view.h"

namespace fastcheck {
namespace {

void parallel_groups(std::int64_t count,
                     const std::function<void(std::int64_t, std::int64_t)>& body) {
  at::parallel_for(0, count, 1, body);
}

}  // namespace

void observe(const at::Tensor& tensor, Depth depth, bool logical, const Identity& identity,
             Record& record) {
  const bool is_lazy = tensor.is_conj() || tensor.is_neg();
  const at::Tensor resolved = is_lazy ? resolve_views(tensor) : at::Tensor();
  Record fresh;
  std::memset(&fresh, 0, sizeof(fresh));
  const bool is_serial =
      static_cast<std::int64_t>(tensor.nbytes()) < cpu::kSerialBytes || at::in_parallel_region();
  const int threads = is_serial ? 1 : at::get_num_threads();
  cpu::reduce(view_of(is_lazy ? resolved : tensor), depth, logical, threads, parallel_groups,
              fresh);
  fresh.seq = identity.seq;
  fresh.step = identity.step;
  fresh.call = identity.call;
  fresh.site = identity.site;
  fresh.flags |= identity.flags;
  record = fresh;
}

Record* slot(const at::Tensor& slots, std::int64_t index, std::int64_t count) {
  if (slots.scalar_type() != at::kByte || !slots.device().is_cpu() || !slots.is_contiguous()) {
    throw std::invalid_argument("expected slots in a contiguous uint8 tensor on the CPU, came " +
                                std::string(c10::toString(slots.scalar_type())) + " on " +
                                slots.device().str());
  }
  const std::int64_t capacity = slots.numel() / static_cast<std::int64_t>(sizeof(Record));
  if (index < 0 || count < 0 || index + count > capacity) {
    throw std::out_of_range("expected slots within a ring of " + std::to_string(capacity) +
                            ", came [" + std::to_string(index) + ", " +
                            std::to_string(index + count) + ")");
  }
  return reinterpret_cast<Record*>(slots.mutable_data_ptr()) + index;
}

Depth checked_depth(std::int64_t depth) {
  if (depth < 1 || depth > 3) {
    throw std::invalid_argument("expected depth 1 (health), 2 (stats) or 3 (full), came " +
                                std::to_string(depth));
  }
  return static_cast<Depth>(depth);
}

}  // namespace fastcheck
