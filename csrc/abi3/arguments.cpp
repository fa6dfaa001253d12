#include "abi3/arguments.h"

#include <new>

#include "kernels/layout.h"

namespace fastcheck::abi3 {
namespace {

// Appends the integers of a tuple.
void append(std::vector<std::int64_t>& to, PyObject* tuple, const char* what) {
  for (PyObject* item : items(tuple, what)) {
    to.push_back(integer(item));
    if (to.back() < 0) {
      throw std::invalid_argument(std::string("expected ") + what + " of integers from 0, got " +
                                  std::to_string(to.back()));
    }
  }
}

}  // namespace

Tensors::Tensors(PyObject* list) {
  if (!PyList_Check(list)) throw WrongType("expected a list of tensors' tuples");
  for (Py_ssize_t i = 0; i < PyList_Size(list); ++i) {
    const std::vector<PyObject*> fields =
        items(PyList_GetItem(list, i), "a tuple (pointer, dtype code, sizes, strides)", 4);
    const std::int64_t code = integer(fields[1]);
    if (code < 0 || code >= kDTypeCount) {
      throw std::invalid_argument("expected a dtype's code from 0 to " +
                                  std::to_string(kDTypeCount - 1) + ", got " +
                                  std::to_string(code));
    }
    std::vector<std::int64_t>& extents = extents_.emplace_back();
    append(extents, fields[2], "a tuple of sizes");
    const std::size_t ndim = extents.size();
    append(extents, fields[3], "a tuple of strides");
    if (extents.size() != 2 * ndim || ndim > cpu::kMaxDims) {
      throw std::invalid_argument("expected as many strides as sizes, at most " +
                                  std::to_string(cpu::kMaxDims) + ", got " + std::to_string(ndim) +
                                  " sizes and " + std::to_string(extents.size() - ndim) +
                                  " strides");
    }
    views_.push_back(view_of(pointer<const std::byte>(fields[0]), static_cast<DType>(code),
                             static_cast<int>(ndim), extents.data(), extents.data() + ndim));
  }
}

PyObject* called(PyObject* arguments, Py_ssize_t count,
                 PyObject* (*body)(const std::vector<PyObject*>&)) {
  try {
    const std::string expected = std::to_string(count) + " arguments";
    return body(items(arguments, expected.c_str(), count));
  } catch (const PythonError&) {
  } catch (const WrongType& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

}  // namespace fastcheck::abi3
