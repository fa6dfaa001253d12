#include "torch/op_level/scopes.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <optional>
#include <stdexcept>
#include <utility>

#include "torch/op_level/op_observer.h"

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
  std::optional<State> state;

  void enter() {
    if (state) throw std::logic_error("expected a scope that is not entered yet");
    state.emplace();
  }
};

template <class State>
void define(py::module_& m, const char* name) {
  using Of = Scope<State>;
  py::class_<Of>(m, name)
      .def(py::init<>())
      .def("__enter__", &Of::enter)
      .def("__exit__", [](Of& self, const py::args&) { self.state.reset(); });
}

}  // namespace

void define_scopes(py::module_& m) {
  define<Unobserved>(m, "Unobserved");
  define<UnreadOps>(m, "Unread");
  define<at::NoGradGuard>(m, "NoGrad");
  m.def("is_unobserved", [] { return unobserved_depth > 0; });
}

}  // namespace fastcheck
