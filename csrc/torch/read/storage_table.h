// StorageTable: a map from a storage to what is known of its memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <iterator>
#include <memory_resource>
#include <unordered_map>

#include "torch/read/own_pages.h"

namespace fastcheck {

// Storages are held weakly: their memory is free to go, but no other storage gets the address of
// one that is remembered. What remains of a storage whose memory is gone lies in the heap between
// tensors (own_pages.h), and is let go of soon. The lock of its owner guards it. Other threads may
// free the storages meanwhile: an entry's count is asked for, but no storage is reached through it.
template <class Value>
class StorageTable {
 public:
  // Null: nothing is known of it.
  Value* find(const at::Tensor& tensor) {
    if (entries_.empty() || !tensor.has_storage()) return nullptr;
    const auto found = entries_.find(key_of(tensor));
    return found == entries_.end() ? nullptr : &found->second.value;
  }
  const Value* find(const at::Tensor& tensor) const {
    return const_cast<StorageTable*>(this)->find(tensor);
  }
  // The value of a tensor that has a storage; an empty Value where it is new. Good until the next
  // call.
  Value& at(const at::Tensor& tensor) {
    const auto found = entries_.find(key_of(tensor));
    if (found != entries_.end()) return found->second.value;
    forget_some();
    // A reference is counted atomically: only now.
    return entries_.try_emplace(key_of(tensor), tensor.storage().getWeakStorageImpl())
        .first->second.value;
  }
  void erase(const at::Tensor& tensor) {
    if (tensor.has_storage()) entries_.erase(key_of(tensor));
  }
  void clear() { entries_.clear(); }
  std::size_t size() const { return entries_.size(); }

  template <class Visit>
  void each(const Visit& visit) {
    for (auto& [storage, entry] : entries_) visit(entry.value);
  }

 private:
  struct Entry {
    explicit Entry(c10::weak_intrusive_ptr<c10::StorageImpl> held) : storage(std::move(held)) {}
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    Value value{};
  };

  static const c10::StorageImpl* key_of(const at::Tensor& tensor) {
    return tensor.storage().unsafeGetStorageImpl();
  }

  // Looks at a few entries each time that a storage is added, in turn: what is gone is found before
  // the table has grown by a quarter. Entries, not buckets: an iterator of a bucket divides.
  void forget_some() {
    constexpr std::size_t kEntries = 4;
    auto entry = entries_.find(next_);
    for (std::size_t i = 0; i < kEntries && !entries_.empty(); ++i) {
      if (entry == entries_.end()) entry = entries_.begin();
      entry = entry->second.storage.expired() ? entries_.erase(entry) : std::next(entry);
    }
    next_ = entry == entries_.end() ? nullptr : entry->first;
  }

  OwnPool pool_;
  std::pmr::unordered_map<const c10::StorageImpl*, Entry> entries_{pool_.get()};
  const c10::StorageImpl* next_ = nullptr;  // where to look first; perhaps no longer in the table
};

}  // namespace fastcheck
