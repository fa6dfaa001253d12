#include "torch/dump/call_names.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "torch/python/types.h"

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
  Thread& first = threads_[std::this_thread::get_id()];
  first.newest = oldest_;
  first.is_first = true;
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

void CallNamer::move(PyObject* node, bool is_recompute, bool is_in_optimizer,
                     const py::object& python) {
  const ModuleText* const module = module_of(node, python);
  Thread& mine = threads_[std::this_thread::get_id()];
  mine.module = module;
  mine.is_recompute = is_recompute;
  mine.is_in_optimizer = is_in_optimizer;
}

CallName CallNamer::name(const Op& op, const py::object& python) {
  const ModuleText* const outside = module_of(Py_None, python);
  const Thread& mine = threads_[std::this_thread::get_id()];
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  // Only where gradients are enabled a function may be run again: Python is seldom called.
  const bool is_recompute =
      in_backward && (mine.is_recompute ||
                      (at::GradMode::is_enabled() && python.attr("recomputes")().cast<bool>()));
  CallName name{&op, 0, Direction::kForward, mine.module, nullptr, is_recompute};
  if (name.module == nullptr) name.module = outside;
  if (in_backward && !is_recompute) {
    name.direction = Direction::kBackward;
    name.module = outside;
    if (const auto node = torch::autograd::get_current_node()) {
      const auto found = forwards_.find(static_cast<std::int64_t>(node->sequence_nr()));
      if (found != forwards_.end()) name.forward = found->second;
    }
  } else if (!in_backward && mine.is_in_optimizer) {
    name.direction = Direction::kOptimizer;
    name.module = outside;
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
  // Each thread counts its own nodes: a recompute on a device's thread does not shift them.
  if (forward != nullptr && !mine.is_first) return;
  forward = std::allocate_shared<Forward>(std::pmr::polymorphic_allocator<Forward>(pool_.get()),
                                          name.op, name.call, name.module);
}

}  // namespace fastcheck::dump
