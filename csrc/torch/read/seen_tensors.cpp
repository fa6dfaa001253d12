#include "torch/read/seen_tensors.h"

#include <ATen/core/Tensor.h>
#include <c10/util/hash.h>

namespace fastcheck {

bool SeenTensors::Key::operator==(const Key& other) const {
  return storage == other.storage && offset == other.offset && numel == other.numel &&
         version == other.version && kind == other.kind && geometry == other.geometry;
}

std::size_t SeenTensors::Hash::operator()(const Key& key) const {
  return c10::get_hash(key.storage, key.offset, key.numel, key.version, key.kind);
}

std::int64_t SeenTensors::add(const at::Tensor& tensor, std::int64_t seq) {
  if (!tensor.has_storage() || tensor.is_inference()) return -1;
  const c10::Storage& storage = tensor.storage();
  Key key{storage.unsafeGetStorageImpl(),
          tensor.storage_offset(),
          tensor.numel(),
          static_cast<std::uint32_t>(tensor._version()),
          static_cast<std::int32_t>(tensor.scalar_type()) << 2 | tensor.is_conj() << 1 |
              static_cast<std::int32_t>(tensor.is_neg()),
          {}};
  if (!tensor.is_non_overlapping_and_dense()) {
    key.geometry.assign(tensor.sizes().begin(), tensor.sizes().end());
    key.geometry.insert(key.geometry.end(), tensor.strides().begin(), tensor.strides().end());
  }
  const auto [found, is_new] = seen_.try_emplace(std::move(key), seq);
  // Not before it is known to be new: a reference is counted atomically.
  if (is_new) found->second.storage = storage.getWeakStorageImpl();
  return is_new ? -1 : found->second.seq;
}

}  // namespace fastcheck
