// What the kernels need to know of a torch tensor, and the reasons for which one can't be read.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "core/dtypes.h"
#include "cpu/reduce.h"

namespace fastcheck {

std::optional<DType> dtype_of(at::ScalarType type);

// Why `tensor` can't be read by kernels of a device of type `device`: what was expected, what came,
// what to do. Empty when it can.
std::string unreadable_reason(const at::Tensor& tensor,
                              c10::DeviceType device = c10::DeviceType::CPU);

// Conjugate and negative views hold other bits than they show: these are written out.
at::Tensor resolve_views(const at::Tensor& tensor);

// `tensor` must be readable and resolved, and must outlive the view.
cpu::TensorView view_of(const at::Tensor& tensor);

}  // namespace fastcheck
