// Tensors that modules store, gathered for one list call: parameters, gradients and buffers.
#pragma once

#include <pybind11/pybind11.h>

namespace fastcheck {

// Defines functions that do for ordinary tensors what python/fastcheck/calls/stored.py does for
// all, and the types TensorList, ParameterFinder, ReadGradients, MemoryRef and GradientProbe.
//
// TensorList()                 a sequence of tensors, with append()
// parameter_ids(groups) -> set of ids
// gradients_in(groups) -> list of tensors | None
//                              the gradients of what an optimizer with these groups holds; None:
//                              one is not ordinary or not strided, or they are on several devices
// stored_in(nodes, kind, owned) -> list of (node, name, tensor)
//                              of `kind`, "_parameters" or "_buffers": each parameter once, under
//                              its first name; `owned`: only those with one of these ids, or None
// ParameterFinder(nodes)
//   .look(groups) -> (set of ids or None, sequence of (node, name, tensor), list of the same)
//                              what an optimizer with these groups holds, and the parameters among
//                              it; None: all parameters; and the buffers of all modules. Fast where
//                              nothing has changed since the last call
// add_stored(batch, stored, role, add)
//                              appends the tensors to batch.tensors, with their sites and roles;
//                              `add(stored)` does it of one that is not ordinary or has no site yet
// add_gradients(batch, stored, role, add)
//                              the same with the gradients of parameters
// ReadGradients()              gradients that were read, by tensor
//   .add(tensors, first)       they were read in this order, the first as the record `first`
//   .find(gradient) -> int | None
//                              the number of its record, while nothing has written to it
//   .changed(gradients)        what has written to them since is known, and changes nothing
//   .clear(), len()
// add_unread_gradients(batch, stored, role, add, read, sites, numbers)
//                              add_gradients() of those that `read` does not know; of the others
//                              appends the sites and the numbers of the records
// holders_of(gradients, stored) -> list of (node, name, tensor)
//                              those of the parameters whose gradient is one of these
// parameter_states(stored, state_of) -> (list of bool, list of bool, list of bool)
//                              of each parameter: whether it is trained, has a gradient, and is a
//                              part of one; `state_of(stored)` tells it of one that is not ordinary
// is_readable(tensor) -> bool  can_read() of Python; False: it is not ordinary, or it can't be read
// largest_magnitude(records) -> float
//                              of floating-point tensors
// are_on_host(tensors) -> bool
// common_device(tensors) -> device | None
//                              None: there are several, or no tensors
// identities(tensors, sites, step, first_seq, flags) -> array of int64 (tensors, 7)
//                              of each an Identity (python/fastcheck/record/format.py)
// memory_ref(other, tensor) -> MemoryRef, or other(tensor) where it is not ordinary
//   .is_of(tensor) -> bool
// gradient_probe(gradient, elements) -> GradientProbe | None
//                              its memory, version and, on the CPU, first elements; None: it is
//                              not ordinary
//   .version -> int
//   .is_changed(gradient) -> bool
//   .has_same_elements(tensor) -> bool | None
//                              only the first elements count; None: it is not ordinary, on a
//                              device, or has more or fewer
// gradient_probes(places, elements) -> dict of GradientProbe | None
//                              of the gradients that parameters have now, by place: the node of a
//                              module and a name; None: one is not ordinary
// take_changed(probes, owned) -> bool | None
//                              takes out those of these parameters (None: all) until one has
//                              changed, and whether one has; None: one is not ordinary, and none
//                              was taken out
void define_stored(pybind11::module_& m);

}  // namespace fastcheck
