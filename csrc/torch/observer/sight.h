// Which tensors the observer can look at, and how often it could not at the others.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "torch/tensor_view.h"

namespace fastcheck::observer {

enum class Sight : std::uint8_t {
  kRead,     // plain floating-point memory
  kNothing,  // undefined, or integers: there is nothing to see
  // Numbers that nobody can look at, and why:
  kMeta,
  kWrapper,
  kSparse,
  kNested,
  kQuantized,
  kDType,
  kNoMemory,
  kDevice,
};

// In the middle of a sentence: "a sparse tensor: ...".
std::string reason_of(Sight sight);

// Of a tensor that is not kRead, at leisure.
Sight why_unread(const at::Tensor& tensor);

// A tensor of zeros without memory, as autograd has them, passes as a wrapper: it is written out
// before an op uses it.
inline bool is_veiled(const at::Tensor& tensor) {
  return is_wrapper(tensor) ||
         (tensor.defined() && tensor.key_set().has(c10::DispatchKey::ZeroTensor));
}

inline Sight sight_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return Sight::kNothing;
  const auto type = tensor.scalar_type();
  if (!may_be_nonfinite(type)) return c10::isQIntType(type) ? Sight::kQuantized : Sight::kNothing;
  if (has_plain_memory(tensor) && !is_veiled(tensor) && dtype_of(type).has_value() &&
      (tensor.numel() == 0 || tensor.storage().nbytes() > 0)) {
    return Sight::kRead;
  }
  return why_unread(tensor);
}

// Several of them, of one call of an op.
class Sights {
 public:
  void add(Sight sight) { bits_ |= 1u << static_cast<unsigned>(sight); }
  bool has(Sight sight) const { return (bits_ >> static_cast<unsigned>(sight)) & 1u; }
  bool is_empty() const { return bits_ == 0; }
  void clear() { bits_ = 0; }

 private:
  std::uint32_t bits_ = 0;
};

// How many calls of an op had something that could not be read, by the reason. Not thread-safe.
class Unread {
 public:
  struct Row {
    std::int32_t op;  // -1: none of the dispatcher's
    Sight sight;
    std::int64_t calls;
  };
  void add(std::int32_t op, Sights sights);
  std::vector<Row> rows() const;
  void clear() { calls_.clear(); }

 private:
  std::map<std::tuple<std::int32_t, Sight>, std::int64_t> calls_;
};

}  // namespace fastcheck::observer
