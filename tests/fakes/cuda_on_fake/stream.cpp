// The binding's device, for the tests: the fake accelerator in the place of CUDA.
#include <c10/core/impl/VirtualGuardImpl.h>

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

}  // namespace fastcheck::cuda
