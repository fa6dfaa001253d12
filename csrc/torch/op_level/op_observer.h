// OpObserver: observes every op of the process through the dispatcher, and reads its tensors.
//
// Callbacks of at::RecordFunction: no Python runs between an op and its record on the CPU. Tensors
// on a device are read there by the callback of start(); which ops were incidents is known when
// the records arrive. There is one observer in a process, and it is never deleted:
// callbacks on other threads may be inside it.
//
// Locks. `mutex_` guards what the ops of all threads share; a Thread, with its frames and the
// tensors that they hold, belongs to one thread and needs none. Whoever holds `mutex_` takes
// neither Python's lock nor lets a tensor go that nobody else holds: the holder of Python's lock
// may wait for `mutex_`. Tensors are only taken from an op's arguments and results, which the op
// holds.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/record.h"
#include "torch/op_level/arrivals.h"
#include "torch/op_level/forward_ops.h"
#include "torch/op_level/incident.h"
#include "torch/op_level/provenance.h"
#include "torch/op_level/readability.h"
#include "torch/operators/filter.h"
#include "torch/operators/op_table.h"
#include "torch/python/line.h"
#include "torch/read/depths.h"
#include "torch/read/observe.h"
#include "torch/read/waiting.h"

namespace fastcheck::op_level {

// The events since the last take().
struct Batch {
  std::vector<Record> records;  // site: number of an OpSite, or ~site of a reading by name
  std::vector<Incident> incidents;
  // Numbers of what was overwritten before its turn to be read came, and has no record.
  std::vector<std::int64_t> unread;
  // Ops whose records are on a device, in the order in which they ran. Once there is one, all that
  // may be an incident is among these.
  std::vector<Incident> waiting;
  std::vector<OpSite> sites;  // new ones, numbered from first_site on
  std::int32_t first_site = 0;
};

// A tensor of another device, to be read now, on its stream.
struct Launch {
  at::Tensor tensor;
  Identity identity;  // site: as in Batch
  // Not the tensor, but the status word of its device.
  bool is_status = false;
  // It has waited: where Python was when it was seen.
  bool is_late = false;
  PythonLine line = {};
};

// The way in which one run of the observer reads.
struct Options {
  Depth depth = Depth::kStats;
  Filter filter;
  // Tensors of other devices are copied to the host to be read, which waits for each.
  bool copies = false;
  // Tells where Python is. Called for culprits only; where their forward was is known.
  std::function<std::string()> line;
  // Has tensors of other devices read on their streams, and throws nothing; the observer holds no
  // lock. Null: they pass unread.
  std::function<void(std::vector<Launch>)> launch;
};

class OpObserver {
 public:
  static OpObserver& instance();

  // Begins with nothing known. What the filter leaves out is read nevertheless where it takes in
  // something that is known to be non-finite: what becomes of that decides about it.
  // Returns the number of the run, by which it is stopped.
  std::uint64_t start(Options options);
  // Does nothing when another run goes on.
  void stop(std::uint64_t run);
  std::uint64_t run() const { return running_ ? run_.load() : 0; }

  // The step that records belong to, and their depth; `flags` of records in backward. Calls count
  // from 0 again with a step.
  void begin_step(std::int64_t step);
  void set_depth(Depth depth);
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
  // The call of torch's Python API that this thread is in, by a number of the caller's.
  static void set_api(std::int64_t api);
  // Within it, what this thread computes passes unread.
  static void pause(int delta);

  struct Reading {
    std::int64_t seq;
    bool is_bad, is_collective;
    bool is_pending = false;  // its record is on a device: is_bad is not set
    std::int64_t source = -1;
    // Numbers of the records that it was known by which are bad, or may be; the youngest first.
    std::vector<std::int64_t> suspects = {};
  };
  // Reads a tensor under a name of its own, unless what it holds is known.
  Reading read(const at::Tensor& tensor, std::int32_t site, std::int32_t call, std::uint32_t flags);
  // Reads it whether that is known or not; what is known of it stays. `source`: the record of
  // its contents, -1 if there was none.
  Reading read_again(const at::Tensor& tensor, std::int32_t site, std::int32_t call,
                     std::uint32_t flags) {
    return read_anew(tensor, site, call, flags, false);
  }
  // The same, and from now on this record describes its contents.
  Reading take_over(const at::Tensor& tensor, std::int32_t site, std::int32_t call,
                    std::uint32_t flags) {
    return read_anew(tensor, site, call, flags, true);
  }

  // Each of these tensors has reached the place of its number: what is non-finite among them
  // becomes an incident. Of what was never read nothing is known, and nothing is read.
  void reach(const std::vector<at::Tensor>& tensors, const std::vector<std::int32_t>& places);

  bool has_incidents() const { return incident_count_.load(std::memory_order_relaxed) != 0; }
  Batch take();
  // Records below `stop` have arrived, and among them these are bad: which of the ops that waited
  // for them are incidents. Batches come in the order of take().
  std::vector<Incident> settle(std::vector<Incident> waiting, const std::vector<std::int64_t>& bad,
                               std::int64_t stop);
  // Sets what this device does to a result that does not fit, for records of copies.
  void set_device_mode(c10::Device device, DeviceMode mode);
  // Behind what an op has made on this device its status word is to be read, too.
  void watch_status(c10::Device device);
  // Lets what ops make on devices of this type wait to be read together (torch/read/waiting.h).
  void let_wait(c10::DeviceType type);
  // Has what waits read.
  void read_waiting();
  // The two records of a trial have arrived.
  void compared(std::int64_t site, bool are_same);
  // Tensors on devices of this type pass unread from now on.
  void leave_out(c10::DeviceType type) { is_left_out_[static_cast<std::size_t>(type)] = true; }
  std::vector<Unread::Row> unread();
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
  // The tensors to be read together, and where Python was when each was seen, by its number.
  struct Due {
    Waiting::Due tensors;
    std::vector<std::pair<std::int64_t, PythonLine>> lines;
  };
  static Thread& thread();
  void renew(Thread& mine, std::uint64_t run);
  void connect();

