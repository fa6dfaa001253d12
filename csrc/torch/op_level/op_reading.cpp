// OpObserver, the reading part: makes records of tensors, and incidents of records.
#include <ATen/core/Tensor.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "torch/op_level/op_frame.h"
#include "torch/op_level/op_observer.h"
#include "torch/op_level/op_tensors.h"
#include "torch/read/observe.h"
#include "torch/read/unobserved.h"

namespace fastcheck::op_level {

Readability OpObserver::look(const at::Tensor& tensor) const {
  const Readability readability = readability_of(tensor);
  if (readability != Readability::kRead || tensor.is_cpu()) return readability;
  const auto type = static_cast<std::size_t>(tensor.device().type());
  return is_left_out_[type].load(std::memory_order_relaxed) ? Readability::kDevice : readability;
}

bool OpObserver::is_read(const at::Tensor& tensor, Frame& frame) const {
  const Readability readability = look(tensor);
  if (readability == Readability::kRead) return true;
  if (readability != Readability::kNothing) frame.unread.add(readability);
  return false;
}

RecordRef OpObserver::record(const at::Tensor& tensor, Thread& mine, std::int32_t site,
                             std::int32_t call, std::uint32_t flags, bool may_wait) {
  Identity identity{next_seq_++, step_, call, site, flags};
  if (tensor.is_cpu() || copies_) return record_here(tensor, mine, identity);
  is_deferred_ = true;
  const Waiting::Turn turn = may_wait && with_status_.empty()
                                 ? waiting_.turn_of(tensor, site, step_)
                                 : Waiting::Turn::kNow;
  if (turn != Waiting::Turn::kLater) mine.launches.push_back({tensor, identity});
  if (turn == Waiting::Turn::kNowAndAgain) identity.flags |= Waiting::kAgain;
  if (turn != Waiting::Turn::kNow) mine.later.push_back({tensor, identity});
  return {identity.seq, false, true};
}

RecordRef OpObserver::record_here(const at::Tensor& tensor, Thread& mine,
                                  const Identity& identity) {
  const bool is_bad =
      read_into(batch_.records.emplace_back(), tensor, mine, identity, depths_.of(tensor));
  if (is_bad) has_bad_ = true;
  return {identity.seq, is_bad};
}

// True if the tensor is non-finite.
bool OpObserver::read_into(Record& record, const at::Tensor& tensor, Thread& mine,
                           const Identity& identity, Depth depth) const {
  const Busy busy(mine.busy);
  const bool is_here = tensor.is_cpu();
  const at::Tensor copy = is_here ? at::Tensor() : on_host(tensor);
  // A copy without gaps is read in the order of what it is a copy of.
  const bool is_logical = !is_here && !tensor.is_non_overlapping_and_dense();
  observe(is_here ? tensor : copy, depth, is_logical, identity, record);
  if (!is_here && !tensor.is_cuda()) {
    record.device_mode = static_cast<std::uint8_t>(mode_of(tensor.device()));
  }
  const bool saturates = record.device_mode == static_cast<std::uint8_t>(DeviceMode::kSaturating);
  return (record.flags & kFlagNonfinite) != 0 || (saturates && record.saturated_count != 0);
}

void OpObserver::reach(const std::vector<at::Tensor>& tensors,
                       const std::vector<std::int32_t>& places) {
  Thread& mine = thread();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!has_bad_ && !is_deferred_) return;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    Incident incident;
    incident.place = places[i];
    if (!is_read(tensors[i]) || !find_bad(tensors[i], mine, incident.fed)) continue;
    if (is_deferred_) {
      batch_.waiting.push_back(std::move(incident));
    } else {
      batch_.incidents.push_back(std::move(incident));
      ++incident_count_;
    }
  }
}

