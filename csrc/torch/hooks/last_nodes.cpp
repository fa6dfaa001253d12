#include "torch/hooks/last_nodes.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_cpp_function.h>

#include <string>
#include <typeindex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "torch/python/tensors.h"
#include "torch/python/types.h"

namespace py = pybind11;

namespace fastcheck {
namespace {

using torch::autograd::Node;
// A std::shared_ptr or torch's own, by the release.
using NodePtr = decltype(torch::autograd::Edge::function);

struct Kind {
  bool is_named;
  bool is_leaf;  // it adds to a parameter's gradient
};

// Names are made anew each time, and are the same for all nodes of a class.
Kind kind_of(const Node& node, const py::object& names) {
  static auto* const known = new std::unordered_map<std::type_index, Kind>;
  const std::type_index type(typeid(node));
  const auto found = known->find(type);
  if (found != known->end()) return found->second;
  const std::string name = node.name();
  const Kind kind{names.contains(name), name == "torch::autograd::AccumulateGrad"};
  return known->emplace(type, kind).first->second;
}

py::list last_nodes(const py::sequence& roots, const py::object& names, std::size_t most) {
  std::vector<NodePtr> waiting;
  for (const py::handle root : roots) {
    if (const auto& node = unpack(root).grad_fn()) waiting.push_back(node);
  }
  std::unordered_set<const Node*> met;
  for (const auto& node : waiting) met.insert(node.get());
  py::list found;
  for (std::size_t i = 0; i < waiting.size(); ++i) {
    const NodePtr node = waiting[i];
    if (kind_of(*node, names).is_named) {
      found.append(owned(torch::autograd::functionToPyObject(node)));
    }
    if (waiting.size() >= most) continue;
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      const auto& following = edge.function;
      if (following == nullptr || kind_of(*following, names).is_leaf) continue;
      if (met.insert(following.get()).second) waiting.push_back(following);
    }
  }
  return found;
}

// The leaves of a graph, nearest first, one at a time: the graph is followed as far as to the one
// that is asked for, and until `most` nodes were met.
class GraphLeaves {
 public:
  GraphLeaves(py::handle root, std::size_t most) : most_(most) {
    if (const auto& node = unpack(root).grad_fn()) waiting_.push_back(node);
  }

  py::object next() {
    for (; at_ < waiting_.size(); ++at_, edge_ = 0) {
      const NodePtr node = waiting_[at_];
      while (edge_ < node->num_outputs()) {
        const NodePtr& following = node->next_edge(edge_++).function;
        if (following == nullptr || !met_.insert(following.get()).second) continue;
        if (met_.size() >= most_) throw py::stop_iteration();
        const Node& reached = *following;
        if (typeid(reached) == typeid(torch::autograd::AccumulateGrad)) {
          return wrap(static_cast<const torch::autograd::AccumulateGrad&>(reached).variable);
        }
        waiting_.push_back(following);
      }
    }
    throw py::stop_iteration();
  }

 private:
  // Of the node that is followed: its place, and its next edge.
  std::size_t most_, at_ = 0, edge_ = 0;
  std::vector<NodePtr> waiting_;
  std::unordered_set<const Node*> met_;
};

}  // namespace

void define_last_nodes(py::module_& m) {
  py::class_<GraphLeaves>(m, "GraphLeaves")
      .def(py::init<py::handle, std::size_t>(), py::arg("root"), py::arg("most"))
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", &GraphLeaves::next);
  m.def("last_nodes", last_nodes, py::arg("roots"), py::arg("names"), py::arg("most"));
}

}  // namespace fastcheck