  void begin_op(const at::RecordFunction& fn, Thread& mine);
  void begin_node(const at::RecordFunction& fn, Thread& mine);
  void end_op(const at::RecordFunction& fn, Frame& frame, Thread& mine);
  void begin_function(const at::RecordFunction& fn, Thread& mine);
  void begin_composite(const at::RecordFunction& fn, const Op& op, Thread& mine);
  void begin_zero_tensor(const at::RecordFunction& fn, const Op& op, Thread& mine);
  bool is_under_mode() const;
  Readability look(const at::Tensor& tensor) const;
  bool is_read(const at::Tensor& tensor) const { return look(tensor) == Readability::kRead; }
  bool is_read(const at::Tensor& tensor, Frame& frame) const;
  void forget_statistics(const Op& op, c10::ArrayRef<const c10::IValue> inputs);
  static bool reads_at_once(const Frame& frame, const Thread& mine, bool is_written);
  void look_at_input(const at::Tensor& tensor, std::int32_t argument, Frame& frame, Thread& mine,
                     bool is_written);
  Fed fed_by(const RecordRef& ref, const Known& known) const;
  void read_late(Frame& frame, Thread& mine);
  void read_parts(Frame& frame, Thread& mine);
  Reading read_anew(const at::Tensor& tensor, std::int32_t site, std::int32_t call,
                    std::uint32_t flags, bool takes_over);
  void note_results(const at::RecordFunction& fn, Frame& frame, const Thread& mine);
  static bool reads_results(const Frame& frame, const Thread& mine);
  bool take_results(const at::RecordFunction& fn, Frame& frame, Thread& mine, Incident& incident);
  void look_at_output(const at::Tensor& tensor, std::int32_t index, Frame& frame, Thread& mine,
                      Incident& incident);
  void note_output(const at::Tensor& tensor, std::int32_t index, Frame& frame, Thread& mine,
                   Incident& incident, bool is_write, std::int64_t version_before);
  // `may_wait`: an op of torch's has computed it from another tensor.
  RecordRef record(const at::Tensor& tensor, Thread& mine, std::int32_t site, std::int32_t call,
                   std::uint32_t flags, bool may_wait = false);
  static bool may_wait(const Frame& frame);
  void wait(Thread& mine);
  void take_waiting(Thread& mine);
  void read_waiting_before(const at::RecordFunction& fn, const Op& op, Thread& mine);
  static void launch_due(const Options& options, Due due);
  RecordRef record_here(const at::Tensor& tensor, Thread& mine, const Identity& identity);
  bool read_into(Record& record, const at::Tensor& tensor, Thread& mine, const Identity& identity,
                 Depth depth) const;
  bool find_bad(const at::Tensor& tensor, Thread& mine, std::vector<Fed>& found) const;
  std::int32_t site_number(const Frame& frame, Role role, std::int32_t index);
  DeviceMode mode_of(c10::Device device) const;
  void ask_status(const Frame& frame, Thread& mine);
  void launch(Thread& mine);
  std::shared_ptr<const Options> options();
  std::string line(Thread& mine);

  // Taken before mutex_: starting and stopping, with the callback's handle.
  std::mutex running_mutex_;
  std::mutex mutex_;
  OpTable& ops_ = OpTable::instance();
  Provenance provenance_;
  Arrivals arrivals_;
  Unread unread_;
  Batch batch_;
  std::map<OpSite, std::int32_t> sites_;
  // The number of calls of an op in this step, by direction.
  std::array<std::vector<std::int32_t>, 3> calls_;
  ForwardOps forward_ops_;
  Waiting waiting_;
  std::vector<std::pair<std::int64_t, PythonLine>> waiting_lines_;

  // The options of the run that goes on; the functions are shared with those who call them without
  // the lock.
  Depths depths_{Depth::kStats};
  // Never changed, only replaced: each thread holds the one that its ops began with.
  std::shared_ptr<const Filter> filter_ = std::make_shared<const Filter>();
  bool copies_ = false;
  std::vector<std::pair<c10::Device, DeviceMode>> modes_;
  std::vector<c10::Device> with_status_;
  std::shared_ptr<const Options> options_;
  std::atomic<std::uint64_t> run_{0};
  std::atomic<bool> running_{false}, active_{true};
  // Something non-finite was met in this run: from then on filtered ops are asked what they read.
  std::atomic<bool> has_bad_{false};
  // Something was left to a device to read: from then on what it found decides.
  std::atomic<bool> is_deferred_{false};
  std::array<std::atomic<bool>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> is_left_out_{};
  std::atomic<const void*> mode_{nullptr};
  std::atomic<bool> has_waiting_{false};
  std::atomic<std::int64_t> next_seq_{0};
  std::atomic<std::int64_t> step_{0};
  std::atomic<std::uint32_t> backward_flags_{0};
  std::atomic<std::int64_t> incident_count_{0};
  std::int32_t lines_left_ = 0;
  at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
};

}  // namespace fastcheck::op_level
