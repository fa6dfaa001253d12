// Shared parts of types that are made with CPython's own interface. They are called a few times for
// each tensor: a call of pybind11's costs four tenths of a microsecond, one of these a tenth.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <type_traits>

namespace fastcheck {

// The result of `body`, or nullptr with Python's exception for what it has thrown.
template <class Body>
PyObject* translated(const Body& body) {
  try {
    return body();
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (const pybind11::builtin_exception& error) {
    error.set_error();
  } catch (const std::out_of_range& error) {
    PyErr_SetString(PyExc_IndexError, error.what());
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// A new reference that is not nullptr, or what Python has raised.
inline pybind11::object owned(PyObject* object) {
  if (object == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(object);
}

// A string that Python compares by its address; for good.
inline PyObject* interned(const char* text) {
  return owned(PyUnicode_InternFromString(text)).release().ptr();
}

inline pybind11::object borrowed(PyObject* object) {
  return pybind11::reinterpret_borrow<pybind11::object>(object);
}

// Checks the result of a function that returns -1 when Python has raised.
inline void checked(int status) {
  if (status != 0) throw pybind11::error_already_set();
}

// An object of a type that has fields of C++ behind Python's head.
template <class Fields>
struct Object {
  PyObject head;
  Fields fields;

  static Fields& of(PyObject* self) { return reinterpret_cast<Object*>(self)->fields; }

  template <class... Arguments>
  static PyObject* make(PyTypeObject* type, Arguments&&... arguments) {
    Fields fields{std::forward<Arguments>(arguments)...};  // may throw: nothing is half made
    PyObject* const self = owned(type->tp_alloc(type, 0)).release().ptr();
    new (&of(self)) Fields(std::move(fields));
    return self;
  }

  static void destroy(PyObject* self) {
    PyTypeObject* const type = Py_TYPE(self);
    of(self).~Fields();
    type->tp_free(self);
    Py_DECREF(type);
  }
};

// The fields of an object that has to be of `type`.
template <class Fields>
Fields& fields_of(PyTypeObject* type, pybind11::handle object) {
  if (Py_TYPE(object.ptr()) != type) {
    throw pybind11::type_error(std::string("expected a ") + type->tp_name + ", got a " +
                               Py_TYPE(object.ptr())->tp_name);
  }
  return Object<Fields>::of(object.ptr());
}

// A field as a property.
template <class Fields, auto kField>
PyObject* get_field(PyObject* self, void*) {
  const auto value = Object<Fields>::of(self).*kField;
  if constexpr (std::is_same_v<decltype(value), const bool>) {
    return PyBool_FromLong(value);
  } else if constexpr (std::is_unsigned_v<decltype(value)>) {
    return PyLong_FromUnsignedLongLong(value);
  } else if constexpr (std::is_integral_v<decltype(value)>) {
    return PyLong_FromLongLong(value);
  } else {
    return pybind11::object(value).release().ptr();
  }
}

template <class Fields, auto kField>
int set_field(PyObject* self, PyObject* value, void*) {
  if (value == nullptr) {
    PyErr_SetString(PyExc_AttributeError, "it can't be deleted");
    return -1;
  }
  const long long number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred() != nullptr) return -1;
  Object<Fields>::of(self).*kField = number;
  return 0;
}

// Slots of types that take part in garbage collection: fields.each(visit) shows what they hold,
// fields.clear() lets go of what may lead back. Py_VISIT wants the name `arg`.
template <class Fields>
int traverse(PyObject* self, visitproc visit, void* arg) {
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
void destroy_tracked(PyObject* self) {
  PyObject_GC_UnTrack(self);
  Object<Fields>::destroy(self);
}

inline PyTypeObject* new_type(PyType_Spec& spec) {
  return reinterpret_cast<PyTypeObject*>(owned(PyType_FromSpec(&spec)).release().ptr());
}

// For slots of a type: what they hold are untyped pointers.
template <class Function>
void* as_slot(Function* function) {
  return reinterpret_cast<void*>(function);
}

template <class Function>
PyCFunction as_method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace fastcheck
