// A tensor as the launchers of cuda/launch.h take it.
#pragma once

#include <cstdint>

#include "cpu/reduce.h"
#include "cuda/launch.h"

namespace fastcheck::cuda {

// The argument whose record goes to slot `slot`. `logical`: the checksum is of the elements in
// logical order, wherever they lie.
inline TensorArgument argument_of(const cpu::TensorView& view, std::int64_t slot, bool logical) {
  const bool dense = logical ? view.contiguous : view.dense;
  TensorArgument argument{};
  argument.data = view.data;
  argument.numel = view.numel;
  argument.sizes = view.sizes;
  argument.strides = view.strides;
  argument.slot = slot;
  argument.ndim = view.ndim;
  argument.dtype = static_cast<std::uint8_t>(view.dtype);
  argument.order = static_cast<std::uint8_t>(dense && !logical ? Order::kStorage : Order::kLogical);
  argument.dense = dense;
  return argument;
}

}  // namespace fastcheck::cuda
