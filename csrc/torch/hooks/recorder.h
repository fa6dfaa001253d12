// HookRecorder: what the C++ hooks of one session share. They handle the ordinary calls;
// ModuleObserver (python/fastcheck/monitor/hooks/module_observer.py) handles all others in Python.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <type_traits>

#include "torch/hooks/call.h"
#include "torch/hooks/reader.h"
#include "torch/python/cursor.h"
#include "torch/python/lock.h"
#include "torch/python/rows.h"
#include "torch/python/types.h"
#include "torch/read/waiting.h"

namespace fastcheck {

// Fields are those of attach(), open() and set_target(). The interpreter's lock guards them, and
// the session's whatever calls of Python lie between: a call of Python may let other threads run.
struct HookRecorder {
  pybind11::object reader_object;
  HookReader* reader;
  pybind11::object cursor_object;
  Cursor* cursor;
  pybind11::object lock_object;
  SessionLock* lock;

  pybind11::object observer = pybind11::none(), local = pybind11::none(), due = pybind11::none();
  pybind11::object inner_input = pybind11::none(), output = pybind11::none();
  pybind11::object gradient = pybind11::none();
  std::uint64_t id = 0;  // of attach(), in the process

  bool is_open = false;
  // The thread whose calls of inner modules are nothing to anybody; 0: there is none.
  unsigned long resting = 0;
  bool settles = false;
  bool after_gap = false;
  std::uint32_t gradient_flags = 0;
  long long step = 0;
  pybind11::object add_call = pybind11::none(), findings = pybind11::none();
  pybind11::object entries = pybind11::none(), gradients = pybind11::none();

  // The function to which records from elsewhere go.
  pybind11::object observe = pybind11::none();
  RingRows rows{};
  Waiting waiting{};

  bool is_deferred() const { return !entries.is_none(); }

  // The ModuleObserver, None where it is gone; and its session.
  pybind11::object owner() const { return owned(PyObject_CallNoArgs(observer.ptr())); }
  pybind11::object session() const;
  pybind11::object level() const;

  // ModuleLevel.read().
  std::int64_t read(PyObject* tensor, std::int64_t site, long long call, std::uint32_t flags);
  // Has what waits read, on its stream.
  void read_waiting();
  // An entry of the journal, of what read() has found: judged when its record arrives or, on the
  // CPU, now if it is bad.
  template <class... Fields>
  void note(std::int64_t found, const pybind11::object& kind, const Fields&... fields) {
    if (is_deferred()) {
      checked(PyList_Append(entries.ptr(), entry(kind, fields...).ptr()));
    } else if ((found & code::kBad) != 0) {
      level().attr("saw")(entry(kind, fields...), true);
    }
  }
  // The end of what a hook has recorded.
  void finish() const;
  // Outside the session's lock: a stop that is due is raised from here.
  void deliver() const;

  template <class Visit>
  int each(const Visit& visit) const {
    for (const pybind11::object* held :
         {&reader_object, &cursor_object, &lock_object, &observer, &local, &due, &inner_input,
          &output, &gradient, &add_call, &findings, &entries, &gradients, &observe}) {
      if (const int status = visit(held->ptr())) return status;
    }
    return rows.each(visit);
  }
  // Drops what may lead back to the recorder.
  void clear() {
    is_open = false;
    resting = 0;
    add_call = findings = entries = gradients = observe = pybind11::none();
  }

 private:
  static pybind11::object object_of(const pybind11::object& field) { return field; }
  template <class Number, std::enable_if_t<std::is_arithmetic_v<Number>, int> = 0>
  static pybind11::object object_of(Number field) {
    return pybind11::cast(field);
  }
  // A tuple of this class, as tuple.__new__() makes it.
  template <class... Fields>
  static pybind11::object entry(const pybind11::object& kind, const Fields&... fields) {
    auto* const type = reinterpret_cast<PyTypeObject*>(kind.ptr());
    pybind11::object made = owned(type->tp_alloc(type, sizeof...(fields)));
    Py_ssize_t at = 0;
    (PyTuple_SET_ITEM(made.ptr(), at++, object_of(fields).release().ptr()), ...);
    return made;
  }
  // The session hears that `tensor` can't be read. Call it with Python's exception raised.
  void refuse(PyObject* tensor, std::int64_t site) const;
  // The record of a tensor that the reader found elsewhere. False: it could not be read.
  bool read_elsewhere(PyObject* tensor, std::int64_t found, std::int64_t site, long long call,
                      std::uint32_t flags);
  bool read_now(PyObject* tensor, std::int64_t found, const Identity& identity);
};

// Taking the lock may let other threads run.
class Locked {
 public:
  explicit Locked(const HookRecorder& recorder) : lock_(*recorder.lock) {
    if (!lock_.acquire()) throw pybind11::error_already_set();
  }
  ~Locked() { lock_.release(); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  SessionLock& lock_;
};

// True if `body` did anything. What it throws is an error of fastcheck's own, which is passed to
// `fail`; training goes on.
template <class Body, class Fail>
bool guarded(const Body& body, const Fail& fail) {
  bool is_done = true;
  PyObject* const done = translated([&] {
    is_done = body();
    Py_RETURN_NONE;
  });
  if (done == nullptr) {
    pybind11::error_already_set error;
    if (!error.matches(PyExc_Exception)) throw error;  // an interrupt is the user's
    fail(error.value());
  }
  Py_XDECREF(done);
  return is_done;
}

HookRecorder& hook_recorder_of(PyObject* object);
PyTypeObject* hook_recorder_type();

// Defines the type HookRecorder.
//
// HookRecorder(reader, cursor, lock): of one session. It records while it is open.
//   .attach(observer, local, due, inner_input, output, gradient)
//                              a weak reference to the ModuleObserver; the calls that are running
//                              in a thread are the list `local.stack`; `due` is the ledger's; the
//                              classes of the entries that it writes into a journal, besides calls
//                              that returned (python/fastcheck/verdict/entries.py)
//   .open(step, add_call, findings, entries, gradients, after_gap, gradient_flags)
//                              `entries`: the journal of a session that is deferred, or None
//   .close()                   from now on all is left to Python
//   .rest()                    until close() or open() what this thread calls within models is left
//                              out
//   .redirect(entries)         what is read from now on belongs to this journal
//   .settle()                  what is recorded now is followed by session.settle_call(), and then
//                              nothing is recorded any more
//   .set_target(observe, slots, identities, cursor)
//                              a record of the stream that the reader saw last goes to the next row
//                              of `slots`, row cursor.slot, through observe(tensor, slots, row,
//                              depth), and its identity to that row of `identities`
//   .clear_target()
void define_hook_recorder(pybind11::module_& m);

}  // namespace fastcheck
