#include "torch/hooks/module_recorder.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <typeinfo>

#include "torch/hooks/call.h"
#include "torch/hooks/flatten.h"
#include "torch/hooks/reader.h"
#include "torch/hooks/recorder.h"
#include "torch/python/tensors.h"
#include "torch/python/types.h"
#include "torch/read/tensor_view.h"

namespace py = pybind11;

namespace fastcheck {
namespace {

using std::string_view_literals::operator""sv;

struct Names {
  PyObject* stack = interned("stack");
  PyObject* is_root = interned("is_root");
  PyObject* recorder = interned("recorder");
  PyObject* own_recorder = interned("_recorder");
  PyObject* grad_input = interned("grad_input");
  PyObject* grad_output = interned("grad_output");
  PyObject* reader = interned("reader");
  PyObject* is_compiling = interned("_is_compiling_flag");
};

const Names& names() {
  static const Names* const kNames = new Names;
  return *kNames;
}

// ---- Gradients ----------------------------------------------------------------------------------

// The part that the autograd graph of an observed tensor holds; does nothing once the monitor is
// gone.
struct GradientRecorder {
  py::object observer;  // a weak reference
  py::object call;
  py::object role;
  long long site;
  long long tensor_seq;
};

using GradientObject = Object<GradientRecorder>;

// False: Python has to do it.
bool record(HookRecorder& recorder, PyObject* self, PyObject* gradient) {
  if (!recorder.is_open) return false;
  const Locked locked(recorder);
  const GradientRecorder& hook = GradientObject::of(self);
  const Call& call = *Call::of(hook.call.ptr());
  if (!recorder.is_open || call.is_recompute) return false;
  const std::int64_t found =
      recorder.read(gradient, hook.site, call.index, recorder.gradient_flags);
  if (found >= 0) {
    const py::int_ seq(found >> code::kSeqShift);
    checked(PyDict_SetItem(recorder.gradients.ptr(), py::int_(hook.tensor_seq).ptr(), seq.ptr()));
    if ((found & code::kNew) != 0) {
      recorder.note(found, recorder.gradient, seq, hook.call, hook.role, hook.tensor_seq,
                    recorder.gradient_flags != 0);
    }
  }
  recorder.finish();
  return true;
}

PyObject* gradient_came(PyObject* self, PyObject* gradient) {
  return translated([&]() -> PyObject* {
    const py::object observer = owned(PyObject_CallNoArgs(GradientObject::of(self).observer.ptr()));
    if (observer.is_none()) Py_RETURN_NONE;
    const py::object recorder = owned(PyObject_GetAttr(observer.ptr(), names().recorder));
    HookRecorder& shared = hook_recorder_of(recorder.ptr());
    const bool is_done =
        guarded([&] { return record(shared, self, gradient); },
                [&](const py::object& error) {
                  shared.session().attr("switch_off")(GradientObject::of(self).site, error);
                });
    if (is_done) {
      shared.deliver();
    } else {
      observer.attr("gradient_came")(py::handle(self), py::handle(gradient));
    }
    Py_RETURN_NONE;
  });
}

PyObject* call_gradient(PyObject* self, PyObject* arguments, PyObject*) {
  if (PyTuple_GET_SIZE(arguments) != 1) {
    return PyErr_Format(PyExc_TypeError, "expected one gradient");
  }
  PyObject* const gradient = PyTuple_GET_ITEM(arguments, 0);
  if (gradient == Py_None) Py_RETURN_NONE;  // of an output that nothing has used
  return gradient_came(self, gradient);
}

template <auto kField>
PyObject* get_object(PyObject* self, void*) {
  return py::object(GradientObject::of(self).*kField).release().ptr();
}

template <auto kField>
PyObject* get_number(PyObject* self, void*) {
  return PyLong_FromLongLong(GradientObject::of(self).*kField);
}

PyGetSetDef kGradientProperties[] = {
    {"call", &get_object<&GradientRecorder::call>, nullptr, nullptr, nullptr},
    {"reader", &get_object<&GradientRecorder::observer>, nullptr, nullptr, nullptr},
    {"role", &get_object<&GradientRecorder::role>, nullptr, nullptr, nullptr},
    {"site", &get_number<&GradientRecorder::site>, nullptr, nullptr, nullptr},
    {"tensor_seq", &get_number<&GradientRecorder::tensor_seq>, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot kGradientSlots[] = {
    {Py_tp_dealloc, as_slot(&GradientObject::destroy)},
    {Py_tp_call, as_slot(&call_gradient)},
    {Py_tp_getset, kGradientProperties},
    {0, nullptr},
};

PyType_Spec kGradientSpec = {"fastcheck._C.GradientRecorder", sizeof(GradientObject), 0,
                             Py_TPFLAGS_DEFAULT, kGradientSlots};

PyTypeObject* gradient_type() {
  static PyTypeObject* const made = [] {
    PyTypeObject* const fresh = new_type(kGradientSpec);
    fresh->tp_new = nullptr;  // made by a ModuleRecorder alone
    return fresh;
  }();
  return made;
}

// ---- Calls --------------------------------------------------------------------------------------

struct ModuleRecorder {
  py::object recorder;
  py::object node;
  py::object counter;
  HookSites input_sites, output_sites, grad_input_sites, grad_output_sites;
  // It was given to install().
  bool is_root;

  HookRecorder& shared() const { return hook_recorder_of(recorder.ptr()); }
  bool is_off() const { return CallCounter::of(counter).is_off; }

  template <class Visit>
  int each(const Visit& visit) const {
    for (const py::object* held : {&recorder, &node, &counter}) {
      if (const int status = visit(held->ptr())) return status;
    }
    return 0;
  }
  void clear() {}

  bool enter(PyObject* args, PyObject* kwargs);
  bool leave(PyObject* output);

 private:
  // An outermost call: Python's enter() with the arguments at hand, where they are ordinary.
  bool begin(const HookRecorder& of, PyObject* args, PyObject* kwargs) const;
  // A call of an inner module in a step that is not observed.
  bool is_left_out(const HookRecorder& of) const;
  void watch(const HookRecorder& of, const HookTensors::Item& item, const py::object& call,
             PyObject* role, HookSites& sites, std::int64_t tensor_seq) const;
};

// The calls that are running in this thread, outermost first. `local` keeps the list as long as
// Python's state of the thread lives, which is only for one call where a library's own thread calls
// Python. A look-up takes longer than a copy of the last result.
PyObject* stack_of(const HookRecorder& recorder) {
  thread_local std::uint64_t last_id = 0, last_state = 0;
  thread_local PyObject* last = nullptr;
  const std::uint64_t state = PyThreadState_GetID(PyThreadState_Get());
  if (last_id != recorder.id || last_state != state) {
    last = owned(PyObject_GetAttr(recorder.local.ptr(), names().stack)).ptr();
    last_id = recorder.id;
    last_state = state;
  }
  return last;
}

Call* call_at(PyObject* stack, Py_ssize_t place) { return Call::of(PyList_GET_ITEM(stack, place)); }

// Does what list.pop() does with the last item, without the search for it.
void drop_last(PyObject* stack) {
  const Py_ssize_t last = PyList_GET_SIZE(stack) - 1;
  PyObject* const item = PyList_GET_ITEM(stack, last);
  Py_SET_SIZE(stack, last);
  Py_DECREF(item);
}

// False for a view without a graph of what was written to since: torch refuses to tell.
bool is_inner(const at::Tensor& tensor) {
  try {
    return !tensor.is_leaf();
  } catch (const c10::Error&) {
    return false;
  }
}

// The __torch_function__ of modes and of subclasses is not called meanwhile.
struct WithoutTorchFunction {
  using Tls = at::impl::PythonTorchFunctionTLS;
  WithoutTorchFunction() {
    Tls::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~WithoutTorchFunction() { Tls::set_disabled_state(before); }
  const at::impl::TorchFunctionDisabledState before = Tls::get_disabled_state();
};

// A GradientRecorder at the node that has made the tensor. tensor.register_hook() would do the same
// with a dict, an object of Python for the node, and a few calls.
class NodeHook : public torch::autograd::FunctionPreHook {
 public:
  NodeHook(py::object recorder, std::uint32_t output)
      : recorder_(std::move(recorder)), output_(output) {}
  NodeHook(const NodeHook&) = delete;
  NodeHook& operator=(const NodeHook&) = delete;
  ~NodeHook() override {
    // A graph may be let go of by any thread, and after the interpreter.
    if (Py_IsInitialized() == 0) {
      recorder_.release();
      return;
    }
    const py::gil_scoped_acquire acquired;
    recorder_ = py::object();
  }

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    // An output that nothing has used has no gradient.
    if (!gradients.at(output_).defined()) return gradients;
    const py::gil_scoped_acquire acquired;
    const py::object gradient = wrap(gradients.at(output_));
    PyObject* const done = gradient_came(recorder_.ptr(), gradient.ptr());
    if (done == nullptr) throw python_error();
    Py_DECREF(done);
    return gradients;
  }

  PyObject* recorder() const { return recorder_.ptr(); }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    PyObject* const held = py::object(recorder_).release().ptr();
    args.add_tensor_pre_hook(c10::SafePyObject(held, getPyInterpreter()),
                             static_cast<int>(output_));
  }

 private:
  py::object recorder_;
  std::uint32_t output_;
};

// True for a GradientRecorder, and a GradientHook of Python, of this session. A hook of the program
// whose class looks up attributes by code of its own is not asked.
bool is_of(const HookRecorder& recorder, PyObject* hook) {
  if (Py_TYPE(hook)->tp_getattro != PyObject_GenericGetAttr) return false;
  PyObject* const reader = PyObject_GetAttr(hook, names().reader);
  PyErr_Clear();
  Py_XDECREF(reader);
  return reader != nullptr && reader == recorder.observer.ptr();
}

// `tensor`: no leaf.
void register_hook(PyObject* tensor, py::object hook) {
  PyObject* const hooks = reinterpret_cast<THPVariable*>(tensor)->backward_hooks;
  if (hooks != nullptr && hooks != Py_None) {
    // Others were registered before it, and may be after it: they run in this order. It is its own
    // key: those of torch are numbers.
    checked(PyObject_SetItem(hooks, hook.ptr(), hook.ptr()));
    return;
  }
  const at::Tensor& made = unpack(tensor);
  made.grad_fn()->add_tensor_pre_hook(
      std::make_unique<NodeHook>(std::move(hook), static_cast<std::uint32_t>(made.output_nr())));
}

bool ModuleRecorder::is_left_out(const HookRecorder& of) const {
  return of.resting != 0 && of.resting == PyThread_get_thread_ident() && !is_root && !is_off() &&
         PyList_GET_SIZE(stack_of(of)) == 0;
}

// True while torch.jit.trace(), torch.export() or a transform of functorch runs the program.
bool is_traced() {
  static const py::object* const kCompiler =
      new py::object(py::module_::import("torch").attr("compiler"));
  const auto& included = c10::impl::tls_local_dispatch_key_set().included_;
  return torch::jit::tracer::isTracing() ||
         included.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         included.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode) ||
         py::getattr(*kCompiler, names().is_compiling, py::none()).is(py::bool_(true));
}

bool ModuleRecorder::begin(const HookRecorder& of, PyObject* args, PyObject* kwargs) const {
  const py::object observer = of.owner();
  const py::object inputs = labelled_arguments(args, kwargs);
  if (observer.is_none() || !inputs || is_traced()) return false;
  const WithoutTorchFunction plain;
  const py::object given =
      py::make_tuple(py::handle(args), py::handle(kwargs), inputs, at::GradMode::is_enabled());
  observer.attr("enter")(node, inputs, py::none(), given);
  return true;
}

bool ModuleRecorder::enter(PyObject* args, PyObject* kwargs) {
  HookRecorder& of = shared();
  if (is_left_out(of)) return true;
  if (is_off() || torch::autograd::get_current_graph_task_id() != -1) return false;
  if (PyList_GET_SIZE(stack_of(of)) == 0) return begin(of, args, kwargs);
  if (!of.is_open) return false;
  const Locked locked(of);
  if (!of.is_open) return false;
  PyObject* const stack = stack_of(of);
  const Py_ssize_t running = PyList_GET_SIZE(stack);
  if (running == 0) return false;
  const Call* const outermost = call_at(stack, 0);
  if (outermost == nullptr || outermost->node.is(node)) return false;
  HookTensors found;
  if (!found.add_arguments(args, kwargs, input_sites)) return false;

  const py::object call =
      Call::make(node, CallCounter::of(counter).next(of.step), PyList_GET_ITEM(stack, running - 1),
                 PyThread_get_thread_ident(), of.cursor->seq, false);
  checked(PyList_Append(stack, call.ptr()));
  owned(PyObject_CallOneArg(of.add_call.ptr(), call.ptr()));
  Call& fields = *Call::of(call.ptr());
  for (const HookTensors::Item& item : found.items) {
    const std::int64_t code = of.read(item.tensor, item.site, fields.index, 0);
    if (code < 0) continue;
    const std::int64_t tensor_seq = code >> code::kSeqShift;
    fields.inputs.push_back({tensor_seq, item.site});
    if ((code & code::kNew) == 0) continue;
    of.note(code, of.inner_input, tensor_seq, call, of.after_gap);
    if ((code & code::kNeedsGradient) != 0) {
      watch(of, item, call, names().grad_input, grad_input_sites, tensor_seq);
    }
  }
  of.finish();
  return true;
}

bool ModuleRecorder::leave(PyObject* output) {
  HookRecorder& of = shared();
  if (is_left_out(of)) return true;
  if (is_off() || !of.is_open) return false;
  const Locked locked(of);
  if (!of.is_open) return false;
  PyObject* const stack = stack_of(of);
  const Py_ssize_t running = PyList_GET_SIZE(stack);
  if (running == 0) return false;
  const auto call = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(stack, running - 1));
  Call* const fields = Call::of(call.ptr());
  if (fields == nullptr || !fields->node.is(node) || fields->is_recompute ||
      !fields->watched.is_none()) {
    return false;
  }
  HookTensors found;
  if (!found.add(output, hook_labels().output, output_sites)) {
    return false;
  }
  // Python finds out what has ended it.
  if (running == 1 && found.count == 0) return false;

