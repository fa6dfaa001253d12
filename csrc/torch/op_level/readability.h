// Tells which tensors the observer can read, and counts the others by reason.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "torch/read/tensor_view.h"

namespace fastcheck::op_level {

enum class Readability : std::uint8_t {
  kRead,     // plain floating-point memory
  kNothing,  // undefined, or integers: no value can be non-finite
  // Numbers that can not be read, and why:
  kMeta,
  kWrapper,
  kSparse,
  kNested,
  kQuantized,
  kDType,
  kNoMemory,
  kDevice,
  kInFlight,
};

// The reason in the middle of a sentence: "a sparse tensor: ...".
std::string reason_of(Readability readability);

// The reason for a tensor that is not kRead, at leisure.
Readability why_unread(const at::Tensor& tensor);

// A tensor of zeros without memory, as autograd has them, passes as a wrapper: it is written out
// before an op uses it.
inline bool is_zero_tensor(const at::Tensor& tensor) {
  return is_wrapper(tensor) ||
         (tensor.defined() && tensor.key_set().has(c10::DispatchKey::ZeroTensor));
}

inline Readability readability_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return Readability::kNothing;
  const auto type = tensor.scalar_type();
  if (!may_be_nonfinite(type))
    return c10::isQIntType(type) ? Readability::kQuantized : Readability::kNothing;
  if (has_plain_memory(tensor) && !is_zero_tensor(tensor) && dtype_of(type).has_value() &&
      (tensor.numel() == 0 || tensor.storage().nbytes() > 0)) {
    return may_be_in_flight(tensor) ? Readability::kInFlight : Readability::kRead;
  }
  return why_unread(tensor);
}

// Several of them, of one call of an op.
class Readabilities {
 public:
  void add(Readability readability) { bits_ |= 1u << static_cast<unsigned>(readability); }
  bool has(Readability readability) const {
    return (bits_ >> static_cast<unsigned>(readability)) & 1u;
  }
  bool is_empty() const { return bits_ == 0; }
  void clear() { bits_ = 0; }

 private:
  std::uint32_t bits_ = 0;
};

// The number of calls of an op that had something that could not be read, by the reason.
// OpObserver's lock guards it.
class Unread {
 public:
  struct Row {
    std::int32_t op;  // -1: none of the dispatcher's
    Readability readability;
    std::int64_t calls;
  };
  void add(std::int32_t op, Readabilities found);
  std::vector<Row> rows() const;
  void clear() { calls_.clear(); }

 private:
  std::map<std::tuple<std::int32_t, Readability>, std::int64_t> calls_;
};

}  // namespace fastcheck::op_level
