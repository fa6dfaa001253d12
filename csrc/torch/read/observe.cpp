#include "torch/read/observe.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <cstring>

#include "cpu/reduce.h"
#include "torch/read/tensor_view.h"

namespace fastcheck {
namespace {

void parallel_groups(std::int64_t count,
                     const std::function<void(std::int64_t, std::int64_t)>& body) {
  at::parallel_for(0, count, 1, body);
}

int threads_for(const at::Tensor& tensor) {
  const bool is_serial =
      static_cast<std::int64_t>(tensor.nbytes()) < cpu::kSerialBytes || at::in_parallel_region();
  return is_serial ? 1 : at::get_num_threads();
}

}  // namespace

void observe(const at::Tensor& tensor, Depth depth, bool logical, const Identity& identity,
             Record& record) {
  const bool is_lazy = tensor.is_conj() || tensor.is_neg();
  const at::Tensor resolved = is_lazy ? resolve_views(tensor) : at::Tensor();
  Record fresh;
  std::memset(&fresh, 0, sizeof(fresh));
  cpu::reduce(view_of(is_lazy ? resolved : tensor), depth, logical, threads_for(tensor),
              parallel_groups, fresh);
  fresh.seq = identity.seq;
  fresh.step = identity.step;
  fresh.call = identity.call;
  fresh.site = identity.site;
  fresh.flags |= identity.flags;
  record = fresh;
}

}  // namespace fastcheck
