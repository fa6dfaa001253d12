#include "torch/dump/op_recorder.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "torch/dump/call_names.h"
#include "torch/dump/fresh_memory.h"
#include "torch/dump/json_text.h"
#include "torch/dump/known_readings.h"
#include "torch/dump/op_facts.h"
#include "torch/observe_from_python.h"
#include "torch/python_tensors.h"
#include "torch/python_types.h"
#include "torch/slots.h"
#include "torch/tensor_view.h"

namespace py = pybind11;

namespace fastcheck::dump {
namespace {

constexpr std::size_t kMostKnown = 65536;
constexpr std::string_view kUnwritten = "\"memory that nothing was written to yet\"";

struct Names {
  PyObject* count = interned("count");
  PyObject* used = interned("used");
};

const Names& names() {
  static const Names* const kNames = new Names;
  return *kNames;
}

// ---- Arguments ----------------------------------------------------------------------------------

bool is_sequence(PyObject* value) { return PyTuple_Check(value) || PyList_Check(value); }

PyObject* item_of(PyObject* sequence, Py_ssize_t i) {
  return PyTuple_Check(sequence) ? PyTuple_GET_ITEM(sequence, i) : PyList_GET_ITEM(sequence, i);
}

// visit(label, tensor) for `value`, or for those in a list or tuple.
template <class Visit>
void each_tensor(PyObject* value, const std::string& label, const Visit& visit) {
  if (THPVariable_Check(value)) {
    visit(label, value);
  } else if (is_sequence(value)) {
    for (Py_ssize_t i = 0; i < Py_SIZE(value); ++i) {
      PyObject* const item = item_of(value, i);
      if (!THPVariable_Check(item) && !is_sequence(item)) continue;
      each_tensor(item, label + "[" + std::to_string(i) + "]", visit);
    }
  }
}

// visit(name, place in the schema, value) for each argument.
template <class Visit>
void each_argument(const OpFacts& op, PyObject* args, PyObject* kwargs, const Visit& visit) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
    const auto place = static_cast<std::size_t>(i);
    visit(op.arguments.at(place), place, PyTuple_GET_ITEM(args, i));
  }
  Py_ssize_t at = 0;
  PyObject *key = nullptr, *value = nullptr;
  while (PyDict_Next(kwargs, &at, &key, &value) != 0) {
    const auto name = py::cast<std::string>(py::handle(key));
    visit(name, op.place(name), value);
  }
}

// visit(place, label, tensor)
template <class Visit>
void each_input(const OpFacts& op, PyObject* args, PyObject* kwargs, const Visit& visit) {
  each_argument(op, args, kwargs, [&](const std::string& name, std::size_t place, PyObject* value) {
    each_tensor(value, name,
                [&](const std::string& label, PyObject* tensor) { visit(place, label, tensor); });
  });
}

// What an operator has written in place, and what it has returned beside that.
std::vector<PyObject*> made_by(const OpFacts& op, PyObject* args, PyObject* kwargs,
                               PyObject* result) {
  std::vector<PyObject*> made;
  if (op.writes_any) {
    each_input(op, args, kwargs, [&](std::size_t place, const std::string&, PyObject* tensor) {
      if (op.writes(place)) made.push_back(tensor);
    });
  }
  const std::size_t written = made.size();
  each_tensor(result, "", [&](const std::string&, PyObject* tensor) {
    const auto end = made.begin() + static_cast<std::ptrdiff_t>(written);
    if (std::find(made.begin(), end, tensor) == end) made.push_back(tensor);
  });
  return made;
}

// ---- A call -------------------------------------------------------------------------------------

struct OpCall {
  const OpFacts* op;
  CallName name;
  std::string inputs;  // the items of a JSON list
};

using CallObject = Object<OpCall>;

// ---- The recorder -------------------------------------------------------------------------------

// The RecordWriter, and what it counts: both sides take slots from it.
struct Writer {
  py::object object;
  std::int64_t count = 0, used = 0;

