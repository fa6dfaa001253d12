#include "torch/dump/op_mode.h"

#include <optional>
#include <stdexcept>
#include <string>

#include "torch/python/types.h"

namespace py = pybind11;

namespace fastcheck::dump {
namespace {

struct ModeNames {
  PyObject* is_closed = interned("is_closed");
  PyObject* problem = interned("problem");
  PyObject* call_count = interned("call_count");
  PyObject* torch_dispatch = interned("__torch_dispatch__");
};

const ModeNames& mode_names() {
  static const ModeNames* const kNames = new ModeNames;
  return *kNames;
}

bool is_true(const py::object& object, PyObject* name) {
  const int is = PyObject_IsTrue(owned(PyObject_GetAttr(object.ptr(), name)).ptr());
  if (is < 0) throw py::error_already_set();
  return is == 1;
}

// A signal's handler may raise while it waits.
class Locked {
 public:
  explicit Locked(SessionLock& lock) : lock_(lock) {
    if (!lock_.acquire()) throw py::error_already_set();
  }
  ~Locked() { lock_.release(); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  SessionLock& lock_;
};

}  // namespace

bool OpMode::is_on() const {
  return !is_true(session_, mode_names().is_closed) && !is_true(session_, mode_names().problem);
}

// It calls the operator again for the plain tensors below, which is what to see.
bool OpMode::is_for_subclass(PyObject* types) const {
  if (PyTuple_GET_SIZE(types) == 0) return false;
  const py::object plain = python_.attr("plain_dispatch");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); ++i) {
    const py::object own =
        owned(PyObject_GetAttr(PyTuple_GET_ITEM(types, i), mode_names().torch_dispatch));
    if (!own.is(plain)) return true;
  }
  return false;
}

const OpMode::Function& OpMode::function(PyObject* func) {
  const auto found = functions_.find(func);
  if (found != functions_.end()) return found->second;
  Function made{borrowed(func), borrowed(func)};
  const py::object told = python_.attr("operator")(made.func);
  if (told.is_none()) {
    made.is_higher_order = true;
  } else if (!told.is(made.func)) {
    const auto [name, overload, call] =
        told.cast<std::tuple<std::string, std::string, py::object>>();
    made.call = call;
    made.op = OpTable::instance().find(c10::OperatorName(name, overload));
    if (made.op == nullptr) throw std::runtime_error("no schema is registered for " + name);
  }
  return functions_.emplace(func, std::move(made)).first->second;
}

// False with an exception that is not to be kept from training, such as an interrupt. An error ends
// the dump.
template <class Body>
bool OpMode::attempt(const Body& body) {
  PyObject* const done = translated([&] {
    body();
    Py_RETURN_NONE;
  });
  if (done != nullptr) {
    Py_DECREF(done);
    return true;
  }
  if (PyErr_ExceptionMatches(PyExc_Exception) == 0) return false;
  const py::error_already_set error;
  return translated([&] {
           python_.attr("failed")(error.value()).inc_ref();
           Py_RETURN_NONE;
         }) != nullptr;
}

PyObject* OpMode::dispatch(PyObject* func, PyObject* types, PyObject* args, PyObject* kwargs) {
  std::optional<OpCall> call;
  py::object target = borrowed(func);
  bool is_left = false;
  const bool is_begun = attempt([&] {
    if (!is_on()) return;
    const Function& known = function(func);
    if (known.is_higher_order) {
      python_.attr("pass_by")(known.func);
      return;
    }
    is_left = is_for_subclass(types);
    if (is_left && python_.attr("is_fake")(py::handle(types)).cast<bool>()) {
      // Its own handler would refuse the call, as long as its mode lies below this one.
      python_.attr("pass_by_fake")(known.func);
      is_left = false;
      return;
    }
    if (is_left || known.op == nullptr) return;
    target = known.call;
    const Locked locked(session_lock_of(lock_));
    call = recorder_.begin(*known.op, args, kwargs);
  });
  if (!is_begun) return nullptr;
  if (is_left) Py_RETURN_NOTIMPLEMENTED;
  py::object result = py::reinterpret_steal<py::object>(PyObject_Call(target.ptr(), args, kwargs));
  if (!result || !call.has_value()) return result.release().ptr();
  const bool is_ended = attempt([&] {
    const Locked locked(session_lock_of(lock_));
    const long long number =
        PyLong_AsLongLong(owned(PyObject_GetAttr(session_.ptr(), mode_names().call_count)).ptr());
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    const std::string line = recorder_.end(*call, args, kwargs, result.ptr(), number);
    python_.attr("add_line")(line);
  });
  return is_ended ? result.release().ptr() : nullptr;
}

}  // namespace fastcheck::dump
