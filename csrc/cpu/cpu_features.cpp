#include "cpu/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fastcheck::cpu {

CpuFeatures detect_cpu_features() {
  CpuFeatures features;
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned eax, ebx, ecx = 0, edx;
  __get_cpuid(1, &eax, &ebx, &ecx, &edx);  // clang 14 knows no __builtin_cpu_supports("f16c")
  features.avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (ecx & bit_F16C);
  features.avx512 = features.avx2 && __builtin_cpu_supports("avx512f") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
  features.avx512_vnni = features.avx512 && __builtin_cpu_supports("avx512vnni");
  features.avx512_vbmi = features.avx512_vnni && __builtin_cpu_supports("avx512vbmi");
#elif defined(__aarch64__)
  // The procedure call standard passes arguments in its registers: no Linux runs without.
  features.neon = true;
#endif
  return features;
}

}  // namespace fastcheck::cpu
