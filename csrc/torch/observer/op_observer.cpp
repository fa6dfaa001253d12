#include "torch/observer/op_observer.h"

#include <ATen/ATen.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pthread.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "torch/observe.h"
#include "torch/observer/op_frame.h"
#include "torch/observer/op_tensors.h"

namespace fastcheck::observer {
namespace {

// Culprits whose Python line is looked up in one step; the first one is the one that matters.
constexpr std::int32_t kLinesPerStep = 16;
// Storages that are gone are forgotten at steps, and when so many are remembered.
constexpr std::size_t kSweepAt = 1 << 16;
constexpr std::size_t kMaxForwardOps = 1 << 20;

std::uint64_t node_key(std::uint64_t thread, std::int64_t sequence) {
  return thread << 44 ^ static_cast<std::uint64_t>(sequence);
}

struct Busy {
  explicit Busy(bool& flag) : flag_(flag) { flag_ = true; }
  ~Busy() { flag_ = false; }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  bool& flag_;
};

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& fn) {
  OpObserver::instance().begin(fn);
  return nullptr;
}

void on_end(const at::RecordFunction& fn, at::ObserverContext*) { OpObserver::instance().end(fn); }

}  // namespace

OpObserver& OpObserver::instance() {
  static OpObserver* const observer = [] {
    // A forked child (a worker of a DataLoader) is not observed: nobody there takes anything in,
    // and a lock that another thread held is held for ever.
    pthread_atfork(nullptr, nullptr, [] { instance().running_ = false; });
    return new OpObserver;
  }();
  return *observer;
}

OpObserver::Thread& OpObserver::thread() {
  thread_local Thread mine;
  const std::uint64_t run = instance().run_.load(std::memory_order_relaxed);
  if (mine.run != run) {
    // What a run left on this thread that ended within a module.
    mine = Thread();
    mine.run = run;
  }
  return mine;
}

std::uint64_t OpObserver::start(Depth depth, std::function<std::string()> line, Filter filter,
                                bool copies) {
  ops_.select(filter);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    depth_ = depth;
    line_ = std::move(line);
    filter_ = std::move(filter);
    copies_ = copies;
    has_bad_ = false;
    mode_ = nullptr;
    provenance_.clear();
    batch_ = Batch();
    sites_.clear();
    forward_ops_.clear();
    for (auto& calls : calls_) calls.clear();
    next_seq_ = 0;
    step_ = 0;
    incident_count_ = 0;
    lines_left_ = kLinesPerStep;
    active_ = true;
  }
  ++run_;
  running_ = true;
  connect();
  return run_;
}

