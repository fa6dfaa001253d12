// The arguments of the launches that count exponents, passed by value.
#pragma once

#include <cstdint>

#include "cuda/arguments.h"
#include "cuda/layout.h"

namespace fastcheck::cuda {

// The place of the counts of a tensor.
struct CountsArgument {
  std::int64_t* words;
  unsigned long long* totals;  // zero between launches
  Counter* blocks_done;        // too
};

struct ExponentsLaunch {
  Entry entry;
  std::int64_t tiles;
  CountsArgument counts;
  Layout layout;
};

// A launch for one tensor, in the first entry of the list.
struct RecordAndExponentsLaunch {
  RecordsLaunch<List> record;
  CountsArgument counts;
};

static_assert(sizeof(RecordAndExponentsLaunch) <= 4000);

}  // namespace fastcheck::cuda
