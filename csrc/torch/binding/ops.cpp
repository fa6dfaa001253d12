// torch.ops.fastcheck.*: every schema in the block below, then an implementation for each.
//
// Records leave as uint8 tensors of 192 bytes a row. Nothing here is differentiable.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include "core/accumulator.h"
#include "torch/read/observe.h"
#include "torch/read/slots.h"
#include "torch/read/tensor_view.h"

TORCH_LIBRARY(fastcheck, m) {
  m.def("stats(Tensor x, int depth=3, bool logical=False) -> Tensor");
  m.def("stats_list(Tensor[] xs, int depth=3, bool logical=False) -> Tensor");
  m.def("checksum(Tensor x, bool logical=False) -> Tensor");
  m.def("found_nonfinite(Tensor[] xs) -> Tensor");
  m.def(
      "observe_(Tensor x, Tensor(a!) slots, int index, int depth, int site, int call, int step, "
      "int seq, int flags) -> ()");
}

namespace fastcheck::ops {
namespace {

constexpr std::int64_t kRecordBytes = sizeof(Record);

void check_readable(const at::Tensor& x) {
  const std::string reason = unreadable_reason(x);
  TORCH_CHECK_TYPE(reason.empty(), "fastcheck: ", reason);
}

void observe_into(const at::Tensor& x, std::int64_t depth, bool logical, Record& record) {
  check_readable(x);
  observe(x, checked_depth(depth), logical, {}, record);
}

// ---- CPU ---------------------------------------------------------------------------------------

at::Tensor stats(const at::Tensor& x, std::int64_t depth, bool logical) {
  at::Tensor out = at::empty({kRecordBytes}, at::kByte);
  observe_into(x, depth, logical, *slot(out, 0));
  return out;
}

at::Tensor stats_list(at::TensorList xs, std::int64_t depth, bool logical) {
  at::Tensor out = at::empty({static_cast<std::int64_t>(xs.size()), kRecordBytes}, at::kByte);
  for (std::size_t i = 0; i < xs.size(); ++i) {
    observe_into(xs[i], depth, logical, *slot(out, static_cast<std::int64_t>(i)));
  }
  return out;
}

at::Tensor checksum(const at::Tensor& x, bool logical) {
  Record record;
  observe_into(x, static_cast<std::int64_t>(Depth::kFull), logical, record);
  return at::scalar_tensor(static_cast<std::int64_t>(record.checksum), at::kLong);
}

at::Tensor found_nonfinite(at::TensorList xs) {
  bool found = false;
  for (const at::Tensor& x : xs) {
    Record record;
    observe_into(x, static_cast<std::int64_t>(Depth::kHealth), false, record);
    found = found || (record.flags & kFlagNonfinite) != 0;
  }
  return at::scalar_tensor(found ? 1.0 : 0.0, at::kFloat);
}

void observe_(const at::Tensor& x, const at::Tensor& slots, std::int64_t index, std::int64_t depth,
              std::int64_t site, std::int64_t call, std::int64_t step, std::int64_t seq,
              std::int64_t flags) {
  check_readable(x);
  const Identity identity{seq, step, static_cast<std::int32_t>(call),
                          static_cast<std::int32_t>(site), static_cast<std::uint32_t>(flags)};
  observe(x, checked_depth(depth), false, identity, *slot(slots, index));
}

// ---- Meta: shapes alone, for tracing -----------------------------------------------------------

at::Tensor stats_meta(const at::Tensor& x, std::int64_t, bool) {
  return at::empty({kRecordBytes}, x.options().dtype(at::kByte));
}

at::Tensor stats_list_meta(at::TensorList xs, std::int64_t, bool) {
  return at::empty({static_cast<std::int64_t>(xs.size()), kRecordBytes},
                   at::TensorOptions(at::kMeta).dtype(at::kByte));
}

at::Tensor checksum_meta(const at::Tensor& x, bool) {
  return at::empty({}, x.options().dtype(at::kLong));
}

at::Tensor found_nonfinite_meta(at::TensorList) {
  return at::empty({}, at::TensorOptions(at::kMeta).dtype(at::kFloat));
}

void observe_meta(const at::Tensor&, const at::Tensor&, std::int64_t, std::int64_t, std::int64_t,
                  std::int64_t, std::int64_t, std::int64_t, std::int64_t) {}

}  // namespace

TORCH_LIBRARY_IMPL(fastcheck, CPU, m) {
  m.impl("stats", stats);
  m.impl("stats_list", stats_list);
  m.impl("checksum", checksum);
  m.impl("found_nonfinite", found_nonfinite);
  m.impl("observe_", observe_);
}

TORCH_LIBRARY_IMPL(fastcheck, Meta, m) {
  m.impl("stats", stats_meta);
  m.impl("stats_list", stats_list_meta);
  m.impl("checksum", checksum_meta);
  m.impl("found_nonfinite", found_nonfinite_meta);
  m.impl("observe_", observe_meta);
}

// Records and flags are not functions to differentiate: the key falls through to the kernels.
TORCH_LIBRARY_IMPL(fastcheck, Autograd, m) {
  for (const char* op : {"stats", "stats_list", "checksum", "found_nonfinite", "observe_"}) {
    m.impl(op, torch::CppFunction::makeFallthrough());
  }
}

}  // namespace fastcheck::ops
