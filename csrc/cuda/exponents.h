// The exponent counts of a CUDA tensor: docs/record-format.md, section 10. Alone, or with its
// record in the same pass. Raw pointers and a stream, as launch.h, and without waiting as there.
#pragma once

#include <cstdint>

#include "core/exponents.h"
#include "core/record.h"
#include "cuda/launch.h"

namespace fastcheck::cuda {

extern "C" {

// Tells if the kernels run on the current device, where they are loaded.
int fastcheck_cuda_find_exponents();

// The workspace that the launcher needs for this tensor: counters, nothing else.
int fastcheck_cuda_exponents_workspace(const TensorArgument* tensor, WorkspaceSize* size);

// Writes kExponentWords words of a tensor of floating-point components to `words`, in device
// memory. The counters are 8-byte aligned.
int fastcheck_cuda_exponents(const TensorArgument* tensor, std::int64_t* words,
                             const Workspace* workspace, const Tuning* tuning, void* stream);

// The workspace that this launcher needs.
int fastcheck_cuda_record_and_exponents_workspace(const TensorArgument* tensor,
                                                  const Tuning* tuning, WorkspaceSize* size);

// fastcheck_cuda_records() of this tensor at full depth, and its exponents, in one launch that
// reads memory once.
int fastcheck_cuda_record_and_exponents(const TensorArgument* tensor, Record* slots,
                                        std::int64_t* words, const Workspace* workspace,
                                        const Tuning* tuning, void* stream);
}

}  // namespace fastcheck::cuda
