// Records of tensors that a dump has read and that nothing has written since: later readings reuse
// them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>

#include "core/record.h"
#include "torch/read/storage_table.h"

namespace fastcheck::dump {

// Tensors of the CPU that leave no gaps, by storage, place and version. Operators that write are
// noted (x.data has a version of its own); what writes without telling torch shows in a few of the
// tensor's bytes, unless it writes just a few of them. The session's lock guards it.
class ReadCache {
 public:
  // The most storages, and the most views of one; then it begins anew.
  static constexpr std::size_t kMostStorages = 65536, kMostViews = 64;

  struct Reading {
    std::int64_t offset = 0, numel = 0;
    std::int32_t kind = 0;  // dtype, and whether the bits are shown conjugated or negated
    // An operator that writes counts a version when it is over, which is after its outputs are
    // read.
    bool is_counted_later = false;
    // Otherwise it is to be read, and the record to be filled in.
    bool is_known = false;
    std::int64_t version = 0;
    std::uint64_t sample = 0;
    Record record{};
  };
  // Good until the next call; null of what can't be remembered. `is_written`: by the operator that
  // is running.
  Reading* find(const at::Tensor& tensor, bool is_written);
  // An operator has written to it.
  void wrote(const at::Tensor& tensor);
  void clear();

 private:
  using Readings = c10::SmallVector<Reading, 1>;
  StorageTable<Readings> storages_;
};

}  // namespace fastcheck::dump
