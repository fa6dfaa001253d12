#include "torch/hooks/recorder.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/numpy.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <string>

#include "torch/python/tensors.h"

namespace py = pybind11;

namespace fastcheck {

void HookRecorder::refuse(PyObject* tensor, std::int64_t site) const {
  py::error_already_set error;
  if (!error.matches(PyExc_Exception)) throw error;  // an interrupt is no answer
  level().attr("on_unreadable")(py::handle(tensor), site, error.value());
}

bool HookRecorder::read_now(PyObject* tensor, std::int64_t found, const Identity& identity) {
  if (!rows.has_room() || (found & code::kNewStream) != 0) {
    return level()
        .attr("read_elsewhere")(py::handle(tensor), found, identity.site, identity.call,
                                identity.flags)
        .cast<bool>();
  }
  const py::object at_row = owned(PyLong_FromLongLong(rows.next()));
  const Depth depth = reader->depths().of(unpack(tensor));
  const py::object number = owned(PyLong_FromLong(static_cast<long>(depth)));
  std::array<PyObject*, 4> arguments{tensor, rows.slots().ptr(), at_row.ptr(), number.ptr()};
  PyObject* const done =
      PyObject_Vectorcall(observe.ptr(), arguments.data(), arguments.size(), nullptr);
  if (done == nullptr) {
    refuse(tensor, identity.site);
    return false;
  }
  Py_DECREF(done);
  rows.put(identity, code::dtype_of(found), code::order_of(found), depth);
  return true;
}

bool HookRecorder::read_elsewhere(PyObject* object, std::int64_t found, std::int64_t site,
                                  long long call, std::uint32_t flags) {
  Identity identity{cursor->seq, step, static_cast<std::int32_t>(call),
                    static_cast<std::int32_t>(site), flags};
  const at::Tensor& tensor = unpack(object);
  const bool may_wait = (found & code::kNewStream) == 0;
  if (!may_wait) waiting.leave_stream();
  const Waiting::Turn turn = may_wait ? waiting.turn_of(tensor, site, step) : Waiting::Turn::kNow;
  if (turn != Waiting::Turn::kLater && !read_now(object, found, identity)) return false;
  if (turn == Waiting::Turn::kNow) return true;
  if (turn == Waiting::Turn::kNowAndAgain) identity.flags |= Waiting::kAgain;
  waiting.add(tensor, identity, code::dtype_of(found), code::order_of(found), reader->stream());
  if (waiting.is_full()) read_waiting();
  return true;
}

void HookRecorder::read_waiting() {
  if (waiting.is_empty()) return;
  Waiting::Due due = waiting.take();
  TensorList tensors;
  py::array_t<long long> identities(
      {static_cast<py::ssize_t>(due.items.size()), static_cast<py::ssize_t>(kIdentityNumbers)});
  for (const Waiting::Item& item : due.items) {
    const auto row = static_cast<py::ssize_t>(tensors.all->size());
    write_identity(item.identity, item.dtype, item.order, reader->depths().of(item.tensor),
                   identities.mutable_data(row, 0));
    tensors.add(item.tensor);
  }
  py::list changed;
  for (const Waiting::Item& item : due.changed) {
    if ((item.identity.flags & Waiting::kAgain) == 0) changed.append(item.identity.seq);
  }
  const c10::StreamGuard on_stream(due.stream);
  level().attr("read_waiting")(tensors, identities, changed);
  // The memory of another stream's tensor is not that one's before the reading is over.
  const c10::impl::VirtualGuardImpl device(due.stream.device_type());
  for (const Waiting::Item& item : due.items) {
    device.recordDataPtrOnStream(item.tensor.storage().data_ptr(), due.stream);
  }
}

std::int64_t HookRecorder::read(PyObject* tensor, std::int64_t site, long long call,
                                std::uint32_t flags) {
  const auto ask = [&] {
    return level().attr("read")(py::handle(tensor), site, call, flags).cast<std::int64_t>();
  };
  if (cursor->slot == reader->capacity()) return ask();
  std::int64_t found = code::kUnread;
  PyObject* const done = translated([&] {
    const Identity identity{cursor->seq, step, static_cast<std::int32_t>(call),
                            static_cast<std::int32_t>(site), flags};
    found = reader->read(tensor, cursor->slot, identity, false);
    Py_RETURN_NONE;
  });
  if (done == nullptr) {
    refuse(tensor, site);
    return code::kUnread;
  }
  Py_DECREF(done);
  if (found == code::kUnknownDevice) return ask();
  if (found < 0 || (found & code::kNew) == 0) return found;
  if ((found & code::kElsewhere) == 0) {
    ++cursor->slot;
  } else if (!read_elsewhere(tensor, found, site, call, flags)) {
    return code::kUnread;
  }
  ++cursor->seq;
  return found;
}

void HookRecorder::finish() const {
  if (settles) session().attr("settle_call")();
}

void HookRecorder::deliver() const {
  if (PyList_GET_SIZE(due.ptr()) != 0) owner().attr("deliver")();
}

py::object HookRecorder::level() const { return session().attr("level"); }

py::object HookRecorder::session() const {
  static PyObject* const kName = interned("session");
  return owned(PyObject_GetAttr(owner().ptr(), kName));
}

// ---- The type -------------------------------------------------------------------------------

namespace {

using RecorderObject = Object<HookRecorder>;

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
  const auto is_tuple_class = [](PyObject* object) {
    return PyType_Check(object) != 0 && PyType_FastSubclass(reinterpret_cast<PyTypeObject*>(object),
                                                            Py_TPFLAGS_TUPLE_SUBCLASS) != 0;
  };
  if (count != 6 || !PyList_CheckExact(arguments[2]) ||
      !std::all_of(arguments + 3, arguments + 6, is_tuple_class)) {
    return PyErr_Format(PyExc_TypeError,
                        "expected an observer, a local, a list, and three classes of tuples");
  }
  static std::atomic<std::uint64_t> attached{0};
  HookRecorder& recorder = hook_recorder_of(self);
  recorder.observer = borrowed(arguments[0]);
  recorder.local = borrowed(arguments[1]);
  recorder.due = borrowed(arguments[2]);
  recorder.inner_input = borrowed(arguments[3]);
  recorder.output = borrowed(arguments[4]);
  recorder.gradient = borrowed(arguments[5]);
  recorder.id = ++attached;
  Py_RETURN_NONE;
}

PyObject* open(PyObject* self, PyObject* arguments) {
  HookRecorder& recorder = hook_recorder_of(self);
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
  recorder.resting = 0;
  Py_RETURN_NONE;
}

PyObject* close(PyObject* self, PyObject*) {
  hook_recorder_of(self).is_open = false;
  hook_recorder_of(self).resting = 0;
  Py_RETURN_NONE;
}

PyObject* rest(PyObject* self, PyObject*) {
  hook_recorder_of(self).resting = PyThread_get_thread_ident();
  Py_RETURN_NONE;
}

PyObject* redirect(PyObject* self, PyObject* entries) {
  if (!PyList_CheckExact(entries)) return PyErr_Format(PyExc_TypeError, "expected a list");
  hook_recorder_of(self).entries = borrowed(entries);
  Py_RETURN_NONE;
}

PyObject* settle(PyObject* self, PyObject*) {
  hook_recorder_of(self).settles = true;
  hook_recorder_of(self).is_open = false;
  Py_RETURN_NONE;
}

PyObject* set_target(PyObject* self, PyObject* arguments) {
  PyObject *observe = nullptr, *slots = nullptr, *identities = nullptr, *row = nullptr;
  if (PyArg_ParseTuple(arguments, "OOOO:set_target", &observe, &slots, &identities, &row) == 0) {
    return nullptr;
  }
  return translated([&] {
    HookRecorder& recorder = hook_recorder_of(self);
    recorder.rows.set(borrowed(slots), borrowed(identities), borrowed(row));
    recorder.observe = borrowed(observe);
    Py_RETURN_NONE;
  });
}

PyObject* clear_target(PyObject* self, PyObject*) {
  HookRecorder& recorder = hook_recorder_of(self);
  recorder.observe = py::none();
  recorder.rows.clear();
  Py_RETURN_NONE;
}

PyObject* let_wait(PyObject* self, PyObject* type) {
  return translated([&] {
    std::optional<c10::DeviceType> allowed;
    if (type != Py_None) allowed = c10::Device(py::cast<std::string>(type)).type();
    hook_recorder_of(self).waiting.allow(allowed);
    Py_RETURN_NONE;
  });
}

PyObject* read_waiting(PyObject* self, PyObject*) {
  return translated([&] {
    hook_recorder_of(self).read_waiting();
    Py_RETURN_NONE;
  });
}

PyObject* has_passed(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "expected a tensor and a site");
  const long long site = PyLong_AsLongLong(arguments[1]);
  if (site == -1 && PyErr_Occurred() != nullptr) return nullptr;
  return translated([&] {
    return PyBool_FromLong(hook_recorder_of(self).waiting.has_passed(unpack(arguments[0]), site));
  });
}

