#include "torch/op_level/readability.h"

#include <array>

namespace fastcheck::op_level {
namespace {

constexpr std::array kReasons{
    Readability::kMeta,     Readability::kWrapper, Readability::kSparse,
    Readability::kNested,   Readability::kDType,   Readability::kQuantized,
    Readability::kNoMemory, Readability::kDevice,  Readability::kInFlight};

}  // namespace

std::string reason_of(Readability readability) {
  switch (readability) {
    case Readability::kMeta: return "a meta or fake tensor has no values";
    case Readability::kWrapper:
      return "a tensor subclass computed it without calling an operator for the data within";
    case Readability::kSparse: return "a layout without strides, such as that of a sparse tensor";
    case Readability::kNested: return "a nested tensor: its values lie in a tensor of its own";
    case Readability::kQuantized: return "a quantized tensor holds integers";
    case Readability::kDType: return "no kernel reads its dtype";
    case Readability::kNoMemory: return "its memory was freed or given away (a sharded parameter?)";
    case Readability::kDevice: return "tensors of its device can't be read without waiting for it";
    case Readability::kInFlight:
      return "pinned memory of the host, to which a copy from a device may be under way";
    default: return {};
  }
}

Readability why_unread(const at::Tensor& tensor) {
  if (tensor.is_meta()) return Readability::kMeta;
  // Its operators are called again, for what is within.
  if (is_zero_tensor(tensor)) return Readability::kNothing;
  if (tensor.is_nested()) return Readability::kNested;
  if (tensor.layout() != at::kStrided) return Readability::kSparse;
  if (!dtype_of(tensor.scalar_type()).has_value()) return Readability::kDType;
  return Readability::kNoMemory;
}

void Unread::add(std::int32_t op, Readabilities found) {
  for (const Readability reason : kReasons) {
    if (found.has(reason)) ++calls_[{op, reason}];
  }
}

std::vector<Unread::Row> Unread::rows() const {
  std::vector<Row> rows;
  for (const auto& [key, calls] : calls_) {
    rows.push_back({std::get<0>(key), std::get<1>(key), calls});
  }
  return rows;
}

}  // namespace fastcheck::op_level
