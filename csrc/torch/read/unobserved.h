// PlainTorch: runs torch operations without autograd and without the caller's dispatch modes.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fastcheck {

// While it lives: no autograd, no dispatch mode of Python (profilers, fake tensors).
struct PlainTorch {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                           c10::python_ks};
};

}  // namespace fastcheck
