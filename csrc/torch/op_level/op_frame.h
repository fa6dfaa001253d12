// The state that OpObserver keeps of the ops that are running, on each thread: nobody else reaches
// it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "torch/op_level/op_observer.h"
#include "torch/op_level/op_tensors.h"

namespace fastcheck::op_level {

// An op, or a node of autograd, that is running.
struct OpObserver::Frame {
  const at::RecordFunction* fn = nullptr;
  const Op* op = nullptr;  // null: a node
  std::int32_t module = -1;
  std::int32_t call = 0;
  ForwardOp forward;
  Direction direction = Direction::kForward;
  bool is_recompute = false;
  // It is seen once more, as the dispatch mode calls it.
  bool is_composite_call = false;
  // True for a call with wrapped tensors, which is called again for what is within. `began`: how
  // many ops had begun on this thread by then.
  bool is_zero_tensor = false;
  std::uint64_t began = 0;
  // The filter lets it through; and, as an op made of others, what it calls.
  bool is_open = true;
  bool opens = false;
  Scalars scalars;
  // The state of a node: how many modules were entered when it began, and what ops have made within
  // it.
  const void* python = nullptr;  // the frame that autograd was called in, or called Python in
  std::size_t modules = 0;
  std::int32_t made = 0;
  std::int64_t clock = 0;
  std::int64_t node = -1;  // the number of what autograd may have made of it; -1: nothing
  PythonLine line;         // where it was called, as far as its node has to know
  Readabilities unread;    // tensors that could not be looked at
  std::vector<Fed> fed;
  std::vector<Input> inputs;
  // Left out by a filter, and neither fed on something bad nor wrote: there is nothing to look at.
  bool is_idle() const {
    return !is_open && !is_composite_call && !is_zero_tensor && fed.empty() && written.empty() &&
           !op->is_collective;
  }
  struct Held {
    at::Tensor tensor;
    std::int64_t version;
    std::int32_t argument;
    bool is_part = false;  // what is known of it is known of more
  };
  std::vector<Held> written;
  // Inputs that were not read: they are read if a result is non-finite.
  std::vector<Held> untold;
  // The tensors on the CPU that are known, and are looked at once more if a result is non-finite.
  std::vector<Held> told;

  // True if a composite op returns an input of which nothing is known, or a view of it, which its
  // schema does not tell (broadcast_tensors, dropout in eval).
  bool shows_untold(const at::Tensor& tensor) const {
    for (const Held& held : untold) {
      if (op->is_composite && held.tensor.is_alias_of(tensor)) return true;
    }
    return false;
  }
};

struct OpObserver::Thread {
  // [0, depth) are running; the others are kept for their memory. A deque: what a tensor's end
  // calls may add one while another is referred to.
  std::deque<Frame> frames;
  std::size_t depth = 0;
  std::vector<std::int32_t> modules;
  std::int64_t api = -1;
  int paused = 0;
  std::uint64_t run = 0;  // of the observer, that the rest belongs to
  std::shared_ptr<const Filter> filter = std::make_shared<const Filter>();
  bool at_optimizer = false;
  bool busy = false;  // within our own code: resolving a view calls ops
  OpTable::Recent recent;
  std::uint64_t ops_begun = 0;
  // Launches to be had read when the observer's lock is free: now, later, and what has waited.
  std::vector<Launch> launches;
  std::vector<Launch> later;
  std::vector<Due> due;
  // The op that a dispatch mode is about to call, and autograd's number, which it has only outside.
  const Op* composite = nullptr;
  std::int64_t composite_seq = -1;

  Frame& push(const at::RecordFunction& fn) {
    if (depth == frames.size()) frames.emplace_back();
    Frame& frame = frames[depth++];
    frame.fn = &fn;
    frame.op = nullptr;
    frame.forward = {};
    frame.is_recompute = false;
    frame.is_composite_call = frame.is_zero_tensor = false;
    frame.node = -1;
    frame.line = {};
    frame.unread.clear();
    frame.is_open = true;
    frame.opens = false;
    frame.made = 0;
    frame.scalars = {};
    frame.fed.clear();
    frame.inputs.clear();
    frame.written.clear();
    frame.untold.clear();
    frame.told.clear();
    return frame;
  }
  // True within an op with a kernel of its own: what it calls is part of it, and not looked at.
  bool is_in_kernel() const {
    if (depth == 0) return false;
    const Frame& inner = frames[depth - 1];
    return inner.op != nullptr && !inner.op->is_composite && !inner.is_composite_call &&
           !inner.is_zero_tensor;
  }
  // The line where Python has called something: in the middle of a backward that called no Python
  // itself, it is where its forward was called.
  static PythonLine line(const Frame* node) {
    if (node == nullptr) return python_line();
    const PythonLine within = python_line(node->python);
    return within ? within : node->forward.line;
  }
  // The innermost node of autograd that is running; null: none is.
  Frame* node() {
    for (std::size_t i = depth; i-- > 0;) {
      if (frames[i].op == nullptr) return &frames[i];
    }
    return nullptr;
  }
  // The same, unless it computes a part of the forward again.
  Frame* node_of_backward() {
    Frame* const inner = node();
    return inner == nullptr || modules.size() > inner->modules ? nullptr : inner;
  }
};

// Marks a thread as being within our own code, which may call more of it.
struct Busy {
  explicit Busy(bool& flag) : flag_(flag), outer_(flag) { flag_ = true; }
  ~Busy() { flag_ = outer_; }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  bool& flag_;
  const bool outer_;
};

}  // namespace fastcheck::op_level
