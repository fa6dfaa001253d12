// Incident: what the observer reports of an op with non-finite values; OpSite: where a record of an
// op comes from.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "torch/operators/filter.h"
#include "torch/python/line.h"

namespace fastcheck::op_level {

// The place that a record of an op comes from. In backward the op of the forward pass gives the
// site its name and the record its call number, where it is known.
struct OpSite {
  std::int32_t module;  // as numbered by enter(); -1: outside of all
  std::int32_t op;
  std::int32_t forward_op;  // -1: none is known
  Direction direction;
  Role role;
  // The position of an input among the arguments; of an output that among the outputs of the op or,
  // with a forward op, among all that the node of autograd has made; of a status word the device's.
  std::int32_t index;
  auto key() const { return std::tie(module, op, forward_op, direction, role, index); }
  bool operator<(const OpSite& other) const { return key() < other.key(); }
};

// A non-finite tensor that an op read.
struct Fed {
  std::int64_t seq;    // of the record that describes it
  bool is_arrival;     // no observed op has made it
  bool is_collective;  // but a collective
  // Its record is still on a device: it may be finite. `is_own`: the op itself had it read, as a
  // part of what the records `wholes` describe (the youngest first; none: no observed op has made
  // it).
  bool is_pending = false;
  bool is_own = false;
  std::vector<std::int64_t> wholes = {};
  // Several records describe parts of it that are bad: `seq` and `also`, the youngest first; `read`
  // is then the record of the whole, which later ops know it by. -1: one describes it.
  std::vector<std::int64_t> also = {};
  std::int64_t read = -1;
};

// A tensor that an op read, and the record of its contents; or of a tensor that it is a part of.
struct Input {
  std::int32_t argument;
  std::int64_t seq;
  bool is_part = false;
};

// The places of a value that the host reads (aten._local_scalar_dense), of one that a collective
// sends, and of one that is converted to integers. Other places have numbers of the caller's.
constexpr std::int32_t kHostPlace = 0;
constexpr std::int32_t kRanksPlace = 1;
constexpr std::int32_t kIntegersPlace = 2;

// An op that made or read something non-finite; or may have, as long as its records are on a
// device. Or a place that something non-finite has reached: then `op` is -1, or hands a value to
// the host.
struct Incident {
  std::int32_t op = -1;
  Direction direction = Direction::kForward;
  bool is_recompute = false;
  std::int32_t place = -1;  // what was read has reached it; -1: none
  // Left out by a filter, and not looked at: what it made of what it read is not known.
  bool is_unseen = false;
  // It read memory that a copy may be writing, of which there is no record.
  bool reads_in_flight = false;
  // A scalar argument is itself infinite: bit 0 +Inf, bit 1 -Inf; or at least the largest number of
  // something that was made: bits 2 and 3.
  std::uint8_t infinite_scalars = 0;
  std::int64_t api = -1;  // as given to set_api(), in backward that of the forward; -1: none
  std::string node;       // the autograd node that it is part of
  std::string line;       // where Python was
  // And where it was in the forward of what ran in backward, unless that runs Python itself.
  PythonLine forward_line;
  std::int64_t forward_seq = -1;  // the first record that this forward made; -1: not known
  std::vector<Fed> fed;
  std::vector<Input> inputs;
  std::vector<std::int64_t> made;    // records of what came out
  std::vector<std::uint8_t> is_bad;  // which of them are non-finite
  // A view, or an op whose results are integers, adds nothing to what it read.
  bool is_news() const {
    bool has_bad = false, has_arrival = false;
    for (const std::uint8_t bad : is_bad) has_bad = has_bad || bad;
    for (const Fed& one : fed) has_arrival = has_arrival || one.is_arrival || !one.also.empty();
    const bool uses_inputs = !made.empty() || is_unseen || place >= 0;
    return has_arrival || has_bad || (!fed.empty() && uses_inputs);
  }
};

}  // namespace fastcheck::op_level
