// OpObserver, the end of an op: reads its results, and finds out whether it is an incident.
#include <ATen/core/Tensor.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "torch/op_level/op_frame.h"
#include "torch/op_level/op_observer.h"
#include "torch/op_level/op_tensors.h"

namespace fastcheck::op_level {
namespace {

// Modes of torch itself, under which tensors stand for others.
bool is_traced() {
  using Modes = c10::impl::TorchDispatchModeTLS;
  using Key = c10::impl::TorchDispatchModeKey;
  return Modes::get_mode(Key::FAKE).has_value() || Modes::get_mode(Key::PROXY).has_value() ||
         Modes::get_mode(Key::FUNCTIONAL).has_value();
}

// True if an op returned numbers that are never non-finite.
bool has_integers(const at::RecordFunction& fn, const Op& op) {
  bool found = false;
  for (const c10::IValue& value : results_of(fn, op)) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      found = found || c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/false);
    });
  }
  return found;
}

}  // namespace

void OpObserver::end(const at::RecordFunction& fn) {
  Thread& mine = thread();
  if (mine.depth == 0 || mine.busy) return;
  // Frames above it ended on another thread, or not at all.
  std::size_t at = mine.depth;
  while (at > 0 && mine.frames[at - 1].fn != &fn) --at;
  if (at == 0) return;
  mine.depth = at;
  Frame& frame = mine.frames[at - 1];
  if (frame.op != nullptr && !frame.is_idle() && running_.load(std::memory_order_relaxed)) {
    end_op(fn, frame, mine);
    launch(mine);
  }
  frame.written.clear();
  frame.untold.clear();
  frame.told.clear();
  mine.depth = at - 1;
}

void OpObserver::end_op(const at::RecordFunction& fn, Frame& frame, Thread& mine) {
  Incident incident;
  bool wants_line = false, is_waiting = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool may_be_one = take_results(fn, frame, mine, incident);
    if (!incident.made.empty() && !with_status_.empty()) ask_status(frame, mine);
    if (!frame.unread.is_empty() && frame.is_open) unread_.add(frame.op->number, frame.unread);
    if (!may_be_one) return;
    bool is_bad = false;
    for (const std::uint8_t bad : incident.is_bad) is_bad = is_bad || bad;
    is_waiting = is_deferred_;
    wants_line = is_bad && options_->line && lines_left_ > 0;
    if (wants_line) --lines_left_;
  }
  incident.op = frame.op->number;
  incident.direction = frame.direction;
  incident.is_recompute = frame.is_recompute;
  incident.api = frame.direction == Direction::kBackward ? frame.forward.api : mine.api;
  incident.infinite_scalars |= frame.scalars.infinite();
  incident.reads_in_flight = frame.unread.has(Readability::kInFlight);
  incident.forward_seq = frame.forward.seq;
  incident.fed = frame.fed;
  incident.inputs = frame.inputs;
  if (const Frame* const node = mine.node()) {
    incident.node = node->fn->name();
    // The backward of a torch.autograd.Function has a line of its own.
    const bool is_backward = frame.direction == Direction::kBackward;
    if (is_backward && !python_line(node->python)) incident.forward_line = node->forward.line;
  }
  if (wants_line) incident.line = line(mine);
  // Its records are found among those that were launched on a device.
  launch(mine);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (mine.run != run_) return;  // what was called has begun another one
  if (is_waiting) {
    batch_.waiting.push_back(std::move(incident));
    return;
  }
  batch_.incidents.push_back(std::move(incident));
  ++incident_count_;
}

// The line of Python. It may run ops of its own (finalizers), which are not observed.
std::string OpObserver::line(Thread& mine) {
  const Busy busy(mine.busy);
  return options()->line();
}

// Asks if anything has overflowed on the devices that are about to read what the op has made, by
// the time that it is through.
void OpObserver::ask_status(const Frame& frame, Thread& mine) {
  const std::size_t made = mine.launches.size();
  for (const c10::Device device : with_status_) {
    for (std::size_t i = 0; i < made; ++i) {
      if (mine.launches[i].tensor.device() != device) continue;
      const Identity identity{next_seq_++, step_, frame.call,
                              site_number(frame, Role::kStatus, device.index()), 0};
      mine.launches.push_back({mine.launches[i].tensor, identity, true});
      break;
    }
  }
}

// The results of an op that fed on something bad have to be known. Those of an op that only may
// have fed on it are not asked for: on a device a filter would leave nothing out.
bool OpObserver::reads_results(const Frame& frame, const Thread& mine) {
  for (const Fed& one : frame.fed) {
    if (!one.is_pending) return true;
  }
  return frame.is_open && mine.filter->has_role(frame.direction, Role::kOutput);
}

// An op of wrapped tensors is over. Nothing was called for what they wrap, so its results were not
// observed.
void OpObserver::note_results(const at::RecordFunction& fn, Frame& frame, const Thread& mine) {
  const bool has_news = !frame.op->is_view && !frame.op->ignores_values && !frame.op->overwrites;
  if (!has_news || frame.began != mine.ops_begun) return;
  // Traced code runs later, for good.
  if (is_traced()) return;
  for (const c10::IValue& value : results_of(fn, *frame.op)) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (is_wrapper(tensor) && may_be_nonfinite(tensor.scalar_type())) {
        const bool is_fake = tensor.has_storage() && tensor.storage().device().is_meta();
        frame.unread.add(is_fake ? Readability::kMeta : Readability::kWrapper);
      }
    });
  }
}

