#include "torch/hooks/held_locals.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "torch/python/line.h"
#include "torch/python/tensors.h"
#include "torch/python/types.h"

namespace py = pybind11;

namespace fastcheck {
namespace {

constexpr std::size_t kMostElements = 32;
// Of a script they are all of its global names.
constexpr std::size_t kMostVariables = 512;

std::int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<std::int64_t>(tensor._version());
}

class HeldLocals {
 public:
  HeldLocals(std::size_t most, std::size_t room) {
    for (const ProgramFrame& frame : program_frames(most)) {
      const std::size_t number = calls_.size();
      calls_.push_back({borrowed(frame.code), borrowed(frame.globals), frame.instruction});
      const std::size_t count = std::min(frame.variables.size(), kMostVariables);
      for (std::size_t i = 0; i < count; ++i) {
        add(number, frame.variables[i].first, frame.variables[i].second);
      }
    }
    std::stable_sort(held_.begin(), held_.end(),
                     [](const Held& a, const Held& b) { return a.size < b.size; });
    std::size_t kept = 0;
    for (; kept < held_.size() && nbytes_ + held_[kept].size <= room; ++kept) {
      Held& one = held_[kept];
      nbytes_ += one.size;
      one.version = version_of(one.tensor);
      if (const auto& node = one.tensor.grad_fn()) {
        one.order = static_cast<std::int64_t>(node->sequence_nr());
        one.node = node->name();
      }
      // What detach() does, less its ways through the dispatcher: the versions are those of the
      // tensor.
      const c10::TensorImpl& own = *one.tensor.unsafeGetTensorImpl();
      one.tensor = at::Tensor(own.shallow_copy_and_detach(own.version_counter(), false));
    }
    held_.resize(kept);
  }

  std::size_t nbytes() const { return nbytes_; }

  py::list frames() const {
    py::list frames;
    for (std::size_t number = 0; number < calls_.size(); ++number) {
      py::list held;
      for (const Held& one : held_) {
        if (one.call != number) continue;
        held.append(
            py::make_tuple(one.name, one.key, wrap(one.tensor), one.version, one.order, one.node));
      }
      const Call& call = calls_[number];
      frames.append(py::make_tuple(call.code, call.globals, call.instruction, held));
    }
    return frames;
  }

 private:
  struct Call {
    py::object code, globals;
    int instruction;
  };

  struct Held {
    std::size_t call;
    py::object name, key;
    at::Tensor tensor;
    std::size_t size;
    std::int64_t version, order;
    std::string node;
  };

  // A variable. No code of the program runs: its subclasses are left alone.
  void add(std::size_t call, PyObject* name, PyObject* value) {
    if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
      const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(value));
      if (count > kMostElements) return;
      PyObject** const items = PySequence_Fast_ITEMS(value);
      for (std::size_t i = 0; i < count; ++i) {
        if (is_held(items[i])) keep(call, name, py::int_(i), items[i]);
      }
    } else if (PyDict_CheckExact(value)) {
      if (static_cast<std::size_t>(PyDict_GET_SIZE(value)) > kMostElements) return;
      PyObject *key = nullptr, *item = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(value, &at, &key, &item) != 0;) {
        const bool is_plain = PyUnicode_CheckExact(key) || PyLong_CheckExact(key);
        if (is_plain && is_held(item)) keep(call, name, borrowed(key), item);
      }
    } else if (is_held(value)) {
      keep(call, name, py::none(), value);
    }
  }

  static bool is_held(PyObject* value) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != THPVariableClass) return false;
    const at::Tensor& tensor = THPVariable_Unpack(value);
    const bool is_plain = tensor.layout() == at::kStrided && tensor.has_storage();
    const bool is_number = tensor.is_floating_point() || tensor.is_complex();
    return is_plain && is_number && !(tensor.requires_grad() && tensor.is_leaf());
  }

  void keep(std::size_t call, PyObject* name, py::object key, PyObject* value) {
    const at::Tensor& tensor = THPVariable_Unpack(value);
    // A view holds the whole.
    held_.push_back(
        {call, borrowed(name), std::move(key), tensor, tensor.storage().nbytes(), 0, -1, {}});
  }

  std::vector<Call> calls_;
  std::vector<Held> held_;
  std::size_t nbytes_ = 0;
};

py::list local_variables(std::size_t most) {
  // Held before anything is made of them, which may run the program's code to collect garbage.
  std::vector<std::pair<py::object, py::object>> held;
  for (const ProgramFrame& frame : program_frames(most)) {
    for (const auto& [name, value] : frame.variables) {
      held.emplace_back(borrowed(name), borrowed(value));
    }
  }
  py::list found;
  for (const auto& [name, value] : held) found.append(py::make_tuple(name, value));
  return found;
}

}  // namespace

void define_held_locals(py::module_& m) {
  m.def("local_variables", local_variables, py::arg("most"));
  py::class_<HeldLocals>(m, "HeldLocals")
      .def(py::init<std::size_t, std::size_t>(), py::arg("most"), py::arg("room"))
      .def_property_readonly("nbytes", &HeldLocals::nbytes)
      .def("frames", &HeldLocals::frames);
}

}  // namespace fastcheck
