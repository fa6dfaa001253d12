#include "torch/dump/probe.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "torch/tensor_view.h"

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

}  // namespace

std::optional<std::uint64_t> probe(const at::Tensor& tensor) {
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

}  // namespace fastcheck::dump