  void load() {
    count = number(names().count);
    used = number(names().used);
  }
  void store() const {
    checked(PyObject_SetAttr(object.ptr(), names().count, py::int_(count).ptr()));
    checked(PyObject_SetAttr(object.ptr(), names().used, py::int_(used).ptr()));
  }

 private:
  std::int64_t number(PyObject* name) const {
    return py::cast<std::int64_t>(owned(PyObject_GetAttr(object.ptr(), name)));
  }
};

class OpRecorder {
 public:
  OpRecorder(py::object python, py::object writer, at::Tensor slots, Depth depth, std::int64_t step)
      : python_(std::move(python)),
        writer_{std::move(writer)},
        slots_(std::move(slots)),
        capacity_(slots_.numel() / static_cast<std::int64_t>(sizeof(Record))),
        depth_(depth),
        step_(step),
        known_(kMostKnown) {}

  OpCall begin(PyObject* func, PyObject* args, PyObject* kwargs, const Whereabouts& where);
  std::string end(OpCall& call, PyObject* args, PyObject* kwargs, PyObject* result,
                  std::int64_t number);
  void forget() { known_.clear(); }
  void clear() {
    known_.clear();
    fresh_.clear();
    namer_.clear();
    sites_.clear();
    ops_.clear();
  }
  std::int64_t reused() const { return reused_; }

  template <class Visit>
  int each(const Visit& visit) const {
    if (const int status = visit(python_.ptr())) return status;
    return visit(writer_.object.ptr());
  }

 private:
  enum class Role { kInput, kOutput };
  using SiteKey = std::tuple<const ModuleText*, const OpFacts*, Direction, Role, std::string>;

  void describe(std::string& text, const std::string& label, PyObject* object);
  void read(std::string& text, const OpCall& call, Role role, const std::string& label,
            std::size_t place, PyObject* object);
  bool read_here(std::string& text, const at::Tensor& tensor, const Identity& identity);
  std::int32_t site(const OpCall& call, Role role, const std::string& label, std::size_t place);
  void append_value(std::string& text, PyObject* value, int depth = 0);
  void append_others(std::string& text, const OpFacts& op, PyObject* args, PyObject* kwargs);

  py::object python_;
  Writer writer_;
  at::Tensor slots_;
  std::int64_t capacity_;
  Depth depth_;
  std::int64_t step_;
  OpTable ops_;
  CallNamer namer_;
  FreshMemory fresh_;
  KnownReadings known_;
  std::map<SiteKey, std::int32_t> sites_;
  std::int64_t reused_ = 0;
};

OpCall OpRecorder::begin(PyObject* func, PyObject* args, PyObject* kwargs,
                         const Whereabouts& where) {
  const OpFacts& op = ops_.of(func, python_.attr("op_info"));
  OpCall call{&op, namer_.name(op, where, python_), {}};
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
      read(text, call, Role::kInput, label, place, tensor);
    }
    text += '}';
  });
  writer_.store();
  return call;
}

