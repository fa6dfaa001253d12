#include "torch/op_level/scopes.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "torch/op_level/op_observer.h"
#include "torch/python/types.h"

namespace py = pybind11;

namespace fastcheck {
namespace {

using Modes = c10::impl::TorchDispatchModeTLS;

thread_local int unobserved_depth = 0;

// fastcheck's own operators: no dump, no mode and no monitor sees them.
class Unobserved {
 public:
  Unobserved() {
    if (Modes::stack_len() != 0) {
      modes_ = Modes::get_state();
      Modes::set_state({});
    }
    op_level::OpObserver::pause(1);
    ++unobserved_depth;
  }
  ~Unobserved() {
    --unobserved_depth;
    op_level::OpObserver::pause(-1);
    if (modes_) Modes::set_state(std::move(*modes_));
  }
  Unobserved(const Unobserved&) = delete;
  Unobserved& operator=(const Unobserved&) = delete;

 private:
  std::optional<Modes> modes_;
};

// Operators that op level leaves out; others see them.
struct UnreadOps {
  UnreadOps() { op_level::OpObserver::pause(1); }
  ~UnreadOps() { op_level::OpObserver::pause(-1); }
  UnreadOps(const UnreadOps&) = delete;
  UnreadOps& operator=(const UnreadOps&) = delete;
};

// One entry of a `with` statement. An object that is dropped while it is entered leaves its state.
template <class State>
struct Scope {
  using Self = Object<std::unique_ptr<State>>;

  static PyObject* make(PyTypeObject* type, PyObject*, PyObject*) {
    return translated([&] { return Self::make(type); });
  }

  static PyObject* enter(PyObject* self, PyObject*) {
    return translated([&] {
      auto& state = Self::of(self);
      if (state) throw std::logic_error("expected a scope that is not entered yet");
      state = std::make_unique<State>();
      return py::none().release().ptr();
    });
  }

  static PyObject* leave(PyObject* self, PyObject* const*, Py_ssize_t) {
    Self::of(self).reset();
    Py_RETURN_NONE;
  }
};

template <class State>
void define(py::module_& m, const std::string& name) {
  using Of = Scope<State>;
  static PyMethodDef methods[] = {
      {"__enter__", &Of::enter, METH_NOARGS, nullptr},
      {"__exit__", as_method(&Of::leave), METH_FASTCALL, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  PyType_Slot slots[] = {
      {Py_tp_new, as_slot(&Of::make)},
      {Py_tp_dealloc, as_slot(&Of::Self::destroy)},
      {Py_tp_methods, methods},
      {0, nullptr},
  };
  static const std::string full_name = "fastcheck._C." + name;
  PyType_Spec spec = {full_name.c_str(), sizeof(typename Of::Self), 0, Py_TPFLAGS_DEFAULT, slots};
  m.attr(name.c_str()) = py::handle(reinterpret_cast<PyObject*>(new_type(spec)));
}

}  // namespace

void define_scopes(py::module_& m) {
  define<Unobserved>(m, "Unobserved");
  define<UnreadOps>(m, "Unread");
  define<at::NoGradGuard>(m, "NoGrad");
  m.def("is_unobserved", [] { return unobserved_depth > 0; });
}

}  // namespace fastcheck
