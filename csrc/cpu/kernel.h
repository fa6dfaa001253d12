// The interface of a kernel: one function per dtype and depth, over consecutive tiles.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/accumulator.h"
#include "core/dtypes.h"
#include "core/record.h"
#include "cpu/exponent_kernel.h"

namespace fastcheck::cpu {

// Reads `components` consecutive components, the first of which starts tile `first_tile` of the
// traversal. `data` may have any alignment. The floating-point environment must be the default one.
using ReduceTiles = void (*)(const std::byte* data, std::int64_t components,
                             std::uint64_t first_tile, Partial* out);

constexpr int kDepthCount = 4;

struct KernelSet {
  const char* name;
  const ExponentKernels* (*exponents)();
  ReduceTiles reduce[kDTypeCount][kDepthCount];

  ReduceTiles at(DType dtype, Depth depth) const {
    return reduce[static_cast<int>(dtype)][static_cast<int>(depth) - 1];
  }
};

// Each lives in a file of its own, compiled for its instruction set. Builds have those of their
// architecture (cpu/kernels.cmake).
const KernelSet* scalar_kernels();
const KernelSet* avx2_kernels();
const KernelSet* avx512_kernels();
const KernelSet* avx512_vnni_kernels();
const KernelSet* avx512_vbmi_kernels();
const KernelSet* neon_kernels();

// Fills a KernelSet from a template `Reduce<Component, Depth>::run`.
#define FASTCHECK_KERNEL_ROW(code, name, component, components)                   \
  {Reduce<component, Depth::kHealth>::run, Reduce<component, Depth::kStats>::run, \
   Reduce<component, Depth::kFull>::run, Reduce<component, Depth::kChecksum>::run},

}  // namespace fastcheck::cpu