std::string OpRecorder::end(OpCall& call, PyObject* args, PyObject* kwargs, PyObject* result,
                            std::int64_t number) {
  const OpFacts& op = *call.op;
  writer_.load();
  const std::vector<PyObject*> made = made_by(op, args, kwargs, result);
  if (op.writes_any) {
    each_input(op, args, kwargs, [&](std::size_t place, const std::string&, PyObject* tensor) {
      if (!op.writes(place)) return;
      fresh_.wrote(unpack(tensor), op.overwrites);
      known_.wrote(unpack(tensor), writer_.count);
    });
  }
  if (op.is_allocation) {
    for (PyObject* const tensor : made) fresh_.add(unpack(tensor));
  }
  std::string outputs;
  for (std::size_t i = 0; i < made.size(); ++i) {
    const std::string label = i == 0 ? "output" : "output[" + std::to_string(i) + "]";
    outputs += i == 0 ? "{" : ", {";
    describe(outputs, label, made[i]);
    if (!op.overwrites && fresh_.is_fresh(unpack(made[i]))) {
      outputs.append(", \"problem\": ").append(kUnwritten);
    } else if (!op.is_view) {
      read(outputs, call, Role::kOutput, label, i, made[i]);
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
  if (op.writes_any) line += ", \"in_place\": true";
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
                      std::size_t place, PyObject* object) {
  const at::Tensor& tensor = unpack(object);
  const std::uint32_t flags = call.name.is_recompute ? std::uint32_t{kFlagRecompute} : 0;
  const std::int32_t number = site(call, role, label, place);
  const Identity identity{writer_.count, step_, static_cast<std::int32_t>(call.name.call), number,
                          flags};
  if (read_here(text, tensor, identity)) return;
  writer_.store();
  text += ", ";
  text += python_.attr("read_text")(py::handle(object), number, call.name.call, flags)
              .cast<std::string>();
  writer_.load();
}

bool OpRecorder::read_here(std::string& text, const at::Tensor& tensor, const Identity& identity) {
  if (!has_plain_memory(tensor) || !tensor.is_cpu() || !unreadable_reason(tensor).empty()) {
    return false;
  }
  Record& record = *slot(slots_, writer_.used);
  KnownReadings::Reading* const reading = known_.find(tensor, identity.seq);
  if (reading != nullptr && reading->seq >= 0) {
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
      reading->seq = identity.seq;
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
  const auto [found, is_new] =
      sites_.try_emplace(SiteKey{name.module, name.op, name.direction, role, spelt});
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

// What json.dumps would make of fastcheck.dump.arguments.plain(value); false: ask them.
bool append_plain(std::string& text, PyObject* value, int depth = 0) {
  constexpr Py_ssize_t kMostItems = 64;
  constexpr int kMostDepth = 6;
  if (value == Py_None) {
    text += "null";
  } else if (PyBool_Check(value)) {
    text += value == Py_True ? "true" : "false";
  } else if (PyLong_CheckExact(value)) {
    int overflows = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflows);
    if (overflows != 0) return false;
    append(text, static_cast<std::int64_t>(number));
  } else if (PyFloat_CheckExact(value)) {
    append(text, PyFloat_AS_DOUBLE(value));
  } else if (THPDtype_Check(value)) {
    text += in_quotes(reinterpret_cast<THPDtype*>(value)->name);
  } else if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) {
    if (depth == kMostDepth || Py_SIZE(value) > kMostItems) return false;
    text += '[';
    for (Py_ssize_t i = 0; i < Py_SIZE(value); ++i) {
      if (i != 0) text += ", ";
      if (!append_plain(text, item_of(value, i), depth + 1)) return false;
    }
    text += ']';
  } else {
    return false;
  }
  return true;
}

bool holds_tensor(PyObject* value) {
  if (THPVariable_Check(value)) return true;
  if (!is_sequence(value)) return false;
  for (Py_ssize_t i = 0; i < Py_SIZE(value); ++i) {
    if (THPVariable_Check(item_of(value, i))) return true;
  }
  return false;
}

// `, "args": {...}`: those that are no tensors, where there are any.
void OpRecorder::append_others(std::string& text, const OpFacts& op, PyObject* args,
                               PyObject* kwargs) {
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

// ---- The types ----------------------------------------------------------------------------------

PyType_Slot kCallSlots[] = {
    {Py_tp_dealloc, as_slot(&CallObject::destroy)},
    {0, nullptr},
};

PyType_Spec kCallSpec = {"fastcheck._C.OpCall", sizeof(CallObject), 0, Py_TPFLAGS_DEFAULT,
                         kCallSlots};

PyTypeObject* call_type() {
  static PyTypeObject* const made = [] {
    PyTypeObject* const fresh = new_type(kCallSpec);
    fresh->tp_new = nullptr;  // made by begin() alone
    return fresh;
  }();
  return made;
}

// In memory of its own: it can't be moved.
struct HeldRecorder {
  std::unique_ptr<OpRecorder> recorder;

  template <class Visit>
  int each(const Visit& visit) const {
    return recorder == nullptr ? 0 : recorder->each(visit);
  }
  void clear() { recorder.reset(); }
};

using RecorderObject = Object<HeldRecorder>;

OpRecorder& recorder_of(PyObject* self) {
  const std::unique_ptr<OpRecorder>& recorder = RecorderObject::of(self).recorder;
  if (recorder == nullptr)
    throw std::invalid_argument("expected an OpRecorder, came one that is gone");
  return *recorder;
}

PyObject* new_recorder(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *python = nullptr, *writer = nullptr, *slots = nullptr;
  int depth = 0;
  long long step = 0;
  if (PyArg_ParseTuple(arguments, "OOOiL:OpRecorder", &python, &writer, &slots, &depth, &step) ==
      0) {
    return nullptr;
  }
  return translated([&] {
    return RecorderObject::make(
        type, std::make_unique<OpRecorder>(borrowed(python), borrowed(writer), unpack(slots),
                                           checked_depth(depth), static_cast<std::int64_t>(step)));
  });
}

PyObject* begin(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 6 || !PyTuple_Check(arguments[1]) || !PyDict_Check(arguments[2])) {
    return PyErr_Format(PyExc_TypeError,
                        "expected (func, tuple, dict, node, is_recompute, is_in_optimizer)");
  }
  return translated([&] {
    const Whereabouts where{arguments[3], PyObject_IsTrue(arguments[4]) == 1,
                            PyObject_IsTrue(arguments[5]) == 1};
    return CallObject::make(
        call_type(), recorder_of(self).begin(arguments[0], arguments[1], arguments[2], where));
  });
}

PyObject* end(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 5 || Py_TYPE(arguments[0]) != call_type() || !PyTuple_Check(arguments[1]) ||
      !PyDict_Check(arguments[2])) {
    return PyErr_Format(PyExc_TypeError, "expected (OpCall, tuple, dict, result, number)");
  }
  return translated([&] {
    const long long number = PyLong_AsLongLong(arguments[4]);
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    const std::string line = recorder_of(self).end(CallObject::of(arguments[0]), arguments[1],
                                                   arguments[2], arguments[3], number);
    return PyUnicode_DecodeASCII(line.data(), static_cast<Py_ssize_t>(line.size()), nullptr);
  });
}

PyObject* forget(PyObject* self, PyObject*) {
  return translated([&] {
    recorder_of(self).forget();
    Py_RETURN_NONE;
  });
}

PyObject* clear_all(PyObject* self, PyObject*) {
  return translated([&] {
    recorder_of(self).clear();
    Py_RETURN_NONE;
  });
}

PyObject* get_reused(PyObject* self, void*) {
  return translated([&] { return PyLong_FromLongLong(recorder_of(self).reused()); });
}

PyMethodDef kMethods[] = {
    {"begin", as_method(&begin), METH_FASTCALL,
     "begin(self, func, args, kwargs, node, is_recompute, is_in_optimizer) -> OpCall"},
    {"end", as_method(&end), METH_FASTCALL, "end(self, call, args, kwargs, result, number) -> str"},
    {"forget", &forget, METH_NOARGS, "forget(self) -> None"},
    {"clear", &clear_all, METH_NOARGS, "clear(self) -> None"},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef kProperties[] = {
    {"reused", &get_reused, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot kSlots[] = {
    {Py_tp_new, as_slot(&new_recorder)},
    {Py_tp_dealloc, as_slot(&destroy_tracked<HeldRecorder>)},
    {Py_tp_traverse, as_slot(&traverse<HeldRecorder>)},
    {Py_tp_clear, as_slot(&fastcheck::clear<HeldRecorder>)},
    {Py_tp_methods, kMethods},
    {Py_tp_getset, kProperties},
    {0, nullptr},
};

PyType_Spec kSpec = {"fastcheck._C.OpRecorder", sizeof(RecorderObject), 0,
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kSlots};

}  // namespace

void define_op_recorder(py::module_& m) {
  static PyTypeObject* const kType = new_type(kSpec);
  m.attr("OpRecorder") = py::handle(reinterpret_cast<PyObject*>(kType));
}

}  // namespace fastcheck::dump
