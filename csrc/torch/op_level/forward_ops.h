// Finds the op of the forward pass that created a node of autograd.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "torch/operators/filter.h"
#include "torch/python/line.h"

namespace fastcheck::op_level {

// The op that a backward belongs to; of a torch.autograd.Function only its module and its call.
struct ForwardOp {
  std::int32_t op = -1, call = 0, module = -1;
  std::int64_t api = -1;
  Choice choice = Choice::kOther;
  PythonLine line;        // where Python called it
  std::int64_t seq = -1;  // the first record that it made
};

// Ops by thread and by autograd's sequence number, which a thread only raises: of the ops that saw
// a number the last, and innermost, may have made the node. OpObserver's lock guards it.
class ForwardOps {
 public:
  void add(std::uint64_t thread, std::int64_t sequence, const ForwardOp& op);
  // Null: none is known. Until the next call of add().
  ForwardOp* find(std::uint64_t thread, std::int64_t sequence);
  // Drops what came before the last step began: ops run between two steps, whose backward is in the
  // second one.
  void begin_step();
  void clear();

 private:
  struct Entry {
    std::int64_t sequence;
    ForwardOp op;
  };
  struct Log {
    std::vector<Entry> entries;  // sorted
    std::size_t before_step = 0;
  };
  std::unordered_map<std::uint64_t, Log> logs_;
  std::size_t size_ = 0;
};

}  // namespace fastcheck::op_level
