// SessionLock: the lock of a session (threading.RLock), taken from C++ without a call into Python.
#pragma once

#include <pybind11/pybind11.h>

namespace fastcheck {

// Re-entrant, and taken and released with the interpreter's lock held, which guards its fields: one
// that is free is taken without a system call. While it waits it lets go of the interpreter's lock;
// then a signal's handler may run, and raise.
class SessionLock {
 public:
  SessionLock();
  ~SessionLock();
  SessionLock(SessionLock&& other) noexcept;
  SessionLock(const SessionLock&) = delete;
  SessionLock& operator=(const SessionLock&) = delete;

  // False with Python's exception raised: it was not taken.
  bool acquire();
  // False where this thread does not hold it.
  bool release();
  bool is_owned() const { return count_ != 0 && owner_ == PyThread_get_thread_ident(); }

 private:
  bool wait();

  unsigned long owner_ = 0;
  unsigned long count_ = 0;
  // The threads that wait, and the lock that they wait for: free once they have been called.
  unsigned long waiting_ = 0;
  bool is_called_ = false;
  PyThread_type_lock bell_;
};

// The lock in an object of Python's type SessionLock; throws where it is none.
SessionLock& session_lock_of(pybind11::handle object);

// Defines the type SessionLock, for a `with` statement and with acquire() and release().
void define_session_lock(pybind11::module_& m);

}  // namespace fastcheck
