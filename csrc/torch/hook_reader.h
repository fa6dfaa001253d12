// What a hook asks of one tensor, in one call from Python: whether it can be read, whether it was
// read before and, on the CPU, its record.
#pragma once

#include <pybind11/pybind11.h>

namespace fastcheck {

// Defines the type HookReader, and what makes one. It is CPython's own type, not pybind11's: a call
// costs a tenth of a microsecond, not four tenths, and a hook makes one for each tensor.
//
// hook_reader(seen, slots, depth) -> HookReader
//   .read(tensor, index, site, call, step, seq, flags, any_dtype) -> int
//   .know(tensor): tensors on devices of this tensor's type are readable too; the CPU's always are
//
// read() gives -1 for a tensor that passes unread (not floating point, where that is asked for; no
// plain memory; remembered as unreadable), -2 for one on a device that know() was not told of, and
// otherwise, from the lowest bit on (python/fastcheck/_reader.py has the same):
//   1 bit   read for the first time: remembered under `seq`
//   1 bit   the record of it, in slot `index`, is of non-finite components
//   1 bit   it is not on the CPU: remembered, and its record is to be had from its device
//   1 bit   its gradient will come back
//   1 bit   the stream is another than that of the last tensor that was not on the CPU
//   5 bits  the dtype code, and
//   1 bit   the order that its record will say: 1 for logical
//   the rest: the sequence number under which it is remembered
// Throws what fastcheck._C.observe throws.
void define_hook_reader(pybind11::module_& m);

}  // namespace fastcheck
