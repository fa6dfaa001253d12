// Arrivals: the records that came from devices, and the ops that waited for them and are incidents.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "torch/op_level/incident.h"

namespace fastcheck::op_level {

// OpObserver's lock guards it. It holds numbers only.
class Arrivals {
 public:
  // These are non-finite.
  void add(const std::vector<std::int64_t>& bad);
  // Judges ops in the order in which they ran, whose records are all here: those that made or read
  // something non-finite.
  std::vector<Incident> judge(std::vector<Incident> waiting);
  bool has(std::int64_t seq) const { return bad_.count(seq) != 0; }
  // The record that a non-finite one is to be known by: of a part that of the whole.
  std::optional<std::int64_t> source(std::int64_t seq) const {
    const auto found = bad_.find(seq);
    return found == bad_.end() ? std::nullopt : std::optional(found->second);
  }
  void clear() { bad_.clear(); }

 private:
  bool settle(Fed& fed);

  std::unordered_map<std::int64_t, std::int64_t> bad_;
};

}  // namespace fastcheck::op_level