  // Whatever comes: the call is over.
  drop_last(stack);
  fields->outputs_seq = of.cursor->seq;
  bool is_complete = found.count != 0;
  for (const HookTensors::Item& item : found.items) {
    const std::int64_t code = of.read(item.tensor, item.site, fields->index, 0);
    if (code < 0) {
      is_complete = is_complete && !may_be_nonfinite(unpack(item.tensor).scalar_type());
      continue;
    }
    const std::int64_t tensor_seq = code >> code::kSeqShift;
    fields->outputs.push_back(tensor_seq);
    if ((code & code::kNew) == 0) continue;
    if (!of.is_deferred()) of.note(code, of.output, tensor_seq, call);
    if ((code & code::kNeedsGradient) != 0) {
      watch(of, item, call, names().grad_output, grad_output_sites, tensor_seq);
    }
  }
  fields->is_complete = is_complete;
  if (of.is_deferred()) {
    checked(PyList_Append(of.entries.ptr(), call.ptr()));
  } else if (PyList_GET_SIZE(of.findings.ptr()) != 0) {
    of.session().attr("call_ended")(call, is_complete);
  }
  if (running == 1) {
    of.read_waiting();
    const WithoutTorchFunction plain;
    of.owner().attr("pass_left")(node, of.cursor->seq, at::GradMode::is_enabled());
  }
  of.finish();
  return true;
}

void ModuleRecorder::watch(const HookRecorder& of, const HookTensors::Item& item,
                           const py::object& call, PyObject* role, HookSites& sites,
                           std::int64_t tensor_seq) const {
  const WithoutTorchFunction plain;
  std::int64_t site = -1;
  // A parameter, a leaf, or a tensor of another class is left to _watch(), which has more to do.
  if (reinterpret_cast<PyObject*>(Py_TYPE(item.tensor)) == THPVariableClass &&
      is_inner(unpack(item.tensor))) {
    site = sites.of(item.label.ptr());
  }
  if (site < 0) {
    of.owner().attr("_watch")(py::handle(item.tensor), call, py::handle(role), item.label,
                              item.position, tensor_seq);
    return;
  }
  register_hook(item.tensor,
                owned(GradientObject::make(gradient_type(), of.observer, call, borrowed(role),
                                           static_cast<long long>(site),
                                           static_cast<long long>(tensor_seq))));
}

// ---- The type -----------------------------------------------------------------------------

using ModuleObject = Object<ModuleRecorder>;

PyObject* new_module_recorder(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *recorder = nullptr, *node = nullptr, *counter = nullptr;
  std::array<PyObject*, 4> sites{};
  if (PyArg_ParseTuple(arguments, "O!OOO!O!O!O!:ModuleRecorder", hook_recorder_type(), &recorder,
                       &node, &counter, &PyDict_Type, &sites[0], &PyDict_Type, &sites[1],
                       &PyDict_Type, &sites[2], &PyDict_Type, &sites[3]) == 0) {
    return nullptr;
  }
  return translated([&] {
    CallCounter::of(counter);
    return ModuleObject::make(type, borrowed(recorder), borrowed(node), borrowed(counter),
                              HookSites(borrowed(sites[0])), HookSites(borrowed(sites[1])),
                              HookSites(borrowed(sites[2])), HookSites(borrowed(sites[3])),
                              owned(PyObject_GetAttr(node, names().is_root)).is(py::bool_(true)));
  });
}

template <class Body>
PyObject* attend(PyObject* self, const Body& body) {
  return translated([&] {
    ModuleRecorder& module = ModuleObject::of(self);
    const HookRecorder& of = module.shared();
    const bool is_done =
        guarded([&] { return body(module); },
                [&](const py::object& error) { of.owner().attr("failed")(module.node, error); });
    if (is_done) of.deliver();
    return PyBool_FromLong(is_done);
  });
}

PyObject* enter(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2 || !PyTuple_Check(arguments[0]) || !PyDict_Check(arguments[1])) {
    return PyErr_Format(PyExc_TypeError, "expected a tuple and a dict");
  }
  return attend(self,
                [&](ModuleRecorder& module) { return module.enter(arguments[0], arguments[1]); });
}

