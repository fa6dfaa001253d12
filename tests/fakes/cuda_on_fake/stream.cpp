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

}  // namespace fastcheck::cuda
