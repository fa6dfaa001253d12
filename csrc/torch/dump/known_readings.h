// What a dump has read already, and nothing has written since: its record holds for every operator
// that takes it in.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "core/record.h"
#include "torch/seen_tensors.h"

namespace fastcheck::dump {

// Tensors of the CPU by storage, place and version. Operators that write to a storage are told
// (x.data has a version of its own); what writes without telling torch shows in a few of the
// tensor's bytes (torch/dump/probe.h), unless it writes just a few of them. Not thread-safe.
class KnownReadings {
 public:
  // So many tensors are remembered; then it begins anew.
  static constexpr std::size_t kMost = 65536;

  struct Reading {
    // The number that it was read under; negative: it is to be read, and both to be filled in.
    std::int64_t seq = -1;
    Record record{};
    std::uint64_t probe = 0;
  };
  // Good until the next call; null of what can't be remembered.
  Reading* find(const at::Tensor& tensor);
  // An operator has written to it; the next reading is number `seq`.
  void wrote(const at::Tensor& tensor, std::int64_t seq);
  void clear();

 private:
  SeenTensors seen_;
  std::unordered_map<std::int64_t, Reading> readings_;  // by the tokens of seen_
  std::int64_t next_ = 0;                               // of these
  // The number of the first reading after a storage was written to last.
  std::unordered_map<const c10::StorageImpl*, std::int64_t> written_;
};

}  // namespace fastcheck::dump
