#include "torch/read/waiting.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

namespace fastcheck {
namespace {

std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

// One kernel reads it with others, and its version is counted.
bool is_simple(const at::Tensor& tensor) {
  return tensor.numel() != 0 && tensor.is_non_overlapping_and_dense() && !tensor.is_inference() &&
         !tensor.is_conj() && !tensor.is_neg() &&
         !tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

// Without gradients a loop reuses its memory, and an error of the device may come of any tensor.
bool is_training() {
  return at::GradMode::is_enabled() || torch::autograd::get_current_graph_task_id() != -1;
}

bool is_changed(const Waiting::Item& item) {
  const c10::Storage& storage = item.tensor.storage();
  return version_of(item.tensor) != item.version || storage.data() != item.memory ||
         storage.nbytes() == 0;
}

bool are_in_one_memory(const at::Tensor& one, const at::Tensor& other) {
  return one.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl();
}

}  // namespace

Waiting::Site& Waiting::site_of(std::int64_t number) {
  const auto at = static_cast<std::size_t>(number);
  if (at >= sites_.size()) sites_.resize(at + 1);
  return sites_[at];
}

bool Waiting::can_wait(const at::Tensor& tensor, std::int64_t number) const {
  return type_ == tensor.device().type() && number >= 0 && is_simple(tensor) && is_training() &&
         tensor.storage().nbytes() <= kMostBytes;
}

bool Waiting::has_passed(const at::Tensor& tensor, std::int64_t number) {
  if (!can_wait(tensor, number)) return false;
  const Site& site = site_of(number);
  return !site.is_at_once && site.trial >= 0 && site.pending == 0;
}

Waiting::Turn Waiting::turn_of(const at::Tensor& tensor, std::int64_t number, std::int64_t step) {
  if (!can_wait(tensor, number)) return Turn::kNow;
  Site& site = site_of(number);
  if (site.is_at_once) return Turn::kNow;
  if (site.first < 0) site.first = step;
  if (watches_sums_ && site.first == step) {
    if (std::exchange(watched_in_, step) != step) watched_.clear();
    watched_[tensor.storage().unsafeGetStorageImpl()] = number;
    return Turn::kNow;
  }
  if (site.trial < 0) site.trial = step;
  if (site.trial == step) return Turn::kNowAndAgain;
  return site.pending == 0 ? Turn::kLater : Turn::kNow;
}

void Waiting::add(const at::Tensor& tensor, const Identity& identity, std::int64_t dtype,
                  std::int64_t order, const c10::Stream& stream) {
  stream_ = stream;
  const auto& impl = tensor.unsafeGetTensorImpl();
  at::Tensor alias(impl->shallow_copy_and_detach(impl->version_counter(), false));
  const void* const memory = alias.storage().data();
  items_.push_back({std::move(alias), identity, dtype, order, version_of(tensor), memory});
  if ((identity.flags & kAgain) != 0) ++site_of(identity.site).pending;
}

Waiting::Due Waiting::take() {
  Due due{*stream_, {}, {}};
  due.items.reserve(items_.size());
  for (Item& item : items_) {
    if (!is_changed(item)) {
      due.items.push_back(std::move(item));
      continue;
    }
    read_at_once(item);
    due.changed.push_back(std::move(item));
  }
  items_.clear();
  return due;
}

void Waiting::added_to(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return;
  const auto found = watched_.find(tensor.storage().unsafeGetStorageImpl());
  if (found != watched_.end()) site_of(found->second).is_at_once = true;
}

void Waiting::leave_stream(const at::Tensor* written) {
  if (items_.empty()) return;
  const c10::impl::VirtualGuardImpl device(stream_->device_type());
  if (device.getStream(stream_->device()) == *stream_) return;
  for (Item& item : items_) {
    read_at_once(item);
    if (written != nullptr && are_in_one_memory(item.tensor, *written)) item.memory = nullptr;
  }
}

bool Waiting::reaches(const at::Tensor& tensor) const {
  if (!tensor.has_storage()) return false;
  return std::any_of(items_.begin(), items_.end(),
                     [&](const Item& item) { return are_in_one_memory(item.tensor, tensor); });
}

std::vector<Waiting::Item> Waiting::clear() {
  sites_.clear();
  watched_.clear();
  return std::exchange(items_, {});
}

void Waiting::compared(std::int64_t number, bool are_same) {
  Site& site = site_of(number);
  --site.pending;
  if (!are_same) site.is_at_once = true;
}

}  // namespace fastcheck
