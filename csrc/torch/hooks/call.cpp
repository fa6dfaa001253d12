#include "torch/hooks/call.h"

#include <string>

namespace py = pybind11;

namespace fastcheck {
namespace {

PyObject* list_of(const std::int64_t* first, std::size_t count, std::size_t stride) {
  return translated([&] {
    py::list list(count);
    for (std::size_t i = 0; i < count; ++i) list[i] = py::int_(first[i * stride]);
    return list.release().ptr();
  });
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
  if (count != 2) return PyErr_Format(PyExc_TypeError, "expected a sequence number and a site");
  const Call::Input input{PyLong_AsLongLong(arguments[0]), PyLong_AsLongLong(arguments[1])};
  if (PyErr_Occurred() != nullptr) return nullptr;
  CallObject::of(self).inputs.push_back(input);
  Py_RETURN_NONE;
}

PyObject* add_output(PyObject* self, PyObject* seq) {
  const long long number = PyLong_AsLongLong(seq);
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
  return list_of(inputs.empty() ? nullptr : &inputs[0].seq, inputs.size(), 2);
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
    {"node", &get_field<Call, &Call::node>, nullptr, nullptr, nullptr},
    {"parent", &get_field<Call, &Call::parent>, nullptr, nullptr, nullptr},
    {"index", &get_field<Call, &Call::index>, nullptr, nullptr, nullptr},
    {"depth", &get_field<Call, &Call::depth>, nullptr, nullptr, nullptr},
    {"thread", &get_field<Call, &Call::thread>, nullptr, nullptr, nullptr},
    {"first_seq", &get_field<Call, &Call::first_seq>, nullptr, nullptr, nullptr},
    {"outputs_seq", &get_field<Call, &Call::outputs_seq>, nullptr, nullptr, nullptr},
    {"is_recompute", &get_field<Call, &Call::is_recompute>, nullptr, nullptr, nullptr},
    {"is_complete", &get_field<Call, &Call::is_complete>, nullptr, nullptr, nullptr},
    {"watched", &get_field<Call, &Call::watched>, &set_watched, nullptr, nullptr},
    {"inputs", &inputs, nullptr, nullptr, nullptr},
    {"input_sites", &input_sites, nullptr, nullptr, nullptr},
    {"outputs", &outputs, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef kCallMethods[] = {
    {"add_input", as_method(&add_input), METH_FASTCALL, "add_input(self, seq, site) -> None"},
    {"add_output", &add_output, METH_O, "add_output(self, seq) -> None"},
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
    {"total", &get_field<CallCounter, &CallCounter::total>,
     &set_field<CallCounter, &CallCounter::total>, nullptr, nullptr},
    {"is_off", &get_field<CallCounter, &CallCounter::is_off>,
     &set_field<CallCounter, &CallCounter::is_off>, nullptr, nullptr},
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

void define_hook_call(py::module_& m) {
  for (PyTypeObject* const type : {call_type(), counter_type()}) {
    const std::string name = type->tp_name;
    m.attr(name.substr(name.rfind('.') + 1).c_str()) =
        py::handle(reinterpret_cast<PyObject*>(type));
  }
}

}  // namespace fastcheck
