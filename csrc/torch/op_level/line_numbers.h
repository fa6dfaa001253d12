// LineNumbers: the Python line at which each record of a step was requested.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "torch/op_level/op_observer.h"
#include "torch/python/line.h"

namespace fastcheck::op_level {

// Kept for every record: the culprit's is known when its record arrives, and only that one is
// formatted. The interpreter's lock guards it.
class LineNumbers {
 public:
  // The records of these launches are requested at the current line.
  void add(const std::vector<Launch>& launches);
  // "train.py:12 in forward"; empty where it is not known.
  std::string of(std::int64_t seq) const;

 private:
  std::unordered_map<std::int64_t, PythonLine> of_;
};

}  // namespace fastcheck::op_level
