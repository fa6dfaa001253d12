// Sees every op of the process from the dispatcher, and reads what it computes.
//
// Callbacks of at::RecordFunction: no Python runs between an op and its record. There is one
// observer in a process, and it is never deleted: callbacks on other threads may be inside it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "core/record.h"
#include "torch/observer/filter.h"
#include "torch/observer/op_table.h"
#include "torch/observer/provenance.h"

namespace fastcheck::observer {

// Where a record of an op comes from. In backward the op of the forward pass gives the site its
// name and the record its call number, where it is known.
struct OpSite {
  std::int32_t module;  // as numbered by enter(); -1: outside of all
  std::int32_t op;
  std::int32_t forward_op;  // -1: none is known
  Direction direction;
  Role role;
  // Of an input the position among the arguments; of an output that among the outputs of the op or,
  // with a forward op, among all that the node of autograd has made.
  std::int32_t index;
  auto key() const { return std::tie(module, op, forward_op, direction, role, index); }
  bool operator<(const OpSite& other) const { return key() < other.key(); }
};

// A non-finite tensor that an op read.
struct Fed {
  std::int64_t seq;    // of the record that knows it
  bool is_arrival;     // nobody observed has made it
  bool is_collective;  // but a collective
};

// A tensor that an op read, and the record that tells what it held.
struct Input {
  std::int32_t argument;
  std::int64_t seq;
};

// An op that made or read something non-finite.
struct Incident {
  std::int32_t op;
  Direction direction;
  bool is_recompute;
  // A scalar argument is itself infinite: bit 0 +Inf, bit 1 -Inf.
  std::uint8_t infinite_scalars;
  std::string node;          // the autograd node that it is part of
  std::string line;          // where Python was
  std::string forward_line;  // and where it was in the forward of what ran in backward
  std::vector<Fed> fed;
  std::vector<Input> inputs;
  std::vector<std::int64_t> made;    // records of what came out
  std::vector<std::uint8_t> is_bad;  // which of them are non-finite
};

// What happened since the last take().
struct Batch {
  std::vector<Record> records;  // site: number of an OpSite, or ~site of a reading by name
  std::vector<Incident> incidents;
  std::vector<OpSite> sites;  // new ones, numbered from first_site on
  std::int32_t first_site = 0;
};

class OpObserver {
 public:
  static OpObserver& instance();

  // Begins with nothing known. `line` tells where Python is; called with the interpreter's lock
  // held, for culprits only. What `filter` leaves out is read nevertheless where it takes in
  // something non-finite: what becomes of that decides about it.
  // Returns the number of the run, by which it is stopped.
  // `copies`: tensors of other devices are copied to the host to be read, which waits for each.
  std::uint64_t start(Depth depth, std::function<std::string()> line, Filter filter = {},
                      bool copies = false);
  // Does nothing when another run goes on.
  void stop(std::uint64_t run);
  std::uint64_t run() const { return running_ ? run_.load() : 0; }

  // The step that records belong to; `flags` of records in backward. Calls count from 0 again.
  void begin_step(std::int64_t step);
  void set_backward_flags(std::uint32_t flags) { backward_flags_ = flags; }
  // While it is not active no op costs anything, and nothing is known of what was written.
  void set_active(bool active);
  // A TorchDispatchMode: where it is on a thread's stack, ops are seen as it calls them, so that
  // they are judged before they return. Null: none.
  void set_mode(const void* mode) { mode_ = mode; }

  // This thread's modules, innermost last; and whether an optimizer is at work in it.
  static void enter(std::int32_t module);
  static void leave();
  static void set_optimizer(bool at_work);
  // Within it, what this thread computes passes unread.
  static void pause(int delta);

  struct Reading {
    std::int64_t seq;
    bool is_bad, is_collective;
  };
  // Reads a tensor under a name of its own, unless what it holds is known.
  Reading read(const at::Tensor& tensor, std::int32_t site, std::int32_t call, std::uint32_t flags);

  bool has_incidents() const { return incident_count_.load(std::memory_order_relaxed) != 0; }
  Batch take();
  std::string op_name(std::int32_t number) const { return ops_.name(number); }
  std::string argument_name(std::int32_t number, std::int32_t position) const {
    return ops_.argument(number, position);
  }
  std::int64_t next_seq() const { return next_seq_.load(std::memory_order_relaxed); }

  // Callbacks.
  void begin(const at::RecordFunction& fn);
  void end(const at::RecordFunction& fn);

 private:
  struct Frame;
  struct Thread;
  static Thread& thread();
  void connect();

  void begin_op(const at::RecordFunction& fn, Thread& mine);
  void begin_node(const at::RecordFunction& fn, Thread& mine);
  void end_op(const at::RecordFunction& fn, Frame& frame, Thread& mine);
  void begin_shell(const at::RecordFunction& fn, const Op& op, Thread& mine);
  bool is_under_mode() const;
  bool reads_at_once(const Frame& frame, bool is_written) const;
  void look_at_input(const at::Tensor& tensor, std::int32_t argument, Frame& frame, Thread& mine,
                     bool is_written);
  void read_late(Frame& frame, Thread& mine);
  void look_at_output(const at::Tensor& tensor, std::int32_t index, Frame& frame, Thread& mine,
                      Incident& incident);
  void note_output(const at::Tensor& tensor, std::int32_t index, Frame& frame, Thread& mine,
                   Incident& incident, bool is_write, std::int64_t version_before);
  Token record(const at::Tensor& tensor, Thread& mine, std::int32_t site, std::int32_t call,
               std::uint32_t flags);
  std::int32_t site_number(const Frame& frame, Role role, std::int32_t index);

  std::mutex mutex_;
  OpTable ops_;
  Provenance provenance_;
  Batch batch_;
  std::map<OpSite, std::int32_t> sites_;
  // How often an op was called in this step, by direction.
  std::array<std::vector<std::int32_t>, 3> calls_;
  struct ForwardOp {
    std::int32_t op = -1, call = 0, module = -1;
    Choice choice = Choice::kOther;
    std::int32_t line = -1;  // where Python was, under a mode: among lines_
  };
  // By thread and by autograd's sequence number: of the innermost op that may have made the node.
  std::unordered_map<std::uint64_t, ForwardOp> forward_ops_;
  std::vector<std::string> lines_;

  Depth depth_ = Depth::kStats;
  Filter filter_;
  bool copies_ = false;
  std::function<std::string()> line_;
  std::atomic<std::uint64_t> run_{0};
  std::atomic<bool> running_{false}, active_{true};
  // Something non-finite was met in this run: from then on filtered ops are asked what they read.
  std::atomic<bool> has_bad_{false};
  std::atomic<const void*> mode_{nullptr};
  std::atomic<std::int64_t> next_seq_{0};
  std::atomic<std::int64_t> step_{0};
  std::atomic<std::uint32_t> backward_flags_{0};
  std::atomic<std::int64_t> incident_count_{0};
  std::int32_t lines_left_ = 0;
  at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
};

}  // namespace fastcheck::observer
