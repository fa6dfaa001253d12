#include "torch/dump/read_cache.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "torch/read/tensor_view.h"

namespace fastcheck::dump {
namespace {

constexpr std::size_t kPlaces = 64;
constexpr std::size_t kPlaceBytes = 64;

std::uint64_t mixed(std::uint64_t hash, const std::byte* bytes, std::size_t count) {
  while (count != 0) {
    std::uint64_t word = 0;
    const std::size_t taken = std::min(count, sizeof word);
    std::memcpy(&word, bytes, taken);
    hash = (hash ^ word) * 0x9E3779B97F4A7C15ULL;  // 2^64 divided by the golden ratio
    hash ^= hash >> 32;
    bytes += taken;
    count -= taken;
  }
  return hash;
}

// A hash of all bytes of a tensor of at most 4 KiB, of a larger one of 64 places of 64 bytes each,
// from the first byte to the last: where it has changed something was written in between, and where
// most of the tensor was it has changed. Nothing of one that is not on the CPU or leaves gaps.
std::optional<std::uint64_t> sample_bytes(const at::Tensor& tensor) {
  if (!has_plain_memory(tensor) || !tensor.is_cpu() || !tensor.is_non_overlapping_and_dense()) {
    return std::nullopt;
  }
  const std::size_t count = tensor.nbytes();
  const std::size_t first = static_cast<std::size_t>(tensor.storage_offset()) * tensor.itemsize();
  if (tensor.storage().nbytes() < first + count) return std::nullopt;  // it was freed
  const auto* const bytes = static_cast<const std::byte*>(tensor.const_data_ptr());
  if (count <= kPlaces * kPlaceBytes) return mixed(count, bytes, count);
  std::uint64_t hash = count;
  for (std::size_t place = 0; place < kPlaces; ++place) {
    const std::size_t at = (count - kPlaceBytes) / (kPlaces - 1) * place;
    hash = mixed(hash, bytes + (place == kPlaces - 1 ? count - kPlaceBytes : at), kPlaceBytes);
  }
  return hash;
}

std::int32_t kind_of(const at::Tensor& tensor) {
  return static_cast<std::int32_t>(tensor.scalar_type()) << 2 | tensor.is_conj() << 1 |
         static_cast<std::int32_t>(tensor.is_neg());
}

}  // namespace

ReadCache::Reading* ReadCache::find(const at::Tensor& tensor, bool is_written) {
  if (tensor.is_inference()) return nullptr;
  const std::optional<std::uint64_t> sample = sample_bytes(tensor);
  if (!sample.has_value()) return nullptr;
  if (storages_.size() >= kMostStorages) clear();
  Readings& readings = storages_.at(tensor);
  const std::int64_t offset = tensor.storage_offset(), numel = tensor.numel();
  const std::int32_t kind = kind_of(tensor);
  auto* found = std::find_if(readings.begin(), readings.end(), [&](const Reading& one) {
    return one.offset == offset && one.numel == numel && one.kind == kind;
  });
  if (found == readings.end()) {
    if (readings.size() >= kMostViews) readings.clear();
    readings.emplace_back();
    found = &readings.back();
    found->offset = offset;
    found->numel = numel;
    found->kind = kind;
  }
  const auto version = static_cast<std::int64_t>(tensor._version());
  const bool is_current =
      version == found->version || (found->is_counted_later && version == found->version + 1);
  if (!is_current || found->sample != *sample) found->is_known = false;
  found->version = version;
  found->is_counted_later = is_written;
  found->sample = *sample;
  return found;
}

void ReadCache::wrote(const at::Tensor& tensor) {
  if (Readings* const readings = storages_.find(tensor)) readings->clear();
}

void ReadCache::clear() { storages_.clear(); }

}  // namespace fastcheck::dump
