// States of a thread that hold within a `with` statement: entered and left in one piece, so that no
// interrupt finds them half done, as it can between two lines of a context manager in Python.
#pragma once

#include <pybind11/pybind11.h>

namespace fastcheck {

// Defines the scopes Unobserved, Unread and NoGrad, and is_unobserved().
void define_scopes(pybind11::module_& m);

}  // namespace fastcheck
