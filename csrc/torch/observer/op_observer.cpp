#include "torch/observer/op_observer.h"

#include <ATen/ATen.h>
#include <pthread.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cmath>

#include "torch/observe.h"
#include "torch/tensor_view.h"

namespace fastcheck::observer {
namespace {

// Culprits whose Python line is looked up in one step; the first one is the one that matters.
constexpr std::int32_t kLinesPerStep = 16;
// Storages that are gone are forgotten at steps, and when so many are remembered.
constexpr std::size_t kSweepAt = 1 << 16;
constexpr std::size_t kMaxForwardOps = 1 << 20;

// Its bytes are elsewhere: within a subclass, under a transform of functorch, or nowhere.
bool is_wrapper(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kWrapped({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                          c10::DispatchKey::FuncTorchBatched,
                                          c10::DispatchKey::FuncTorchGradWrapper,
                                          c10::DispatchKey::ZeroTensor});
  return tensor.defined() && tensor.key_set().has_any(kWrapped);
}

// Plain floating-point memory on the CPU.
bool is_read(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_cpu()) return false;
  const auto type = tensor.scalar_type();
  if (!at::isFloatingType(type) && !at::isComplexType(type)) return false;
  if (tensor.layout() != at::kStrided || !dtype_of(type).has_value()) return false;
  if (is_wrapper(tensor) || !tensor.has_storage() || tensor.is_nested()) return false;
  return tensor.numel() == 0 || tensor.storage().nbytes() > 0;
}

template <class Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor()) visit(item.toTensor());
    }
  }
}

bool takes_wrappers(const at::RecordFunction& fn) {
  bool found = false;
  for (const c10::IValue& input : fn.inputs()) {
    for_each_tensor(input, [&](const at::Tensor& tensor) { found = found || is_wrapper(tensor); });
  }
  return found;
}

std::uint8_t infinite(const c10::IValue& value) {
  if (!value.isDouble() || !std::isinf(value.toDouble())) return 0;
  return value.toDouble() > 0 ? 1 : 2;
}

// Of a number that was made a tensor to be an operand.
std::uint8_t infinite(const at::Tensor& number) {
  if (number.scalar_type() != at::kDouble) return 0;
  const double value = *number.const_data_ptr<double>();
  return !std::isinf(value) ? 0 : value > 0 ? 1 : 2;
}

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

// An op, or a node of autograd, that is running.
struct OpObserver::Frame {
  const at::RecordFunction* fn = nullptr;
  const Op* op = nullptr;  // null: a node
  std::int32_t module = -1;
  std::int32_t call = 0;
  ForwardOp forward{-1, 0, -1};
  Direction direction = Direction::kForward;
  bool is_recompute = false;
  std::uint8_t infinite_scalars = 0;
  // Of a node: how many modules were entered when it began, and what ops have made within it.
  std::size_t modules = 0;
  std::int32_t made = 0;
  std::int64_t clock = 0;
  std::vector<Fed> fed;
  std::vector<Input> inputs;
  struct Written {
    at::Tensor tensor;
    std::int64_t version;
  };
  std::vector<Written> written;
};

struct OpObserver::Thread {
  std::vector<Frame> frames;  // [0, depth) are running; the others are kept for their memory
  std::size_t depth = 0;
  std::vector<std::int32_t> modules;
  int paused = 0;
  std::uint64_t run = 0;  // of the observer, that the rest belongs to
  bool at_optimizer = false;
  bool busy = false;  // within our own code: resolving a view calls ops

  Frame& push(const at::RecordFunction& fn) {
    if (depth == frames.size()) frames.emplace_back();
    Frame& frame = frames[depth++];
    frame.fn = &fn;
    frame.op = nullptr;
    frame.forward = {-1, 0, -1};
    frame.is_recompute = false;
    frame.made = 0;
    frame.infinite_scalars = 0;
    frame.fed.clear();
    frame.inputs.clear();
    frame.written.clear();
    return frame;
  }
  // What an op with a kernel of its own calls is part of it, and not looked at.
  bool is_in_kernel() const {
    return depth > 0 && frames[depth - 1].op != nullptr && !frames[depth - 1].op->is_composite;
  }
  // The innermost node of autograd that is running; null: none is.
  Frame* node() {
    for (std::size_t i = depth; i-- > 0;) {
      if (frames[i].op == nullptr) return &frames[i];
    }
    return nullptr;
  }
};

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

std::uint64_t OpObserver::start(Depth depth, std::function<std::string()> line) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    depth_ = depth;
    line_ = std::move(line);
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
  handle_ = at::addGlobalCallback(
      at::RecordFunctionCallback(&on_begin, &on_end)
          .needsInputs(true)
          .needsOutputs(true)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  return run_;
}

void OpObserver::stop(std::uint64_t run) {
  if (run != run_ || !running_.exchange(false)) return;
  at::removeCallback(handle_);
  const std::lock_guard<std::mutex> lock(mutex_);
  provenance_.clear();
  forward_ops_.clear();
}

