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
  const auto whole = std::find_if(fed.wholes.begin(), fed.wholes.end(),
                                  [this](std::int64_t seq) { return has(seq); });
  fed.is_arrival = whole == fed.wholes.end();
  // What is bad in a part began where the whole did.
  if (!fed.is_arrival) fed.seq = found->second = *source(*whole);
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
