// The C interface of runtime.h, for kernels that are not torch ops.
#include <cstdio>
#include <cstdlib>

#include "runtime.h"

extern "C" void fake_device_launch(void* native_stream, const char* name, void (*fn)(void*),
                                   void* arg, void (*drop)(void*)) {
  const std::shared_ptr<void> held(arg, [drop](void* each) {
    if (drop != nullptr) drop(each);
  });
  auto& stream = *static_cast<fake::Stream*>(native_stream);
  if (stream.device() != fake::current_device())
    throw std::runtime_error("fake device: a stream of device " + std::to_string(stream.device()) +
                             " was launched on while device " +
                             std::to_string(fake::current_device()) + " was current");
  stream.submit(fake::TaskKind::kernel, name, [fn, held] { fn(held.get()); });
}

extern "C" int fake_device_is_capturing(void* native_stream) {
  return static_cast<fake::Stream*>(native_stream)->capture() != nullptr ? 1 : 0;
}

extern "C" int fake_device_exchange_capture_mode(int mode) {
  return fake::exchange_capture_mode(mode);
}

extern "C" void* fake_device_memory(const void* device_address) {
  if (!fake::on_worker()) {
    std::fprintf(stderr, "fake device: fake_device_memory() called outside a kernel\n");
    std::abort();
  }
  return fake::backing_of_any(device_address);
}
