#include "torch/op_level/line_numbers.h"

namespace fastcheck::op_level {
namespace {

constexpr std::size_t kMaxLines = 65536;

}  // namespace

void LineNumbers::add(const std::vector<Launch>& launches) {
  const PythonLine here = python_line();
  if (of_.size() > kMaxLines) of_.clear();
  for (const Launch& launch : launches) {
    const PythonLine line = launch.is_late ? launch.line : here;
    if (line) of_[launch.identity.seq] = line;
  }
}

std::string LineNumbers::of(std::int64_t seq) const {
  const auto found = of_.find(seq);
  return found == of_.end() ? std::string() : spelt(found->second);
}

}  // namespace fastcheck::op_level
