// Counts exponents on every CPU, one component at a time: the reference for the vector form.
#include "cpu/exponent_kernel.h"

namespace fastcheck::cpu {
namespace {

template <class Component>
constexpr CountExponents counter() {
  if constexpr (Component::kIsFloat) {
    return count_scalar<Component>;
  } else {
    return nullptr;
  }
}

}  // namespace

const ExponentKernels* scalar_exponents() {
  static constexpr ExponentKernels kKernels{{FASTCHECK_FOR_EACH_DTYPE(FASTCHECK_EXPONENT_ROW)}};
  return &kKernels;
}

}  // namespace fastcheck::cpu
