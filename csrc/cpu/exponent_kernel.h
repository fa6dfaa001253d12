// The interface of a kernel that counts exponents, and its scalar form.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/exponents.h"

namespace fastcheck::cpu {

// Adds consecutive components, the first of which begins a block of 32, to totals of their format.
// `data` may have any alignment. Null for integers.
using CountExponents = void (*)(const std::byte* data, std::int64_t components,
                                std::int64_t* totals);

struct ExponentKernels {
  CountExponents count[kDTypeCount];
};

// Each lives in a file of its own, compiled for its instruction set (cpu/kernels.cmake).
const ExponentKernels* scalar_exponents();
const ExponentKernels* avx2_exponents();
const ExponentKernels* avx512_exponents();
const ExponentKernels* neon_exponents();

#define FASTCHECK_EXPONENT_ROW(code, name, component, components) counter<component>(),

namespace {

// The specification as code, and what the vector kernel leaves to it: any component, one by one.
template <class Format>
void count_scalar(const std::byte* data, std::int64_t components, std::int64_t* totals) {
  using Bits = typename Format::Bits;
  constexpr int kLowest = kLowestExponent<Format>;
  std::int64_t* const elements = totals + kTotalBins;
  std::int64_t* const maxima32 = elements + kBinades<Format>;
  std::int64_t* const maxima16 = maxima32 + kBinades<Format>;
  for (std::int64_t first = 0; first < components; first += kBlock) {
    const int n = components - first < kBlock ? static_cast<int>(components - first) : kBlock;
    Bits block[kBlock];
    Bits largest[2] = {0, 0};  // of each half
    for (int i = 0; i < n; ++i) {
      Bits bits;
      std::memcpy(&bits, data + (first + i) * static_cast<std::int64_t>(sizeof(Bits)),
                  sizeof(Bits));
      const bool is_counted = is_finite<Format>(bits);
      totals[kTotalNonfinite] += is_counted ? 0 : 1;
      block[i] = is_counted ? magnitude<Format>(bits) : Bits(0);
      totals[kTotalZero] += is_counted && block[i] == 0 ? 1 : 0;
      Bits& half = largest[i / kHalfBlock];
      if (block[i] > half) half = block[i];
    }
    const Bits whole = largest[0] > largest[1] ? largest[0] : largest[1];
    if (whole == 0) continue;
    if (static_cast<std::int64_t>(whole) > totals[kTotalLargest]) {
      totals[kTotalLargest] = static_cast<std::int64_t>(whole);
    }
    const int top = floor_exponent<Format>(whole);
    ++maxima32[top - kLowest];
    for (int half = 0; half < 2; ++half) {
      if (largest[half] == 0) continue;
      const int half_top = floor_exponent<Format>(largest[half]);
      ++maxima16[half_top - kLowest];
      const int end = (half + 1) * kHalfBlock < n ? (half + 1) * kHalfBlock : n;
      for (int i = half * kHalfBlock; i < end; ++i) {
        if (block[i] == 0) continue;
        const int exponent = ceil_exponent<Format>(block[i]);
        ++elements[exponent - kLowest];
        const int below32 = top + 1 - exponent;
        const int below16 = half_top + 1 - exponent;
        ++totals[kTotalBelow32 + (below32 < kExponentBins ? below32 : kExponentBins - 1)];
        ++totals[kTotalBelow16 + (below16 < kExponentBins ? below16 : kExponentBins - 1)];
      }
    }
  }
}

}  // namespace

}  // namespace fastcheck::cpu
