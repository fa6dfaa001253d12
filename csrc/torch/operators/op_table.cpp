#include "torch/operators/op_table.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <string_view>

namespace fastcheck {
namespace {

bool starts_with(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

// True for in-place ops whose result does not depend on what was there before.
bool is_overwriting(std::string_view name) {
  constexpr std::string_view kNames[] = {
      "aten::copy_",          "aten::fill_",      "aten::zero_",      "aten::normal_",
      "aten::uniform_",       "aten::bernoulli_", "aten::random_",    "aten::exponential_",
      "aten::log_normal_",    "aten::cauchy_",    "aten::geometric_", "aten::_foreach_copy_",
      "aten::_foreach_zero_", "aten::set_",       "aten::arange",     "aten::eye",
  };
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

// True for ops that write in place what describes the memory, not the memory.
bool is_metadata_only(std::string_view name) {
  constexpr std::string_view kNames[] = {
      "aten::detach_",    "aten::t_",        "aten::transpose_",  "aten::squeeze_",
      "aten::unsqueeze_", "aten::swapaxes_", "aten::swapdims_",   "aten::as_strided_",
      "aten::set_",       "aten::resize_",   "aten::resize_as_",  "aten::requires_grad_",
      "aten::rename_",    "aten::set_data",  "aten::_coalesced_",
  };
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

// Copies a rank's part into memory that a collective is to fill, and returns all of it.
constexpr std::string_view kRoomForCollective = "fsdp::all_gather_copy_in";

bool ignores_values(std::string_view name) {
  // Those of collectives are given what one is still writing, or is to write.
  constexpr std::string_view kOfCollectives[] = {
      "_c10d_functional::wait_tensor",
      "_c10d_functional::_wrap_tensor_autograd",
      kRoomForCollective,
  };
  if (std::find(std::begin(kOfCollectives), std::end(kOfCollectives), name) !=
      std::end(kOfCollectives)) {
    return true;
  }
  constexpr std::string_view kLike = "_like";
  return starts_with(name, "aten::new_") ||
         (name.size() > kLike.size() && name.substr(name.size() - kLike.size()) == kLike);
}

bool is_allocation(std::string_view name) {
  return starts_with(name, "aten::empty") || starts_with(name, "aten::new_empty") ||
         name == "aten::resize_" || name == "aten::_efficientzerotensor";
}

// Batch norms from before schemas had running statistics as written.
bool writes_statistics(std::string_view name) {
  return name.find("batch_norm") != std::string_view::npos &&
         name.find("backward") == std::string_view::npos;
}

std::string spelt(const c10::OperatorName& name) {
  std::string text = name.name;
  const auto colons = text.find("::");
  if (colons != std::string::npos) text.replace(colons, 2, ".");
  return name.overload_name.empty() ? text : text + "." + name.overload_name;
}

}  // namespace

OpTable& OpTable::instance() {
  static OpTable* const table = new OpTable;  // threads that end last may be inside it
  return *table;
}

const Op* OpTable::find(const at::RecordFunction& fn) {
  const Key key{fn.name(), fn.overload_name()};
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = ops_.find(key);
  if (found != ops_.end()) return found->second;
  const std::optional<c10::OperatorName> name = fn.operator_name();
  const Op* const op = name.has_value() ? add(*name) : nullptr;
  if (op != nullptr) ops_.emplace(key, op);
  return op;
}

const Op* OpTable::find(const c10::OperatorName& name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return add(name);
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

const Op* OpTable::add(const c10::OperatorName& operator_name) {
  const auto handle = c10::Dispatcher::singleton().findSchema(operator_name);
  if (!handle.has_value()) return nullptr;
  // A library in Python may be defined again, with another schema under the same name.
  std::string schema = c10::toString(handle->schema());
  const auto known = by_schema_.find(schema);
  if (known != by_schema_.end()) return known->second.get();
  auto op = std::make_unique<Op>();
  op->name = spelt(operator_name);
  op->is_own = starts_with(operator_name.name, "fastcheck::");
  op->is_plain = starts_with(operator_name.name, "aten::");
  op->is_allocation = is_allocation(operator_name.name);
  // The second looks at its probabilities, and refuses those that are not finite.
  op->is_host_read = operator_name.name == "aten::_local_scalar_dense" ||
                     operator_name.name == "aten::multinomial";
  op->converts = operator_name.name == "aten::_to_copy" || operator_name.name == "aten::copy_";
  op->is_composite = handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
                     !handle->hasKernelForDispatchKey(c10::DispatchKey::CPU);
  op->number = static_cast<std::int32_t>(by_number_.size());
  op->is_collective = starts_with(operator_name.name, "c10d::") ||
                      starts_with(operator_name.name, "_c10d_functional") ||  // or ..._autograd
                      operator_name.name == kRoomForCollective;
  op->is_unfinished = op->is_collective && operator_name.name != "_c10d_functional::wait_tensor";
  op->sends = starts_with(operator_name.name, "c10d::allreduce") ||
              starts_with(operator_name.name, "c10d::send") ||
              starts_with(operator_name.name, "_c10d_functional::all_reduce");
  op->ignores_values = ignores_values(operator_name.name);
  bool is_out = false;
  const bool is_meta = is_metadata_only(operator_name.name);
  op->result_count = handle->schema().returns().size();
  const auto& arguments = handle->schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    op->arguments.push_back(arguments[i].name());
    const c10::AliasInfo* const alias = arguments[i].alias_info();
    const bool is_statistic =
        arguments[i].name() == "running_mean" || arguments[i].name() == "running_var";
    if (alias == nullptr && is_statistic && writes_statistics(operator_name.name)) {
      op->written_in_training.push_back(static_cast<std::uint8_t>(i));
    }
    if (alias == nullptr || !alias->isWrite() || is_meta) continue;
    op->written.push_back(static_cast<std::uint8_t>(i));
    is_out = is_out || arguments[i].is_out();
  }
  const auto& returns = handle->schema().returns();
  op->is_view = is_meta || (!returns.empty() &&
                            std::all_of(returns.begin(), returns.end(), [](const auto& one) {
                              return one.alias_info() != nullptr && !one.alias_info()->isWrite();
                            }));
  op->overwrites = is_out || is_overwriting(operator_name.name);
  if (starts_with(operator_name.name, "c10d::")) {
    // Their schemas have as read what they receive.
    const bool receives = starts_with(operator_name.name, "c10d::recv");
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const std::string& name = arguments[i].name();
      const bool is_output = starts_with(name, "output") && name != "output_split_sizes";
      if (is_output || (receives && i == 0)) op->written.push_back(static_cast<std::uint8_t>(i));
    }
    op->overwrites = op->overwrites || !op->written.empty();
  }
  op->choice = filter_.choice(op->name);
  by_number_.push_back(op.get());
  return (by_schema_[std::move(schema)] = std::move(op)).get();
}

}  // namespace fastcheck
