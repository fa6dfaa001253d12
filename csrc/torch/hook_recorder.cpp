#include "torch/hook_recorder.h"

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "torch/hook_call.h"
#include "torch/hook_reader.h"
#include "torch/python_tensors.h"
#include "torch/python_types.h"
#include "torch/session_lock.h"

namespace py = pybind11;

namespace fastcheck {
namespace {

// ---- Names --------------------------------------------------------------------------------------

// A string that Python compares by its address.
PyObject* name(const char* text) { return owned(PyUnicode_InternFromString(text)).release().ptr(); }

struct Names {
  PyObject* stack = name("stack");
  PyObject* session = name("session");
  PyObject* recorder = name("recorder");
  PyObject* register_hook = name("register_hook");
  PyObject* input = name("input");
  PyObject* output = name("output");
  PyObject* gradient = name("gradient");
  PyObject* grad_input = name("grad_input");
  PyObject* grad_output = name("grad_output");
};

const Names& names() {
  static const Names* const kNames = new Names;
  return *kNames;
}

// "input[3]", as python/fastcheck/_flatten.py spells it.
py::object indexed(PyObject* label, Py_ssize_t index) {
  constexpr std::size_t kCount = 16;
  static const auto cached = [](PyObject* of) {
    std::array<PyObject*, kCount> labels{};
    for (std::size_t i = 0; i < kCount; ++i) {
      labels[i] = owned(PyUnicode_FromFormat("%U[%zu]", of, i)).release().ptr();
    }
    return labels;
  };
  static const std::array<PyObject*, kCount> kInputs = cached(names().input);
  static const std::array<PyObject*, kCount> kOutputs = cached(names().output);
  if (static_cast<std::size_t>(index) < kCount) {
    const auto i = static_cast<std::size_t>(index);
    if (label == names().input) return py::reinterpret_borrow<py::object>(kInputs[i]);
    if (label == names().output) return py::reinterpret_borrow<py::object>(kOutputs[i]);
  }
  return owned(PyUnicode_FromFormat("%U[%zd]", label, index));
}

// ---- The tensors of a call ----------------------------------------------------------------------

// Those that can be non-finite, with the numbers of their sites, in the order of _flatten.py.
struct Found {
  struct Item {
    py::object label;
    PyObject* tensor;
    std::int64_t site;
    Py_ssize_t position;
  };
  c10::SmallVector<Item, 4> items;
  Py_ssize_t count = 0;  // of all tensors

  // False where Python has to look: a container of another kind, a tensor without a site.
  bool add(PyObject* value, const py::object& label, PyObject* sites, int depth = 0) {
    if (THPVariable_Check(value)) return add_tensor(value, label, sites);
    const bool is_tuple = PyTuple_CheckExact(value);
    if (!is_tuple && !PyList_CheckExact(value)) return holds_no_tensor(value);
    constexpr int kMaxDepth = 8;
    if (depth == kMaxDepth) return true;
    for (Py_ssize_t i = 0; i < Py_SIZE(value); ++i) {
      PyObject* const item = is_tuple ? PyTuple_GET_ITEM(value, i) : PyList_GET_ITEM(value, i);
      if (holds_no_tensor(item)) continue;
      if (!add(item, indexed(label.ptr(), i), sites, depth + 1)) return false;
    }
    return true;
  }

  bool add_arguments(PyObject* args, PyObject* kwargs, PyObject* sites) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
      PyObject* const value = PyTuple_GET_ITEM(args, i);
      if (holds_no_tensor(value)) continue;
      if (!add(value, indexed(names().input, i), sites)) return false;
    }
    Py_ssize_t place = 0;
    PyObject *key = nullptr, *value = nullptr;
    while (PyDict_Next(kwargs, &place, &key, &value) != 0) {
      if (holds_no_tensor(value)) continue;
      if (!add(value, owned(PyUnicode_FromFormat("input.%U", key)), sites)) return false;
    }
    return true;
  }

 private:
  static bool holds_no_tensor(PyObject* value) {
    return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) ||
           PyFloat_CheckExact(value) || PyUnicode_CheckExact(value);
  }

  bool add_tensor(PyObject* tensor, const py::object& label, PyObject* sites) {
    const Py_ssize_t position = count++;
    if (!can_be_nonfinite(unpack(tensor).scalar_type())) return true;
    PyObject* const site = PyDict_GetItemWithError(sites, label.ptr());
    if (site == nullptr) return false;
    items.push_back({label, tensor, PyLong_AsLongLong(site), position});
    return true;
  }
};

