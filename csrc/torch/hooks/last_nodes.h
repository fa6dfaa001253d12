// The last nodes of a graph, of which backward frees what they have saved; and its leaves.
#pragma once

#include <pybind11/pybind11.h>

namespace fastcheck {

// Defines
//
// saved_near(roots, attributes_of, most, room) -> (list of (name, order, needs, values, versions),
//     bytes)
//                              what the last nodes of the graphs of these tensors have saved, by
//                              the attributes of their types: from so many nodes on no further ones
//                              are looked for, leaves not counted. Of at most ``room`` bytes
// GraphLeaves(root, most, recorder) -> iterator of tensors
//                              the leaves of its graph, nearest first, until so many nodes were met
//   .has_recorded              among these was a node whose gradient the recorder records
void define_last_nodes(pybind11::module_& m);

}  // namespace fastcheck
