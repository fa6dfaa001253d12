#include "torch/dump/fresh_memory.h"

namespace fastcheck::dump {

void FreshMemory::add(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.storage().nbytes() == 0) return;
  const c10::Storage& storage = tensor.storage();
  left_[storage.unsafeGetStorageImpl()] = static_cast<std::int64_t>(storage.nbytes());
  held_.try_emplace(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
}

bool FreshMemory::is_fresh(const at::Tensor& tensor) const {
  return !left_.empty() && tensor.has_storage() &&
         left_.count(tensor.storage().unsafeGetStorageImpl()) != 0;
}

void FreshMemory::wrote(const at::Tensor& tensor, bool is_overwriting) {
  if (left_.empty() || !tensor.has_storage()) return;
  const auto found = left_.find(tensor.storage().unsafeGetStorageImpl());
  if (found == left_.end()) return;
  if (is_overwriting) {
    found->second -= tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
  }
  // What is written here and there has an author who knows where.
  if (!is_overwriting || found->second <= 0) left_.erase(found);
}

void FreshMemory::clear() {
  left_.clear();
  held_.clear();
}

}  // namespace fastcheck::dump
