// The ops that are not one CPU kernel on a stream (allocation, views, copies, random numbers), and
// the registration of all of them.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/fill_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <limits>

#include "launch.h"
#include "supported_ops.h"

namespace fake {
namespace {

// ---- Random numbers: drawn on the host from the device's generator, see registration.cpp
// ----------------------

Tensor host_like(const Tensor& t) {
  return at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type());
}

// empty_like: t's layout, without its holes and overlaps.
Tensor device_like(const Tensor& t, at::ScalarType dtype) {
  return device_empty(t.sizes(), at::infer_dense_strides(t.sizes(), t.strides()), dtype,
                      t.device());
}

void fill_random(const c10::OperatorHandle& op, Stack* stack) {
  const std::string name = name_of(op);
  const std::size_t count = op.schema().arguments().size();
  Stack values(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  const Tensor self = values[0].toTensor();
  const auto generator = cpu_generator(values.back().toOptional<at::Generator>(), self.device());
  const Tensor host = host_like(self);
  values[0] = host;
  values.back() = generator;
  call(op, values);
  if (self.numel() > 0)
    enqueue(self.device(), name, [to = alias_of(self), host] { to.copy_(host); });
  torch::jit::drop(*stack, count);
  stack->emplace_back(self);
}

Tensor& randperm_out(int64_t n, std::optional<at::Generator> generator, Tensor& out) {
  const Tensor host = at::randperm(n, cpu_generator(generator, out.device()),
                                   at::TensorOptions().dtype(out.dtype()));
  at::native::resize_output(out, host.sizes());
  if (n > 0)
    enqueue(out.device(), "aten::randperm.generator_out",
            [to = alias_of(out), host] { to.copy_(host); });
  return out;
}

// The same arithmetic as dropout on the CPU, where it is a composite: noise = mask / (1 - p), out =
// input * noise.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p,
                                          std::optional<bool> train) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const bool active = train.value_or(true);
  const Tensor output = device_like(input, input.scalar_type()),
               kept = device_like(input, at::kBool);
  const Tensor mask = host_like(output);
  if (active)
    mask.bernoulli_(1 - p, cpu_generator(std::nullopt, input.device()));
  else
    mask.fill_(1);
  const double keep = active ? 1 - p : 1;
  enqueue(input.device(), "aten::native_dropout",
          [mask, keep, in = alias_of(input), out = alias_of(output), kept_alias = alias_of(kept)] {
            kept_alias.copy_(mask);
            out.copy_(in.mul(mask.div(keep)));
          });
  return {output, kept};
}

Tensor native_dropout_backward(const Tensor& grad, const Tensor& mask, double scale) {
  const Tensor result = device_like(grad, grad.scalar_type());
  // 1 / scale is 1 - p again, after rounding to the tensor's precision: see native_dropout.
  enqueue(grad.device(), "aten::native_dropout_backward",
          [scale, g = alias_of(grad), m = alias_of(mask), out = alias_of(result)] {
            out.copy_(g.mul(m.to(g.scalar_type()).div_(scale == 0 ? 1 : 1 / scale)));
          });
  return result;
}

// ---- Convolution: backends outside of torch get an op without bias_sizes
// --------------------------------------

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  auto make = [&](bool want, at::IntArrayRef sizes) {
    if (!want) return Tensor();
    return device_empty(sizes, at::detail::defaultStrides(sizes), grad.scalar_type(),
                        grad.device());
  };
  const std::vector<int64_t> bias = {grad.size(1)};
  std::tuple<Tensor, Tensor, Tensor> result = {
      make(wanted[0], input.sizes()), make(wanted[1], weight.sizes()), make(wanted[2], bias)};
  auto alias = [](const Tensor& t) { return t.defined() ? alias_of(t) : t; };
  enqueue(grad.device(), "aten::convolution_backward_overrideable",
          [=, stride = stride.vec(), padding = padding.vec(), dilation = dilation.vec(),
           output_padding = output_padding.vec(), g = alias_of(grad), x = alias_of(input),
           w = alias_of(weight), to_x = alias(std::get<0>(result)),
           to_w = alias(std::get<1>(result)), to_b = alias(std::get<2>(result))] {
            const auto [of_x, of_w, of_b] =
                at::convolution_backward(g, x, w, bias, stride, padding, dilation, transposed,
                                         output_padding, groups, wanted);
            if (wanted[0]) to_x.copy_(of_x);
            if (wanted[1]) to_w.copy_(of_w);
            if (wanted[2]) to_b.copy_(of_b);
          });
  return result;
}

// ---- Copies
// ---------------------------------------------------------------------------------------------------

Tensor copy_across(const Tensor& from, const Tensor& to) {
  Stream& source = stream_now(from.device());
  Stream& target = stream_now(to.device());
  source.wait_for(target.record());  // what still uses `to` there
  enqueue(from.device(), "copy (device to device)",
          [a = alias_of(to), b = alias_of(from)] { a.copy_(b); });
  target.wait_for(source.record());
  return to;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const Tensor from = self.expand(to.sizes());
  if (on_device(from) && on_device(to)) {
    count(Counter::device_copy);
    if (from.device() != to.device()) return copy_across(from, to);
    enqueue(to.device(), "copy", [a = alias_of(to), b = alias_of(from)] { a.copy_(b); });
    return to;
  }
  const bool upload = on_device(to);
  const Tensor& host = upload ? from : to;
  const c10::Device device = upload ? to.device() : from.device();
  TORCH_CHECK(host.is_cpu(), "fake device: no copies between it and ", host.device());
  const Tensor host_alias = over(host, const_cast<void*>(host.const_data_ptr()));
  const bool asynchronous = non_blocking && is_pinned(host.const_data_ptr());
  // What is read too early is never right by chance.
  if (asynchronous && !upload && !stream_now(device).capture()) {
    Tensor stale = host_alias;
    at::native::fill_(stale, isFloatingType(to.scalar_type()) || isComplexType(to.scalar_type())
                                 ? c10::Scalar(std::numeric_limits<double>::quiet_NaN())
                                 : c10::Scalar(-1));
  }
  // A copy that is refused must not be under way: the caller is free to let its memory go.
  if (!asynchronous) count_synchronisation(Counter::blocking_copy);
  enqueue(device, upload ? "copy (host to device)" : "copy (device to host)",
          [a = upload ? alias_of(to) : host_alias, b = upload ? host_alias : alias_of(from)] {
            a.copy_(b);
          });
  if (asynchronous) {
    count(Counter::async_copy);
    record_pinned_use(host.const_data_ptr(), stream_now(device));
  } else {
    stream_now(device).wait_idle();
  }
  return to;
}