PyObject* compared(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "expected a site and a bool");
  const long long site = PyLong_AsLongLong(arguments[0]);
  if (site == -1 && PyErr_Occurred() != nullptr) return nullptr;
  return translated([&] {
    hook_recorder_of(self).waiting.compared(site, arguments[1] == Py_True);
    Py_RETURN_NONE;
  });
}

PyMethodDef kRecorderMethods[] = {
    {"attach", as_method(&attach), METH_FASTCALL,
     "attach(self, observer, local, due, inner_input, output, gradient) -> None"},
    {"open", &open, METH_VARARGS,
     "open(self, step, add_call, findings, entries, gradients, after_gap, gradient_flags) -> None"},
    {"close", &close, METH_NOARGS, "close(self) -> None"},
    {"rest", &rest, METH_NOARGS, "rest(self) -> None"},
    {"redirect", &redirect, METH_O, "redirect(self, entries) -> None"},
    {"settle", &settle, METH_NOARGS, "settle(self) -> None"},
    {"set_target", &set_target, METH_VARARGS,
     "set_target(self, observe, slots, identities, cursor) -> None"},
    {"clear_target", &clear_target, METH_NOARGS, "clear_target(self) -> None"},
    {"let_wait", &let_wait, METH_O, "let_wait(self, device_type) -> None"},
    {"read_waiting", &read_waiting, METH_NOARGS, "read_waiting(self) -> None"},
    {"has_passed", as_method(&has_passed), METH_FASTCALL, "has_passed(self, tensor, site) -> bool"},
    {"compared", as_method(&compared), METH_FASTCALL, "compared(self, site, are_same) -> None"},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot kRecorderSlots[] = {
    {Py_tp_new, as_slot(&new_recorder)},
    {Py_tp_dealloc, as_slot(&destroy_tracked<HookRecorder>)},
    {Py_tp_traverse, as_slot(&traverse<HookRecorder>)},
    {Py_tp_clear, as_slot(&clear<HookRecorder>)},
    {Py_tp_methods, kRecorderMethods},
    {0, nullptr},
};

PyType_Spec kRecorderSpec = {"fastcheck._C.HookRecorder", sizeof(RecorderObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kRecorderSlots};

}  // namespace

HookRecorder& hook_recorder_of(PyObject* object) { return RecorderObject::of(object); }

PyTypeObject* hook_recorder_type() {
  static PyTypeObject* const made = new_type(kRecorderSpec);
  return made;
}

void define_hook_recorder(py::module_& m) {
  m.attr("HookRecorder") = py::handle(reinterpret_cast<PyObject*>(hook_recorder_type()));
}

}  // namespace fastcheck
