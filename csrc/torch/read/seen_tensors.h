// SeenTensors: the tensors that were read already in this step, under any name.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory_resource>
#include <unordered_map>
#include <vector>

namespace fastcheck {

// Two tensors are the same reading when they show the same bytes of the same storage at the same
// version. The storage is held weakly: its memory is free to go, but its identity is not handed to
// another storage while it is remembered here, so a reused address never passes for what it was.
// The interpreter's lock guards it, and the session's.
class SeenTensors {
 public:
  // -1 when the tensor is new, which remembers it under `seq`; else the seq that it was first seen
  // with. A tensor without a version counter (inference mode) is always new and never remembered.
  std::int64_t add(const at::Tensor& tensor, std::int64_t seq);
  void clear() { seen_.clear(); }
  std::size_t size() const { return seen_.size(); }

 private:
  struct Key {
    const c10::StorageImpl* storage;
    std::int64_t offset;
    std::int64_t numel;
    std::uint32_t version;
    std::int32_t kind;  // dtype, and whether the bits are shown conjugated or negated
    std::vector<std::int64_t> geometry;  // sizes and strides; empty when dense
    bool operator==(const Key& other) const;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const;
  };
  struct Entry {
    explicit Entry(std::int64_t seq) : seq(seq) {}
    std::int64_t seq;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
  };

  // The pool keeps the memory: as many come in each step.
  std::pmr::unsynchronized_pool_resource pool_;
  std::pmr::unordered_map<Key, Entry, Hash> seen_{&pool_};
};

}  // namespace fastcheck
