#include "torch/python/observe.h"

#include <pybind11/pybind11.h>

namespace fastcheck {
namespace {

// Reading this many bytes takes longer than letting go of the interpreter and taking it again.
constexpr std::int64_t kReleaseBytes = 64 * 1024;

}  // namespace

void observe_from_python(const at::Tensor& tensor, Depth depth, bool logical,
                         const Identity& identity, Record& record) {
  if (tensor.numel() * static_cast<std::int64_t>(tensor.element_size()) < kReleaseBytes) {
    observe(tensor, depth, logical, identity, record);
  } else {
    const at::Tensor held = tensor;  // the caller may drop its reference meanwhile
    const pybind11::gil_scoped_release release;
    observe(held, depth, logical, identity, record);
  }
}

}  // namespace fastcheck
