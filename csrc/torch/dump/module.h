// What Python sees of the dump's recorder.
#pragma once

#include <pybind11/pybind11.h>

namespace fastcheck::dump {

// Defines the types OpRecorder and OpCall, which begin() makes. All but the making of a recorder
// wants the session's lock to be held.
//
// OpRecorder(python, writer, slots, depth, step)
//   `python`, for what is seldom:
//      .op_info(func) -> OpInfo
//      .module_text(node) -> (JSON of its path, JSON of its type)
//      .site(node, op, direction, role, index, label) -> the number of a site
//      .recomputes() -> whether, within backward, a checkpointed function is run again
//      .plain_text(value) -> JSON of an argument that is no tensor
//      .tensor_text(tensor) -> JSON of what the index says of it beside its record
//      .read_text(tensor, site, call, flags) -> JSON of what the index says of its record, having
//          read it; for what is not ordinary memory of the CPU
//   `writer`: the RecordWriter: .count, .used and .flush(), which empties the slots
//   .begin(func, args, kwargs, node, is_recompute, is_in_optimizer) -> OpCall
//   .end(call, args, kwargs, result, number) -> the call's line of the index
//   .forget()         something has run that may have written to anything
//   .clear()          nothing is known of any tensor
//   .reused           of how many records the memory was not read again
void define_op_recorder(pybind11::module_& m);

}  // namespace fastcheck::dump
