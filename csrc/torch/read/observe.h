// observe(): reads a tensor into a record in host memory. The ops and the Python module both use
// it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "core/record.h"

namespace fastcheck {

// The identity fields of a record: who observed what, when.
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

}  // namespace fastcheck
