// The table of operators: facts about each op, looked up once in a process.
#pragma once

#include <ATen/core/operator_name.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "torch/operators/filter.h"

namespace fastcheck {

struct Op {
  std::string name;  // "aten.addmm.default": namespace, name, overload
  std::vector<std::string> arguments;
  std::size_t result_count = 0;
  // Places of the arguments that the op writes, and whether it reads them before: out= and fill_ do
  // not.
  std::vector<std::uint8_t> written;
  // Places of those that it writes in training although its schema has them as read: the running
  // statistics of batch norms.
  std::vector<std::uint8_t> written_in_training;
  bool overwrites = false;
  // Looks at the shape of what it is given, never at the values (zeros_like, new_full,
  // wait_tensor, ...).
  bool ignores_values = false;
  // Made of other ops, which are seen by themselves. What an op with a kernel of its own calls is
  // part of that kernel, and is not.
  bool is_composite = false;
  // Returns other shapes of what it is given, and reads nothing.
  bool is_view = false;
  // Returns at once, and writes while the host goes on (c10d).
  bool is_collective = false;
  // Such an op, but for the one that waits: what it returns is not written yet.
  bool is_unfinished = false;
  // Such an op of which every tensor argument is sent: none is only room for what it receives.
  bool sends = false;
  // Returns memory that holds nothing yet (empty, empty_strided, ...).
  bool is_allocation = false;
  // Hands a value to the host (item(), float(), bool()).
  bool is_host_read = false;
  // Changes the dtype of what it is given (to(), copy_()).
  bool converts = false;
  // One of fastcheck's.
  bool is_own = false;
  // One of torch's own, which writes at once, and nothing but what is said above.
  bool is_plain = false;
  // The class of its name in the current run's filter.
  std::atomic<Choice> choice{Choice::kSelected};
  std::int32_t number = 0;

  bool writes(std::size_t place) const {
    return std::find(written.begin(), written.end(), place) != written.end();
  }
  // The argument of this name; behind the last one where it has none of the name.
  std::size_t place(std::string_view argument) const {
    const auto found = std::find(arguments.begin(), arguments.end(), argument);
    return static_cast<std::size_t>(found - arguments.begin());
  }
};

// The ops that were met, by number. Thread-safe.
class OpTable {
 public:
  // The one of the process.
  static OpTable& instance();

  // Null for what is no op: ranges that libraries mark by a name.
  const Op* find(const at::RecordFunction& fn);
  // Null where no such op is registered.
  const Op* find(const c10::OperatorName& name);
  std::string name(std::int32_t number) const;
  std::string argument(std::int32_t number, std::int32_t position) const;
  // Makes `filter` select the ops from now on.
  void select(const Filter& filter);

  // The ops that a thread met last, by where the schema lies: most ops are found here, without the
  // lock.
  class Recent {
   public:
    const Op* find(const at::RecordFunction& fn, OpTable& table);

   private:
    struct Slot {
      const char* name = nullptr;
      const char* overload = nullptr;
      const Op* op = nullptr;
    };
    std::array<Slot, 128> slots_;
  };

 private:
  struct Key {
    // The names of the schema, which lives as long as the op is registered: distinguished by their
    // addresses.
    const char* name;
    const char* overload;
    bool operator==(const Key& other) const {
      return name == other.name && overload == other.overload;
    }
  };
  struct Hash {
    std::size_t operator()(const Key& key) const {
      return reinterpret_cast<std::uintptr_t>(key.name) * 31 +
             reinterpret_cast<std::uintptr_t>(key.overload);
    }
  };
  const Op* add(const c10::OperatorName& name);

  mutable std::mutex mutex_;
  std::unordered_map<std::string, std::unique_ptr<Op>> by_schema_;
  std::unordered_map<Key, const Op*, Hash> ops_;
  std::vector<Op*> by_number_;
  Filter filter_;
};

}  // namespace fastcheck