void OpObserver::connect() {
  handle_ = at::addGlobalCallback(
      at::RecordFunctionCallback(&on_begin, &on_end)
          .needsInputs(true)
          .needsOutputs(true)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
}

void OpObserver::stop(std::uint64_t run) {
  if (run != run_ || !running_.exchange(false)) return;
  if (active_) at::removeCallback(handle_);
  const std::lock_guard<std::mutex> lock(mutex_);
  provenance_.clear();
  forward_ops_.clear();
}

void OpObserver::begin_step(std::int64_t step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  step_ = step;
  for (auto& calls : calls_) calls.assign(calls.size(), 0);
  forward_ops_.clear();
  lines_.clear();
  lines_left_ = kLinesPerStep;
  provenance_.sweep();
}

void OpObserver::set_active(bool active) {
  if (!running_ || active_.exchange(active) == active) return;
  if (!active) {
    at::removeCallback(handle_);
    return;
  }
  {
    // Whatever was written meanwhile, nobody saw it.
    const std::lock_guard<std::mutex> lock(mutex_);
    provenance_.clear();
  }
  connect();
}

void OpObserver::enter(std::int32_t module) { thread().modules.push_back(module); }

void OpObserver::leave() {
  auto& modules = thread().modules;
  if (!modules.empty()) modules.pop_back();
}

void OpObserver::set_optimizer(bool at_work) { thread().at_optimizer = at_work; }

void OpObserver::pause(int delta) { thread().paused += delta; }

// ---- Callbacks ----------------------------------------------------------------------------------

void OpObserver::begin(const at::RecordFunction& fn) {
  if (!running_.load(std::memory_order_relaxed) || !active_.load(std::memory_order_relaxed)) return;
  Thread& mine = thread();
  if (mine.busy || mine.paused > 0 || mine.is_in_kernel()) return;
  if (fn.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    begin_node(fn, mine);
  } else {
    begin_op(fn, mine);
  }
}

void OpObserver::begin_node(const at::RecordFunction& fn, Thread& mine) {
  Frame& frame = mine.push(fn);
  frame.modules = mine.modules.size();
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = forward_ops_.find(node_key(fn.forwardThreadId(), fn.seqNr()));
  if (found != forward_ops_.end()) frame.forward = found->second;
}

bool OpObserver::is_under_mode() const {
  const void* const mode = mode_.load(std::memory_order_relaxed);
  if (mode == nullptr) return false;
  using Modes = c10::impl::TorchDispatchModeTLS;
  for (std::int64_t i = Modes::stack_len(); i-- > 0;) {
    if (Modes::get_stack_at(i)->ptr(getPyInterpreter()) == mode) return true;
  }
  return false;
}

// The mode calls the op again, below autograd: there it is read. What autograd adds outside is an
// op's number in the graph, and the version of what it has written.
void OpObserver::begin_shell(const at::RecordFunction& fn, const Op& op, Thread& mine) {
  mine.shell = &op;
  mine.shell_seq = fn.seqNr();
  Frame& frame = mine.push(fn);
  frame.op = &op;
  frame.is_shell = true;
  if (op.is_allocation) return;
  const auto inputs = fn.inputs();
  for (const std::uint8_t at : op.written) {
    if (at >= inputs.size()) break;
    for_each_tensor(inputs[at], [&](const at::Tensor& tensor) {
      if (is_read(tensor, copies_))
        frame.written.push_back({tensor, Provenance::version(tensor), at});
    });
  }
}

void OpObserver::begin_op(const at::RecordFunction& fn, Thread& mine) {
  const Op* const op = mine.recent.find(fn, ops_);
  // What wraps memory has the op called again for what is wrapped: that call is the one to see.
  if (op == nullptr || takes_wrappers(fn)) return;
  if (is_under_mode()) {
    begin_shell(fn, *op, mine);
    return;
  }
  Frame& frame = mine.push(fn);
  frame.op = op;
  frame.module = mine.modules.empty() ? -1 : mine.modules.back();
  frame.direction = mine.at_optimizer ? Direction::kOptimizer : Direction::kForward;
  Choice choice = op->choice.load(std::memory_order_relaxed);
  if (mine.depth > 1 && choice == Choice::kOther && mine.frames[mine.depth - 2].opens) {
    choice = Choice::kSelected;
  }
  frame.opens = op->is_composite && choice == Choice::kSelected;
  if (torch::autograd::get_current_graph_task_id() != -1) {
    const Frame* const node = mine.node();
    frame.is_recompute = node != nullptr && mine.modules.size() > node->modules;
    if (!frame.is_recompute) {
      frame.direction = Direction::kBackward;
      if (node != nullptr) frame.forward = node->forward;
      frame.module = frame.forward.module;
      // It goes by the name of its forward, too.
      choice = std::max(choice, frame.forward.choice);
    }
  }
  const bool has_input = filter_.has_role(frame.direction, Role::kInput);
  frame.is_open = choice == Choice::kSelected && filter_.has_module(frame.module) &&
                  (has_input || filter_.has_role(frame.direction, Role::kOutput));
  std::int64_t sequence = fn.seqNr();
  std::string line;
  if (mine.shell == op) {
    sequence = mine.shell_seq;
    mine.shell = nullptr;
    // For debugging, where it may cost something: the line that a bad gradient will go back to.
    if (sequence >= 0 && frame.direction == Direction::kForward) line = line_();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  frame.clock = next_seq_;
  auto& calls = calls_[static_cast<std::size_t>(frame.direction)];
  const auto number = static_cast<std::size_t>(op->number);
  if (calls.size() <= number) calls.resize(number + 1, 0);
  frame.call = calls[number]++;
  if (frame.direction == Direction::kForward && sequence >= 0 &&
      forward_ops_.size() < kMaxForwardOps) {
    std::int32_t at = -1;
    if (!line.empty()) {
      at = static_cast<std::int32_t>(lines_.size());
      lines_.push_back(std::move(line));
    }
    forward_ops_[node_key(fn.threadId(), sequence)] = {op->number, frame.call, frame.module, choice,
                                                       at};
  }
  if (frame.forward.op >= 0) frame.call = frame.forward.call;
  if (op->is_allocation) return;
  const bool is_asked = frame.is_open || has_bad_.load(std::memory_order_relaxed);
  if (!is_asked && op->written.empty()) return;
  const auto inputs = fn.inputs();
  auto written = op->written.begin();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const bool is_written = written != op->written.end() && *written == i;
    if (is_written) ++written;
    if (is_asked) frame.infinite_scalars |= infinite(inputs[i]);
    if ((op->ignores_values || op->is_view || !is_asked) && !is_written) continue;
    for_each_tensor(inputs[i], [&](const at::Tensor& tensor) {
      if (!is_read(tensor, copies_)) return;
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        frame.infinite_scalars |= infinite(tensor);
        return;
      }
      const auto argument = static_cast<std::int32_t>(i);
      if (is_written) frame.written.push_back({tensor, Provenance::version(tensor), argument});
      if (is_asked && (!is_written || !op->overwrites)) {
        look_at_input(tensor, argument, frame, mine, is_written);
      }
    });
  }
}