// ---- What a session's hooks share ---------------------------------------------------------------

constexpr long long kIdentityNumbers = 7;  // seq, step, call, site, flags, dtype, order

struct HookRecorder {
  py::object reader_object;
  HookReader* reader;
  py::object cursor_object;
  Cursor* cursor;
  py::object lock_object;
  SessionLock* lock;

  py::object observer = py::none(), local = py::none(), due = py::none();
  std::uint64_t id = 0;  // of attach(), in the process

  bool is_open = false;
  bool settles = false;
  bool after_gap = false;
  std::uint32_t gradient_flags = 0;
  long long step = 0;
  py::object add_call = py::none(), findings = py::none();
  py::object entries = py::none(), gradients = py::none();

  // Where records from elsewhere go.
  py::object observe = py::none(), slots = py::none(), identities = py::none();
  py::object row_object = py::none();
  Cursor* row = nullptr;
  long long* numbers = nullptr;  // of the identities, row by row
  long long rows = 0;

  bool is_deferred() const { return !entries.is_none(); }

  py::object owner() const { return owned(PyObject_CallNoArgs(observer.ptr())); }
  py::object session() const { return owned(PyObject_GetAttr(owner().ptr(), names().session)); }

  template <class Visit>
  int each(const Visit& visit) const {
    for (const py::object* held :
         {&reader_object, &cursor_object, &lock_object, &observer, &local, &due, &add_call,
          &findings, &entries, &gradients, &observe, &slots, &identities, &row_object}) {
      if (const int status = visit(held->ptr())) return status;
    }
    return 0;
  }
  // What may lead back to the recorder.
  void clear() {
    is_open = false;
    add_call = findings = entries = gradients = observe = py::none();
  }
};

using RecorderObject = Object<HookRecorder>;