// ---- Allocation, views, storage
// -------------------------------------------------------------------------------

void check_factory(std::optional<at::Layout> layout, std::optional<c10::Device> device,
                   std::optional<bool> pin) {
  TORCH_CHECK(device.has_value() && device->type() == kType,
              "fake device: empty() for another device");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "fake device: only strided tensors");
  TORCH_CHECK(!pin.value_or(false), "only CPU memory can be pinned");
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout> layout, std::optional<c10::Device> device,
             std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  check_factory(layout, device, pin);
  const c10::DeviceGuard guard(*device);
  return at::detail::empty_generic(size, c10::GetAllocator(kType),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                     std::optional<c10::Device> device, std::optional<bool> pin) {
  check_factory(layout, device, pin);
  return device_empty(size, stride, c10::dtype_or_default(dtype), *device);
}

void grow_storage(const Tensor& self, std::size_t bytes) {
  if (bytes > self.storage().nbytes())
    at::native::resize_bytes_nocuda(self.storage(), static_cast<int64_t>(bytes));
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size,
                     std::optional<at::MemoryFormat> format) {
  auto* const impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    grow_storage(self, at::detail::computeStorageNbytesContiguous(size, self.itemsize(),
                                                                  self.storage_offset()));
  }
  if (format.has_value() && *format != at::MemoryFormat::Preserve)
    impl->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                    at::IntArrayRef stride) {
  at::native::checkSetStorage(self, storage, offset, size, stride);
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(
      size, stride.empty() ? at::IntArrayRef(at::detail::defaultStrides(size)) : stride);
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {count}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

Tensor& set_empty(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  return set_whole_storage(
      self, at::Storage(at::Storage::use_byte_size_t(), 0, c10::GetAllocator(kType), true));
}

void record_stream(Tensor& self, c10::Stream stream) {
  static_cast<c10::DeviceAllocator*>(c10::GetAllocator(kType))
      ->recordStream(self.storage().data_ptr(), stream);
}

// A device tensor's memory for kernels written in Python; see launch() in device_module.py.
Tensor kernel_view(const Tensor& t) { return on_device(t) ? alias_of(t) : t; }

at::Generator generator_of(int64_t device) {
  return at::globalContext().defaultGenerator(
      c10::Device(kType, static_cast<c10::DeviceIndex>(device)));
}

std::vector<std::string> unknown_ops;  // listed, but not in this torch

std::vector<std::string> list_unknown_ops() { return unknown_ops; }

int64_t choose_attention(const Tensor& /*query*/, const Tensor& /*key*/, const Tensor& /*value*/,
                         const std::optional<Tensor>& /*mask*/, double /*dropout*/, bool /*causal*/,
                         std::optional<double> /*scale*/, bool /*gqa*/) {
  return 0;  // sdp::SDPBackend::math, the composite
}

// ---- Registration
// ---------------------------------------------------------------------------------------------

template <auto function>
void implement(torch::Library& m, const std::string& name) {
  const auto dot = name.find('.');
  const std::string base = name.substr(0, dot),
                    overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  if (!c10::Dispatcher::singleton().findSchema({base, overload}).has_value()) {
    unknown_ops.push_back(name);
    return;
  }
  m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<function>());
}

}  // namespace
}  // namespace fake

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &fake::choose_attention)
}

using namespace fake;

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&not_implemented>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name : kAsynchronousOps) implement<&launch>(m, qualified(name));
  for (const auto& pair : kRenamedOps) implement<&launch_renamed>(m, qualified(pair[0]));
  for (const char* name : kWaitingOps) implement<&run_and_wait>(m, qualified(name));
  for (const char* name : kRandomOps) implement<&fill_random>(m, qualified(name));
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames())
    if (name.name.rfind(kAsynchronousPrefix, 0) == 0)
      implement<&launch_list>(
          m, name.overload_name.empty() ? name.name : name.name + "." + name.overload_name);

  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("native_dropout", &native_dropout);
  m.impl("native_dropout_backward", &native_dropout_backward);
  m.impl("randperm.generator_out", &randperm_out);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("is_set_to", &at::native::is_set_to);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view", &at::native::view);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("record_stream", &record_stream);
  m.impl("resize_", &resize);
  m.impl("set_", &set_empty);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
}

// Copies read lazily conjugated and negated tensors as they are; torch's fallback would copy them
// first, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY(fake_device, m) {
  m.def("kernel_view(Tensor(a) t) -> Tensor(a)",
        torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &kernel_view));
  m.def("default_generator(int device) -> Generator?", &generator_of);
  m.def("unknown_ops() -> str[]", &list_unknown_ops);
}
