#include "torch/operators/filter.h"

#include <fnmatch.h>

#include <algorithm>
#include <array>

namespace fastcheck {
namespace {

// "aten.add.Tensor" goes by that name, by "aten.add", "add.Tensor" and "add".
std::array<std::string, 4> names_of(const std::string& name) {
  const auto first = name.find('.');
  const std::string bare = first == std::string::npos ? name : name.substr(first + 1);
  const auto second = bare.find('.');
  const std::string base = bare.substr(0, second);
  const std::string space = first == std::string::npos ? "" : name.substr(0, first + 1);
  return {name, space + base, bare, base};
}

bool matches(const std::vector<std::string>& patterns, const std::array<std::string, 4>& names) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
    return std::any_of(names.begin(), names.end(), [&](const std::string& name) {
      return fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
    });
  });
}

}  // namespace

Choice Filter::choice(const std::string& name) const {
  const auto names = names_of(name);
  if (matches(not_ops, names)) return Choice::kExcluded;
  return ops.empty() || matches(ops, names) ? Choice::kSelected : Choice::kOther;
}

}  // namespace fastcheck