PyObject* leave(PyObject* self, PyObject* output) {
  return attend(self, [&](ModuleRecorder& module) { return module.leave(output); });
}

PyTypeObject* module_type();

// ---- The hooks of Python --------------------------------------------------------------------

// The functions by which Python's classes of hooks are called once call_in_cpp() was given them:
// the recorder first and, where it leaves a call to Python, their own __call__(). That stays what
// torch.compile traces.
ternaryfunc call_in_python[2];

template <int kPlace, class Attend>
PyObject* call_hook(PyObject* self, PyObject* args, PyObject* kwargs, Py_ssize_t count,
                    const Attend& attend_to) {
  if (kwargs == nullptr && PyTuple_GET_SIZE(args) == count &&
      PyTuple_Check(PyTuple_GET_ITEM(args, 1)) && PyDict_Check(PyTuple_GET_ITEM(args, 2))) {
    PyObject* const recorder = PyObject_GetAttr(self, names().own_recorder);
    if (recorder == nullptr) return nullptr;
    PyObject* const is_done =
        Py_TYPE(recorder) == module_type() ? attend_to(recorder) : Py_NewRef(Py_False);
    Py_DECREF(recorder);
    if (is_done == nullptr) return nullptr;
    Py_DECREF(is_done);
    if (is_done == Py_True) Py_RETURN_NONE;
  }
  return call_in_python[kPlace](self, args, kwargs);
}

