// What python/fastcheck/dump/op_info.py knows of an operator.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace fastcheck::dump {

struct OpFacts {
  explicit OpFacts(const pybind11::object& info);

  // The argument of this name; behind the last one where it has none of the name.
  std::size_t place(std::string_view argument) const;
  bool writes(std::size_t place) const { return place < written.size() && written[place]; }

  std::string name;  // "aten.add.Tensor"
  std::vector<std::string> arguments;
  std::vector<bool> written;  // by place
  bool writes_any = false;
  bool overwrites = false;
  bool is_view = false;
  bool is_allocation = false;
  bool ignores_values = false;
};

// By the OpOverload; each is asked for once.
class OpTable {
 public:
  // `python.op_info(func)` gives the OpInfo.
  const OpFacts& of(pybind11::handle func, const pybind11::object& python);

 private:
  // Overloads live as long as torch's library does, and are held here all the same.
  struct Entry {
    pybind11::object func;
    std::unique_ptr<OpFacts> facts;
  };
  std::unordered_map<const PyObject*, Entry> ops_;
};

}  // namespace fastcheck::dump
