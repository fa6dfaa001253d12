// OpObserver, the beginning of an op: starting and stopping, modules, modes, and its inputs.
#include "torch/op_level/op_observer.h"

#include <ATen/core/Tensor.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pthread.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "torch/op_level/op_frame.h"
#include "torch/op_level/op_tensors.h"

namespace fastcheck::op_level {
namespace {

// Culprits whose Python line is looked up in one step; the first one is the one that matters.
constexpr std::int32_t kLinesPerStep = 16;

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& fn) {
  OpObserver::instance().begin(fn);
  return nullptr;
}

void on_end(const at::RecordFunction& fn, at::ObserverContext*) { OpObserver::instance().end(fn); }

}  // namespace

OpObserver& OpObserver::instance() {
  static OpObserver* const observer = [] {
    // A forked child (a worker of a DataLoader) is not observed: nothing there takes records in,
    // and a lock that another thread held is held for ever.
    pthread_atfork(nullptr, nullptr, [] { instance().running_ = false; });
    return new OpObserver;
  }();
  return *observer;
}

OpObserver::Thread& OpObserver::thread() {
  thread_local Thread mine;
  OpObserver& observer = instance();
  const std::uint64_t run = observer.run_.load(std::memory_order_acquire);
  // Within our own code someone holds a Frame, and what runs there is not observed.
  if (mine.run != run && !mine.busy) observer.renew(mine, run);
  return mine;
}

// Drops what a run left on this thread that ended within a module.
void OpObserver::renew(Thread& mine, std::uint64_t run) {
  Thread old;
  std::swap(mine, old);
  mine.run = run;
  const std::lock_guard<std::mutex> lock(mutex_);
  mine.filter = filter_;
}

std::uint64_t OpObserver::start(Options options) {
  ops_.select(options.filter);
  const std::lock_guard<std::mutex> running(running_mutex_);
  std::vector<Waiting::Item> dropped;  // let go without the lock
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    dropped = waiting_.clear();
    waiting_.watch_sums();
    waiting_.allow(std::nullopt);
    waiting_lines_.clear();
    has_waiting_ = false;
    depths_ = Depths(options.depth);
    filter_ = std::make_shared<const Filter>(options.filter);
    copies_ = options.copies;
    // Without a callback that reads devices everything but the CPU is left out.
    const bool is_alone = !options.copies && !options.launch;
    for (auto& one : is_left_out_) one = is_alone;
    is_left_out_[static_cast<std::size_t>(c10::DeviceType::CPU)] = false;
    options_ = std::make_shared<const Options>(std::move(options));
    has_bad_ = is_deferred_ = false;
    modes_.clear();
    with_status_.clear();
    mode_ = nullptr;
    backward_flags_ = 0;
    provenance_.clear();
    arrivals_.clear();
    unread_.clear();
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
  if (!running_) return;  // in a forked child another thread may hold the locks for ever
  const std::lock_guard<std::mutex> running(running_mutex_);
  if (run != run_ || !running_.exchange(false)) return;
  if (active_) at::removeCallback(handle_);
  std::vector<Waiting::Item> dropped;  // let go without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  dropped = waiting_.clear();
  waiting_lines_.clear();
  has_waiting_ = false;
  provenance_.clear();
  forward_ops_.clear();
}

void OpObserver::begin_step(std::int64_t step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (step_.exchange(step) == step) return;
  for (auto& calls : calls_) calls.assign(calls.size(), 0);
  forward_ops_.begin_step();
  lines_left_ = kLinesPerStep;
}

void OpObserver::set_depth(Depth depth) {
  const std::lock_guard<std::mutex> lock(mutex_);
  depths_.set(depth);
}

void OpObserver::set_active(bool active) {
  if (!running_) return;
  const std::lock_guard<std::mutex> running(running_mutex_);
  if (!running_ || active_.exchange(active) == active) return;
  if (!active) {
    at::removeCallback(handle_);
    return;
  }
  {
    // Writes in the meantime were not observed.
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

void OpObserver::set_api(std::int64_t api) { thread().api = api; }

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
    launch(mine);
  }
}

