// The filter of op level: which ops are read, and which of their tensors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fastcheck {

enum class Direction : std::uint8_t { kForward, kBackward, kOptimizer };
// kStatus: the overflow status word of a device, after the op.
enum class Role : std::uint8_t { kInput, kOutput, kStatus };
// The class of a name in a filter: not selected, selected, or excluded in any case.
enum class Choice : std::uint8_t { kOther, kSelected, kExcluded };

// A filter in which everything is open by default. Not changed while a run goes on.
struct Filter {
  // Patterns as of fnmatch on op names, with and without namespace and overload; none: all ops.
  std::vector<std::string> ops, not_ops;
  // Choices by the number that a module is entered with; none: all modules.
  std::vector<std::uint8_t> modules;
  // True if what runs in none of them is selected: losses, optimizers.
  bool outside = true;
  // One bit for each direction and role, as bit() numbers them.
  std::uint32_t roles = 0xff;

  static std::uint32_t bit(Direction direction, Role role) {
    return 1u << (static_cast<std::uint32_t>(direction) * 2 + static_cast<std::uint32_t>(role));
  }
  bool has_role(Direction direction, Role role) const { return roles & bit(direction, role); }
  bool has_module(std::int32_t module) const {
    if (module < 0) return outside;
    const auto number = static_cast<std::size_t>(module);
    return number >= modules.size() || modules[number] != 0;
  }
  // `name`: "aten.add.Tensor".
  Choice choice(const std::string& name) const;
};

}  // namespace fastcheck
