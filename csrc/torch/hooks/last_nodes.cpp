#include "torch/hooks/last_nodes.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torch/hooks/module_recorder.h"
#include "torch/hooks/recorder.h"
#include "torch/python/tensors.h"
#include "torch/python/types.h"

namespace py = pybind11;

namespace fastcheck {
namespace {

using torch::autograd::Node;
// A std::shared_ptr or torch's own, by the release.
using NodePtr = decltype(torch::autograd::Edge::function);

// A value that is read of a node: its name, its attribute, and the attribute that tells whether
// hooks have packed it (None: it is a number).
struct Attribute {
  py::object name, saved, packed;
};

// Whether it adds to a gradient. The header of its class includes those of all operators.
bool is_leaf(const Node& node) {
  return node.num_outputs() == 0 && node.name() == "torch::autograd::AccumulateGrad";
}

struct Kind {
  bool is_leaf;
  std::vector<Attribute> attributes;
};

// Asked for each class of nodes once: by the address of its type_info, of which a library may have
// another, and then the class is asked for again. The hash of a type_index reads a whole name.
const Kind& kind_of(const NodePtr& node, const py::object& attributes_of) {
  static auto* const known = new std::unordered_map<const std::type_info*, Kind>;
  const Node& met = *node;
  const std::type_info* const type = &typeid(met);
  const auto found = known->find(type);
  if (found != known->end()) return found->second;
  Kind kind{is_leaf(met), {}};
  if (!kind.is_leaf) {
    const py::object object = owned(torch::autograd::functionToPyObject(node));
    for (const py::handle one : attributes_of(py::type::handle_of(object))) {
      kind.attributes.push_back({one[py::int_(0)], one[py::int_(1)], one[py::int_(2)]});
    }
  }
  return known->emplace(type, std::move(kind)).first->second;
}

// What a node has saved, by name, the versions of the tensors among it, and its size in bytes.
struct Saved {
  py::dict values;
  py::list versions;
  std::size_t size = 0;
};

// Whether code of the program would unpack a saved tensor: a hook, or the operators of its class.
bool is_unpacked_by_program(const py::object& packed) {
  static PyObject* const hook = interned("unpack_hook");
  static PyObject* const data = interned("data");
  if (!py::getattr(packed, hook, py::bool_(true)).is_none()) return true;
  const py::object held = py::getattr(packed, data, py::none());
  return THPVariable_Check(held.ptr()) && unpack(held).key_set().has(c10::DispatchKey::Python);
}

// Empty where code of the program would unpack it, or it was written in place.
Saved saved_by(const NodePtr& node, const Kind& kind) {
  const py::object object = owned(torch::autograd::functionToPyObject(node));
  Saved found;
  for (const auto& [name, saved, packed] : kind.attributes) {
    if (!packed.is_none() && is_unpacked_by_program(py::getattr(object, packed))) return Saved();
    auto value = py::reinterpret_steal<py::object>(PyObject_GetAttr(object.ptr(), saved.ptr()));
    if (!value && PyErr_ExceptionMatches(PyExc_RuntimeError) != 0) {
      PyErr_Clear();
      return Saved();
    }
    if (!value) throw py::error_already_set();
    if (THPVariable_Check(value.ptr())) {
      const at::Tensor& tensor = unpack(value);
      found.size += tensor.nbytes();
      found.versions.append(tensor.is_inference() ? 0 : static_cast<long>(tensor._version()));
      value = wrap(tensor.detach());  // without the graph, which would live as long
    }
    if (!value.is_none()) found.values[name] = value;
  }
  return found;
}

py::tuple saved_near(const py::sequence& roots, const py::object& attributes_of, std::size_t most,
                     std::size_t room) {
  std::vector<NodePtr> waiting;
  for (const py::handle root : roots) {
    if (const auto& node = unpack(root).grad_fn()) waiting.push_back(node);
  }
  std::unordered_set<const Node*> met;
  for (const auto& node : waiting) met.insert(node.get());
  std::vector<std::pair<std::uint64_t, py::tuple>> near;
  std::size_t total = 0;
  for (std::size_t i = 0; i < waiting.size(); ++i) {
    const NodePtr node = waiting[i];
    const Kind& kind = kind_of(node, attributes_of);
    if (!kind.attributes.empty()) {
      const Saved saved = saved_by(node, kind);
      if (saved.values.size() > 0 && total + saved.size <= room) {
        py::tuple needs(node->num_outputs());
        for (std::size_t k = 0; k < needs.size(); ++k) {
          needs[k] = py::bool_(node->next_edge(k).function != nullptr);
        }
        near.emplace_back(node->sequence_nr(), py::make_tuple(node->name(), node->sequence_nr(),
                                                              needs, saved.values, saved.versions));
        total += saved.size;
      }
    }
    if (waiting.size() >= most) continue;
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      const auto& following = edge.function;
      if (following == nullptr || kind_of(following, attributes_of).is_leaf) continue;
      if (met.insert(following.get()).second) waiting.push_back(following);
    }
  }
  std::stable_sort(near.begin(), near.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  py::list found;
  for (const auto& [order, saved] : near) found.append(saved);
  return py::make_tuple(found, total);
}

// The leaves of a graph, nearest first, one at a time: the graph is followed as far as to the one
// that is asked for, and until `most` nodes were met.
class GraphLeaves {
 public:
  GraphLeaves(py::handle root, std::size_t most, py::object recorder) : most_(most) {
    // At op level it is one of Python, and no gradient is recorded at a node.
    if (Py_TYPE(recorder.ptr()) == hook_recorder_type()) recorder_ = std::move(recorder);
    if (const auto& node = unpack(root).grad_fn()) follow(node);
  }

  bool has_recorded() const { return has_recorded_; }

  py::object next() {
    for (; at_ < waiting_.size(); ++at_, edge_ = 0) {
      const NodePtr node = waiting_[at_];
      while (edge_ < node->num_outputs()) {
        const NodePtr& following = node->next_edge(edge_++).function;
        if (following == nullptr || !met_.insert(following.get()).second) continue;
        if (met_.size() >= most_) throw py::stop_iteration();
        if (is_leaf(*following)) {
          return owned(torch::autograd::functionToPyObject(following)).attr("variable");
        }
        follow(following);
      }
    }
    throw py::stop_iteration();
  }

 private:
  void follow(const NodePtr& node) {
    has_recorded_ =
        has_recorded_ || (recorder_ && records_gradient(hook_recorder_of(recorder_.ptr()), *node));
    waiting_.push_back(node);
  }

  // Of the node that is followed: its place, and its next edge.
  std::size_t most_, at_ = 0, edge_ = 0;
  py::object recorder_;
  bool has_recorded_ = false;
  std::vector<NodePtr> waiting_;
  std::unordered_set<const Node*> met_;
};

}  // namespace

void define_last_nodes(py::module_& m) {
  py::class_<GraphLeaves>(m, "GraphLeaves")
      .def(py::init<py::handle, std::size_t, py::object>(), py::arg("root"), py::arg("most"),
           py::arg("recorder"))
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", &GraphLeaves::next)
      .def_property_readonly("has_recorded", &GraphLeaves::has_recorded);
  m.def("saved_near", saved_near, py::arg("roots"), py::arg("attributes_of"), py::arg("most"),
        py::arg("room"));
}

}  // namespace fastcheck
