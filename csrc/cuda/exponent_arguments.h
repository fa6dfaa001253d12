// The arguments of an exponent kernel's launch, passed by value.
#pragma once

#include <cstdint>

#include "cuda/arguments.h"
#include "cuda/layout.h"

namespace fastcheck::cuda {

struct ExponentsLaunch {
  Entry entry;
  std::int64_t tiles;
  std::int64_t* words;
  unsigned long long* totals;  // zero between launches
  Counter* blocks_done;        // too
  Layout layout;
};

}  // namespace fastcheck::cuda
