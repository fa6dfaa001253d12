#include "cpu/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "cpu/cpu_features.h"

namespace fastcheck::cpu {
namespace {

struct Candidate {
  const char* name;
  const KernelSet* set;  // null when the build has no such kernel
  bool supported;
  const char* needs;
};

std::vector<Candidate> candidates() {
  const CpuFeatures cpu = detect_cpu_features();
  return {
      {"avx512", avx512_kernels(), cpu.avx512, "AVX-512 F, BW, DQ and VL"},
      {"avx2", avx2_kernels(), cpu.avx2, "AVX2, FMA and F16C"},
      {"scalar", scalar_kernels(), true, "nothing"},
  };
}

bool usable(const Candidate& candidate) { return candidate.set != nullptr && candidate.supported; }

const KernelSet* choose(const std::string& name) {
  std::string names;
  for (const Candidate& candidate : candidates()) {
    if (!usable(candidate)) continue;
    if (name == "auto" || name == candidate.name) return candidate.set;
    names += std::string(", ") + candidate.name;
  }
  throw std::invalid_argument("FASTCHECK_CPU_ISA is '" + name +
                              "'; expected one that this machine and build can run: auto" + names);
}

std::atomic<const KernelSet*> active{nullptr};

}  // namespace

std::vector<IsaStatus> isa_statuses() {
  std::vector<IsaStatus> statuses;
  for (const Candidate& candidate : candidates()) {
    std::string reason = std::string("needs ") + candidate.needs;
    if (candidate.set == nullptr) {
      reason += "; not in this build";
    } else if (!candidate.supported) {
      reason += "; this CPU lacks it";
    } else {
      reason += "; usable";
    }
    statuses.push_back({candidate.name, usable(candidate), reason});
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
