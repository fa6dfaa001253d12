// Memory that was allocated and not written yet. Its contents are left over from other uses and
// differ between runs, so a dump leaves them out. python/fastcheck/dump/op_calls.py has
// the same in Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "torch/read/storage_table.h"

namespace fastcheck::dump {

// The session's lock guards it.
class FreshMemory {
 public:
  // `tensor` was allocated.
  void add(const at::Tensor& tensor) {
    if (!tensor.has_storage() || tensor.storage().nbytes() == 0) return;
    left_.at(tensor) = static_cast<std::int64_t>(tensor.storage().nbytes());
  }
  // True if some of the tensor may be unwritten.
  bool is_fresh(const at::Tensor& tensor) const { return left_.find(tensor) != nullptr; }
  // An operator has written to it: over all of it, or somewhere in it.
  void wrote(const at::Tensor& tensor, bool is_overwriting) {
    std::int64_t* const left = left_.find(tensor);
    if (left == nullptr) return;
    if (is_overwriting) *left -= tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
    // A partial write (an index, a mask): the program defines which elements count.
    if (!is_overwriting || *left <= 0) left_.erase(tensor);
  }
  void clear() { left_.clear(); }

 private:
  StorageTable<std::int64_t> left_;  // how many bytes are not written yet
};

}  // namespace fastcheck::dump
