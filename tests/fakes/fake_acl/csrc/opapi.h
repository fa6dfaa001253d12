// The operator interface of CANN ("aclnn"), as torch_npu calls it: a first function plans a call
// and returns the size of its workspace, a second one runs the plan on a stream. build.py makes
// both for each line of operators.txt, from the templates here.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <functional>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "driver.h"

struct aclTensor {
  at::Tensor view;  // over the device's bytes: for kernels only
};
struct aclScalar {
  at::Scalar value;
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclBoolArray {
  std::vector<uint8_t> values;
};
struct aclFloatArray {
  std::vector<float> values;
};
struct aclTensorList {
  std::vector<const aclTensor*> tensors;  // owned, as CANN's are
};
struct aclScalarList {
  std::vector<const aclScalar*> scalars;
};
struct aclOpExecutor {
  const char* name;
  std::function<void()> work;
  std::vector<at::Tensor> results;
};

namespace fake_acl {

using Ints = std::vector<int64_t>;
using Tensors = std::vector<at::Tensor>;

at::ScalarType scalar_type(aclDataType dtype);

// ---- Arguments as the expressions of operators.txt see them
// -------------------------------------------------------

inline at::Tensor given(const aclTensor* t) { return t == nullptr ? at::Tensor() : t->view; }
inline Tensors given(const aclTensorList* list) {
  Tensors found;
  for (const aclTensor* each : list->tensors) found.push_back(each->view);
  return found;
}
inline std::optional<at::Scalar> given(const aclScalar* s) {
  return s == nullptr ? std::nullopt : std::optional<at::Scalar>(s->value);
}
inline std::vector<at::Scalar> given(const aclScalarList* list) {
  std::vector<at::Scalar> found;
  for (const aclScalar* each : list->scalars) found.push_back(each->value);
  return found;
}
inline Ints given(const aclIntArray* a) { return a == nullptr ? Ints() : a->values; }
inline std::vector<uint8_t> given(const aclBoolArray* a) { return a->values; }
template <class Number, std::enable_if_t<!std::is_pointer_v<Number>, int> = 0>
Number given(Number value) {
  return value;
}

// ---- Results
// ------------------------------------------------------------------------------------------------------

void put(const at::Tensor& to, const at::Tensor& result);
void put(const Tensors& to, const Tensors& results);
template <class... Results, std::size_t... k>
void put_each(const Tensors& to, const std::tuple<Results...>& results, std::index_sequence<k...>) {
  (put(to[k], std::get<k>(results)), ...);
}
template <class... Results>
void put(const Tensors& to, const std::tuple<Results...>& results) {
  put_each(to, results, std::index_sequence_for<Results...>());
}

struct Rates {
  double rate, beta1, beta2, decay, eps;
};
// AdamW's parameter and moments behind step `step` + 1, as the operator of that name has them.
std::tuple<at::Tensor, at::Tensor, at::Tensor> adamw(const at::Tensor& self, const at::Tensor& mean,
                                                     const at::Tensor& square,
                                                     const at::Tensor& grad, const at::Tensor& step,
                                                     const Rates& rates, bool amsgrad,
                                                     bool maximize);

int plan(const char* name, uint64_t* workspace, aclOpExecutor** executor, Tensors results,
         std::function<void()> work);
int run(aclOpExecutor* executor, aclrtStream stream);

}  // namespace fake_acl