bool OpObserver::reads_at_once(const Frame& frame, bool is_written) const {
  // What it is made of reads it, if that is asked for.
  if (!frame.is_open || frame.op->is_composite) return false;
  // What it is about to write is gone afterwards.
  return is_written || filter_.has_role(frame.direction, Role::kInput);
}

void OpObserver::look_at_input(const at::Tensor& tensor, std::int32_t argument, Frame& frame,
                               Thread& mine, bool is_written) {
  const Known known = provenance_.find(tensor);
  const bool is_known = known.is_whole && !known.is_unread;
  std::int64_t seq = known.seq;
  if (is_known && known.is_exact) {
    frame.fed.push_back({known.bad.front(), false, false});
  } else if (!is_known && known.bad.empty() && !reads_at_once(frame, is_written)) {
    if (!is_written) frame.unread.push_back({tensor, Provenance::version(tensor), argument});
    return;
  } else if (!is_known || !known.bad.empty()) {
    // Never met, or a part of something bad, which may itself be finite.
    const std::int32_t site = site_number(frame, Role::kInput, argument);
    Token token = record(tensor, mine, site, frame.call, 0);
    seq = token.seq;
    if (token.is_bad) {
      const bool is_arrival = known.bad.empty();
      // What is bad in a part began where the whole did.
      if (!is_arrival) token.seq = known.bad.front();
      frame.fed.push_back({token.seq, is_arrival, known.is_collective});
    }
    provenance_.put(tensor, token);
  }
  frame.inputs.push_back({argument, seq});
}

// Before an op is blamed for what it made, all that it read has to be known.
void OpObserver::read_late(Frame& frame, Thread& mine) {
  for (const Frame::Held& held : frame.unread) {
    if (Provenance::version(held.tensor) != held.version) continue;
    const Known known = provenance_.find(held.tensor);
    const std::int32_t site = site_number(frame, Role::kInput, held.argument);
    const Token token = record(held.tensor, mine, site, frame.call, 0);
    if (token.is_bad) frame.fed.push_back({token.seq, true, known.is_collective});
    provenance_.put(held.tensor, token);
    frame.inputs.push_back({held.argument, token.seq});
  }
  frame.unread.clear();
}

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
  }
  frame.written.clear();
  frame.unread.clear();
  mine.depth = at - 1;
}

void OpObserver::end_op(const at::RecordFunction& fn, Frame& frame, Thread& mine) {
  Incident incident;
  bool wants_line = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::int32_t index = 0;
    if (frame.is_shell) {
      for (const Frame::Held& written : frame.written) {
        if (provenance_.knows(written.tensor)) provenance_.accept(written.tensor);
      }
      return;
    }
    if (frame.op->is_collective) {
      for (const Frame::Held& written : frame.written) {
        provenance_.wrote(written.tensor, written.version, {kCollective, false});
      }
      for (const c10::IValue& value : fn.outputs()) {
        for_each_tensor(value, [&](const at::Tensor& tensor) {
          if (is_read(tensor, copies_)) provenance_.put(tensor, {kCollective, false});
        });
      }
      return;
    }
    // Of what fed on something non-finite it has to be known what came out.
    const bool is_followed = !frame.fed.empty();
    const bool is_made_read =
        is_followed || (frame.is_open && filter_.has_role(frame.direction, Role::kOutput));
    if (!is_made_read) {
      for (const Frame::Held& written : frame.written) {
        if (provenance_.knows(written.tensor)) {
          provenance_.wrote(written.tensor, written.version, {kUnseen, false});
        }
      }
      return;
    }
    for (const Frame::Held& written : frame.written) {
      if (provenance_.written_at(written.tensor) < frame.clock) {
        note_output(written.tensor, index, frame, mine, incident, true, written.version);
      }
      ++index;
    }
    index = 0;
    for (const c10::IValue& value : fn.outputs()) {
      for_each_tensor(value, [&](const at::Tensor& tensor) {
        look_at_output(tensor, index++, frame, mine, incident);
      });
    }
    if (provenance_.size() > kSweepAt) provenance_.sweep();
    bool is_bad = false;
    for (const std::uint8_t bad : incident.is_bad) is_bad = is_bad || bad;
    if (is_bad && frame.fed.empty()) read_late(frame, mine);
    bool is_arrival = false;
    for (const Fed& one : frame.fed) is_arrival = is_arrival || one.is_arrival;
    // A view, or an op whose results are integers, tells nothing new of what it read.
    if (!is_arrival && (incident.made.empty() || (frame.fed.empty() && !is_bad))) return;
    const auto forward_line = static_cast<std::size_t>(frame.forward.line);
    if (frame.forward.line >= 0 && forward_line < lines_.size()) {
      incident.forward_line = lines_[forward_line];
    }
    wants_line = is_bad && line_ && lines_left_ > 0;
    if (wants_line) --lines_left_;
  }
  incident.op = frame.op->number;
  incident.direction = frame.direction;
  incident.is_recompute = frame.is_recompute;
  incident.infinite_scalars = frame.infinite_scalars;
  incident.fed = frame.fed;
  incident.inputs = frame.inputs;
  if (const Frame* const node = mine.node()) incident.node = node->fn->name();
  if (wants_line) incident.line = line_();
  const std::lock_guard<std::mutex> lock(mutex_);
  batch_.incidents.push_back(std::move(incident));
  ++incident_count_;
}

