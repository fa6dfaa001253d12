#include "torch/op_level/arrivals.h"

#include <algorithm>
#include <utility>

namespace fastcheck::op_level {
namespace {

// A run that goes on for ever on non-finite values must not grow for ever.
constexpr std::size_t kMostBad = 1 << 20;

}  // namespace

void Arrivals::add(const std::vector<std::int64_t>& bad) {
  if (bad_.size() > kMostBad) bad_.clear();
  for (const std::int64_t seq : bad) bad_.emplace(seq, seq);
}

// False: it was finite.
bool Arrivals::settle(Fed& fed) {
  if (!fed.is_pending) return true;
  const auto found = bad_.find(fed.seq);
  if (found == bad_.end()) return false;
  fed.is_pending = false;
  if (!fed.is_own) {
    fed.seq = found->second;
    return true;
  }
  std::vector<std::int64_t> bad;
  for (const std::int64_t whole : fed.wholes) {
    const auto origin = source(whole);
    if (origin && std::find(bad.begin(), bad.end(), *origin) == bad.end()) bad.push_back(*origin);
  }
  fed.is_arrival = bad.empty();
  if (bad.empty()) return true;
  // A bad value in a part began where the whole did.
  if (bad.size() == 1) {
    found->second = bad.front();
  } else {
    fed.read = fed.seq;
    fed.also.assign(bad.begin() + 1, bad.end());
  }
  fed.seq = bad.front();
  return true;
}

std::vector<Incident> Arrivals::judge(std::vector<Incident> waiting) {
  std::vector<Incident> found;
  for (Incident& op : waiting) {
    op.fed.erase(
        std::remove_if(op.fed.begin(), op.fed.end(), [this](Fed& one) { return !settle(one); }),
        op.fed.end());
    for (std::size_t i = 0; i < op.made.size(); ++i) {
      if (has(op.made[i])) op.is_bad[i] = true;
    }
    if (op.is_news()) found.push_back(std::move(op));
  }
  return found;
}

}  // namespace fastcheck::op_level
