// CUDA tensors to records in slots on their device, launched on torch's current stream.
//
// Nothing here waits for the device, and nothing is copied to the host but non-finite records, by
// the kernels themselves (black_box.h). Memory is allocated only when a stream needs more than ever
// before, and while a graph is captured. With or without Python's lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "core/record.h"

namespace fastcheck::cuda {

// The reason why the kernels can't run on this device, in the middle of a sentence; empty when they
// can.
std::string problem(std::int64_t device);

// Has slots[first + i] written from tensors[i], which are readable, and on the device of `slots`,
// uint8 (n, 192). Whole records except the host's fields: seq, step, site and call are
// zero. `gate`: int32, of one element on that device; nothing is read or written while it is 0.
void observe(at::ArrayRef<at::Tensor> tensors, const at::Tensor& slots, std::int64_t first,
             Depth depth, bool logical, const std::optional<at::Tensor>& gate = std::nullopt);

// float32, 0-dim, on the tensors' device: 1.0 where any of them has a NaN or an infinity. On the
// CPU for no tensors.
at::Tensor found_nonfinite(at::ArrayRef<at::Tensor> tensors);

// int64 (kExponentWords,), on the tensor's device: its exponent counts (docs/record-format.md,
// section 10). The tensor is readable, of floating-point components. `logical` as of observe().
at::Tensor exponents(const at::Tensor& tensor, bool logical);

// observe() of one such tensor at full depth, and its exponents(), in one launch.
at::Tensor observe_and_count(const at::Tensor& tensor, const at::Tensor& slots, std::int64_t index);

}  // namespace fastcheck::cuda
