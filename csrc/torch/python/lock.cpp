#include "torch/python/lock.h"

#include <utility>

#include "torch/python/types.h"

namespace py = pybind11;

namespace fastcheck {

SessionLock::SessionLock() : bell_(PyThread_allocate_lock()) {
  if (bell_ == nullptr) throw std::bad_alloc();
  PyThread_acquire_lock(bell_, NOWAIT_LOCK);
}

SessionLock::~SessionLock() {
  if (bell_ == nullptr) return;
  if (!is_called_) PyThread_release_lock(bell_);
  PyThread_free_lock(bell_);
}

SessionLock::SessionLock(SessionLock&& other) noexcept
    : owner_(other.owner_),
      count_(std::exchange(other.count_, 0)),
      is_called_(other.is_called_),
      bell_(std::exchange(other.bell_, nullptr)) {}

bool SessionLock::acquire() {
  if (!is_owned()) {
    while (count_ != 0) {
      if (!wait()) return false;
    }
    owner_ = PyThread_get_thread_ident();
  }
  ++count_;
  return true;
}

// Returns after a release; another thread may take the free lock first.
bool SessionLock::wait() {
  ++waiting_;
  PyLockStatus status = PY_LOCK_FAILURE;
  Py_BEGIN_ALLOW_THREADS;
  status = PyThread_acquire_lock_timed(bell_, -1, 1);
  Py_END_ALLOW_THREADS;
  --waiting_;
  if (status == PY_LOCK_ACQUIRED) is_called_ = false;
  return status != PY_LOCK_INTR || PyErr_CheckSignals() == 0;
}

bool SessionLock::release() {
  if (!is_owned()) return false;
  if (--count_ == 0) {
    owner_ = 0;
    if (waiting_ != 0 && !is_called_) {
      is_called_ = true;
      PyThread_release_lock(bell_);
    }
  }
  return true;
}

// ---- The type -----------------------------------------------------------------------------------

namespace {

using LockObject = Object<SessionLock>;

PyObject* new_lock(PyTypeObject* type, PyObject*, PyObject*) {
  return translated([&] { return LockObject::make(type); });
}

PyObject* acquire(PyObject* self, PyObject*) {
  if (!LockObject::of(self).acquire()) return nullptr;
  Py_RETURN_TRUE;
}

PyObject* release(PyObject* self, PyObject*) {
  if (LockObject::of(self).release()) Py_RETURN_NONE;
  PyErr_SetString(PyExc_RuntimeError, "expected a lock that this thread holds");
  return nullptr;
}

PyObject* leave(PyObject* self, PyObject* const*, Py_ssize_t) { return release(self, nullptr); }

PyObject* is_owned(PyObject* self, PyObject*) {
  return PyBool_FromLong(LockObject::of(self).is_owned());
}

PyMethodDef kMethods[] = {
    {"acquire", &acquire, METH_NOARGS, "acquire(self) -> bool"},
    {"release", &release, METH_NOARGS, "release(self) -> None"},
    {"__enter__", &acquire, METH_NOARGS, nullptr},
    {"__exit__", as_method(&leave), METH_FASTCALL, nullptr},
    {"_is_owned", &is_owned, METH_NOARGS, "_is_owned(self) -> bool, as threading.RLock has it"},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot kSlots[] = {
    {Py_tp_new, as_slot(&new_lock)},
    {Py_tp_dealloc, as_slot(&LockObject::destroy)},
    {Py_tp_methods, kMethods},
    {0, nullptr},
};

PyType_Spec kSpec = {"fastcheck._C.SessionLock", sizeof(LockObject), 0, Py_TPFLAGS_DEFAULT, kSlots};

PyTypeObject* type() {
  static PyTypeObject* const made = new_type(kSpec);
  return made;
}

}  // namespace

SessionLock& session_lock_of(py::handle object) {
  if (Py_TYPE(object.ptr()) != type()) throw py::type_error("expected a SessionLock");
  return LockObject::of(object.ptr());
}

void define_session_lock(py::module_& m) {
  m.attr("SessionLock") = py::handle(reinterpret_cast<PyObject*>(type()));
}

}  // namespace fastcheck
