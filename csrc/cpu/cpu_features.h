// Detects the instruction sets of this CPU. cpu/dispatch.h chooses among the kernels.
#pragma once

namespace fastcheck::cpu {

struct CpuFeatures {
  bool avx2 = false;         // AVX2, FMA and F16C
  bool avx512 = false;       // F, BW, DQ and VL, and the above
  bool avx512_vnni = false;  // and VNNI
  bool avx512_vbmi = false;  // and VBMI
  bool neon = false;         // Advanced SIMD of AArch64
};

// Includes what the operating system saves on a context switch (XCR0), by the compiler's own
// detection.
CpuFeatures detect_cpu_features();

}  // namespace fastcheck::cpu
