// count_exponents(): the exponent counts of a tensor from its memory, by threads, for any strides.
#pragma once

#include <cstdint>

#include "cpu/reduce.h"

namespace fastcheck::cpu {

// Fills the kExponentWords words of docs/record-format.md, section 10, which must be zeroed. The
// tensor is of floating-point components. `logical` and `threads` as of reduce(); the words do not
// depend on the kernel, the threads or the alignment.
void count_exponents(const TensorView& tensor, bool logical, int threads,
                     const ParallelFor& parallel_for, std::int64_t* words);

}  // namespace fastcheck::cpu
