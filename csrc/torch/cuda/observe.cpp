#include "torch/cuda/observe.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <stdexcept>

#include "cuda/exponents.h"
#include "cuda/launch.h"
#include "kernels/cuda_arguments.h"
#include "kernels/cuda_errors.h"
#include "torch/cuda/device.h"
#include "torch/cuda/workspace.h"
#include "torch/read/slots.h"
#include "torch/read/tensor_view.h"
#include "torch/read/unobserved.h"

namespace fastcheck::cuda {
namespace {

// The launchers' arguments for a list of tensors, and the objects that have to outlive the launch.
class Arguments {
 public:
  Arguments(at::ArrayRef<at::Tensor> tensors, c10::Device device, std::int64_t first,
            bool logical) {
    arguments_.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) {
      if (tensor.device() != device) {
        throw std::invalid_argument("expected all tensors on " + device.str() + ", got one on " +
                                    tensor.device().str());
      }
      const bool is_lazy = tensor.is_conj() || tensor.is_neg();
      if (is_lazy) resolved_.push_back(resolve(tensor));
      arguments_.push_back(
          argument_of(view_of(is_lazy ? resolved_.back() : tensor), first++, logical));
    }
  }

  at::ArrayRef<TensorArgument> all() const { return arguments_; }

 private:
  static at::Tensor resolve(const at::Tensor& tensor) {
    const PlainTorch plain;
    return resolve_views(tensor);
  }

  c10::SmallVector<TensorArgument, 4> arguments_;
  c10::SmallVector<at::Tensor, 1> resolved_;
};

// True if these are launched at once, and without a table: one kernel for what is of a dtype and
// dense.
bool is_one_launch(const TensorArgument* tensors, std::size_t count) {
  if (count == 1) return true;
  const auto is_like_first = [&](const TensorArgument& tensor) {
    return tensor.dtype == tensors->dtype && tensor.dense != 0;
  };
  return count <= kWithoutTable && std::all_of(tensors, tensors + count, is_like_first);
}

// Calls launch(tensors, count, workspace, tuning, stream) once, or for parts of the list that a
// launch can take. The device is current.
//
// A launch makes the plan that its buffers follow from. So a single one is tried with the buffers
// that are there, which it refuses before anything is launched, and planned for where they are too
// small.
template <class Launch>
void in_parts(at::ArrayRef<TensorArgument> tensors, c10::Device device, const Launch& launch) {
  if (tensors.empty()) return;
  void* const stream = current_stream(device.index());
  Workspaces workspaces(device, stream);
  const Tuning& tuning = workspaces.tuning();
  for (std::size_t done = 0; done < tensors.size();) {
    const std::size_t count = std::min(tensors.size() - done, workspaces.most_tensors());
    const TensorArgument* const part = tensors.data() + done;
    const auto start = [&](const WorkspaceSize& size) {
      const Workspace workspace = workspaces.fit(size);
      return launch(part, static_cast<int>(count), workspace, &tuning, stream);
    };
    int error = kErrorWorkspace;
    if (is_one_launch(part, count)) error = start({static_cast<std::int64_t>(count), 0, 0});
    if (error == kErrorWorkspace) {
      WorkspaceSize size;
      check(fastcheck_cuda_workspace(part, static_cast<int>(count), &tuning, &size),
            "planning a launch");
      error = start(size);
    }
    check(error, "a launch");
    done += count;
  }
}

const std::int32_t* gate_of(const at::Tensor& gate, c10::Device device) {
  if (gate.device() != device || gate.scalar_type() != at::kInt || gate.numel() != 1) {
    throw std::invalid_argument("expected an int32 gate of one element on " + device.str());
  }
  return gate.const_data_ptr<std::int32_t>();
}

at::Tensor empty_words(c10::Device device) {
  const PlainTorch plain;
  return at::empty({kExponentWords}, at::TensorOptions(device).dtype(at::kLong));
}

}  // namespace

