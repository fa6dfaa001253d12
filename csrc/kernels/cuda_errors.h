// check(): an error of the CUDA kernels' functions as an exception.
#pragma once

#include <stdexcept>
#include <string>

#include "cuda/launch.h"

namespace fastcheck::cuda {

// Throws std::runtime_error with the call that failed and the reason, unless `error` is 0.
inline void check(int error, const char* call) {
  if (error == 0) return;
  const std::string name = fastcheck_cuda_error_name(error);
  if (fastcheck_cuda_is_device_lost(error) == 0) {
    throw std::runtime_error(std::string("fastcheck's CUDA kernels: ") + call + " failed: " + name);
  }
  throw std::runtime_error("CUDA error: " + name + " (in a kernel that ran before " + call +
                           " of fastcheck, which CUDA has reported it at)");
}

}  // namespace fastcheck::cuda
