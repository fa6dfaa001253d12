#include "torch/dump/op_facts.h"

#include <pybind11/stl.h>

#include <algorithm>

namespace py = pybind11;

namespace fastcheck::dump {

OpFacts::OpFacts(const py::object& from)
    : name(from.attr("name").cast<std::string>()),
      arguments(from.attr("arguments").cast<std::vector<std::string>>()),
      written(arguments.size()),
      overwrites(from.attr("overwrites").cast<bool>()),
      is_view(from.attr("is_view").cast<bool>()),
      is_allocation(from.attr("is_allocation").cast<bool>()),
      ignores_values(from.attr("ignores_values").cast<bool>()) {
  for (const py::handle place : from.attr("written")) {
    written[place.cast<std::size_t>()] = true;
    writes_any = true;
  }
}

std::size_t OpFacts::place(std::string_view argument) const {
  return static_cast<std::size_t>(std::find(arguments.begin(), arguments.end(), argument) -
                                  arguments.begin());
}

const OpFacts& OpTable::of(py::handle func, const py::object& python) {
  const auto found = ops_.find(func.ptr());
  if (found != ops_.end()) return *found->second.facts;
  auto facts = std::make_unique<OpFacts>(python.attr("op_info")(func));
  Entry entry{py::reinterpret_borrow<py::object>(func), std::move(facts)};
  return *ops_.emplace(func.ptr(), std::move(entry)).first->second.facts;
}

}  // namespace fastcheck::dump
