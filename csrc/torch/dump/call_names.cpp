#include "torch/dump/call_names.h"

#include <ATen/SequenceNumber.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "torch/python_types.h"

namespace py = pybind11;

namespace fastcheck::dump {
namespace {

std::int64_t newest_node() { return static_cast<std::int64_t>(at::sequence_number::peek()) - 1; }

}  // namespace

std::int64_t Forward::next_made() {
  const std::int64_t task = torch::autograd::get_current_graph_task_id();
  if (task != task_) {
    task_ = task;
    made_ = -1;
  }
  return ++made_;
}

CallNamer::CallNamer() : oldest_(newest_node()) {
  threads_[std::this_thread::get_id()] = {oldest_, true};
}

const ModuleText* CallNamer::module_of(PyObject* node, const py::object& python) {
  std::unique_ptr<ModuleText>& module = modules_[node];
  if (module == nullptr) {
    const auto text =
        python.attr("module_text")(py::handle(node)).cast<std::pair<std::string, std::string>>();
    module = std::make_unique<ModuleText>(ModuleText{borrowed(node), text.first, text.second});
  }
  return module.get();
}

CallName CallNamer::name(const OpFacts& op, const Whereabouts& where, const py::object& python) {
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  const bool is_recompute =
      in_backward && (where.is_recompute || python.attr("recomputes")().cast<bool>());
  CallName name{&op, 0, Direction::kForward, module_of(where.node, python), nullptr, is_recompute};
  if (in_backward && !is_recompute) {
    name.direction = Direction::kBackward;
    name.module = module_of(Py_None, python);
    if (const auto node = torch::autograd::get_current_node()) {
      const auto found = forwards_.find(static_cast<std::int64_t>(node->sequence_nr()));
      if (found != forwards_.end()) name.forward = found->second;
    }
  } else if (!in_backward && where.is_in_optimizer) {
    name.direction = Direction::kOptimizer;
    name.module = module_of(Py_None, python);
  }
  name.call = counts_[static_cast<std::size_t>(name.direction)][&op]++;
  if (name.forward != nullptr) {
    name.op = name.forward->op;
    name.call = name.forward->call;
    name.module = name.forward->module;
  }
  return name;
}

void CallNamer::add(const CallName& name) {
  const std::int64_t newest = newest_node();
  Thread& mine = threads_[std::this_thread::get_id()];
  const bool is_new = newest > mine.newest;
  mine.newest = newest;
  if (!is_new || newest <= oldest_) return;
  std::shared_ptr<Forward>& forward = forwards_[newest];
  // Each thread counts its own nodes: a recompute on a device's thread takes nobody's place.
  if (forward != nullptr && !mine.is_first) return;
  forward = std::make_shared<Forward>(name.op, name.call, name.module);
}

}  // namespace fastcheck::dump
