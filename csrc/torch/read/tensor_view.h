// Torch tensors as the kernels take them, and the reasons why a tensor cannot be read.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "core/dtypes.h"
#include "core/record.h"
#include "cpu/reduce.h"

namespace fastcheck {

std::optional<DType> dtype_of(at::ScalarType type);

// Its bytes are in the tensor that a transform of functorch has wrapped.
inline bool is_transformed(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kTransformed(
      {c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper});
  return tensor.defined() && tensor.key_set().has_any(kTransformed);
}

// Its bytes are elsewhere: within a subclass, or under a transform of functorch.
inline bool is_wrapper(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kWrapped(
      {c10::DispatchKey::Python, c10::DispatchKey::Functionalize});
  return is_transformed(tensor) || (tensor.defined() && tensor.key_set().has_any(kWrapped));
}

// Ordinary memory: not sparse, nested, fake, or wrapped.
inline bool has_plain_memory(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_nested() &&
         !tensor.is_meta() && !is_wrapper(tensor) && tensor.has_storage();
}

// True if a copy from a device may still be under way to it: with non_blocking=True such a copy is
// waited for by nothing, and its memory is pinned. Nothing of a tensor tells when it has arrived.
bool may_be_in_flight(const at::Tensor& tensor);

inline bool may_be_nonfinite(at::ScalarType type) {
  return at::isFloatingType(type) || at::isComplexType(type);
}

// The reason why `tensor` can't be read by kernels of a device of type `device`: what was expected,
// what came, what to do. Empty when it can.
std::string unreadable_reason(const at::Tensor& tensor,
                              c10::DeviceType device = c10::DeviceType::CPU);

// Conjugate and negative views hold other bits than they show: these are written out.
at::Tensor resolve_views(const at::Tensor& tensor);

// The order that a record of `tensor` is read in, and has. Resolving a lazy view makes it dense.
Order order_of(const at::Tensor& tensor);

// `tensor` must be readable and resolved, and must outlive the view.
cpu::TensorView view_of(const at::Tensor& tensor);

}  // namespace fastcheck
