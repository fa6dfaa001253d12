#include "cuda_on_cpu/device.h"

#include <mutex>
#include <set>

namespace cuda_on_cpu {
namespace {

void (*connected_enqueue)(void*, const char*, void (*)(void*), void*, void (*)(void*)) = nullptr;
void* (*connected_memory)(const void*) = nullptr;
int (*connected_is_capturing)(void*) = nullptr;
bool capturing = false;
std::mutex of_kernels;
std::set<const void*> found, launched;

// The fibers' scheduler runs one grid at a time, whichever stream's thread calls it.
std::mutex one_grid;

void run_work(void* argument) {
  const std::lock_guard<std::mutex> lock(one_grid);
  (*static_cast<std::function<void()>*>(argument))();
}

void drop_work(void* argument) { delete static_cast<std::function<void()>*>(argument); }

}  // namespace

bool has_device() { return connected_enqueue != nullptr; }
void* memory(const void* address) { return connected_memory(address); }
bool is_capturing(void* stream) {
  return capturing || (connected_is_capturing != nullptr && connected_is_capturing(stream) != 0);
}

void note_found(const void* kernel) {
  const std::lock_guard<std::mutex> lock(of_kernels);
  found.insert(kernel);
}
void note_launched(const void* kernel) {
  const std::lock_guard<std::mutex> lock(of_kernels);
  launched.insert(kernel);
}

void enqueue(void* stream, const char* name, std::function<void()> work) {
  connected_enqueue(stream, name, run_work, new std::function<void()>(std::move(work)), drop_work);
}

}  // namespace cuda_on_cpu

extern "C" {

void cuda_on_cpu_connect(void (*enqueue)(void*, const char*, void (*)(void*), void*,
                                         void (*)(void*)),
                         void* (*memory)(const void*), int (*is_capturing)(void*)) {
  cuda_on_cpu::connected_enqueue = enqueue;
  cuda_on_cpu::connected_memory = memory;
  cuda_on_cpu::connected_is_capturing = is_capturing;
}

void cuda_on_cpu_found(int* found, int* launched_unfound) {
  const std::lock_guard<std::mutex> lock(cuda_on_cpu::of_kernels);
  *found = static_cast<int>(cuda_on_cpu::found.size());
  *launched_unfound = 0;
  for (const void* kernel : cuda_on_cpu::launched)
    *launched_unfound += cuda_on_cpu::found.count(kernel) == 0;
}

void cuda_on_cpu_pretend_capture(int is_capturing) { cuda_on_cpu::capturing = is_capturing != 0; }
}
