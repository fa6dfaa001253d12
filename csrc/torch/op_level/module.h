// fastcheck._C.OpObserver: the op observer for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace fastcheck::op_level {

void bind(pybind11::module_& m);

}  // namespace fastcheck::op_level
