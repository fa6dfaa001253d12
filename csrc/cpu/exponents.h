// The exponent counts of a tensor from its memory, by threads, for any strides: alone, or with its
// record in the same pass.
#pragma once

#include <cstdint>

#include "core/record.h"
#include "cpu/reduce.h"

namespace fastcheck::cpu {

// Fills the kExponentWords words of docs/record-format.md, section 10, which must be zeroed. The
// tensor is of floating-point components. `logical` and `threads` as of reduce(); the words do not
// depend on the kernel, the threads or the alignment.
void count_exponents(const TensorView& tensor, bool logical, int threads,
                     const ParallelFor& parallel_for, std::int64_t* words);

// reduce() and count_exponents() of the same tensor, each to the bit, with the memory read once: a
// few tiles are counted while the cache holds them.
void reduce_and_count(const TensorView& tensor, Depth depth, bool logical, int threads,
                      const ParallelFor& parallel_for, Record& record, std::int64_t* words);

}  // namespace fastcheck::cpu
