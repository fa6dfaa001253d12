// What of an op's arguments and results is read.
#pragma once

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <cmath>
#include <cstdint>

#include "torch/observer/sight.h"

namespace fastcheck::observer {

template <class Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor()) visit(item.toTensor());
    }
  }
}

// What wraps memory, or is made of zeros without any, has the op called again for what it stands
// for.
inline bool takes_wrappers(const at::RecordFunction& fn) {
  bool found = false;
  for (const c10::IValue& input : fn.inputs()) {
    for_each_tensor(input, [&](const at::Tensor& tensor) { found = found || is_veiled(tensor); });
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

inline std::uint8_t infinite(const c10::IValue& value) {
  if (!value.isDouble() || !std::isinf(value.toDouble())) return 0;
  return value.toDouble() > 0 ? 1 : 2;
}

// Of a number that was made a tensor to be an operand.
inline std::uint8_t infinite(const at::Tensor& number) {
  if (number.scalar_type() != at::kDouble) return 0;
  const double value = *number.const_data_ptr<double>();
  return !std::isinf(value) ? 0 : value > 0 ? 1 : 2;
}

}  // namespace fastcheck::observer