PyObject* call_pre_hook(PyObject* self, PyObject* args, PyObject* kwargs) {
  return call_hook<0>(self, args, kwargs, 3, [&](PyObject* recorder) {
    return attend(recorder, [&](ModuleRecorder& module) {
      return module.enter(PyTuple_GET_ITEM(args, 1), PyTuple_GET_ITEM(args, 2));
    });
  });
}

PyObject* call_forward_hook(PyObject* self, PyObject* args, PyObject* kwargs) {
  return call_hook<1>(self, args, kwargs, 4, [&](PyObject* recorder) {
    return leave(recorder, PyTuple_GET_ITEM(args, 3));
  });
}

void call_in_cpp(const py::type& before, const py::type& after) {
  const std::array<py::type, 2> types{before, after};
  constexpr std::array<ternaryfunc, 2> kCalls{&call_pre_hook, &call_forward_hook};
  for (std::size_t i = 0; i < types.size(); ++i) {
    auto* const type = reinterpret_cast<PyTypeObject*>(types[i].ptr());
    if (type->tp_call == kCalls[i]) continue;
    call_in_python[i] = type->tp_call;
    type->tp_call = kCalls[i];
    PyType_Modified(type);
  }
}

PyMethodDef kModuleMethods[] = {
    {"enter", as_method(&enter), METH_FASTCALL, "enter(self, args, kwargs) -> bool"},
    {"leave", &leave, METH_O, "leave(self, output) -> bool"},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot kModuleSlots[] = {
    {Py_tp_new, as_slot(&new_module_recorder)},
    {Py_tp_dealloc, as_slot(&destroy_tracked<ModuleRecorder>)},
    {Py_tp_traverse, as_slot(&traverse<ModuleRecorder>)},
    {Py_tp_clear, as_slot(&clear<ModuleRecorder>)},
    {Py_tp_methods, kModuleMethods},
    {0, nullptr},
};

PyType_Spec kModuleSpec = {"fastcheck._C.ModuleRecorder", sizeof(ModuleObject), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kModuleSlots};

PyTypeObject* module_type() {
  static PyTypeObject* const made = new_type(kModuleSpec);
  return made;
}

}  // namespace

