#include "torch/hooks/call.h"

#include <string>
#include <type_traits>

namespace py = pybind11;

namespace fastcheck {
namespace {

template <class Fields>
Fields& fields_of(PyTypeObject* type, py::handle object) {
  if (Py_TYPE(object.ptr()) != type) {
    throw py::type_error(std::string("expected a ") + type->tp_name + ", got a " +
                         Py_TYPE(object.ptr())->tp_name);
  }
  return Object<Fields>::of(object.ptr());
}

// A field as a property.
template <class Fields, auto kField>
PyObject* get(PyObject* self, void*) {
  const auto value = Object<Fields>::of(self).*kField;
  if constexpr (std::is_same_v<decltype(value), const bool>) {
    return PyBool_FromLong(value);
  } else if constexpr (std::is_unsigned_v<decltype(value)>) {
    return PyLong_FromUnsignedLongLong(value);
  } else if constexpr (std::is_integral_v<decltype(value)>) {
    return PyLong_FromLongLong(value);
  } else {
    return py::object(value).release().ptr();
  }
}

template <class Fields, auto kField>
int set(PyObject* self, PyObject* value, void*) {
  if (value == nullptr) {
    PyErr_SetString(PyExc_AttributeError, "it can't be deleted");
    return -1;
  }
  const long long number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred() != nullptr) return -1;
  Object<Fields>::of(self).*kField = number;
  return 0;
}

PyObject* list_of(const std::int64_t* first, std::size_t count, std::size_t stride) {
  return translated([&] {
    py::list list(count);
    for (std::size_t i = 0; i < count; ++i) list[i] = py::int_(first[i * stride]);
    return list.release().ptr();
  });
}

// ---- Cursor -------------------------------------------------------------------------------------

using CursorObject = Object<Cursor>;

PyObject* new_cursor(PyTypeObject* type, PyObject*, PyObject*) {
  return translated([&] { return CursorObject::make(type, 0LL, 0LL); });
}

PyGetSetDef kCursorProperties[] = {
    {"seq", &get<Cursor, &Cursor::seq>, &set<Cursor, &Cursor::seq>, nullptr, nullptr},
    {"slot", &get<Cursor, &Cursor::slot>, &set<Cursor, &Cursor::slot>, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot kCursorSlots[] = {
    {Py_tp_new, as_slot(&new_cursor)},
    {Py_tp_dealloc, as_slot(&CursorObject::destroy)},
    {Py_tp_getset, kCursorProperties},
    {0, nullptr},
};

PyType_Spec kCursorSpec = {"fastcheck._C.Cursor", sizeof(CursorObject), 0, Py_TPFLAGS_DEFAULT,
                           kCursorSlots};

PyTypeObject* cursor_type() {
  static PyTypeObject* const made = new_type(kCursorSpec);
  return made;
}

// ---- Call ---------------------------------------------------------------------------------------

using CallObject = Object<Call>;

PyTypeObject* call_type();

PyObject* new_call(PyTypeObject*, PyObject* arguments, PyObject*) {
  PyObject *node = nullptr, *parent = nullptr;
  long long index = 0, first_seq = 0;
  unsigned long long thread = 0;
  int is_recompute = 0;
  if (PyArg_ParseTuple(arguments, "OLOKLp:Call", &node, &index, &parent, &thread, &first_seq,
                       &is_recompute) == 0) {
    return nullptr;
  }
  return translated([&] {
    return Call::make(py::reinterpret_borrow<py::object>(node), index, parent, thread, first_seq,
                      is_recompute != 0)
        .release()
        .ptr();
  });
}

PyObject* add_input(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "expected a token and a site");
  const Call::Input input{PyLong_AsLongLong(arguments[0]), PyLong_AsLongLong(arguments[1])};
  if (PyErr_Occurred() != nullptr) return nullptr;
  CallObject::of(self).inputs.push_back(input);
  Py_RETURN_NONE;
}

PyObject* add_output(PyObject* self, PyObject* token) {
  const long long number = PyLong_AsLongLong(token);
  if (number == -1 && PyErr_Occurred() != nullptr) return nullptr;
  CallObject::of(self).outputs.push_back(number);
  Py_RETURN_NONE;
}

int set_watched(PyObject* self, PyObject* value, void*) {
  CallObject::of(self).watched = py::reinterpret_borrow<py::object>(value ? value : Py_None);
  return 0;
}

PyObject* inputs(PyObject* self, void*) {
  const auto& inputs = CallObject::of(self).inputs;
  return list_of(inputs.empty() ? nullptr : &inputs[0].token, inputs.size(), 2);
}

PyObject* input_sites(PyObject* self, void*) {
  const auto& inputs = CallObject::of(self).inputs;
  return list_of(inputs.empty() ? nullptr : &inputs[0].site, inputs.size(), 2);
}

PyObject* outputs(PyObject* self, void*) {
  const auto& outputs = CallObject::of(self).outputs;
  return list_of(outputs.data(), outputs.size(), 1);
}

PyGetSetDef kCallProperties[] = {
    {"node", &get<Call, &Call::node>, nullptr, nullptr, nullptr},
    {"parent", &get<Call, &Call::parent>, nullptr, nullptr, nullptr},
    {"index", &get<Call, &Call::index>, nullptr, nullptr, nullptr},
    {"depth", &get<Call, &Call::depth>, nullptr, nullptr, nullptr},
    {"thread", &get<Call, &Call::thread>, nullptr, nullptr, nullptr},
    {"first_seq", &get<Call, &Call::first_seq>, nullptr, nullptr, nullptr},
    {"outputs_seq", &get<Call, &Call::outputs_seq>, nullptr, nullptr, nullptr},
    {"is_recompute", &get<Call, &Call::is_recompute>, nullptr, nullptr, nullptr},
    {"is_complete", &get<Call, &Call::is_complete>, nullptr, nullptr, nullptr},
    {"watched", &get<Call, &Call::watched>, &set_watched, nullptr, nullptr},
    {"inputs", &inputs, nullptr, nullptr, nullptr},
    {"input_sites", &input_sites, nullptr, nullptr, nullptr},
    {"outputs", &outputs, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef kCallMethods[] = {
    {"add_input", as_method(&add_input), METH_FASTCALL, "add_input(self, token, site) -> None"},
    {"add_output", &add_output, METH_O, "add_output(self, token) -> None"},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot kCallSlots[] = {
    {Py_tp_new, as_slot(&new_call)},
    {Py_tp_dealloc, as_slot(&CallObject::destroy)},
    {Py_tp_getset, kCallProperties},
    {Py_tp_methods, kCallMethods},
    {0, nullptr},
};

PyType_Spec kCallSpec = {"fastcheck._C.Call", sizeof(CallObject), 0, Py_TPFLAGS_DEFAULT,
                         kCallSlots};

PyTypeObject* call_type() {
  static PyTypeObject* const made = new_type(kCallSpec);
  return made;
}

// ---- CallCounter --------------------------------------------------------------------------------

using CounterObject = Object<CallCounter>;

PyObject* new_counter(PyTypeObject* type, PyObject*, PyObject*) {
  return translated([&] { return CounterObject::make(type); });
}

PyObject* next_call(PyObject* self, PyObject* step) {
  const long long number = PyLong_AsLongLong(step);
  if (number == -1 && PyErr_Occurred() != nullptr) return nullptr;
  return translated([&] { return PyLong_FromLongLong(CounterObject::of(self).next(number)); });
}

PyObject* recomputed_call(PyObject* self, PyObject* step) {
  const long long number = PyLong_AsLongLong(step);
  if (number == -1 && PyErr_Occurred() != nullptr) return nullptr;
  const long long index = CounterObject::of(self).recomputed(number);
  if (index < 0) Py_RETURN_NONE;
  return PyLong_FromLongLong(index);
}

PyGetSetDef kCounterProperties[] = {
    {"total", &get<CallCounter, &CallCounter::total>, &set<CallCounter, &CallCounter::total>,
     nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef kCounterMethods[] = {
    {"next_call", &next_call, METH_O, "next_call(self, step) -> int"},
    {"recomputed_call", &recomputed_call, METH_O, "recomputed_call(self, step) -> int | None"},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot kCounterSlots[] = {
    {Py_tp_new, as_slot(&new_counter)},
    {Py_tp_dealloc, as_slot(&CounterObject::destroy)},
    {Py_tp_getset, kCounterProperties},
    {Py_tp_methods, kCounterMethods},
    {0, nullptr},
};

PyType_Spec kCounterSpec = {"fastcheck._C.CallCounter", sizeof(CounterObject), 0,
                            Py_TPFLAGS_DEFAULT, kCounterSlots};

PyTypeObject* counter_type() {
  static PyTypeObject* const made = new_type(kCounterSpec);
  return made;
}

}  // namespace

py::object Call::make(py::object node, long long index, PyObject* parent, unsigned long long thread,
                      long long first_seq, bool is_recompute) {
  const Call* const above = Call::of(parent);
  return owned(CallObject::make(call_type(), std::move(node),
                                py::reinterpret_borrow<py::object>(parent), index,
                                above == nullptr ? 0LL : above->depth + 1, thread, first_seq,
                                first_seq, is_recompute, false, py::none()));
}

Call* Call::of(PyObject* object) {
  return Py_TYPE(object) == call_type() ? &CallObject::of(object) : nullptr;
}

long long CallCounter::next(long long in_step) {
  if (step != in_step) {
    step = in_step;
    calls = 0;
    not_recomputed.clear();
  }
  ++total;
  not_recomputed.push_back(calls);
  return calls++;
}

long long CallCounter::recomputed(long long in_step) {
  if (step != in_step || calls == 0) return -1;
  if (not_recomputed.empty()) return calls - 1;
  const long long index = not_recomputed.back();
  not_recomputed.pop_back();
  return index;
}

CallCounter& CallCounter::of(py::handle object) {
  return fields_of<CallCounter>(counter_type(), object);
}

Cursor& cursor_of(py::handle object) { return fields_of<Cursor>(cursor_type(), object); }

void define_hook_call(py::module_& m) {
  for (PyTypeObject* const type : {cursor_type(), call_type(), counter_type()}) {
    const std::string name = type->tp_name;
    m.attr(name.substr(name.rfind('.') + 1).c_str()) =
        py::handle(reinterpret_cast<PyObject*>(type));
  }
}

}  // namespace fastcheck
