#include "torch/observer/op_table.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <string_view>

namespace fastcheck::observer {
namespace {

bool starts_with(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

// In-place ops whose result does not depend on what was there before.
bool is_overwriting(std::string_view name) {
  constexpr std::string_view kNames[] = {
      "aten::copy_",          "aten::fill_",      "aten::zero_",      "aten::normal_",
      "aten::uniform_",       "aten::bernoulli_", "aten::random_",    "aten::exponential_",
      "aten::log_normal_",    "aten::cauchy_",    "aten::geometric_", "aten::_foreach_copy_",
      "aten::_foreach_zero_", "aten::set_",       "aten::arange",     "aten::eye",
  };
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

// In-place on what describes the memory, not on the memory.
bool is_metadata_only(std::string_view name) {
  constexpr std::string_view kNames[] = {
      "aten::detach_",    "aten::t_",        "aten::transpose_",  "aten::squeeze_",
      "aten::unsqueeze_", "aten::swapaxes_", "aten::swapdims_",   "aten::as_strided_",
      "aten::set_",       "aten::resize_",   "aten::resize_as_",  "aten::requires_grad_",
      "aten::rename_",    "aten::set_data",  "aten::_coalesced_",
  };
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

bool ignores_values(std::string_view name) {
  constexpr std::string_view kLike = "_like";
  return starts_with(name, "aten::new_") ||
         (name.size() > kLike.size() && name.substr(name.size() - kLike.size()) == kLike);
}

bool is_allocation(std::string_view name) {
  return starts_with(name, "aten::empty") || starts_with(name, "aten::new_empty") ||
         name == "aten::resize_" || name == "aten::_efficientzerotensor";
}

std::string spelt(const c10::OperatorName& name) {
  std::string text = name.name;
  const auto colons = text.find("::");
  if (colons != std::string::npos) text.replace(colons, 2, ".");
  return name.overload_name.empty() ? text : text + "." + name.overload_name;
}

}  // namespace

const Op* OpTable::find(const at::RecordFunction& fn) {
  const Key key{fn.name(), fn.overload_name()};
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = ops_.find(key);
  return found != ops_.end() ? found->second.get() : add(fn, key);
}

const Op* OpTable::Recent::find(const at::RecordFunction& fn, OpTable& table) {
  const char* const name = fn.name();
  const char* const overload = fn.overload_name();
  Slot& slot = slots_[Hash{}({name, overload}) / 8 % slots_.size()];
  if (slot.name == name && slot.overload == overload) return slot.op;
  const Op* const op = table.find(fn);
  // The name of a range that is no op may lie anywhere, and go.
  if (op != nullptr) slot = {name, overload, op};
  return op;
}

void OpTable::select(const Filter& filter) {
  const std::lock_guard<std::mutex> lock(mutex_);
  filter_ = filter;
  for (Op* const op : by_number_) op->choice = filter_.choice(op->name);
}

std::string OpTable::name(std::int32_t number) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return by_number_.at(static_cast<std::size_t>(number))->name;
}

std::string OpTable::argument(std::int32_t number, std::int32_t position) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return by_number_.at(static_cast<std::size_t>(number))
      ->arguments.at(static_cast<std::size_t>(position));
}

const Op* OpTable::add(const at::RecordFunction& fn, const Key& key) {
  const std::optional<c10::OperatorName> name = fn.operator_name();
  if (!name.has_value()) return nullptr;
  const auto handle = c10::Dispatcher::singleton().findSchema(*name);
  if (!handle.has_value()) return nullptr;
  auto op = std::make_unique<Op>();
  op->name = spelt(*name);
  op->is_own = starts_with(name->name, "fastcheck::");
  op->is_allocation = is_allocation(name->name);
  op->is_composite = handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
                     !handle->hasKernelForDispatchKey(c10::DispatchKey::CPU);
  op->number = static_cast<std::int32_t>(by_number_.size());
  op->is_collective =
      starts_with(name->name, "c10d::") || starts_with(name->name, "_c10d_functional::");
  op->ignores_values = ignores_values(name->name);
  bool is_out = false;
  const bool is_meta = is_metadata_only(name->name);
  const auto& arguments = handle->schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    op->arguments.push_back(arguments[i].name());
    const c10::AliasInfo* const alias = arguments[i].alias_info();
    if (alias == nullptr || !alias->isWrite() || is_meta) continue;
    op->written.push_back(static_cast<std::uint8_t>(i));
    is_out = is_out || arguments[i].is_out();
  }
  const auto& returns = handle->schema().returns();
  op->is_view =
      !returns.empty() && std::all_of(returns.begin(), returns.end(), [is_meta](const auto& one) {
        return one.alias_info() != nullptr && (is_meta || !one.alias_info()->isWrite());
      });
  op->overwrites = is_out || is_overwriting(name->name);
  op->choice = filter_.choice(op->name);
  by_number_.push_back(op.get());
  return (ops_[key] = std::move(op)).get();
}

}  // namespace fastcheck::observer
