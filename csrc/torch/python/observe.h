// observe_from_python(): observe() for callers that hold the interpreter's lock.
#pragma once

#include <ATen/core/Tensor.h>

#include "core/record.h"
#include "torch/read/observe.h"

namespace fastcheck {

// Lets go of the lock while it reads, where that takes longer than getting the lock again.
void observe_from_python(const at::Tensor& tensor, Depth depth, bool logical,
                         const Identity& identity, Record& record);

}  // namespace fastcheck
