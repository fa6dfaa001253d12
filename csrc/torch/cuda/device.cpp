// CUDA through the loaded torch, whichever it is: nothing of its CUDA half is linked, so that one
// build loads beside a torch that has none.
#include "torch/cuda/device.h"

#include <dlfcn.h>

#include <stdexcept>

namespace fastcheck::cuda {
namespace {

// torch's own C function for extensions that want the current cudaStream_t; 0 is success.
using GetStream = std::int32_t (*)(std::int32_t device, void** stream);

GetStream find_get_stream() {
  void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  return reinterpret_cast<GetStream>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
}

}  // namespace

const c10::DeviceType kDeviceType = c10::DeviceType::CUDA;

void* current_stream(c10::DeviceIndex device) {
  static const GetStream get_stream = find_get_stream();
  if (get_stream == nullptr) throw std::runtime_error("this torch was built without CUDA");
  void* stream = nullptr;
  if (get_stream(device, &stream) != 0) {
    throw std::runtime_error("torch has no current stream of this CUDA device");
  }
  return stream;
}

// c10/cuda/CUDAStream.cpp: the number of an external stream is its handle.
bool is_external(const c10::Stream& stream, void* handle) {
  return handle != nullptr &&
         stream.id() == static_cast<c10::StreamId>(reinterpret_cast<std::intptr_t>(handle));
}

}  // namespace fastcheck::cuda
