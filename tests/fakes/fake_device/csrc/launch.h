// Enqueues an op on a stream; shared by ops.cpp and launch.cpp.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/Exception.h>

#include <string>
#include <utility>

#include "runtime.h"

namespace fake {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr auto kType = c10::DeviceType::PrivateUse1;

inline bool on_device(const Tensor& t) { return t.defined() && t.device().type() == kType; }
inline Stream& stream_now(c10::Device device) {
  return stream(device.index(), current_stream(device.index()));
}

// A CPU tensor over `bytes`, with t's metadata.
Tensor over(const Tensor& t, void* bytes);
// The device memory of t as a CPU tensor. Only kernels may read it.
Tensor alias_of(const Tensor& t);
// A meta tensor like t.
Tensor meta_of(const Tensor& t);
// A host tensor that a kernel reads, with the value of this moment, whatever the host does to it
// later.
Tensor snapshot(const Tensor& t);
Tensor device_empty(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                    c10::Device device);

inline std::string qualified(const char* name) { return std::string("aten::") + name; }
std::string name_of(const c10::OperatorHandle& op);

// Calls an op that is part of making another one: below autograd.
void call(const c10::OperatorHandle& op, Stack& stack);

void use_one_thread();  // OpenMP threads of the calling worker

// Runs `work` on the device's current stream. What it captured by value is all that it may use.
template <class Work>
void enqueue(c10::Device device, const std::string& name, Work work) {
  stream_now(device).submit(TaskKind::kernel, name, [work = std::move(work)]() mutable {
    use_one_thread();
    const at::AutoDispatchBelowADInplaceOrView below;
    try {
      work();
    } catch (const c10::Error& error) {
      throw std::runtime_error(error.what_without_backtrace());
    }
  });
}

// The boxed kernels of supported_ops.h.
void launch(const c10::OperatorHandle& op, Stack* stack);
void launch_list(const c10::OperatorHandle& op, Stack* stack);
void launch_renamed(const c10::OperatorHandle& op, Stack* stack);
void run_and_wait(const c10::OperatorHandle& op, Stack* stack);
void not_implemented(const c10::OperatorHandle& op, Stack* stack);

// The CPU generator that holds a device generator's state (registration.cpp). Null: the device's
// default one.
at::Generator cpu_generator(const std::optional<at::Generator>& given, c10::Device device);

}  // namespace fake
