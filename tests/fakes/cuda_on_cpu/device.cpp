#include "cuda_on_cpu/device.h"

#include <atomic>
#include <cstdint>
#include <mutex>
#include <set>

namespace cuda_on_cpu {
namespace {

void (*connected_enqueue)(void*, const char*, void (*)(void*), void*, void (*)(void*)) = nullptr;
void* (*connected_memory)(const void*) = nullptr;
int (*connected_is_capturing)(void*) = nullptr;
int (*connected_exchange)(int) = nullptr;
std::atomic<unsigned long long> generation{0};
thread_local int last_error = 0;
std::atomic<int> lasting_error{0};
bool capturing = false;
std::mutex of_kernels;
std::set<const void*> found, launched;
unsigned last_grid = 0, last_shared = 0, last_arguments = 0;

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

int exchange_capture_mode(int mode) {
  return connected_exchange == nullptr ? 0 : connected_exchange(mode);
}

unsigned long long number_of(void* stream) {
  return reinterpret_cast<std::uintptr_t>(stream) + generation;
}

void set_error(int error, bool lasts) {
  if (lasts) {
    lasting_error = error;
  } else {
    last_error = error;
  }
}

int take_error() {
  if (lasting_error != 0) return lasting_error;
  const int error = last_error;
  last_error = 0;
  return error;
}

bool has_lasting_error() { return lasting_error != 0; }

void note_found(const void* kernel) {
  const std::lock_guard<std::mutex> lock(of_kernels);
  found.insert(kernel);
}
void note_launched(const void* kernel, unsigned grid, unsigned shared, unsigned arguments) {
  const std::lock_guard<std::mutex> lock(of_kernels);
  last_grid = grid, last_shared = shared, last_arguments = arguments;
  launched.insert(kernel);
}

void enqueue(void* stream, const char* name, std::function<void()> work) {
  connected_enqueue(stream, name, run_work, new std::function<void()>(std::move(work)), drop_work);
}

}  // namespace cuda_on_cpu

extern "C" {

void cuda_on_cpu_connect(void (*enqueue)(void*, const char*, void (*)(void*), void*,
                                         void (*)(void*)),
                         void* (*memory)(const void*), int (*is_capturing)(void*),
                         int (*exchange_capture_mode)(int)) {
  cuda_on_cpu::connected_enqueue = enqueue;
  cuda_on_cpu::connected_memory = memory;
  cuda_on_cpu::connected_is_capturing = is_capturing;
  cuda_on_cpu::connected_exchange = exchange_capture_mode;
}

void cuda_on_cpu_set_error(int error, int lasts) { cuda_on_cpu::set_error(error, lasts != 0); }

void cuda_on_cpu_renumber_streams() { ++cuda_on_cpu::generation; }

void cuda_on_cpu_found(int* found, int* launched_unfound) {
  const std::lock_guard<std::mutex> lock(cuda_on_cpu::of_kernels);
  *found = static_cast<int>(cuda_on_cpu::found.size());
  *launched_unfound = 0;
  for (const void* kernel : cuda_on_cpu::launched)
    *launched_unfound += cuda_on_cpu::found.count(kernel) == 0;
}

unsigned cuda_on_cpu_grid() { return cuda_on_cpu::last_grid; }
unsigned cuda_on_cpu_shared() { return cuda_on_cpu::last_shared; }
unsigned cuda_on_cpu_arguments() { return cuda_on_cpu::last_arguments; }

void cuda_on_cpu_pretend_capture(int is_capturing) { cuda_on_cpu::capturing = is_capturing != 0; }
}
