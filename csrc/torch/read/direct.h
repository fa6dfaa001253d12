// Passes a backend's observe() from the module that has it to another one's C++: in a capsule.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "core/record.h"

namespace fastcheck {

constexpr const char* kDirectObserveName = "fastcheck.direct_observe";

struct DirectObserve {
  // Has rows of `slots`, a ring's segment on the tensors' device, written from row `first` on, one
  // from each tensor, on the current stream, in the order of order_of(). Throws a std::exception
  // where it can't. With or without Python's lock, which it may let go of meanwhile.
  void (*observe)(at::ArrayRef<at::Tensor> tensors, const at::Tensor& slots, std::int64_t first,
                  Depth depth);
};

}  // namespace fastcheck
