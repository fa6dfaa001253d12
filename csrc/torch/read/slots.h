// Addresses and checks record slots: rows of a ring.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "core/record.h"

namespace fastcheck {

// Slot `index` of `slots`, a contiguous uint8 tensor of whole records on a device of type `device`;
// throws std::out_of_range or std::invalid_argument with what was expected and what came.
Record* slot(const at::Tensor& slots, std::int64_t index, std::int64_t count = 1,
             c10::DeviceType device = c10::DeviceType::CPU);

// Throws std::invalid_argument when it is not 1, 2 or 3.
Depth checked_depth(std::int64_t depth);

}  // namespace fastcheck
