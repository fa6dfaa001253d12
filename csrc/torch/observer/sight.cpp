#include "torch/observer/sight.h"

#include <array>

namespace fastcheck::observer {
namespace {

constexpr std::array kReasons{Sight::kMeta,  Sight::kWrapper,   Sight::kSparse,   Sight::kNested,
                              Sight::kDType, Sight::kQuantized, Sight::kNoMemory, Sight::kDevice};

}  // namespace

std::string reason_of(Sight sight) {
  switch (sight) {
    case Sight::kMeta: return "a meta or fake tensor has no values";
    case Sight::kWrapper:
      return "a tensor subclass computed it without calling an operator for the data within";
    case Sight::kSparse: return "a sparse tensor: its values lie in tensors of its own";
    case Sight::kNested: return "a nested tensor: its values lie in a tensor of its own";
    case Sight::kQuantized: return "a quantized tensor holds integers";
    case Sight::kDType: return "no kernel reads its dtype";
    case Sight::kNoMemory: return "its memory was freed or given away (a sharded parameter?)";
    case Sight::kDevice: return "tensors of its device can't be read without waiting for it";
    default: return {};
  }
}

Sight why_unread(const at::Tensor& tensor) {
  if (tensor.is_meta()) return Sight::kMeta;
  // Its operators are called again, for what is within.
  if (is_veiled(tensor)) return Sight::kNothing;
  if (tensor.is_nested()) return Sight::kNested;
  if (tensor.layout() != at::kStrided) return Sight::kSparse;
  if (!dtype_of(tensor.scalar_type()).has_value()) return Sight::kDType;
  return Sight::kNoMemory;
}

void Unread::add(std::int32_t op, Sights sights) {
  for (const Sight reason : kReasons) {
    if (sights.has(reason)) ++calls_[{op, reason}];
  }
}

std::vector<Unread::Row> Unread::rows() const {
  std::vector<Row> rows;
  for (const auto& [key, calls] : calls_) {
    rows.push_back({std::get<0>(key), std::get<1>(key), calls});
  }
  return rows;
}

}  // namespace fastcheck::observer