void OpObserver::begin_step(std::int64_t step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  step_ = step;
  for (auto& calls : calls_) calls.assign(calls.size(), 0);
  forward_ops_.clear();
  lines_left_ = kLinesPerStep;
  provenance_.sweep();
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

void OpObserver::begin_op(const at::RecordFunction& fn, Thread& mine) {
  const Op* const op = ops_.find(fn);
  // What wraps memory has the op called again for what is wrapped: that call is the one to see.
  if (op == nullptr || takes_wrappers(fn)) return;
  Frame& frame = mine.push(fn);
  frame.op = op;
  frame.module = mine.modules.empty() ? -1 : mine.modules.back();
  frame.direction = mine.at_optimizer ? Direction::kOptimizer : Direction::kForward;
  if (torch::autograd::get_current_graph_task_id() != -1) {
    const Frame* const node = mine.node();
    frame.is_recompute = node != nullptr && mine.modules.size() > node->modules;
    if (!frame.is_recompute) {
      frame.direction = Direction::kBackward;
      if (node != nullptr) frame.forward = node->forward;
      frame.module = frame.forward.module;
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  frame.clock = next_seq_;
  auto& calls = calls_[static_cast<std::size_t>(frame.direction)];
  const auto number = static_cast<std::size_t>(op->number);
  if (calls.size() <= number) calls.resize(number + 1, 0);
  frame.call = calls[number]++;
  if (frame.direction == Direction::kForward && fn.seqNr() >= 0 &&
      forward_ops_.size() < kMaxForwardOps) {
    forward_ops_[node_key(fn.threadId(), fn.seqNr())] = {op->number, frame.call, frame.module};
  }
  if (frame.forward.op >= 0) frame.call = frame.forward.call;
  if (op->is_allocation) return;
  const auto inputs = fn.inputs();
  auto written = op->written.begin();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const bool is_written = written != op->written.end() && *written == i;
    if (is_written) ++written;
    frame.infinite_scalars |= infinite(inputs[i]);
    if ((op->ignores_values || op->is_view) && !is_written) continue;
    for_each_tensor(inputs[i], [&](const at::Tensor& tensor) {
      if (!is_read(tensor)) return;
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        frame.infinite_scalars |= infinite(tensor);
        return;
      }
      if (is_written) frame.written.push_back({tensor, Provenance::version(tensor)});
      if (!is_written || !op->overwrites) {
        look_at_input(tensor, static_cast<std::int32_t>(i), frame, mine);
      }
    });
  }
}

void OpObserver::look_at_input(const at::Tensor& tensor, std::int32_t argument, Frame& frame,
                               Thread& mine) {
  const Known known = provenance_.find(tensor);
  const bool is_known = known.is_whole && !known.is_unread;
  std::int64_t seq = known.seq;
  if (is_known && known.is_exact) {
    frame.fed.push_back({known.bad.front(), false, false});
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

void OpObserver::end(const at::RecordFunction& fn) {
  Thread& mine = thread();
  if (mine.depth == 0 || mine.busy) return;
  // Frames above it ended on another thread, or not at all.
  std::size_t at = mine.depth;
  while (at > 0 && mine.frames[at - 1].fn != &fn) --at;
  if (at == 0) return;
  mine.depth = at;
  Frame& frame = mine.frames[at - 1];
  if (frame.op != nullptr && running_.load(std::memory_order_relaxed)) end_op(fn, frame, mine);
  frame.written.clear();
  mine.depth = at - 1;
}

void OpObserver::end_op(const at::RecordFunction& fn, Frame& frame, Thread& mine) {
  Incident incident;
  bool wants_line = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::int32_t index = 0;
    if (frame.op->is_collective) {
      for (const Frame::Written& written : frame.written) {
        provenance_.wrote(written.tensor, written.version, {kCollective, false});
      }
      for (const c10::IValue& value : fn.outputs()) {
        for_each_tensor(value, [&](const at::Tensor& tensor) {
          if (is_read(tensor)) provenance_.put(tensor, {kCollective, false});
        });
      }
      return;
    }
    for (const Frame::Written& written : frame.written) {
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
    bool is_arrival = false;
    for (const Fed& one : frame.fed) is_arrival = is_arrival || one.is_arrival;
    // A view, or an op whose results are integers, tells nothing new of what it read.
    if (!is_arrival && (incident.made.empty() || (frame.fed.empty() && !is_bad))) return;
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
  if (!is_read(tensor)) return;
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
  const std::int64_t seq = next_seq_++;
  batch_.records.emplace_back();
  const Busy busy(mine.busy);
  observe(tensor, depth_, false, {seq, step_, call, site, flags}, batch_.records.back());
  return {seq, (batch_.records.back().flags & kFlagNonfinite) != 0};
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
