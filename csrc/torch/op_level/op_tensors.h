// Selects the tensors to read among an op's arguments and results.
#pragma once

#include <ATen/SparseTensorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "torch/op_level/readability.h"
#include "torch/operators/op_table.h"

namespace fastcheck::op_level {

// Visits the values of a sparse tensor: the gradients of embeddings, which optimizers read.
template <class Visit>
void visit_values(const at::Tensor& tensor, const Visit& visit) {
  if (tensor.defined() && tensor.is_sparse() && !is_wrapper(tensor)) {
    visit(static_cast<const at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl())->values());
  } else {
    visit(tensor);
  }
}

template <class Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit_values(value.toTensor(), visit);
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor()) visit_values(item.toTensor(), visit);
    }
  } else if (value.isList()) {  // of lists: the tensors that collectives receive
    for (const c10::IValue& item : value.toListRef()) {
      if (!item.isTensorList()) return;
      for_each_tensor(item, visit);
    }
  }
}

using Values = c10::ArrayRef<const c10::IValue>;

// The last of them: a boxed call tells of its whole stack, which may have those of other calls
// below, as within a gradient of torch.func.
inline Values last_of(Values values, std::size_t count) {
  return values.size() > count ? values.slice(values.size() - count) : values;
}

inline Values arguments_of(const at::RecordFunction& fn, const Op& op) {
  return last_of(fn.inputs(), op.arguments.size());
}

inline Values results_of(const at::RecordFunction& fn, const Op& op) {
  const std::vector<c10::IValue>& outputs = fn.outputs();
  return last_of(Values(outputs.data(), outputs.size()), op.result_count);
}

// True if an input wraps memory, or is made of zeros without any: the op is called again for what
// it stands for.
inline bool takes_wrappers(const at::RecordFunction& fn, const Op& op) {
  bool found = false;
  for (const c10::IValue& input : arguments_of(fn, op)) {
    for_each_tensor(input,
                    [&](const at::Tensor& tensor) { found = found || is_zero_tensor(tensor); });
  }
  return found;
}

// A copy in the host's memory, of the same elements in the same order. Waits for the device.
inline at::Tensor on_host(const at::Tensor& tensor) {
  const c10::impl::ExcludeDispatchKeyGuard below(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  const at::AutoDispatchBelowADInplaceOrView also_below_autograd;
  const at::MemoryFormat format = tensor.is_non_overlapping_and_dense()
                                      ? at::MemoryFormat::Preserve
                                      : at::MemoryFormat::Contiguous;
  return tensor.to(tensor.options().device(at::kCPU), /*non_blocking=*/false, /*copy=*/true,
                   format);
}

// The range of the scalar arguments of an op.
struct Scalars {
  double lowest = 0, highest = 0;
  bool has_nan = false;

  void add(const c10::IValue& value) {
    if (value.isDouble()) add(value.toDouble());
  }
  // A number that was made a tensor to be an operand.
  void add(const at::Tensor& number) {
    if (number.scalar_type() == at::kDouble) add(*number.const_data_ptr<double>());
  }
  void add(double value) {
    has_nan = has_nan || std::isnan(value);
    lowest = std::min(lowest, value);
    highest = std::max(highest, value);
  }
  std::uint8_t infinite() const {
    return static_cast<std::uint8_t>(std::isinf(highest) | std::isinf(lowest) << 1 | has_nan << 4);
  }
  // Bit 2: one is the largest number of this type, or above; bit 3: the lowest, or below.
  std::uint8_t largest(at::ScalarType type) const {
    // Integers pass unread; complex numbers are beyond what a mask is made of.
    const double most = type == at::kHalf       ? 65504.0
                        : type == at::kBFloat16 ? 0x1.fep127
                        : type == at::kFloat    ? std::numeric_limits<float>::max()
                                                : std::numeric_limits<double>::max();
    return static_cast<std::uint8_t>((highest >= most) << 2 | (lowest <= -most) << 3);
  }
};

}  // namespace fastcheck::op_level