bool records_gradient(const HookRecorder& recorder, torch::autograd::Node& node) {
  const auto& hooks = node.tensor_pre_hooks();
  return std::any_of(hooks.begin(), hooks.end(), [&](const auto& hook) {
    const torch::autograd::FunctionPreHook& held = *hook;
    if (typeid(held) == typeid(NodeHook)) {
      return is_of(recorder, static_cast<const NodeHook&>(held).recorder());
    }
    // Those of tensor.register_hook(). torch_python keeps the type_info of this class to itself.
    if (typeid(held).name() != "N5torch8autograd23PyFunctionTensorPreHookE"sv) return false;
    using torch::autograd::PyFunctionTensorPreHook;
    PyObject* const others = static_cast<const PyFunctionTensorPreHook&>(held).dict;
    PyObject *key = nullptr, *registered = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(others, &at, &key, &registered) != 0;) {
      if (is_of(recorder, registered)) return true;
    }
    return false;
  });
}

void define_module_recorder(py::module_& m) {
  m.attr("ModuleRecorder") = py::handle(reinterpret_cast<PyObject*>(module_type()));
  m.def("call_in_cpp", call_in_cpp, py::arg("before"), py::arg("after"));
  m.attr("GradientRecorder") = py::handle(reinterpret_cast<PyObject*>(gradient_type()));
}

}  // namespace fastcheck
