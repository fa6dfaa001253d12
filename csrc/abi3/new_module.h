// Makes a module of functions by CPython's stable ABI.
#pragma once

#include <Python.h>

#include <utility>
#include <vector>

namespace fastcheck::abi3 {

// A new reference, or nullptr with Python's exception raised. `methods` come without the entry that
// ends a table. The definition is kept for good, as Python refers to it.
inline PyObject* new_module(const char* name, const char* doc, std::vector<PyMethodDef> methods) {
  methods.push_back({nullptr, nullptr, 0, nullptr});
  auto* const kept = new std::vector<PyMethodDef>(std::move(methods));
  auto* const definition = new PyModuleDef{
      PyModuleDef_HEAD_INIT, name, doc, -1, kept->data(), nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(definition);
}

}  // namespace fastcheck::abi3
