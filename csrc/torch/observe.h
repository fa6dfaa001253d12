// Tensors to records in memory: what the ops and the Python module are both made of.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "core/record.h"

namespace fastcheck {

// Who observed what, when: the identity fields of a record.
struct Identity {
  std::int64_t seq = 0;
  std::int64_t step = 0;
  std::int32_t call = 0;
  std::int32_t site = 0;
  std::uint32_t flags = 0;
};

// Reads a readable tensor on torch's thread pool into `record`, whole.
void observe(const at::Tensor& tensor, Depth depth, bool logical, const Identity& identity,
             Record& record);

// Slot `index` of `slots`, a contiguous uint8 CPU tensor of whole records; throws
// std::out_of_range or std::invalid_argument with what was expected and what came.
Record* slot(const at::Tensor& slots, std::int64_t index, std::int64_t count = 1);

// Throws std::invalid_argument when it is not 1, 2 or 3.
Depth checked_depth(std::int64_t depth);

}  // namespace fastcheck