// Taking the lock may let other threads run.
class Locked {
 public:
  explicit Locked(const HookRecorder& recorder) : lock_(*recorder.lock) {
    if (!lock_.acquire()) throw py::error_already_set();
  }
  ~Locked() { lock_.release(); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  SessionLock& lock_;
};

// The session hears that `tensor` can't be read. Call it with Python's exception raised.
void refuse(const HookRecorder& recorder, PyObject* tensor, std::int64_t site) {
  py::error_already_set error;
  if (!error.matches(PyExc_Exception)) throw error;  // an interrupt is no answer
  recorder.session().attr("refused")(py::handle(tensor), site, error.value());
}

// The record of a tensor that the reader found elsewhere. False: it could not be read.
bool record_elsewhere(HookRecorder& recorder, PyObject* tensor, std::int64_t found,
                      std::int64_t site, long long call, std::uint32_t flags) {
  if (recorder.rows == 0 || recorder.row->slot == recorder.rows ||
      (found & code::kNewStream) != 0) {
    return recorder.session()
        .attr("read_elsewhere")(py::handle(tensor), found, site, call, flags)
        .cast<bool>();
  }
  const py::object at_row = owned(PyLong_FromLongLong(recorder.row->slot));
  const py::object depth = owned(PyLong_FromLong(static_cast<long>(recorder.reader->depth())));
  std::array<PyObject*, 4> arguments{tensor, recorder.slots.ptr(), at_row.ptr(), depth.ptr()};
  PyObject* const done =
      PyObject_Vectorcall(recorder.observe.ptr(), arguments.data(), arguments.size(), nullptr);
  if (done == nullptr) {
    refuse(recorder, tensor, site);
    return false;
  }
  Py_DECREF(done);
  const std::array<long long, kIdentityNumbers> identity{recorder.cursor->seq,
                                                         recorder.step,
                                                         call,
                                                         site,
                                                         flags,
                                                         (found >> code::kDTypeShift) & 31,
                                                         (found >> code::kOrderShift) & 1};
  std::copy(identity.begin(), identity.end(),
            recorder.numbers + recorder.row->slot * kIdentityNumbers);
  ++recorder.row->slot;
  return true;
}

// Session.read().
std::int64_t read(HookRecorder& recorder, PyObject* tensor, std::int64_t site, long long call,
                  std::uint32_t flags) {
  const auto ask = [&] {
    return recorder.session()
        .attr("read")(py::handle(tensor), site, call, flags)
        .cast<std::int64_t>();
  };
  Cursor& cursor = *recorder.cursor;
  if (cursor.slot == recorder.reader->capacity()) return ask();
  std::int64_t found = code::kUnread;
  PyObject* const done = translated([&] {
    const Identity identity{cursor.seq, recorder.step, static_cast<std::int32_t>(call),
                            static_cast<std::int32_t>(site), flags};
    found = recorder.reader->read(tensor, cursor.slot, identity, false);
    Py_RETURN_NONE;
  });
  if (done == nullptr) {
    refuse(recorder, tensor, site);
    return code::kUnread;
  }
  Py_DECREF(done);
  if (found == code::kUnknownDevice) return ask();
  if (found < 0 || (found & code::kNew) == 0) return found;
  if ((found & code::kElsewhere) == 0) {
    ++cursor.slot;
  } else if (!record_elsewhere(recorder, tensor, found, site, call, flags)) {
    return code::kUnread;
  }
  ++cursor.seq;
  return found;
}

// An entry of the journal: judged when its record arrives or, on the CPU, now if it is bad.
template <class... Fields>
void note(HookRecorder& recorder, std::int64_t found, const Fields&... fields) {
  const bool is_deferred = recorder.is_deferred();
  if (!is_deferred && (found & code::kBad) == 0) return;
  const py::tuple entry = py::make_tuple(fields...);
  if (is_deferred) {
    checked(PyList_Append(recorder.entries.ptr(), entry.ptr()));
  } else {
    recorder.session().attr("found")(entry);
  }
}

void finish(const HookRecorder& recorder) {
  if (recorder.settles) recorder.session().attr("settle_call")();
}

// Outside the session's lock: a stop that is due is raised from here.
void deliver(const HookRecorder& recorder) {
  if (PyList_GET_SIZE(recorder.due.ptr()) != 0) recorder.session().attr("deliver")();
}

// Whether `body` did anything. What it throws is an error of fastcheck's own, which `fail` is told
// of; training goes on.
template <class Body, class Fail>
bool guarded(const Body& body, const Fail& fail) {
  bool is_done = true;
  PyObject* const done = translated([&] {
    is_done = body();
    Py_RETURN_NONE;
  });
  if (done == nullptr) {
    py::error_already_set error;
    if (!error.matches(PyExc_Exception)) throw error;  // an interrupt is the user's
    fail(error.value());
  }
  Py_XDECREF(done);
  return is_done;
}

// ---- Gradients ----------------------------------------------------------------------------------

// What the autograd graph of an observed tensor holds; does nothing once the monitor is gone.
struct GradientRecorder {
  py::object observer;  // a weak reference
  py::object call;
  py::object role;
  long long site;
  long long token;
};

using GradientObject = Object<GradientRecorder>;

// False: Python has to do it.
bool record(HookRecorder& recorder, PyObject* self, PyObject* gradient) {
  if (!recorder.is_open) return false;
  const Locked locked(recorder);
  const GradientRecorder& hook = GradientObject::of(self);
  const Call& call = *Call::of(hook.call.ptr());
  if (!recorder.is_open || call.is_recompute) return false;
  const std::int64_t found =
      read(recorder, gradient, hook.site, call.index, recorder.gradient_flags);
  if (found >= 0) {
    const py::int_ token(found >> code::kTokenShift);
    checked(PyDict_SetItem(recorder.gradients.ptr(), py::int_(hook.token).ptr(), token.ptr()));
    if ((found & code::kNew) != 0) {
      note(recorder, found, py::handle(names().gradient), token, py::handle(self),
           recorder.gradient_flags != 0, PyThread_get_thread_ident());
    }
  }
  finish(recorder);
  return true;
}

PyObject* call_gradient(PyObject* self, PyObject* arguments, PyObject*) {
  return translated([&]() -> PyObject* {
    if (PyTuple_GET_SIZE(arguments) != 1) throw py::type_error("expected one gradient");
    PyObject* const gradient = PyTuple_GET_ITEM(arguments, 0);
    const py::object observer = owned(PyObject_CallNoArgs(GradientObject::of(self).observer.ptr()));
    if (observer.is_none()) Py_RETURN_NONE;
    const py::object recorder = owned(PyObject_GetAttr(observer.ptr(), names().recorder));
    HookRecorder& shared = RecorderObject::of(recorder.ptr());
    const bool is_done =
        guarded([&] { return record(shared, self, gradient); },
                [&](const py::object& error) {
                  shared.session().attr("switch_off")(GradientObject::of(self).site, error);
                });
    if (is_done) {
      deliver(shared);
    } else {
      observer.attr("gradient_came")(py::handle(self), py::handle(gradient));
    }
    Py_RETURN_NONE;
  });
}

template <auto kField>
PyObject* get_object(PyObject* self, void*) {
  return py::object(GradientObject::of(self).*kField).release().ptr();
}

template <auto kField>
PyObject* get_number(PyObject* self, void*) {
  return PyLong_FromLongLong(GradientObject::of(self).*kField);
}

PyGetSetDef kGradientProperties[] = {
    {"call", &get_object<&GradientRecorder::call>, nullptr, nullptr, nullptr},
    {"role", &get_object<&GradientRecorder::role>, nullptr, nullptr, nullptr},
    {"site", &get_number<&GradientRecorder::site>, nullptr, nullptr, nullptr},
    {"token", &get_number<&GradientRecorder::token>, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot kGradientSlots[] = {
    {Py_tp_dealloc, as_slot(&GradientObject::destroy)},
    {Py_tp_call, as_slot(&call_gradient)},
    {Py_tp_getset, kGradientProperties},
    {0, nullptr},
};

PyType_Spec kGradientSpec = {"fastcheck._C.GradientRecorder", sizeof(GradientObject), 0,
                             Py_TPFLAGS_DEFAULT, kGradientSlots};

PyTypeObject* gradient_type() {
  static PyTypeObject* const made = [] {
    PyTypeObject* const fresh = new_type(kGradientSpec);
    fresh->tp_new = nullptr;  // made by a ModuleRecorder alone
    return fresh;
  }();
  return made;
}

// ---- Calls --------------------------------------------------------------------------------------

struct ModuleRecorder {
  py::object recorder;
  py::object node;
  py::object counter;
  py::object input_sites, output_sites, grad_input_sites, grad_output_sites;
  bool is_off = false;

  HookRecorder& shared() const { return RecorderObject::of(recorder.ptr()); }

  template <class Visit>
  int each(const Visit& visit) const {
    for (const py::object* held : {&recorder, &node, &counter}) {
      if (const int status = visit(held->ptr())) return status;
    }
    return 0;
  }
  void clear() {}

  bool enter(PyObject* args, PyObject* kwargs) const;
  bool leave(PyObject* output) const;

 private:
  void watch(const HookRecorder& of, const Found::Item& item, const py::object& call,
             PyObject* role, const py::object& sites, std::int64_t token) const;
};

// The calls that are running in this thread, outermost first. `local` keeps the list as long as the
// thread lives; to ask it takes longer than to remember what it said last.
PyObject* stack_of(const HookRecorder& recorder) {
  thread_local std::uint64_t last_id = 0;
  thread_local PyObject* last = nullptr;
  if (last_id != recorder.id) {
    last = owned(PyObject_GetAttr(recorder.local.ptr(), names().stack)).ptr();
    last_id = recorder.id;
  }
  return last;
}

Call* call_at(PyObject* stack, Py_ssize_t place) { return Call::of(PyList_GET_ITEM(stack, place)); }

bool ModuleRecorder::enter(PyObject* args, PyObject* kwargs) const {
  HookRecorder& of = shared();
  if (is_off || !of.is_open || torch::autograd::get_current_graph_task_id() != -1) return false;
  const Locked locked(of);
  if (!of.is_open) return false;
  PyObject* const stack = stack_of(of);
  const Py_ssize_t running = PyList_GET_SIZE(stack);
  if (running == 0) return false;
  const Call* const outermost = call_at(stack, 0);
  if (outermost == nullptr || outermost->node.is(node)) return false;
  Found found;
  if (!found.add_arguments(args, kwargs, input_sites.ptr())) return false;

  const py::object call =
      Call::make(node, CallCounter::of(counter).next(of.step), PyList_GET_ITEM(stack, running - 1),
                 PyThread_get_thread_ident(), of.cursor->seq, false);
  checked(PyList_Append(stack, call.ptr()));
  owned(PyObject_CallOneArg(of.add_call.ptr(), call.ptr()));
  Call& fields = *Call::of(call.ptr());
  for (const Found::Item& item : found.items) {
    const std::int64_t code = read(of, item.tensor, item.site, fields.index, 0);
    if (code < 0) continue;
    const std::int64_t token = code >> code::kTokenShift;
    fields.inputs.push_back({token, item.site});
    if ((code & code::kNew) == 0) continue;
    note(of, code, py::handle(names().input), token, call, of.after_gap);
    if ((code & code::kNeedsGradient) != 0) {
      watch(of, item, call, names().grad_input, grad_input_sites, token);
    }
  }
  finish(of);
  return true;
}

bool ModuleRecorder::leave(PyObject* output) const {
  HookRecorder& of = shared();
  if (is_off || !of.is_open) return false;
  const Locked locked(of);
  if (!of.is_open) return false;
  PyObject* const stack = stack_of(of);
  const Py_ssize_t running = PyList_GET_SIZE(stack);
  if (running < 2) return false;
  const auto call = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(stack, running - 1));
  Call* const fields = Call::of(call.ptr());
  if (fields == nullptr || !fields->node.is(node) || fields->is_recompute ||
      !fields->watched.is_none()) {
    return false;
  }
  Found found;
  if (!found.add(output, py::reinterpret_borrow<py::object>(names().output), output_sites.ptr())) {
    return false;
  }

  // Whatever comes: the call is over.
  checked(PyList_SetSlice(stack, running - 1, running, nullptr));
  fields->outputs_seq = of.cursor->seq;
  bool is_complete = found.count != 0;
  for (const Found::Item& item : found.items) {
    const std::int64_t code = read(of, item.tensor, item.site, fields->index, 0);
    if (code < 0) {
      is_complete = is_complete && !is_plain(unpack(item.tensor));
      continue;
    }
    const std::int64_t token = code >> code::kTokenShift;
    fields->outputs.push_back(token);
    if ((code & code::kNew) == 0) continue;
    if (!of.is_deferred()) note(of, code, py::handle(names().output), token, call);
    if ((code & code::kNeedsGradient) != 0) {
      watch(of, item, call, names().grad_output, grad_output_sites, token);
    }
  }
  fields->is_complete = is_complete;
  if (of.is_deferred()) {
    checked(PyList_Append(of.entries.ptr(), call.ptr()));
  } else if (PyList_GET_SIZE(of.findings.ptr()) != 0) {
    of.session().attr("call_ended")(call, is_complete);
  }
  finish(of);
  return true;
}

void ModuleRecorder::watch(const HookRecorder& of, const Found::Item& item, const py::object& call,
                           PyObject* role, const py::object& sites, std::int64_t token) const {
  PyObject* site = nullptr;
  // Of a parameter, a leaf, or another class of tensors there is more to say.
  if (reinterpret_cast<PyObject*>(Py_TYPE(item.tensor)) == THPVariableClass &&
      !unpack(item.tensor).is_leaf()) {
    site = PyDict_GetItemWithError(sites.ptr(), item.label.ptr());
  }
  if (site == nullptr) {
    of.owner().attr("_watch")(py::handle(item.tensor), call, py::handle(role), item.label,
                              item.position, token);
    return;
  }
  const py::object hook = owned(GradientObject::make(
      gradient_type(), of.observer, call, py::reinterpret_borrow<py::object>(role),
      PyLong_AsLongLong(site), static_cast<long long>(token)));
  owned(PyObject_CallMethodOneArg(item.tensor, names().register_hook, hook.ptr()));
}

// ---- Types that take part in garbage collection -------------------------------------------------

template <class Fields>
int traverse(PyObject* self, visitproc visit, void* arg) {  // the name that Py_VISIT knows
#if PY_VERSION_HEX >= 0x03090000
  Py_VISIT(Py_TYPE(self));
#endif
  return Object<Fields>::of(self).each([&](PyObject* held) {
    Py_VISIT(held);
    return 0;
  });
}

template <class Fields>
int clear(PyObject* self) {
  Object<Fields>::of(self).clear();
  return 0;
}

template <class Fields>
void destroy(PyObject* self) {
  PyObject_GC_UnTrack(self);
  Object<Fields>::destroy(self);
}

// ---- HookRecorder -------------------------------------------------------------------------------

HookRecorder& recorder_of(PyObject* self) { return RecorderObject::of(self); }

py::object borrowed(PyObject* object) { return py::reinterpret_borrow<py::object>(object); }

PyObject* new_recorder(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *reader = nullptr, *cursor = nullptr, *lock = nullptr;
  if (PyArg_ParseTuple(arguments, "OOO:HookRecorder", &reader, &cursor, &lock) == 0) {
    return nullptr;
  }
  return translated([&] {
    return RecorderObject::make(type, borrowed(reader), &hook_reader_of(reader), borrowed(cursor),
                                &cursor_of(cursor), borrowed(lock), &session_lock_of(lock));
  });
}

PyObject* attach(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3 || !PyList_CheckExact(arguments[2])) {
    return PyErr_Format(PyExc_TypeError, "expected an observer, a local, and a list");
  }
  static std::atomic<std::uint64_t> attached{0};
  HookRecorder& recorder = recorder_of(self);
  recorder.observer = borrowed(arguments[0]);
  recorder.local = borrowed(arguments[1]);
  recorder.due = borrowed(arguments[2]);
  recorder.id = ++attached;
  Py_RETURN_NONE;
}

PyObject* open(PyObject* self, PyObject* arguments) {
  HookRecorder& recorder = recorder_of(self);
  PyObject *add_call = nullptr, *findings = nullptr, *entries = nullptr, *gradients = nullptr;
  int after_gap = 0;
  long long step = 0;
  unsigned int flags = 0;
  if (PyArg_ParseTuple(arguments, "LOO!OO!pI:open", &step, &add_call, &PyList_Type, &findings,
                       &entries, &PyDict_Type, &gradients, &after_gap, &flags) == 0) {
    return nullptr;
  }
  recorder.step = step;
  recorder.add_call = borrowed(add_call);
  recorder.findings = borrowed(findings);
  recorder.entries = borrowed(entries);
  recorder.gradients = borrowed(gradients);
  recorder.after_gap = after_gap != 0;
  recorder.gradient_flags = flags;
  recorder.is_open = !recorder.settles;
  Py_RETURN_NONE;
}

PyObject* close(PyObject* self, PyObject*) {
  recorder_of(self).is_open = false;
  Py_RETURN_NONE;
}

PyObject* redirect(PyObject* self, PyObject* entries) {
  if (!PyList_CheckExact(entries)) return PyErr_Format(PyExc_TypeError, "expected a list");
  recorder_of(self).entries = borrowed(entries);
  Py_RETURN_NONE;
}

PyObject* settle(PyObject* self, PyObject*) {
  recorder_of(self).settles = true;
  recorder_of(self).is_open = false;
  Py_RETURN_NONE;
}

PyObject* aim(PyObject* self, PyObject* arguments) {
  PyObject *observe = nullptr, *slots = nullptr, *identities = nullptr, *row = nullptr;
  if (PyArg_ParseTuple(arguments, "OOOO:aim", &observe, &slots, &identities, &row) == 0) {
    return nullptr;
  }
  return translated([&] {
    HookRecorder& recorder = recorder_of(self);
    recorder.row = &cursor_of(row);
    Py_buffer view;
    checked(PyObject_GetBuffer(identities, &view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE));
    recorder.numbers = static_cast<long long*>(view.buf);
    recorder.rows = view.len / static_cast<Py_ssize_t>(kIdentityNumbers * sizeof(long long));
    PyBuffer_Release(&view);  // the array keeps its memory
    recorder.observe = borrowed(observe);
    recorder.slots = borrowed(slots);
    recorder.identities = borrowed(identities);
    recorder.row_object = borrowed(row);
    Py_RETURN_NONE;
  });
}

PyObject* unaim(PyObject* self, PyObject*) {
  HookRecorder& recorder = recorder_of(self);
  recorder.observe = recorder.slots = recorder.identities = recorder.row_object = py::none();
  recorder.rows = 0;
  Py_RETURN_NONE;
}

PyMethodDef kRecorderMethods[] = {
    {"attach", as_method(&attach), METH_FASTCALL, "attach(self, observer, local, due) -> None"},
    {"open", &open, METH_VARARGS,
     "open(self, step, add_call, findings, entries, gradients, after_gap, gradient_flags) -> None"},
    {"close", &close, METH_NOARGS, "close(self) -> None"},
    {"redirect", &redirect, METH_O, "redirect(self, entries) -> None"},
    {"settle", &settle, METH_NOARGS, "settle(self) -> None"},
    {"aim", &aim, METH_VARARGS, "aim(self, observe, slots, identities, cursor) -> None"},
    {"unaim", &unaim, METH_NOARGS, "unaim(self) -> None"},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot kRecorderSlots[] = {
    {Py_tp_new, as_slot(&new_recorder)},
    {Py_tp_dealloc, as_slot(&destroy<HookRecorder>)},
    {Py_tp_traverse, as_slot(&traverse<HookRecorder>)},
    {Py_tp_clear, as_slot(&clear<HookRecorder>)},
    {Py_tp_methods, kRecorderMethods},
    {0, nullptr},
};

PyType_Spec kRecorderSpec = {"fastcheck._C.HookRecorder", sizeof(RecorderObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kRecorderSlots};

PyTypeObject* recorder_type() {
  static PyTypeObject* const made = new_type(kRecorderSpec);
  return made;
}

// ---- ModuleRecorder -----------------------------------------------------------------------------

using ModuleObject = Object<ModuleRecorder>;

PyObject* new_module_recorder(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *recorder = nullptr, *node = nullptr, *counter = nullptr;
  std::array<PyObject*, 4> sites{};
  if (PyArg_ParseTuple(arguments, "O!OOO!O!O!O!:ModuleRecorder", recorder_type(), &recorder, &node,
                       &counter, &PyDict_Type, &sites[0], &PyDict_Type, &sites[1], &PyDict_Type,
                       &sites[2], &PyDict_Type, &sites[3]) == 0) {
    return nullptr;
  }
  return translated([&] {
    CallCounter::of(counter);
    return ModuleObject::make(type, borrowed(recorder), borrowed(node), borrowed(counter),
                              borrowed(sites[0]), borrowed(sites[1]), borrowed(sites[2]),
                              borrowed(sites[3]), false);
  });
}

template <class Body>
PyObject* attend(PyObject* self, const Body& body) {
  return translated([&] {
    const ModuleRecorder& module = ModuleObject::of(self);
    const HookRecorder& of = module.shared();
    const bool is_done =
        guarded([&] { return body(module); },
                [&](const py::object& error) { of.owner().attr("failed")(module.node, error); });
    if (is_done) deliver(of);
    return PyBool_FromLong(is_done);
  });
}

PyObject* enter(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2 || !PyTuple_Check(arguments[0]) || !PyDict_Check(arguments[1])) {
    return PyErr_Format(PyExc_TypeError, "expected a tuple and a dict");
  }
  return attend(
      self, [&](const ModuleRecorder& module) { return module.enter(arguments[0], arguments[1]); });
}

PyObject* leave(PyObject* self, PyObject* output) {
  return attend(self, [&](const ModuleRecorder& module) { return module.leave(output); });
}

PyObject* switch_off(PyObject* self, PyObject*) {
  ModuleObject::of(self).is_off = true;
  Py_RETURN_NONE;
}

PyMethodDef kModuleMethods[] = {
    {"enter", as_method(&enter), METH_FASTCALL, "enter(self, args, kwargs) -> bool"},
    {"leave", &leave, METH_O, "leave(self, output) -> bool"},
    {"switch_off", &switch_off, METH_NOARGS, "switch_off(self) -> None"},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot kModuleSlots[] = {
    {Py_tp_new, as_slot(&new_module_recorder)},
    {Py_tp_dealloc, as_slot(&destroy<ModuleRecorder>)},
    {Py_tp_traverse, as_slot(&traverse<ModuleRecorder>)},
    {Py_tp_clear, as_slot(&clear<ModuleRecorder>)},
    {Py_tp_methods, kModuleMethods},
    {0, nullptr},
};

PyType_Spec kModuleSpec = {"fastcheck._C.ModuleRecorder", sizeof(ModuleObject), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kModuleSlots};

PyTypeObject* module_type() {
  static PyTypeObject* const made = new_type(kModuleSpec);
  return made;
}

}  // namespace

void define_hook_recorder(py::module_& m) {
  m.attr("HookRecorder") = py::handle(reinterpret_cast<PyObject*>(recorder_type()));
  m.attr("ModuleRecorder") = py::handle(reinterpret_cast<PyObject*>(module_type()));
  m.attr("GradientRecorder") = py::handle(reinterpret_cast<PyObject*>(gradient_type()));
}

}  // namespace fastcheck