std::string problem(std::int64_t index) {
  const c10::Device device(kDeviceType, static_cast<c10::DeviceIndex>(index));
  std::int32_t multiprocessors = 0;
  try {
    current_stream(device.index());
    const c10::DeviceGuard guard(device);
    int error = fastcheck_cuda_device(&multiprocessors);
    if (error == 0) error = fastcheck_cuda_find_exponents();
    return error == 0 ? std::string() : fastcheck_cuda_error_name(error);
  } catch (const std::exception& error) {
    return error.what();
  }
}

void observe(at::ArrayRef<at::Tensor> tensors, const at::Tensor& slots, std::int64_t first,
             Depth depth, bool logical, const std::optional<at::Tensor>& gate) {
  slot(slots, first, static_cast<std::int64_t>(tensors.size()), kDeviceType);
  Record* const to = slot(slots, 0, 0, kDeviceType);
  const c10::DeviceGuard guard(slots.device());
  const Arguments arguments(tensors, slots.device(), first, logical);
  const std::int32_t* const opens = gate ? gate_of(*gate, slots.device()) : nullptr;
  in_parts(arguments.all(), slots.device(),
           [&](const TensorArgument* part, int count, Workspace workspace, const Tuning* tuning,
               void* stream) {
             workspace.gate = opens;
             return fastcheck_cuda_records(part, count, static_cast<int>(depth), to, &workspace,
                                           tuning, stream);
           });
}

at::Tensor found_nonfinite(at::ArrayRef<at::Tensor> tensors) {
  const c10::Device device = tensors.empty() ? c10::Device(c10::kCPU) : tensors[0].device();
  const c10::OptionalDeviceGuard guard(device);
  const Arguments arguments(tensors, device, 0, false);
  at::Tensor found;
  {
    const PlainTorch plain;
    found = at::zeros({}, at::TensorOptions(device).dtype(at::kFloat));
  }
  in_parts(arguments.all(), device,
           [&](const TensorArgument* part, int count, const Workspace& workspace,
               const Tuning* tuning, void* stream) {
             return fastcheck_cuda_found_nonfinite(part, count,
                                                   static_cast<float*>(found.mutable_data_ptr()),
                                                   &workspace, tuning, stream);
           });
  return found;
}

at::Tensor exponents(const at::Tensor& tensor, bool logical) {
  const c10::DeviceGuard guard(tensor.device());
  const Arguments arguments(tensor, tensor.device(), 0, logical);
  const TensorArgument& argument = arguments.all()[0];
  const at::Tensor words = empty_words(tensor.device());
  void* const stream = current_stream(tensor.device().index());
  Workspaces workspaces(tensor.device(), stream);
  WorkspaceSize size;
  check(fastcheck_cuda_exponents_workspace(&argument, &size), "planning a launch");
  const Workspace workspace = workspaces.fit(size);
  check(fastcheck_cuda_exponents(&argument, static_cast<std::int64_t*>(words.mutable_data_ptr()),
                                 &workspace, &workspaces.tuning(), stream),
        "a launch");
  return words;
}

at::Tensor observe_and_count(const at::Tensor& tensor, const at::Tensor& slots,
                             std::int64_t index) {
  slot(slots, index, 1, kDeviceType);
  Record* const to = slot(slots, 0, 0, kDeviceType);
  const c10::DeviceGuard guard(slots.device());
  const Arguments arguments(tensor, slots.device(), index, false);
  const TensorArgument& argument = arguments.all()[0];
  const at::Tensor words = empty_words(slots.device());
  void* const stream = current_stream(slots.device().index());
  Workspaces workspaces(slots.device(), stream);
  WorkspaceSize size;
  check(fastcheck_cuda_record_and_exponents_workspace(&argument, &workspaces.tuning(), &size),
        "planning a launch");
  const Workspace workspace = workspaces.fit(size);
  check(fastcheck_cuda_record_and_exponents(&argument, to,
                                            static_cast<std::int64_t*>(words.mutable_data_ptr()),
                                            &workspace, &workspaces.tuning(), stream),
        "a launch");
  return words;
}

}  // namespace fastcheck::cuda
