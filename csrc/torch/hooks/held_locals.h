// Local variables of a program's calls, held for when these have gone on.
#pragma once

#include <pybind11/pybind11.h>

namespace fastcheck {

// Defines
//
// local_variables(most) -> list of (name, value)
//                              the local variables of the innermost calls of the program
// HeldLocals(most, room)       the tensors of floating point among the local variables of the
//                              innermost calls of the program, or in their lists, tuples and
//                              dictionaries: the smaller ones, of at most ``room`` bytes, without
//                              their graphs. Parameters are left out
//   .nbytes                    their size
//   .frames() -> list of (code, globals, offset of the instruction, list of (name, key, tensor,
//       version, order, node))
//                              innermost first. ``key``: in the container of this name, or None;
//                              ``order``, ``node``: of the node that has made it, -1 and ""
void define_held_locals(pybind11::module_& m);

}  // namespace fastcheck
