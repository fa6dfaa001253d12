#include "torch/op_level/forward_ops.h"

#include <algorithm>

namespace fastcheck::op_level {
namespace {

constexpr std::size_t kMaxForwardOps = 1 << 20;

}  // namespace

void ForwardOps::add(std::uint64_t thread, std::int64_t sequence, const ForwardOp& op) {
  Log& log = logs_[thread];
  auto& entries = log.entries;
  while (!entries.empty() && entries.back().sequence >= sequence) {
    entries.pop_back();
    --size_;
  }
  log.before_step = std::min(log.before_step, entries.size());
  if (size_ >= kMaxForwardOps) return;
  entries.push_back({sequence, op});
  ++size_;
}

ForwardOp* ForwardOps::find(std::uint64_t thread, std::int64_t sequence) {
  const auto found = logs_.find(thread);
  if (found == logs_.end()) return nullptr;
  auto& entries = found->second.entries;
  // Asked for where an op ends, which is one of the last; and where its node runs.
  if (!entries.empty() && entries.back().sequence == sequence) return &entries.back().op;
  const auto at = std::lower_bound(
      entries.begin(), entries.end(), sequence,
      [](const Entry& entry, std::int64_t number) { return entry.sequence < number; });
  return at == entries.end() || at->sequence != sequence ? nullptr : &at->op;
}

void ForwardOps::begin_step() {
  for (auto log = logs_.begin(); log != logs_.end();) {
    auto& [entries, before] = log->second;
    entries.erase(entries.begin(), entries.begin() + static_cast<std::ptrdiff_t>(before));
    size_ -= before;
    before = entries.size();
    log = entries.empty() ? logs_.erase(log) : std::next(log);
  }
}

void ForwardOps::clear() {
  logs_.clear();
  size_ = 0;
}

}  // namespace fastcheck::op_level