// True if the op is an incident or, while records are on a device, may be one.
bool OpObserver::take_results(const at::RecordFunction& fn, Frame& frame, Thread& mine,
                              Incident& incident) {
  if (frame.is_composite_call) {
    for (const Frame::Held& written : frame.written) {
      if (provenance_.knows(written.tensor)) provenance_.accept(written.tensor);
    }
    return false;
  }
  if (frame.is_zero_tensor) {
    note_results(fn, frame, mine);
    return false;
  }
  if (frame.op->is_collective) {
    for (const Frame::Held& written : frame.written) {
      provenance_.wrote(written.tensor, written.version, {kCollective, false});
    }
    for (const c10::IValue& value : results_of(fn, *frame.op)) {
      for_each_tensor(value, [&](const at::Tensor& tensor) {
        if (is_read(tensor, frame)) provenance_.put(tensor, {kCollective, false});
      });
    }
    incident.place = kRanksPlace;
    return frame.op->sends && !frame.fed.empty();
  }
  if (frame.op->is_host_read) {
    incident.place = kHostPlace;
    return !frame.fed.empty();
  }
  if (!reads_results(frame, mine)) {
    for (const Frame::Held& written : frame.written) {
      if (provenance_.knows(written.tensor)) {
        provenance_.wrote(written.tensor, written.version, {kUnseen, false});
      }
    }
    incident.is_unseen = true;
    return is_deferred_ && !frame.fed.empty() && !frame.op->is_composite;
  }
  std::int32_t index = 0;
  for (const Frame::Held& written : frame.written) {
    if (provenance_.written_at(written.tensor) < frame.clock) {
      note_output(written.tensor, index, frame, mine, incident, true, written.version);
    }
    ++index;
  }
  index = 0;
  for (const c10::IValue& value : results_of(fn, *frame.op)) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      look_at_output(tensor, index++, frame, mine, incident);
    });
  }
  // A call of wrapped tensors has the number of autograd, and the same op within it the record.
  const Frame* const outer = mine.depth > 1 ? &mine.frames[mine.depth - 2] : &frame;
  const bool is_within = frame.node < 0 && outer->is_zero_tensor && outer->op == frame.op;
  const std::int64_t node = is_within ? outer->node : frame.node;
  if (node >= 0 && !incident.made.empty()) {
    ForwardOp* const made = forward_ops_.find(fn.threadId(), node);
    if (made != nullptr) made->seq = incident.made.front();
  }
  bool is_bad = false;
  for (const std::uint8_t bad : incident.is_bad) is_bad = is_bad || bad;
  if (is_bad && frame.fed.empty()) read_late(frame, mine);
  if (is_bad) read_parts(frame, mine);
  if (frame.op->converts && incident.made.empty() && !frame.fed.empty() &&
      has_integers(fn, *frame.op)) {
    incident.place = kIntegersPlace;
    return true;
  }
  for (const Fed& one : frame.fed) {
    if (one.is_arrival || !one.also.empty() || (one.is_pending && one.is_own)) return true;
  }
  if (incident.made.empty()) return false;
  return is_deferred_ || is_bad || !frame.fed.empty();
}

void OpObserver::look_at_output(const at::Tensor& tensor, std::int32_t index, Frame& frame,
                                Thread& mine, Incident& incident) {
  if (frame.op->is_allocation) {
    if (is_read(tensor) && !provenance_.find(tensor).is_whole)
      provenance_.put(tensor, {kUninitialised, false});
    return;
  }
  // What can't be read of a view can't be read of what it shows.
  if (frame.op->is_view ? !is_read(tensor) : !is_read(tensor, frame)) return;
  // A view, an argument that was returned, or what an op within this one has made. Views that a
  // kernel makes count their versions by themselves, from 0 on.
  const Known known = provenance_.find(tensor, true);
  if (known.is_whole && !known.is_unread) {
    provenance_.accept(tensor, !frame.op->is_view && Provenance::version(tensor) == 0);
    return;
  }
  // A view of what was never met is read when something uses it.
  if (frame.op->is_view || frame.shows_untold(tensor)) return;
  note_output(tensor, index, frame, mine, incident, false, 0);
}

void OpObserver::note_output(const at::Tensor& tensor, std::int32_t index, Frame& frame,
                             Thread& mine, Incident& incident, bool is_write,
                             std::int64_t version_before) {
  std::uint32_t flags = frame.is_recompute ? static_cast<std::uint32_t>(kFlagRecompute) : 0;
  if (frame.direction == Direction::kBackward) flags |= backward_flags_;
  if (frame.forward.op >= 0) {
    if (Frame* const node = mine.node()) index = node->made++;
  }
  const RecordRef ref = record(tensor, mine, site_number(frame, Role::kOutput, index), frame.call,
                               flags, may_wait(frame));
  if (is_write) {
    provenance_.wrote(tensor, version_before, ref);
  } else {
    provenance_.put(tensor, ref);
  }
  incident.infinite_scalars |= frame.scalars.largest(tensor.scalar_type());
  incident.made.push_back(ref.seq);
  incident.is_bad.push_back(ref.is_bad);
}

}  // namespace fastcheck::op_level
