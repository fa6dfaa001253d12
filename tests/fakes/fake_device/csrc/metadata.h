// The metadata of an op's results, known on the host before its kernel has run.
#pragma once

#include <ATen/EmptyTensor.h>

#include "arguments.h"

namespace fake {

struct Metadata {
  Stack inputs, results;  // meta tensors: the arguments after the call (an out= may have been
                          // resized), the results
};

// Most meta kernels are Python and cost more than everything else here, so their answers are kept,
// by everything they can depend on: the op, metadata of tensors, values of the rest. Arguments of
// any other type: not kept.
class MetadataCache {
 public:
  static std::optional<std::string> key(const c10::OperatorHandle& op, const Stack& values) {
    std::string key = name_of(op);
    for (const IValue& value : values)
      if (!add(key, value)) return std::nullopt;
    return key;
  }
  std::shared_ptr<const Metadata> find(const std::string& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(key);
    return found == entries_.end() ? nullptr : found->second;
  }
  void store(const std::string& key, std::shared_ptr<const Metadata> metadata) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (entries_.size() >= 20000) entries_.clear();
    entries_[key] = std::move(metadata);
  }

 private:
  static void add_bytes(std::string& key, const void* bytes, std::size_t count) {
    key.append(reinterpret_cast<const char*>(&count), sizeof count);
    if (count > 0) key.append(static_cast<const char*>(bytes), count);
  }
  template <class T>
  static void add_value(std::string& key, char tag, T value) {
    key.push_back(tag);
    key.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  static bool add(std::string& key, const Tensor& t) {
    if (!t.defined()) {
      key.push_back('u');
      return true;
    }
    const auto* const impl = t.unsafeGetTensorImpl();
    add_value(key, t.is_cpu() ? 'c' : 't', static_cast<int>(t.scalar_type()));
    add_value(key, 'f', t.is_conj() + 2 * t.is_neg() + 4 * impl->is_wrapped_number());
    add_bytes(key, t.sizes().data(), t.sizes().size() * sizeof(int64_t));
    add_bytes(key, t.strides().data(), t.strides().size() * sizeof(int64_t));
    return true;
  }
  static bool add(std::string& key, const IValue& value) {
    if (value.isTensor()) return add(key, value.toTensor());
    if (value.isNone())
      key.push_back('n');
    else if (value.isInt())
      add_value(key, 'i', value.toInt());
    else if (value.isDouble())
      add_value(key, 'd', value.toDouble());
    else if (value.isBool())
      add_value(key, 'b', value.toBool());
    else if (value.isDevice())
      key += "D" + value.toDevice().str();
    else if (value.isString())
      add_bytes(key, value.toStringRef().data(), value.toStringRef().size());
    else if (value.isList() || value.isOptionalTensorList()) {
      const auto list = value.toListRef();
      add_value(key, 'l', list.size());
      for (const IValue& each : list)
        if (!add(key, each)) return false;
    } else
      return false;
    return true;
  }

  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<const Metadata>> entries_;
};

inline std::shared_ptr<const Metadata> metadata_of(const c10::OperatorHandle& op,
                                                   const Arguments& arguments) {
  static auto* const cache = new MetadataCache;
  const auto key = MetadataCache::key(op, arguments.values);
  if (key.has_value())
    if (auto known = cache->find(*key)) return known;
  auto fresh = std::make_shared<Metadata>();
  fresh->inputs = fresh->results = arguments.as_meta();
  call(op, fresh->results);  // replaces the arguments by the results
  if (key.has_value()) cache->store(*key, fresh);
  return fresh;
}

inline bool needs_metadata(const c10::FunctionSchema& schema) {
  for (const auto& ret : schema.returns())
    if (ret.alias_info() == nullptr) return true;
  for (const auto& argument : schema.arguments())
    if (argument.is_out()) return true;
  return false;
}

// What the CPU kernel of a norm returns beside the output differs from what the meta kernel, which
// speaks for other devices, says: statistics in the dtype of the weight, and none at all from batch
// norm in evaluation.
inline Tensor as_cpu_returns(const std::string& name, std::size_t i, const Stack& values,
                             const Tensor& meta) {
  const bool layer = name == "aten::native_layer_norm", group = name == "aten::native_group_norm";
  const bool batch = name == "aten::native_batch_norm" || name == "aten::_native_batch_norm_legit";
  const bool no_stats = name == "aten::_native_batch_norm_legit.no_stats";
  if (i == 0 || !(layer || group || batch || no_stats)) return meta;
  if (batch && !values[5].toBool())
    return at::detail::empty_strided_meta({0}, {1}, values[0].toTensor().scalar_type());
  std::vector<IValue> parameters = {values[layer ? 2 : 1]};
  if (batch) parameters.push_back(values[3]);
  parameters.push_back(values[0]);
  for (const IValue& each : parameters)
    if (each.isTensor() && each.toTensor().defined()) return meta.to(each.toTensor().scalar_type());
  return meta;
}

}  // namespace fake
