#include "torch/op_level/line_numbers.h"

namespace fastcheck::op_level {
namespace {

constexpr std::size_t kMaxLines = 65536;

}  // namespace

void LineNumbers::add(const std::vector<Launch>& launches) {
  const PythonLine line = python_line();
  if (!line) return;
  if (of_.size() > kMaxLines) of_.clear();
  for (const Launch& launch : launches) of_[launch.identity.seq] = line;
}

std::string LineNumbers::of(std::int64_t seq) const {
  const auto found = of_.find(seq);
  return found == of_.end() ? std::string() : spelt(found->second);
}

}  // namespace fastcheck::op_level
