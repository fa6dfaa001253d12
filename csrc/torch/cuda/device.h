// What the binding needs of CUDA beyond torch's device-generic interface.
//
// The tests link another implementation (tests/fakes/cuda_on_fake), and so run the rest of the
// binding on a fake accelerator.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace fastcheck::cuda {

// The devices that the kernels are for.
extern const c10::DeviceType kDeviceType;

// The stream, as the kernels take it, on which torch puts work for this device at present. Throws
// std::runtime_error where this torch has no such device.
void* current_stream(c10::DeviceIndex device);

// True if a stream was made outside of torch, and may be destroyed there: its handle can be that of
// another stream later. torch's own streams last as long as the process.
bool is_external(const c10::Stream& stream, void* handle);

}  // namespace fastcheck::cuda
