// An op's boxed arguments: their tensors, their device, and copies of them as meta tensors and as
// aliases.
#pragma once

#include <functional>
#include <optional>
#include <unordered_map>

#include "launch.h"

namespace fake {

// Applies fn to every defined tensor in a value, through lists; one tensor given twice stays one
// tensor.
class TensorMap {
 public:
  explicit TensorMap(std::function<Tensor(const Tensor&)> fn) : fn_(std::move(fn)) {}

  Tensor operator()(const Tensor& t) {
    if (!t.defined()) return t;
    auto [place, fresh] = seen_.try_emplace(t.unsafeGetTensorImpl());
    if (fresh) place->second = fn_(t);
    return place->second;
  }
  IValue operator()(const IValue& value) {
    if (value.isTensor()) return (*this)(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> result;
      for (const Tensor& t : value.toTensorVector()) result.push_back((*this)(t));
      return result;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> result;
      for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
        result.push_back(t.has_value() ? std::optional<Tensor>((*this)(*t)) : std::nullopt);
      return result;
    }
    return value;
  }
  Stack operator()(const Stack& values) {
    Stack result;
    for (const IValue& value : values) result.push_back((*this)(value));
    return result;
  }

 private:
  std::function<Tensor(const Tensor&)> fn_;
  std::unordered_map<c10::TensorImpl*, Tensor> seen_;
};

// The op's arguments: their device, and the check that they are on it together.
struct Arguments {
  Arguments(const std::string& op, const Stack& stack, std::size_t count, bool host_tensors_allowed)
      : values(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end()) {
    TensorMap visit([&](const Tensor& t) {
      if (t.is_cpu()) {
        TORCH_CHECK(t.dim() == 0 || host_tensors_allowed, op,
                    ": expected all tensors on the device, got a CPU tensor of ", t.sizes());
        return t;
      }
      TORCH_CHECK(on_device(t), op, ": can't mix the device with ", t.device());
      TORCH_CHECK(!device.has_value() || *device == t.device(), op,
                  ": expected all tensors on one device, got ", device.value_or(t.device()),
                  " and ", t.device());
      device = t.device();
      return t;
    });
    visit(values);
    TORCH_CHECK_NOT_IMPLEMENTED(device.has_value(), op,
                                " without a tensor argument on the fake device");
  }
  Stack as_meta() const {
    return TensorMap([](const Tensor& t) { return t.is_cpu() && t.dim() == 0 ? t : meta_of(t); })(
        values);
  }
  Stack as_aliases() const {
    return TensorMap([](const Tensor& t) { return t.is_cpu() ? snapshot(t) : alias_of(t); })(
        values);
  }
  Stack values;
  std::optional<c10::Device> device;
};

}  // namespace fake