// The records by which what is non-finite in a tensor is known, or may be.
bool OpObserver::find_bad(const at::Tensor& tensor, Thread& mine, std::vector<Fed>& found) const {
  const Known known = provenance_.find(tensor);
  if (known.suspects.empty()) return false;
  if (known.is_exact) {
    found.push_back({known.seq, false, false, known.bad.empty()});
    return true;
  }
  // A part of something bad may itself be finite. On a device that is not worth a record.
  if (!known.bad.empty()) {
    Record record{};
    const bool is_here = tensor.is_cpu() || copies_;
    if (known.is_stale && !is_here) return false;
    if (is_here && !read_into(record, tensor, mine, {}, Depth::kHealth)) return false;
    for (const std::int64_t seq : known.bad) found.push_back({seq, false, false});
    return true;
  }
  for (const std::int64_t seq : known.suspects) found.push_back({seq, false, false, true});
  return true;
}

void OpObserver::set_device_mode(c10::Device device, DeviceMode mode) {
  const std::lock_guard<std::mutex> lock(mutex_);
  modes_.emplace_back(device, mode);
}

DeviceMode OpObserver::mode_of(c10::Device device) const {
  for (const auto& [one, mode] : modes_) {
    if (one == device) return mode;
  }
  return DeviceMode::kUnknown;
}

void OpObserver::watch_status(c10::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  with_status_.push_back(device);
}

// Without the lock: a reading may wait for Python's, which another thread may hold that waits
// for ours.
void OpObserver::launch(Thread& mine) {
  if (mine.launches.empty() && mine.later.empty() && mine.due.empty()) return;
  const std::shared_ptr<const Options> options = this->options();
  const Busy busy(mine.busy);
  const PlainTorch plain;
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  std::vector<Launch> launches = std::exchange(mine.launches, {});
  if (options->launch && !launches.empty()) options->launch(std::move(launches));
  wait(mine);
  for (Due& due : std::exchange(mine.due, {})) {
    if (options->launch) launch_due(*options, std::move(due));
  }
}

// The line of Python is found without the observer's lock.
void OpObserver::wait(Thread& mine) {
  if (mine.later.empty()) return;
  const std::vector<Launch> later = std::exchange(mine.later, {});
  const PythonLine line = python_line();
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Launch& launch : later) {
    const c10::Device device = launch.tensor.device();
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    if (!waiting_.is_empty() && !waiting_.is_on(stream)) {
      waiting_.leave_stream();
      take_waiting(mine);
    }
    waiting_.add(launch.tensor, launch.identity, 0, 0, stream);
    waiting_lines_.emplace_back(launch.identity.seq, line);
    has_waiting_ = true;
    if (waiting_.is_full()) take_waiting(mine);
  }
}

void OpObserver::take_waiting(Thread& mine) {
  has_waiting_ = false;
  if (waiting_.is_empty()) return;
  mine.due.push_back({waiting_.take(), std::exchange(waiting_lines_, {})});
  for (const Waiting::Item& item : mine.due.back().tensors.changed) {
    if ((item.identity.flags & Waiting::kAgain) == 0) batch_.unread.push_back(item.identity.seq);
  }
}

void OpObserver::launch_due(const Options& options, Due due) {
  std::vector<Launch> launches;
  auto line = due.lines.begin();
  for (const Waiting::Item& item : due.tensors.items) {
    while (line->first != item.identity.seq) ++line;
    launches.push_back({item.tensor, item.identity, false, true, line->second});
  }
  if (launches.empty()) return;
  const c10::StreamGuard on_stream(due.tensors.stream);
  options.launch(std::move(launches));
  // The memory of another stream's tensor is not that one's before the reading is over.
  const c10::impl::VirtualGuardImpl device(due.tensors.stream.device_type());
  for (const Waiting::Item& item : due.tensors.items) {
    device.recordDataPtrOnStream(item.tensor.storage().data_ptr(), due.tensors.stream);
  }
}

// An op of torch's that has computed it from another tensor. What is made of nothing is mostly
// there to be written by what is no op.
bool OpObserver::may_wait(const Frame& frame) {
  const bool has_read = !frame.inputs.empty() || !frame.untold.empty() || !frame.fed.empty();
  return frame.op->is_plain && has_read && !frame.op->ignores_values;
}

