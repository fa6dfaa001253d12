// Arguments that Python passes: tensors as tuples of pointer, dtype code, sizes and strides. Errors
// are exceptions of C++ here; called() turns them into Python's.
#pragma once

#include <Python.h>

#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/dtypes.h"
#include "core/record.h"
#include "cpu/reduce.h"

namespace fastcheck::abi3 {

// Python's error indicator is set.
struct PythonError : std::exception {};

// TypeError in Python; std::invalid_argument is ValueError, std::runtime_error RuntimeError.
struct WrongType : std::exception {
  explicit WrongType(std::string what) : text(std::move(what)) {}
  const char* what() const noexcept override { return text.c_str(); }
  std::string text;
};

struct Release {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;

// The result of a call that makes a new object; throws PythonError where it failed.
inline Owned owned(PyObject* object) {
  if (object == nullptr) throw PythonError();
  return Owned(object);
}

inline std::int64_t integer(PyObject* object) {
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred() != nullptr) throw PythonError();
  return value;
}

template <class T = void>
T* pointer(PyObject* object) {
  void* const value = PyLong_AsVoidPtr(object);
  if (value == nullptr && PyErr_Occurred() != nullptr) throw PythonError();
  return static_cast<T*>(value);
}

inline Depth depth_of(std::int64_t depth) {
  if (depth < 1 || depth > 3) {
    throw std::invalid_argument("expected depth 1 (health), 2 (stats) or 3 (full), got " +
                                std::to_string(depth));
  }
  return static_cast<Depth>(depth);
}

// Items of a tuple, which owns them.
inline std::vector<PyObject*> items(PyObject* tuple, const char* what, Py_ssize_t count = -1) {
  const Py_ssize_t size = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1;
  if (size < 0 || (count >= 0 && size != count)) {
    throw WrongType(std::string("expected ") + what + ", got " +
                    (size < 0 ? "another type" : "a tuple of " + std::to_string(size)));
  }
  std::vector<PyObject*> found;
  for (Py_ssize_t i = 0; i < size; ++i) found.push_back(PyTuple_GetItem(tuple, i));
  return found;
}

// The tensors of a call. Views point into it.
class Tensors {
 public:
  // A list of tuples (pointer, dtype code, sizes, strides): sizes and strides are tuples of
  // integers that are not negative, in elements.
  explicit Tensors(PyObject* list);

  const std::vector<cpu::TensorView>& views() const { return views_; }

 private:
  std::deque<std::vector<std::int64_t>> extents_;
  std::vector<cpu::TensorView> views_;
};

// Body(arguments) with a tuple of `count` arguments, as a method of Python's: any exception becomes
// Python's.
PyObject* called(PyObject* arguments, Py_ssize_t count,
                 PyObject* (*body)(const std::vector<PyObject*>&));

// The same as the function of a PyMethodDef.
template <Py_ssize_t kCount, PyObject* (*kBody)(const std::vector<PyObject*>&)>
PyObject* method(PyObject*, PyObject* arguments) {
  return called(arguments, kCount, kBody);
}

// Without Python's lock while it lives.
class WithoutLock {
 public:
  WithoutLock() : state_(PyEval_SaveThread()) {}
  ~WithoutLock() { PyEval_RestoreThread(state_); }
  WithoutLock(const WithoutLock&) = delete;
  WithoutLock& operator=(const WithoutLock&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace fastcheck::abi3
