// The last nodes of a graph, of which backward frees what they have saved; and its leaves.
#pragma once

#include <pybind11/pybind11.h>

namespace fastcheck {

// Defines
//
// last_nodes(roots, names, most) -> list of nodes
//                              those with one of these names among the last of the graphs of these
//                              tensors: from so many nodes on no further ones are looked for.
//                              Leaves are not counted
// GraphLeaves(root, most) -> iterator of tensors
//                              the leaves of its graph, nearest first, until so many nodes were met
void define_last_nodes(pybind11::module_& m);

}  // namespace fastcheck
