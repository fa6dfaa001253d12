#include "torch/dump/module.h"

#include <memory>
#include <stdexcept>
#include <string>

#include "torch/dump/op_recorder.h"
#include "torch/python_tensors.h"
#include "torch/python_types.h"
#include "torch/slots.h"

namespace py = pybind11;

namespace fastcheck::dump {
namespace {

using CallObject = Object<OpCall>;

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
  if (recorder == nullptr) throw std::invalid_argument("this OpRecorder was collected already");
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
    return CallObject::make(call_type(), recorder_of(self).begin(self, arguments[0], arguments[1],
                                                                 arguments[2], where));
  });
}

PyObject* end(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  const bool is_ours = count == 5 && Py_TYPE(arguments[0]) == call_type() &&
                       CallObject::of(arguments[0]).recorder.is(py::handle(self));
  if (!is_ours || !PyTuple_Check(arguments[1]) || !PyDict_Check(arguments[2])) {
    return PyErr_Format(PyExc_TypeError,
                        "expected (begin()'s OpCall, tuple, dict, result, number)");
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
  m.attr("OpCall") = py::handle(reinterpret_cast<PyObject*>(call_type()));
  m.attr("OpRecorder") = py::handle(reinterpret_cast<PyObject*>(kType));
}

}  // namespace fastcheck::dump
