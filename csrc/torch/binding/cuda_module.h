// The part of fastcheck._C that is about CUDA; in a module of its own under test.
#pragma once

#include <pybind11/pybind11.h>

namespace fastcheck::cuda {

void define_functions(pybind11::module_& m);

}  // namespace fastcheck::cuda
