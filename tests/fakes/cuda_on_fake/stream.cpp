// The binding's device, for the tests: the fake accelerator in the place of CUDA.
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>

#include "cuda/launch.h"
#include "torch/cuda/device.h"

namespace fastcheck::cuda {

const c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;

void* current_stream(c10::DeviceIndex device) {
  return c10::impl::VirtualGuardImpl(kDeviceType)
      .getStream(c10::Device(kDeviceType, device))
      .native_handle();
}

namespace {
bool pretends_external = false;
}

bool is_external(const c10::Stream&, void*) { return pretends_external; }

// For a test: all streams are as those made outside of torch.
extern "C" [[gnu::visibility("default")]] void cuda_on_fake_pretend_external(int is_external) {
  pretends_external = is_external != 0;
}

// The linker has these two functions of the kernels called through here (--wrap): a test counts the
// plans that size buffers, and has a launch refuse buffers as too small.
namespace {
std::atomic<int> plans{0};
std::atomic<bool> refuses{false};
}  // namespace

extern "C" {

int __real_fastcheck_cuda_workspace(const TensorArgument*, int, const Tuning*, WorkspaceSize*);
int __real_fastcheck_cuda_records(const TensorArgument*, int, int, Record*, const Workspace*,
                                  const Tuning*, void*);

[[gnu::visibility("default")]] int cuda_on_fake_plans() { return plans; }
[[gnu::visibility("default")]] void cuda_on_fake_refuse_buffers() { refuses = true; }

int __wrap_fastcheck_cuda_workspace(const TensorArgument* tensors, int count, const Tuning* tuning,
                                    WorkspaceSize* size) {
  ++plans;
  return __real_fastcheck_cuda_workspace(tensors, count, tuning, size);
}

int __wrap_fastcheck_cuda_records(const TensorArgument* tensors, int count, int depth,
                                  Record* slots, const Workspace* workspace, const Tuning* tuning,
                                  void* stream) {
  if (refuses.exchange(false)) return kErrorWorkspace;
  return __real_fastcheck_cuda_records(tensors, count, depth, slots, workspace, tuning, stream);
}
}

}  // namespace fastcheck::cuda
