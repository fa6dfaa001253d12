// The boxed path of nearly every op. It runs in three parts: the op's meta kernel gives the
// outputs' metadata on the host, the outputs are allocated, and its CPU kernel is enqueued on the
// current stream, on CPU tensors that alias the device's memory. Like on a real device a kernel
// holds addresses only: it keeps no tensor alive.
#include "launch.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/IndexingUtils.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>

#include "metadata.h"
#include "supported_ops.h"

namespace fake {

// ---- Tensors as kernels see them
// ------------------------------------------------------------------------------

static void copy_flags(const Tensor& from, const Tensor& to) {
  auto* const impl = to.unsafeGetTensorImpl();
  impl->_set_conj(from.is_conj());
  impl->_set_neg(from.is_neg());
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
}

Tensor over(const Tensor& t, void* bytes) {
  Tensor result =
      at::from_blob(bytes, t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()));
  copy_flags(t, result);
  return result;
}

Tensor meta_of(const Tensor& t) {
  Tensor result = at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
  copy_flags(t, result);
  return result;
}

// A tensor that the host made and a kernel reads: the value of this moment, whatever the host does
// to it later.
Tensor snapshot(const Tensor& t) {
  return t.unsafeGetTensorImpl()->is_wrapped_number() ? t : t.clone();
}

Tensor alias_of(const Tensor& t) {
  if (t.numel() == 0) return over(t, nullptr);
  TORCH_CHECK(t.layout() == at::kStrided, "fake device: only strided tensors, not ", t.layout());
  const auto needed =
      at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize(), t.storage_offset());
  TORCH_CHECK(needed <= t.storage().nbytes(), "fake device: the tensor reaches past its storage");
  return over(t, backing(t.const_data_ptr()));
}

Tensor device_empty(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                    c10::Device device) {
  const c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(kType),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype);
}

// ---- Helpers
// --------------------------------------------------------------------------------------------------

std::string name_of(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

void call(const c10::OperatorHandle& op, Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(&stack);
}

// An OpenMP pool per stream would spin against the host on a small machine. Looked up in the
// process, because it must be the OpenMP that torch brought; at::set_num_threads would change the
// other threads too.
void use_one_thread() {
  thread_local const bool done = [] {
    at::get_num_threads();  // torch's own lazy setting, which would undo ours
    auto* const set = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
    if (set != nullptr) set(1);
    // This is the device: what observes the host's operators sees nothing of its insides.
    at::enableRecordFunction(false);
    return true;
  }();
  static_cast<void>(done);
}

namespace {

template <std::size_t n>
bool listed(const char* const (&list)[n], const std::string& name) {
  for (const char* each : list)
    if (name == qualified(each)) return true;
  return false;
}

// out= tensors that came with another shape take the meta kernel's, as structured kernels do
// themselves.
void resize_outputs(const c10::FunctionSchema& schema, const Stack& values, const Stack& metas) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!schema.arguments()[i].is_out() || !values[i].isTensor()) continue;
    const Tensor out = values[i].toTensor();
    const Tensor meta = metas[i].toTensor();
    if (out.sizes() == meta.sizes()) continue;
    at::native::resize_output(out, meta.sizes());
    out.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
  }
}

// Index of the argument that return value `i` is, or -1 for a new value. Views are refused: they
// are not launches.
int aliased_argument(const c10::FunctionSchema& schema, std::size_t i) {
  const c10::AliasInfo* const of_return = schema.returns()[i].alias_info();
  if (of_return == nullptr) return -1;
  TORCH_CHECK_NOT_IMPLEMENTED(of_return->isWrite(), "fake device: view op ", schema.name());
  for (std::size_t a = 0; a < schema.arguments().size(); ++a) {
    const c10::AliasInfo* const of_argument = schema.arguments()[a].alias_info();
    if (of_argument != nullptr && of_argument->beforeSets() == of_return->beforeSets())
      return static_cast<int>(a);
  }
  TORCH_CHECK(false, "fake device: can't tell what ", schema.name(), " returns");
}

// Index tensors that are masks become positions, for which the host waits: nonzero() counts it.
void expand_masks(Stack& values) {
  c10::List<std::optional<Tensor>> given = values[1].toOptionalTensorList(), expanded;
  for (const Tensor& index : at::native::expandTensors(values[0].toTensor(), given, true))
    expanded.push_back(index.defined() ? std::optional<Tensor>(index) : std::nullopt);
  values[1] = std::move(expanded);
}

// ---- Kernels
// --------------------------------------------------------------------------------------------------

void write(const Tensor& to, const Tensor& result, const std::string& op) {
  TORCH_CHECK(to.defined() == result.defined(), op,
              ": the CPU kernel and the meta kernel differ in what they return");
  if (!to.defined()) return;
  TORCH_CHECK(to.sizes() == result.sizes() && to.scalar_type() == result.scalar_type(), op,
              ": the CPU kernel gave ", result.scalar_type(), result.sizes(),
              " where the meta kernel said ", to.scalar_type(), to.sizes());
  to.copy_(result);
}