void OpObserver::look_at_output(const at::Tensor& tensor, std::int32_t index, Frame& frame,
                                Thread& mine, Incident& incident) {
  if (!is_read(tensor, copies_)) return;
  if (frame.op->is_allocation) {
    if (!provenance_.find(tensor).is_whole) provenance_.put(tensor, {kUninitialised, false});
    return;
  }
  // A view, an argument that was returned, or what an op within this one has made. Views that a
  // kernel makes count their versions by themselves.
  const Known known = provenance_.find(tensor, true);
  if (known.is_whole && !known.is_unread) {
    provenance_.accept(tensor);
    return;
  }
  // A view of what was never met is read when something uses it.
  if (!frame.op->is_view) note_output(tensor, index, frame, mine, incident, false, 0);
}

void OpObserver::note_output(const at::Tensor& tensor, std::int32_t index, Frame& frame,
                             Thread& mine, Incident& incident, bool is_write,
                             std::int64_t version_before) {
  std::uint32_t flags = frame.is_recompute ? static_cast<std::uint32_t>(kFlagRecompute) : 0;
  if (frame.direction == Direction::kBackward) flags |= backward_flags_;
  if (frame.forward.op >= 0) {
    if (Frame* const node = mine.node()) index = node->made++;
  }
  const Token token =
      record(tensor, mine, site_number(frame, Role::kOutput, index), frame.call, flags);
  if (is_write) {
    provenance_.wrote(tensor, version_before, token);
  } else {
    provenance_.put(tensor, token);
  }
  incident.made.push_back(token.seq);
  incident.is_bad.push_back(token.is_bad);
}

// ---- Records ------------------------------------------------------------------------------------

Token OpObserver::record(const at::Tensor& tensor, Thread& mine, std::int32_t site,
                         std::int32_t call, std::uint32_t flags) {
  const Busy busy(mine.busy);
  const bool is_here = tensor.is_cpu();
  const at::Tensor copy = is_here ? at::Tensor() : on_host(tensor);
  const std::int64_t seq = next_seq_++;
  Record& record = batch_.records.emplace_back();
  // A copy without gaps is read in the order of what it is a copy of.
  const bool is_logical = !is_here && !tensor.is_non_overlapping_and_dense();
  observe(is_here ? tensor : copy, depth_, is_logical, {seq, step_, call, site, flags}, record);
  if (!is_here && !tensor.is_cuda()) {
    record.device_mode = static_cast<std::uint8_t>(DeviceMode::kUnknown);
  }
  const bool is_bad = (record.flags & kFlagNonfinite) != 0;
  if (is_bad) has_bad_ = true;
  return {seq, is_bad};
}

std::int32_t OpObserver::site_number(const Frame& frame, Role role, std::int32_t index) {
  const OpSite site{frame.module, frame.op->number, frame.forward.op, frame.direction, role, index};
  const auto [found, is_new] = sites_.try_emplace(site, static_cast<std::int32_t>(sites_.size()));
  if (is_new) batch_.sites.push_back(site);
  return found->second;
}

OpObserver::Reading OpObserver::read(const at::Tensor& tensor, std::int32_t site, std::int32_t call,
                                     std::uint32_t flags) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Known known = provenance_.find(tensor);
  if (known.is_whole && !known.is_unread) {
    return {known.bad.empty() ? -1 : known.bad.front(), !known.bad.empty(), false};
  }
  const Token token = record(tensor, thread(), ~site, call, flags);
  provenance_.put(tensor, token);
  return {token.seq, token.is_bad, known.is_collective};
}

Batch OpObserver::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Batch taken = std::move(batch_);
  batch_ = Batch();
  batch_.first_site = static_cast<std::int32_t>(sites_.size());
  batch_.records.reserve(taken.records.size());
  incident_count_ = 0;
  return taken;
}

}  // namespace fastcheck::observer