// Reads what the op may write, before it does. Ops of others may write what they don't declare.
void OpObserver::read_waiting_before(const at::RecordFunction& fn, const Op& op, Thread& mine) {
  if (!has_waiting_.load(std::memory_order_relaxed)) return;
  if (op.is_plain && op.written.empty() && op.written_in_training.empty()) return;
  const auto inputs = arguments_of(fn, op);
  const std::lock_guard<std::mutex> lock(mutex_);
  bool reaches = !op.is_plain;
  if (reaches) waiting_.leave_stream();
  for (const auto* const places : {&op.written, &op.written_in_training}) {
    for (const std::uint8_t at : *places) {
      if (at >= inputs.size()) break;
      for_each_tensor(inputs[at], [&](const at::Tensor& tensor) {
        if (!tensor.defined() || !waiting_.reaches(tensor)) return;
        waiting_.leave_stream(&tensor);
        reaches = true;
      });
    }
  }
  if (reaches) take_waiting(mine);
}

void OpObserver::let_wait(c10::DeviceType type) {
  const std::lock_guard<std::mutex> lock(mutex_);
  waiting_.allow(type);
}

void OpObserver::read_waiting() {
  Thread& mine = thread();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    take_waiting(mine);
  }
  launch(mine);
}

void OpObserver::compared(std::int64_t site, bool are_same) {
  const std::lock_guard<std::mutex> lock(mutex_);
  waiting_.compared(site, are_same);
}

std::shared_ptr<const Options> OpObserver::options() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return options_;
}

std::int32_t OpObserver::site_number(const Frame& frame, Role role, std::int32_t index) {
  const OpSite site{frame.module, frame.op->number, frame.forward.op, frame.direction, role, index};
  const auto [found, is_new] = sites_.try_emplace(site, static_cast<std::int32_t>(sites_.size()));
  if (is_new) batch_.sites.push_back(site);
  return found->second;
}

OpObserver::Reading OpObserver::read(const at::Tensor& tensor, std::int32_t site, std::int32_t call,
                                     std::uint32_t flags) {
  Thread& mine = thread();
  Reading reading{};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Known known = provenance_.find(tensor);
    if (known.is_whole && !known.is_unread) {
      if (!known.bad.empty()) return {known.bad.front(), true, false};
      if (known.suspects.empty()) return {known.seq, false, false};
      if (known.is_exact) return {known.seq, false, false, true};
    }
    const RecordRef ref = record(tensor, mine, ~site, call, flags);
    provenance_.put(tensor, ref);
    reading = {ref.seq, ref.is_bad, known.is_collective, ref.is_pending};
  }
  launch(mine);
  return reading;
}

OpObserver::Reading OpObserver::read_anew(const at::Tensor& tensor, std::int32_t site,
                                          std::int32_t call, std::uint32_t flags, bool takes_over) {
  Thread& mine = thread();
  Reading reading{};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Known known = provenance_.find(tensor);
    const bool is_known = known.is_whole && !known.is_unread;
    const RecordRef ref = record(tensor, mine, ~site, call, flags);
    if (!is_known || takes_over) provenance_.put(tensor, ref);
    reading = {ref.seq, ref.is_bad, known.is_collective, ref.is_pending};
    if (is_known) reading.source = known.bad.empty() ? known.seq : known.bad.front();
    reading.suspects.assign(known.suspects.begin(), known.suspects.end());
  }
  launch(mine);
  return reading;
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

std::vector<Incident> OpObserver::settle(std::vector<Incident> waiting,
                                         const std::vector<std::int64_t>& bad, std::int64_t stop) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!bad.empty()) has_bad_ = true;
  arrivals_.add(bad);
  std::vector<Incident> found;
  if (has_bad_) found = arrivals_.judge(std::move(waiting));
  // Afterwards: only now it is known where what is bad in a part began.
  provenance_.settle(stop, [this](std::int64_t seq) { return arrivals_.source(seq); });
  return found;
}

std::vector<Unread::Row> OpObserver::unread() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return unread_.rows();
}

}  // namespace fastcheck::op_level
