// torch's operations without what the caller's modes would make of them.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fastcheck {

// While it lives: no autograd, no dispatch mode of Python (profilers, fake tensors).
struct PlainTorch {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                           c10::python_ks};
};

}  // namespace fastcheck
