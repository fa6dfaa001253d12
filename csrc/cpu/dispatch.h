// Chooses the CPU kernel: the first of a priority list that this machine can run.
#pragma once

#include <string>
#include <vector>

#include "cpu/kernel.h"

namespace fastcheck::cpu {

struct IsaStatus {
  const char* name;
  bool usable;
  std::string reason;  // why it can or can't be used
};

// The states of the instruction sets in order of priority.
std::vector<IsaStatus> isa_statuses();

// The set in use. The first call reads FASTCHECK_CPU_ISA; a value that names no usable kernel
// throws std::invalid_argument, with the usable ones in the message.
const KernelSet& active_kernels();

// Forces one by name, or with "auto" the best. Throws like active_kernels.
void set_active_kernels(const std::string& name);

}  // namespace fastcheck::cpu
