// The Python interface of the dump's recorder.
#pragma once

#include <pybind11/pybind11.h>

namespace fastcheck::dump {

// Defines the type OpRecorder. forget() and clear() want the session's lock to be held.
//
// OpRecorder(python, writer, slots, depth, step)
//   `python`, for what is seldom:
//      .session           the DumpSession, whose lock is a SessionLock
//      .operator(func) -> (name, overload, a callable that does the same); func itself where the
//          operator is passed by; None of a higher-order operator
//      .plain_dispatch    what __torch_dispatch__ is of a tensor that is no subclass's
//      .module_text(node) -> (JSON of its path, JSON of its type)
//      .site(node, op, direction, role, index, label) -> the number of a site
//      .recomputes() -> whether, within backward, a checkpointed function is run again
//      .plain_text(value) -> JSON of an argument that is no tensor
//      .is_fake(types)    whether a FakeTensor is among them
//      .pass_by_fake(func)   a call for these, which is not recorded
//      .tensor_text(tensor) -> JSON of its fields in the index beside its record
//      .read_text(tensor, site, call, flags) -> JSON of its fields in the index with its record,
// having
//          read it; for what is not ordinary memory of the CPU
//      .add_line(text)    a line of the index
//      .pass_by(func)     a higher-order operator is about to run
//      .failed(error)     ends the dump
//   `writer`: the RecordWriter: .count, .used and .flush(), which empties the slots
//   .dispatch(mode, func, types, args, kwargs)   in the place of the method __torch_dispatch__
//   .move(node, is_recompute, is_in_optimizer)   in this thread: see CallNamer
//   .forget()         something has run that may have written to anything
//   .clear()          nothing is known of any tensor
//   .reused           of how many records the memory was not read again
void define_op_recorder(pybind11::module_& m);

}  // namespace fastcheck::dump
