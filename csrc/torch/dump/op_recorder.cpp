#include "torch/dump/op_recorder.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include <string_view>
#include <vector>

#include "torch/dump/json_text.h"
#include "torch/dump/op_arguments.h"
#include "torch/python/observe.h"
#include "torch/python/tensors.h"
#include "torch/python/types.h"
#include "torch/read/slots.h"
#include "torch/read/tensor_view.h"

namespace py = pybind11;

namespace fastcheck::dump {
namespace {

constexpr std::string_view kUnwritten = "\"memory that nothing was written to yet\"";
constexpr std::string_view kUnfinished = "\"memory that a collective may still write to\"";

struct Names {
  PyObject* count = interned("count");
  PyObject* used = interned("used");
};

const Names& names() {
  static const Names* const kNames = new Names;
  return *kNames;
}

std::int64_t number(const py::object& object, PyObject* name) {
  return owned(PyObject_GetAttr(object.ptr(), name)).cast<std::int64_t>();
}

}  // namespace

void Writer::load() {
  count = number(object, names().count);
  used = number(object, names().used);
}

void Writer::store() const {
  checked(PyObject_SetAttr(object.ptr(), names().count, py::int_(count).ptr()));
  checked(PyObject_SetAttr(object.ptr(), names().used, py::int_(used).ptr()));
}

OpCall OpRecorder::begin(const Op& op, PyObject* args, PyObject* kwargs) {
  OpCall call{&op, namer_.name(op, python_), {}};
  if (call.name.direction == Direction::kForward) namer_.add(call.name);
  const bool reads_values = !(op.is_view || op.ignores_values || op.is_allocation);
  writer_.load();
  each_input(op, args, kwargs, [&](std::size_t place, const std::string& label, PyObject* tensor) {
    std::string& text = call.inputs;
    text += text.empty() ? "{" : ", {";
    describe(text, label, tensor);
    if (op.overwrites && op.writes(place)) {
      text += ", \"is_overwritten\": true";
    } else if (fresh_.is_fresh(unpack(tensor))) {
      text.append(", \"problem\": ").append(kUnwritten);
    } else if (reads_values) {
      read(text, call, Role::kInput, label, place, tensor, false);
    }
    text += '}';
  });
  writer_.store();
  return call;
}

std::string OpRecorder::end(const OpCall& call, PyObject* args, PyObject* kwargs, PyObject* result,
                            std::int64_t number) {
  const Op& op = *call.op;
  writer_.load();
  const Made made = made_by(op, args, kwargs, result);
  if (!op.written.empty()) {
    each_input(op, args, kwargs, [&](std::size_t place, const std::string&, PyObject* tensor) {
      if (!op.writes(place)) return;
      fresh_.wrote(unpack(tensor), op.overwrites);
      cache_.wrote(unpack(tensor));
    });
  }
  if (op.is_allocation) {
    for (PyObject* const tensor : made.tensors) fresh_.add(unpack(tensor));
  }
  std::string outputs;
  for (std::size_t i = 0; i < made.tensors.size(); ++i) {
    PyObject* const tensor = made.tensors[i];
    const std::string label = i == 0 ? "output" : "output[" + std::to_string(i) + "]";
    outputs += i == 0 ? "{" : ", {";
    describe(outputs, label, tensor);
    if (!op.overwrites && fresh_.is_fresh(unpack(tensor))) {
      outputs.append(", \"problem\": ").append(kUnwritten);
    } else if (op.is_unfinished) {
      outputs.append(", \"problem\": ").append(kUnfinished);
    } else if (!op.is_view) {
      read(outputs, call, Role::kOutput, label, i, tensor, i < made.written);
    }
    outputs += '}';
  }
  writer_.store();

  const CallName& name = call.name;
  std::string line = "{\"n\": ";
  append(line, number);
  line.append(", \"kind\": \"op\", \"op\": ").append(in_quotes(name.op->name));
  line += ", \"call\": ";
  append(line, name.call);
  line.append(", \"direction\": ");
  line.append(in_quotes(kDirections[static_cast<std::size_t>(name.direction)]));
  line.append(", \"module\": ").append(name.module->path);
  line.append(", \"type\": ").append(name.module->type);
  line.append(", \"in\": [").append(call.inputs);
  line.append("], \"out\": [").append(outputs).append("]");
  if (name.forward != nullptr) line.append(", \"ran\": ").append(in_quotes(op.name));
  append_others(line, op, args, kwargs);
  if (op.is_view) line += ", \"view\": true";
  if (!op.written.empty()) line += ", \"in_place\": true";
  if (name.is_recompute) line += ", \"recompute\": true";
  line += '}';
  return line;
}

// Behind "{": `"label": "self", "dtype": ...`
void OpRecorder::describe(std::string& text, const std::string& label, PyObject* object) {
  text.append("\"label\": ").append(in_quotes(label)).append(", ");
  const at::Tensor& tensor = unpack(object);
  if (!has_plain_memory(tensor) || !tensor.is_cpu()) {
    text += python_.attr("tensor_text")(py::handle(object)).cast<std::string>();
    return;
  }
  const auto append_number = [](std::string& to, std::int64_t number) { append(to, number); };
  text.append("\"dtype\": ").append(in_quotes(torch::getTHPDtype(tensor.scalar_type())->name));
  text += ", \"shape\": ";
  append_list(text, tensor.sizes(), append_number);
  if (!tensor.is_contiguous()) {
    text += ", \"stride\": ";
    append_list(text, tensor.strides(), append_number);
  }
  if (tensor.requires_grad()) text += ", \"requires_grad\": true";
}

// Its record, and behind what the index says of the tensor: `, "seq": 3`
void OpRecorder::read(std::string& text, const OpCall& call, Role role, const std::string& label,
                      std::size_t place, PyObject* object, bool is_written) {
  const at::Tensor& tensor = unpack(object);
  const std::uint32_t flags = call.name.is_recompute ? std::uint32_t{kFlagRecompute} : 0;
  const std::int32_t number = site(call, role, label, place);
  const Identity identity{writer_.count, step_, static_cast<std::int32_t>(call.name.call), number,
                          flags};
  if (read_here(text, tensor, identity, is_written)) return;
  writer_.store();
  text += ", ";
  text += python_.attr("read_text")(py::handle(object), number, call.name.call, flags)
              .cast<std::string>();
  writer_.load();
}

bool OpRecorder::read_here(std::string& text, const at::Tensor& tensor, const Identity& identity,
                           bool is_written) {
  if (!has_plain_memory(tensor) || !tensor.is_cpu() || may_be_in_flight(tensor) ||
      !unreadable_reason(tensor).empty()) {
    return false;
  }
  Record& record = *slot(slots_, writer_.used);
  ReadCache::Reading* const reading = cache_.find(tensor, is_written);
  if (reading != nullptr && reading->is_known) {
    record = reading->record;
    record.seq = identity.seq;
    record.step = identity.step;
    record.call = identity.call;
    record.site = identity.site;
    record.flags = identity.flags | (record.flags & kFlagNonfinite);
    ++reused_;
  } else {
    observe_from_python(tensor, depth_, false, identity, record);
    if (reading != nullptr) {
      reading->record = record;
      reading->is_known = true;
    }
  }
  text += ", \"seq\": ";
  append(text, identity.seq);
  ++writer_.count;
  if (++writer_.used == capacity_) {
    writer_.store();
    writer_.object.attr("flush")();
    writer_.load();
  }
  return true;
}

std::int32_t OpRecorder::site(const OpCall& call, Role role, const std::string& label,
                              std::size_t place) {
  const CallName& name = call.name;
  const bool is_backward = name.direction == Direction::kBackward;
  auto index = static_cast<std::int64_t>(place);
  std::string spelt = label;
  if (name.forward != nullptr) {
    if (role == Role::kOutput) index = name.forward->next_made();
    spelt = std::string(role == Role::kInput ? "grad_output[" : "grad_input[") +
            std::to_string(index) + "] (" + call.op->name + ")";
  }
  const auto [found, is_new] = sites_.try_emplace(
      SiteKey{name.module, name.op, name.direction, role, std::pmr::string(spelt, pool_.get())});
  if (is_new) {
    const char* const spelt_role = role == Role::kInput ? (is_backward ? "grad_output" : "input")
                                                        : (is_backward ? "grad_input" : "output");
    found->second = python_
                        .attr("site")(name.module->node, name.op->name,
                                      kDirections[static_cast<std::size_t>(name.direction)],
                                      spelt_role, index, spelt)
                        .cast<std::int32_t>();
  }
  return found->second;
}

// `, "args": {...}`: those that are no tensors, where there are any.
void OpRecorder::append_others(std::string& text, const Op& op, PyObject* args, PyObject* kwargs) {
  bool is_first = true;
  each_argument(op, args, kwargs, [&](const std::string& name, std::size_t, PyObject* value) {
    if (holds_tensor(value)) return;
    text.append(is_first ? ", \"args\": {" : ", ").append(in_quotes(name)).append(": ");
    is_first = false;
    const std::size_t before = text.size();
    if (append_plain(text, value)) return;
    text.resize(before);
    text += python_.attr("plain_text")(py::handle(value)).cast<std::string>();
  });
  if (!is_first) text += '}';
}

}  // namespace fastcheck::dump
