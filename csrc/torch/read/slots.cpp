#include "torch/read/slots.h"

#include <ATen/core/Tensor.h>

#include <stdexcept>
#include <string>

namespace fastcheck {

Record* slot(const at::Tensor& slots, std::int64_t index, std::int64_t count,
             c10::DeviceType device) {
  if (slots.scalar_type() != at::kByte || slots.device().type() != device ||
      !slots.is_contiguous()) {
    throw std::invalid_argument(
        "expected slots in a contiguous uint8 tensor on the " + c10::DeviceTypeName(device) +
        ", got " + std::string(c10::toString(slots.scalar_type())) + " on " + slots.device().str());
  }
  const std::int64_t capacity = slots.numel() / static_cast<std::int64_t>(sizeof(Record));
  if (index < 0 || count < 0 || index + count > capacity) {
    throw std::out_of_range("expected slots within a ring of " + std::to_string(capacity) +
                            ", got [" + std::to_string(index) + ", " +
                            std::to_string(index + count) + ")");
  }
  return reinterpret_cast<Record*>(slots.mutable_data_ptr()) + index;
}

Depth checked_depth(std::int64_t depth) {
  if (depth < 1 || depth > 3) {
    throw std::invalid_argument("expected depth 1 (health), 2 (stats) or 3 (full), got " +
                                std::to_string(depth));
  }
  return static_cast<Depth>(depth);
}

}  // namespace fastcheck
