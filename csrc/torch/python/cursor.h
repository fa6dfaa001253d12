// Cursor: the position in a ring, which Python and C++ move.
#pragma once

#include <pybind11/pybind11.h>

namespace fastcheck {

// The number of the next record, and the slot of the host's ring that it goes to.
struct Cursor {
  long long seq;
  long long slot;
};

Cursor& cursor_of(pybind11::handle object);

// Defines the type Cursor.
void define_cursor(pybind11::module_& m);

}  // namespace fastcheck
