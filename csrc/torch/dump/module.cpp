#include "torch/dump/module.h"

#include <memory>
#include <stdexcept>
#include <string>

#include "torch/dump/op_mode.h"
#include "torch/python/tensors.h"
#include "torch/python/types.h"
#include "torch/read/slots.h"

namespace py = pybind11;

namespace fastcheck::dump {
namespace {

// A recorder in memory of its own: it can't be moved.
struct HeldRecorder {
  std::shared_ptr<OpMode> mode;

  template <class Visit>
  int each(const Visit& visit) const {
    return mode == nullptr ? 0 : mode->each(visit);
  }
  void clear() { mode.reset(); }
};

using RecorderObject = Object<HeldRecorder>;

// Held by those who use it: the object may be collected meanwhile.
std::shared_ptr<OpMode> mode_of(PyObject* self) {
  std::shared_ptr<OpMode> mode = RecorderObject::of(self).mode;
  if (mode == nullptr) throw std::invalid_argument("this OpRecorder was collected already");
  return mode;
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
        type, std::make_shared<OpMode>(borrowed(python), borrowed(writer), unpack(slots),
                                       checked_depth(depth), static_cast<std::int64_t>(step)));
  });
}

// Whatever calls it in the place of a mode's method, from C++ or from Python: `types` may be a
// list.
PyObject* dispatch(PyObject* self, PyObject* arguments, PyObject* keywords) {
  static const char* const kNames[] = {"", "func", "types", "args", "kwargs", nullptr};
  PyObject *mode = nullptr, *func = nullptr, *types = nullptr, *args = nullptr, *kwargs = nullptr;
  if (PyArg_ParseTupleAndKeywords(arguments, keywords, "OOO|OO:dispatch",
                                  const_cast<char**>(kNames), &mode, &func, &types, &args,
                                  &kwargs) == 0) {
    return nullptr;
  }
  return translated([&] {
    const bool has_kwargs = kwargs != nullptr && PyObject_IsTrue(kwargs) == 1;
    const py::object given = owned(args == nullptr ? PyTuple_New(0) : PySequence_Tuple(args));
    const py::object named = has_kwargs ? py::object(py::dict(borrowed(kwargs))) : py::dict();
    return mode_of(self)->dispatch(func, owned(PySequence_Tuple(types)).ptr(), given.ptr(),
                                   named.ptr());
  });
}

PyObject* move(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3) {
    return PyErr_Format(PyExc_TypeError, "expected (node, is_recompute, is_in_optimizer)");
  }
  return translated([&] {
    mode_of(self)->recorder().move(arguments[0], arguments[1] == Py_True, arguments[2] == Py_True);
    Py_RETURN_NONE;
  });
}

PyObject* forget(PyObject* self, PyObject*) {
  return translated([&] {
    mode_of(self)->recorder().forget();
    Py_RETURN_NONE;
  });
}

PyObject* clear_all(PyObject* self, PyObject*) {
  return translated([&] {
    mode_of(self)->recorder().clear();
    Py_RETURN_NONE;
  });
}

PyObject* get_reused(PyObject* self, void*) {
  return translated([&] { return PyLong_FromLongLong(mode_of(self)->recorder().reused()); });
}

PyMethodDef kMethods[] = {
    {"dispatch", as_method(&dispatch), METH_VARARGS | METH_KEYWORDS,
     "dispatch(self, mode, func, types, args=(), kwargs=None) -> Any"},
    {"move", as_method(&move), METH_FASTCALL,
     "move(self, node, is_recompute, is_in_optimizer) -> None"},
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