void run_kernel(const c10::OperatorHandle& op, const std::string& name, Stack inputs,
                const Stack& targets) {
  if (listed(kScratchOutOps, name)) {
    const Tensor out = inputs.back().toTensor();
    inputs.back() = at::empty({0}, out.options());
    Stack results = inputs;
    op.callBoxed(&results);
    write(out, results[0].toTensor(), name);
    return;
  }
  std::vector<const void*> addresses;
  for (const IValue& value : inputs)
    addresses.push_back(value.isTensor() && value.toTensor().defined()
                            ? value.toTensor().const_data_ptr()
                            : nullptr);
  Stack results = inputs;
  op.callBoxed(&results);
  for (std::size_t i = 0; i < inputs.size(); ++i)
    TORCH_CHECK(addresses[i] == nullptr || inputs[i].toTensor().const_data_ptr() == addresses[i],
                name, ": the CPU kernel moved an argument elsewhere");
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (targets[i].isTensor()) write(targets[i].toTensor(), results[i].toTensor(), name);
    if (!targets[i].isTensorList()) continue;
    const auto to = targets[i].toTensorVector(), from = results[i].toTensorVector();
    TORCH_CHECK(to.size() == from.size(), name, ": list lengths differ");
    for (std::size_t k = 0; k < to.size(); ++k) write(to[k], from[k], name);
  }
}

// `kernel_op` differs from the op itself only where the device has a name of its own for it.
void launch_as(const c10::OperatorHandle& op, const c10::OperatorHandle& kernel_op, Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = name_of(op);
  const std::size_t count = schema.arguments().size();
  Arguments arguments(name, *stack, count, listed(kIndexOps, name));
  const c10::Device device = *arguments.device;
  const c10::DeviceGuard guard(device);
  if (listed(kIndexOps, name)) expand_masks(arguments.values);

  std::shared_ptr<const Metadata> metadata;
  if (needs_metadata(schema)) {
    metadata = metadata_of(kernel_op, arguments);
    resize_outputs(schema, arguments.values, metadata->inputs);
  }
  std::size_t i = 0;
  TensorMap make([&](const Tensor& t) {
    const Tensor meta = as_cpu_returns(name, i, arguments.values, t);
    return device_empty(meta.sizes(), meta.strides(), meta.scalar_type(), device);
  });
  TensorMap alias(alias_of);
  Stack returns, targets;  // per return value: what the host gets, and where the kernel puts it
                           // (None: in place)
  for (; i < schema.returns().size(); ++i) {
    const int argument = aliased_argument(schema, i);
    if (argument >= 0) {
      returns.push_back(arguments.values[argument]);
      targets.emplace_back();
      continue;
    }
    const IValue& meta = metadata->results[i];
    TORCH_CHECK_NOT_IMPLEMENTED(meta.isTensor() || meta.isTensorList(), "fake device: ", name,
                                " returns what is not a tensor");
    returns.push_back(make(meta));
    targets.push_back(alias(returns.back()));
  }
  enqueue(device, name,
          [kernel_op, name, inputs = arguments.as_aliases(), targets = std::move(targets)] {
            run_kernel(kernel_op, name, inputs, targets);
          });
  torch::jit::drop(*stack, count);
  for (IValue& value : returns) stack->push_back(std::move(value));
}

}  // namespace

void launch(const c10::OperatorHandle& op, Stack* stack) { launch_as(op, op, stack); }

// Raises the versions of what is written, as torch's kernels do (increment_version in
// ATen/native/ForeachUtils.h): autograd's code does not for lists.
void launch_list(const c10::OperatorHandle& op, Stack* stack) {
  const c10::Argument& list = op.schema().arguments()[0];
  std::vector<Tensor> written;
  if (list.alias_info() != nullptr && list.alias_info()->isWrite())
    written = torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensorVector();
  launch(op, stack);
  for (const Tensor& tensor : written) tensor.unsafeGetTensorImpl()->bump_version();
}

void launch_renamed(const c10::OperatorHandle& op, Stack* stack) {
  for (const auto& pair : kRenamedOps) {
    if (qualified(pair[0]) != op.operator_name().name) continue;
    launch_as(op, c10::Dispatcher::singleton().findSchemaOrThrow(qualified(pair[1]).c_str(), ""),
              stack);
    return;
  }
  TORCH_CHECK(false, "fake device: ", name_of(op), " is not in kRenamedOps");
}

void run_and_wait(const c10::OperatorHandle& op, Stack* stack) {
  const std::string name = name_of(op);
  const std::size_t count = op.schema().arguments().size();
  const Arguments arguments(name, *stack, count, false);
  const c10::Device device = *arguments.device;
  count_synchronisation(name == "aten::_local_scalar_dense" ? Counter::item
                                                            : Counter::data_dependent);
  auto results = std::make_shared<Stack>(arguments.as_aliases());
  enqueue(device, name, [op, results] { op.callBoxed(results.get()); });
  stream_now(device).wait_idle();
  torch::jit::drop(*stack, count);
  for (const IValue& value : *results) {
    if (!value.isTensor()) {
      stack->push_back(value);
      continue;
    }
    const Tensor host = value.toTensor();
    const Tensor out = device_empty(host.sizes(), host.strides(), host.scalar_type(), device);
    if (host.numel() > 0) enqueue(device, name, [to = alias_of(out), host] { to.copy_(host); });
    stack->push_back(out);
  }
}

void not_implemented(const c10::OperatorHandle& op, Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "fake device: ", name_of(op),
      " is not implemented (tests/fakes/fake_device/csrc/supported_ops.h lists what is)");
}

}  // namespace fake
