// Memory that was allocated and not written yet. What it holds is left over from something else: no
// two runs agree on it, so that nobody should be told of it. python/fastcheck/dump/fresh_memory.py
// has the same in Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>

namespace fastcheck::dump {

// By storage, held weakly: no other gets its address. Not thread-safe.
class FreshMemory {
 public:
  // `tensor` was allocated.
  void add(const at::Tensor& tensor);
  // Whether some of the tensor may have been written by nobody.
  bool is_fresh(const at::Tensor& tensor) const;
  // An operator has written to it: over all of it, or somewhere in it.
  void wrote(const at::Tensor& tensor, bool is_overwriting);
  void clear();

 private:
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  // How many bytes nobody has written yet.
  std::unordered_map<const c10::StorageImpl*, std::int64_t> left_;
  std::unordered_map<const c10::StorageImpl*, Weak> held_;
};

}  // namespace fastcheck::dump
