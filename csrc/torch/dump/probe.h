// A look at a few of a tensor's bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace fastcheck::dump {

// A hash of all bytes of a tensor of at most 4 KiB, of a larger one of 64 places of 64 bytes each,
// from the first byte to the last: where it has changed something was written in between, and where
// most of the tensor was it has changed. Nothing of one that is not on the CPU or leaves gaps.
std::optional<std::uint64_t> probe(const at::Tensor& tensor);

}  // namespace fastcheck::dump
