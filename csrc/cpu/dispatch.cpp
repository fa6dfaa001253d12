#include "cpu/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "cpu/cpu_features.h"

namespace fastcheck::cpu {
namespace {

// `set` is called where the CPU supports it alone: it is compiled for its instruction set, and a
// table that is filled at run time is filled by such instructions.
struct Candidate {
  const char* name;
  const KernelSet* (*set)();
  bool supported;
  const char* needs;
};

std::vector<Candidate> candidates() {
  const CpuFeatures cpu = detect_cpu_features();
  return {
#if defined(__x86_64__)
      {"avx512_vbmi", avx512_vbmi_kernels, cpu.avx512_vbmi, "AVX-512 F, BW, DQ, VL, VNNI and VBMI"},
      {"avx512_vnni", avx512_vnni_kernels, cpu.avx512_vnni, "AVX-512 F, BW, DQ, VL and VNNI"},
      {"avx512", avx512_kernels, cpu.avx512, "AVX-512 F, BW, DQ and VL"},
      {"avx2", avx2_kernels, cpu.avx2, "AVX2, FMA and F16C"},
#elif defined(__aarch64__)
      {"neon", neon_kernels, cpu.neon, "Advanced SIMD"},
#endif
      {"scalar", scalar_kernels, true, "nothing"},
  };
}

const KernelSet* choose(const std::string& name) {
  std::string names;
  for (const Candidate& candidate : candidates()) {
    if (!candidate.supported) continue;
    if (name == "auto" || name == candidate.name) return candidate.set();
    names += std::string(", ") + candidate.name;
  }
  throw std::invalid_argument("FASTCHECK_CPU_ISA is '" + name +
                              "'; expected one that this machine can run: auto" + names);
}

std::atomic<const KernelSet*> active{nullptr};

}  // namespace

std::vector<IsaStatus> isa_statuses() {
  std::vector<IsaStatus> statuses;
  for (const Candidate& candidate : candidates()) {
    statuses.push_back({candidate.name, candidate.supported,
                        std::string("needs ") + candidate.needs +
                            (candidate.supported ? "; usable" : "; this CPU lacks it")});
  }
  return statuses;
}

const KernelSet& active_kernels() {
  const KernelSet* set = active.load(std::memory_order_acquire);
  if (set == nullptr) {
    const char* forced = std::getenv("FASTCHECK_CPU_ISA");
    set = choose(forced != nullptr && *forced != '\0' ? forced : "auto");
    active.store(set, std::memory_order_release);
  }
  return *set;
}

void set_active_kernels(const std::string& name) {
  active.store(choose(name), std::memory_order_release);
}

}  // namespace fastcheck::cpu