void OpObserver::begin_node(const at::RecordFunction& fn, Thread& mine) {
  Frame& frame = mine.push(fn);
  frame.modules = mine.modules.size();
  frame.python = python_frame();
  const std::lock_guard<std::mutex> lock(mutex_);
  const ForwardOp* const found = forward_ops_.find(fn.forwardThreadId(), fn.seqNr());
  if (found != nullptr) frame.forward = *found;
}

// A torch.autograd.Function is no op. Its node has a number like those of ops.
void OpObserver::begin_function(const at::RecordFunction& fn, Thread& mine) {
  if (fn.seqNr() < 0) return;
  const Frame* const node = mine.node_of_backward();
  ForwardOp function;
  function.module = mine.modules.empty() ? -1 : mine.modules.back();
  function.api = mine.api;
  if (node != nullptr) {
    function.module = node->forward.module;
    function.api = node->forward.api;
  }
  function.line = Thread::line(node);
  const std::lock_guard<std::mutex> lock(mutex_);
  forward_ops_.add(fn.threadId(), fn.seqNr(), function);
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
void OpObserver::begin_composite(const at::RecordFunction& fn, const Op& op, Thread& mine) {
  mine.composite = &op;
  mine.composite_seq = fn.seqNr();
  Frame& frame = mine.push(fn);
  frame.op = &op;
  frame.is_composite_call = true;
  if (op.is_allocation) return;
  const auto inputs = arguments_of(fn, op);
  for (const std::uint8_t at : op.written) {
    if (at >= inputs.size()) break;
    for_each_tensor(inputs[at], [&](const at::Tensor& tensor) {
      if (is_read(tensor)) frame.written.push_back({tensor, Provenance::version(tensor), at});
    });
  }
}

// The op is called again for what its arguments wrap; if it is not, its writes were not observed.
void OpObserver::begin_zero_tensor(const at::RecordFunction& fn, const Op& op, Thread& mine) {
  const bool opens = mine.depth > 0 && mine.frames[mine.depth - 1].opens;
  Frame& frame = mine.push(fn);
  frame.op = &op;
  frame.is_zero_tensor = true;
  frame.began = mine.ops_begun;
  const Choice choice = op.choice.load(std::memory_order_relaxed);
  frame.opens = opens || (op.is_composite && choice == Choice::kSelected);
  if (fn.seqNr() < 0 || torch::autograd::get_current_graph_task_id() != -1) return;
  // The node of autograd is that of this call, not of what the call within is made of.
  frame.line = Thread::line(nullptr);
  const std::int32_t module = mine.modules.empty() ? -1 : mine.modules.back();
  const auto number = static_cast<std::size_t>(op.number);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto& calls = calls_[static_cast<std::size_t>(Direction::kForward)];
  const std::int32_t call = number < calls.size() ? calls[number] : 0;
  frame.node = fn.seqNr();
  forward_ops_.add(fn.threadId(), fn.seqNr(),
                   {op.number, call, module, mine.api, choice, frame.line, -1});
}

void OpObserver::begin_op(const at::RecordFunction& fn, Thread& mine) {
  const Op* const op = mine.recent.find(fn, ops_);
  if (op == nullptr) {
    begin_function(fn, mine);
    return;
  }
  if (op->is_own) {
    // Ops that it calls are within it, as within any kernel.
    Frame& frame = mine.push(fn);
    frame.op = op;
    frame.is_open = false;
    return;
  }
  read_waiting_before(fn, *op, mine);
  if (takes_wrappers(fn, *op)) {
    begin_zero_tensor(fn, *op, mine);
    return;
  }
  ++mine.ops_begun;
  if (is_under_mode()) {
    begin_composite(fn, *op, mine);
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
  const bool has_input = mine.filter->has_role(frame.direction, Role::kInput);
  frame.is_open = choice == Choice::kSelected && mine.filter->has_module(frame.module) &&
                  (has_input || mine.filter->has_role(frame.direction, Role::kOutput));
  std::int64_t sequence = fn.seqNr();
  if (mine.composite == op) {
    sequence = mine.composite_seq;
    mine.composite = nullptr;
  }
  const bool is_backward = frame.direction == Direction::kBackward;
  if (sequence >= 0) {
    // An op that is called by another op is on that op's line.
    const Frame* const outer = mine.depth > 1 ? &mine.frames[mine.depth - 2] : nullptr;
    const bool is_within = outer != nullptr && outer->op != nullptr && outer->line;
    frame.line = is_within ? outer->line : Thread::line(is_backward ? mine.node() : nullptr);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  frame.clock = next_seq_;
  // No node runs: autograd adds up what two of them have made.
  if (is_backward && mine.node() == nullptr && !op->written.empty()) {
    const auto inputs = arguments_of(fn, *op);
    for_each_tensor(inputs[op->written.front()],
                    [&](const at::Tensor& tensor) { waiting_.added_to(tensor); });
  }
  auto& calls = calls_[static_cast<std::size_t>(frame.direction)];
  const auto number = static_cast<std::size_t>(op->number);
  if (calls.size() <= number) calls.resize(number + 1, 0);
  frame.call = calls[number]++;
  if (sequence >= 0 && is_backward) {
    // A gradient of a gradient: the op has a name in the first backward alone.
    const ForwardOp again{-1, 0, frame.module, frame.forward.api, Choice::kOther, frame.line, -1};
    forward_ops_.add(fn.threadId(), sequence, again);
  } else if (sequence >= 0 && frame.direction == Direction::kForward) {
    frame.node = sequence;
    forward_ops_.add(fn.threadId(), sequence,
                     {op->number, frame.call, frame.module, mine.api, choice, frame.line, -1});
  }
  if (frame.forward.op >= 0) frame.call = frame.forward.call;
  if (op->is_allocation) return;
  const bool is_asked = frame.is_open || has_bad_.load(std::memory_order_relaxed) ||
                        is_deferred_.load(std::memory_order_relaxed);
  if (!is_asked && op->written.empty() && op->written_in_training.empty()) return;
  const auto inputs = arguments_of(fn, *op);
  auto written = op->written.begin();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const bool is_written = written != op->written.end() && *written == i;
    if (is_written) ++written;
    if (is_asked) frame.scalars.add(inputs[i]);
    if ((op->ignores_values || op->is_view || !is_asked) && !is_written) continue;
    for_each_tensor(inputs[i], [&](const at::Tensor& tensor) {
      if (!is_read(tensor, frame)) return;
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        frame.scalars.add(tensor);
        return;
      }
      const auto argument = static_cast<std::int32_t>(i);
      if (is_written) frame.written.push_back({tensor, Provenance::version(tensor), argument});
      if (is_asked && (!is_written || !op->overwrites)) {
        look_at_input(tensor, argument, frame, mine, is_written);
      }
    });
  }
  forget_statistics(*op, inputs);
}

// The running statistics that a batch norm leaves are read when something asks for them.
void OpObserver::forget_statistics(const Op& op, c10::ArrayRef<const c10::IValue> inputs) {
  if (op.written_in_training.empty() || op.is_composite) return;
  const std::size_t training = op.place("training");
  if (training < inputs.size() && inputs[training].isBool() && !inputs[training].toBool()) return;
  for (const std::uint8_t at : op.written_in_training) {
    if (at >= inputs.size()) break;
    for_each_tensor(inputs[at], [&](const at::Tensor& tensor) {
      if (is_read(tensor)) provenance_.put(tensor, {kUnseen, false});
    });
  }
}

bool OpObserver::reads_at_once(const Frame& frame, const Thread& mine, bool is_written) {
  // A composite op's parts read the input, if that is asked for.
  if (!frame.is_open || frame.op->is_composite) return false;
  // An input that it is about to write is gone afterwards.
  return is_written || mine.filter->has_role(frame.direction, Role::kInput);
}

void OpObserver::look_at_input(const at::Tensor& tensor, std::int32_t argument, Frame& frame,
                               Thread& mine, bool is_written) {
  const Known known = provenance_.find(tensor);
  const bool is_known = known.is_whole && !known.is_unread;
  const bool is_suspect = !known.suspects.empty();
  std::int64_t seq = known.seq;
  bool is_part = is_known && (!known.is_exact || known.is_of_origin);
  if (is_known && known.is_exact && is_suspect) {
    frame.fed.push_back({seq, false, false, known.bad.empty()});
    if (is_part && frame.is_open && !is_written && tensor.is_cpu()) {
      frame.told.push_back({tensor, Provenance::version(tensor), argument, is_part});
    }
  } else if ((!is_known || is_suspect) && known.bad.empty() &&
             !reads_at_once(frame, mine, is_written)) {
    if (!is_known && !is_written) {
      frame.untold.push_back({tensor, Provenance::version(tensor), argument});
    }
    return;
  } else if (!is_known || is_suspect) {
    // Never met, or a part of something bad, which may itself be finite.
    const std::int32_t site = site_number(frame, Role::kInput, argument);
    RecordRef ref = record(tensor, mine, site, frame.call, 0);
    seq = ref.seq;
    is_part = false;
    if (ref.is_pending || ref.is_bad) {
      Fed fed = fed_by(ref, known);
      const bool is_mixed = !fed.also.empty();
      if (ref.is_bad && !is_mixed) {
        ref.is_of_origin = ref.seq != fed.seq;
        ref.seq = fed.seq;
      }
      frame.fed.push_back(std::move(fed));
      // What a composite op calls is told before it: these ops read it themselves.
      if (is_mixed && frame.op->is_composite) return;
    }
    provenance_.put(tensor, ref);
  } else if (frame.is_open && !is_written && tensor.is_cpu()) {
    frame.told.push_back({tensor, Provenance::version(tensor), argument, is_part});
  }
  frame.inputs.push_back({argument, seq, is_part});
}

// Something that an op has just read, of which `known` was known before.
Fed OpObserver::fed_by(const RecordRef& ref, const Known& known) const {
  if (ref.is_pending) {
    return {ref.seq, false, known.is_collective,
            true,    true,  {known.suspects.begin(), known.suspects.end()}};
  }
  const bool is_arrival = known.bad.empty();
  // A bad value in a part began where the whole did.
  Fed fed{is_arrival ? ref.seq : known.bad.front(), is_arrival, known.is_collective};
  if (known.bad.size() > 1) {
    fed.read = ref.seq;
    fed.also.assign(known.bad.begin() + 1, known.bad.end());
  }
  return fed;
}

// Before an op is blamed for what it made, all that it read has to be known.
void OpObserver::read_late(Frame& frame, Thread& mine) {
  for (const Frame::Held& held : frame.untold) {
    if (Provenance::version(held.tensor) != held.version) continue;
    const Known known = provenance_.find(held.tensor);
    const std::int32_t site = site_number(frame, Role::kInput, held.argument);
    const RecordRef ref = record(held.tensor, mine, site, frame.call, 0);
    if (ref.is_pending || ref.is_bad) frame.fed.push_back(fed_by(ref, known));
    provenance_.put(held.tensor, ref);
    frame.inputs.push_back({held.argument, ref.seq});
  }
  frame.untold.clear();
  // A number that was given as infinite explains what was made: nothing need be looked for.
  if (!frame.fed.empty() || frame.scalars.infinite() != 0) return;
  for (const Frame::Held& held : frame.told) {
    // Written without torch: through x.numpy(), by a library that has its address.
    Record found{};
    if (Provenance::version(held.tensor) != held.version ||
        !read_into(found, held.tensor, mine, {}, Depth::kHealth)) {
      continue;
    }
    const std::int32_t site = site_number(frame, Role::kInput, held.argument);
    const RecordRef ref = record(held.tensor, mine, site, frame.call, 0);
    frame.fed.push_back({ref.seq, true, false});
    provenance_.put(held.tensor, ref);
  }
}

// An op that is blamed is told what it read, not what lies around that in memory.
void OpObserver::read_parts(Frame& frame, Thread& mine) {
  for (const Frame::Held& held : frame.told) {
    if (!held.is_part || Provenance::version(held.tensor) != held.version) continue;
    const std::int32_t site = site_number(frame, Role::kInput, held.argument);
    const RecordRef ref = record(held.tensor, mine, site, frame.call, 0);
    for (Input& input : frame.inputs) {
      if (!input.is_part || input.argument != held.argument) continue;
      input = {held.argument, ref.seq, false};
      break;
    }
  }
}

}  // namespace fastcheck::op_level
