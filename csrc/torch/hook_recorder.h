// What a module's hooks do for each call, in C++, as long as nothing is out of the ordinary: the
// calls inside a pass, their arguments and results, the gradients that come back. Everything else
// is ModuleObserver's (python/fastcheck/_hooks.py), which does the same in Python and more.
#pragma once

#include <pybind11/pybind11.h>

namespace fastcheck {

// Defines the types HookRecorder, ModuleRecorder and GradientRecorder.
//
// HookRecorder(reader, cursor, lock): of one session. It records while it is open.
//   .attach(observer, local, due)
//                              a weak reference to the ModuleObserver; the calls that are running
//                              in a thread are the list `local.stack`; `due` is the ledger's
//   .open(step, add_call, findings, entries, gradients, after_gap, gradient_flags, add_leaf)
//                              `entries`: the journal of a session that is deferred, or None
//   .close()                   from now on all is left to Python
//   .redirect(entries)         what is read from now on belongs to this journal
//   .settle()                  what is recorded now is followed by session.settle_call(), and then
//                              nothing is recorded any more
//   .aim(observe, slots, identities, cursor)
//                              a record of the stream that the reader saw last goes to the next row
//                              of `slots`, row cursor.slot, through observe(tensor, slots, row,
//                              depth), and its identity to that row of `identities`
//   .unaim()
//
// ModuleRecorder(recorder, node, counter, input_sites, output_sites, grad_input_sites,
//                grad_output_sites): of one module; the sites are those that it has until now.
//   .enter(args, kwargs) -> bool, .leave(output) -> bool
//                              False: nothing was done, and Python has to. What they raise is what
//                              session.deliver() raises: a stop
//   .switch_off()              never again
//
// What it writes into a journal, python/fastcheck/_journal.py reads:
//   ("input", seq, call, after_gap), ("output", seq, call), a Call that returned,
//   ("gradient", seq, gradient_recorder, is_scaled, thread)
//
// Needs the interpreter's lock, and takes the session's.
void define_hook_recorder(pybind11::module_& m);

}  // namespace fastcheck
