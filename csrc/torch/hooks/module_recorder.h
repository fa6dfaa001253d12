// ModuleRecorder and GradientRecorder: the hooks of a module and of a gradient in C++, for calls
// inside a pass, and for the end of a pass.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/function.h>

namespace fastcheck {

struct HookRecorder;

// True if the gradient of an output of the node is recorded.
bool records_gradient(const HookRecorder& recorder, torch::autograd::Node& node);

// Defines the types ModuleRecorder and GradientRecorder, which need the interpreter's lock, and
// take the session's.
//
// ModuleRecorder(recorder, node, counter, input_sites, output_sites, grad_input_sites,
//                grad_output_sites): of one module; the sites are those that it has until now.
//   .enter(args, kwargs) -> bool, .leave(output) -> bool
//                              False: nothing was done, and Python has to. What they raise is what
//                              observer.deliver() raises: a stop. Nothing is done once
//                              counter.is_off
// call_in_cpp(before, after)  calls of hooks of these two classes of Python, each with a
//                              `_recorder`, are passed to it without a line of Python
void define_module_recorder(pybind11::module_& m);

}  // namespace fastcheck
