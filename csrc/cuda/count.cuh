// What the two launchers that count exponents have in common.
#pragma once

#include "cuda/exponents.cuh"
#include "cuda/plan.h"

namespace fastcheck::cuda {

// In a launch's counters: of blocks that are done, of chunks that are, and then the totals.
constexpr std::int64_t kCountersBefore = 2;

// Words of a dtype's totals; 0 where it has no exponents.
inline std::int64_t totals_of(int dtype) {
  const auto of = [](auto component) -> std::int64_t {
    using Component = decltype(component);
    if constexpr (Component::kIsFloat) return kTotals<Component>;
    return 0;
  };
  switch (static_cast<DType>(dtype)) {
#define FASTCHECK_CASE(code, name, component, components) \
  case DType::k_##name: return of(component());
    FASTCHECK_FOR_EACH_DTYPE(FASTCHECK_CASE)
#undef FASTCHECK_CASE
  }
  return 0;
}

inline std::int64_t counters_of(int dtype) { return kCountersBefore + 2 * totals_of(dtype); }

inline bool has_exponents(const TensorArgument& tensor) {
  return tensor.dtype < kDTypeCount && totals_of(tensor.dtype) > 0 && tensor.numel >= 0 &&
         tensor.ndim <= kMaxDims;
}

inline CountsArgument counts_of(const Workspace& workspace, std::int64_t* words) {
  return {words, reinterpret_cast<unsigned long long*>(workspace.counters + kCountersBefore),
          workspace.counters};
}

// Calls body(Format()) with the format of a dtype's components.
template <class Body>
int with_format(int dtype, const Body& body) {
  const auto of = [&](auto component) -> int {
    if constexpr (decltype(component)::kIsFloat) return body(component);
    return kErrorArgument;
  };
  switch (static_cast<DType>(dtype)) {
#define FASTCHECK_CASE(code, name, component, components) \
  case DType::k_##name: return of(component());
    FASTCHECK_FOR_EACH_DTYPE(FASTCHECK_CASE)
#undef FASTCHECK_CASE
  }
  return kErrorArgument;
}

// find_kernel() of `find` for every format; an error of the first that is not there.
template <class Find>
int for_each_format(const Find& find) {
  int error = 0;
  for (int dtype = 0; dtype < kDTypeCount && error == 0; ++dtype) {
    if (totals_of(dtype) > 0) error = with_format(dtype, find);
  }
  return error;
}

}  // namespace fastcheck::cuda
