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
  fake::require_current(stream.device(), "a launch on a stream");
  stream.submit(fake::TaskKind::kernel, name, [fn, held] { fn(held.get()); });
}

extern "C" int fake_device_is_capturing(void* native_stream) {
  auto& stream = *static_cast<fake::Stream*>(native_stream);
  fake::require_current(stream.device(), "a question for the capture of a stream");
  return stream.capture() != nullptr ? 1 : 0;
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
