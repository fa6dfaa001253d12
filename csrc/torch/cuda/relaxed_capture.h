// RelaxedCapture: calls that would end another thread's capture of a graph in failure.
#pragma once

#include "cuda/launch.h"

namespace fastcheck::cuda {

// Within it this thread may query events and allocate although another thread captures a graph.
class RelaxedCapture {
 public:
  RelaxedCapture() : before_(fastcheck_cuda_exchange_capture_mode(kRelaxed)) {}
  ~RelaxedCapture() {
    if (before_ >= 0) fastcheck_cuda_exchange_capture_mode(before_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  static constexpr int kRelaxed = 2;
  const int before_;
};

}  // namespace fastcheck::cuda
