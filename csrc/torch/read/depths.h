// Depths: how deep the records of a step are (python/fastcheck/ring/depths.py has the same).
#pragma once

#include <ATen/core/Tensor.h>

#include "core/record.h"

namespace fastcheck {

class Depths {
 public:
  explicit Depths(Depth whole) : whole_(whole), now_(whole) {}

  // What is read from now on is of this depth.
  void set(Depth now) { now_ = now; }
  // Of a tensor that is read by itself now: of one element, as the loss, it is whole.
  Depth of(const at::Tensor& tensor) const {
    return now_ == whole_ || tensor.numel() != 1 ? now_ : whole_;
  }

 private:
  Depth whole_;
  Depth now_;
};

}  // namespace fastcheck
