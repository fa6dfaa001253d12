// The target of launches and copies: at once, on the host's own memory; or, when a test has
// connected a device, onto its streams, with addresses that only a kernel can follow.
#pragma once

#include <cstddef>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <vector>

#include "cuda/arguments.h"
#include "cuda/exponent_arguments.h"
#include "cuda_on_cpu/fibers.h"

namespace cuda_on_cpu {

// Whether a device is connected.
bool has_device();
// Puts work on a stream of the device.
void enqueue(void* stream, const char* name, std::function<void()> work);
// The bytes behind a device address, for work on a stream.
void* memory(const void* address);
bool is_capturing(void* stream);
int exchange_capture_mode(int mode);
unsigned long long number_of(void* stream);
// The error that the next call of the runtime returns. One that lasts is returned by all.
void set_error(int error, bool lasts);
int take_error();
bool has_lasting_error();
// A kernel that was looked for, as cudaFuncGetAttributes does, which loads it.
void note_found(const void* kernel);
void note_launched(const void* kernel, unsigned grid, unsigned shared, unsigned arguments);

template <class T>
void locate(T*& pointer) {
  if (pointer != nullptr) pointer = static_cast<T*>(memory(pointer));
}

// Makes the addresses in a launch's arguments the host's; returns what they point to besides.
inline std::vector<fastcheck::cuda::Entry> locate(fastcheck::cuda::List& list) {
  std::vector<fastcheck::cuda::Entry> table;
  fastcheck::cuda::Entry* entries = list.entries;
  if (list.table != nullptr) {
    locate(list.table);
    table.assign(list.table, list.table + list.count);
    list.table = entries = table.data();
  }
  for (int i = 0; i < list.count; ++i) {
    if (entries[i].components > 0) locate(entries[i].data);
  }
  return table;
}

inline std::vector<fastcheck::cuda::Entry> locate(fastcheck::cuda::OneTensor& one) {
  if (one.entry.components > 0) locate(one.entry.data);
  return {};
}

template <class Tensors>
std::vector<fastcheck::cuda::Entry> locate(fastcheck::cuda::RecordsLaunch<Tensors>& launch) {
  locate(launch.slots);
  locate(launch.counters);
  locate(launch.partials);
  locate(launch.gate);
  return locate(launch.list);
}

inline std::vector<fastcheck::cuda::Entry> locate(fastcheck::cuda::FoundLaunch& launch) {
  locate(launch.found);
  return locate(launch.list);
}

inline void locate(fastcheck::cuda::CountsArgument& counts) {
  locate(counts.words);
  locate(counts.totals);
  locate(counts.blocks_done);
}

inline std::vector<fastcheck::cuda::Entry> locate(fastcheck::cuda::ExponentsLaunch& launch) {
  if (launch.entry.components > 0) locate(launch.entry.data);
  locate(launch.counts);
  return {};
}

inline std::vector<fastcheck::cuda::Entry> locate(
    fastcheck::cuda::RecordAndExponentsLaunch& launch) {
  locate(launch.counts);
  return locate(launch.record);
}

inline const char* name_of(const fastcheck::cuda::ExponentsLaunch&) {
  return "fastcheck exponents";
}
inline const char* name_of(const fastcheck::cuda::RecordAndExponentsLaunch&) {
  return "fastcheck record and exponents";
}
template <class Tensors>
const char* name_of(const fastcheck::cuda::RecordsLaunch<Tensors>&) {
  return "fastcheck records";
}
inline const char* name_of(const fastcheck::cuda::FoundLaunch&) {
  return "fastcheck found_nonfinite";
}

// False: the kernel failed, error_message() says how. On a device it throws there, later.
template <class Arguments>
bool launch_on(void* stream, void (*kernel)(Arguments), unsigned grid, unsigned block,
               unsigned shared, const Arguments& arguments) {
  note_launched(reinterpret_cast<const void*>(kernel), grid, shared, sizeof(arguments));
  if (!has_device()) return run_grid(grid, block, [&] { kernel(arguments); }, shared);
  enqueue(stream, name_of(arguments), [=] {
    Arguments there = arguments;
    const auto table = locate(there);
    const bool ok = run_grid(grid, block, [&] { kernel(there); }, shared);
    if (!ok) throw std::runtime_error(error_message());
  });
  return true;
}

inline void copy_on(void* stream, void* to, const void* from, std::size_t bytes) {
  if (!has_device()) {
    std::memcpy(to, from, bytes);
    return;
  }
  enqueue(stream, "fastcheck table", [=] { std::memcpy(memory(to), from, bytes); });
}

}  // namespace cuda_on_cpu

// What a test connects. `enqueue` has work(argument) run on the stream, as often as a graph that
// captured it is replayed, and then drop(argument); `memory` is called there.
extern "C" {
void cuda_on_cpu_connect(void (*enqueue)(void* stream, const char* name, void (*work)(void*),
                                         void* argument, void (*drop)(void*)),
                         void* (*memory)(const void* address), int (*is_capturing)(void* stream),
                         int (*exchange_capture_mode)(int mode));
// An earlier call of this thread has left this error; or all calls from now on return it.
void cuda_on_cpu_set_error(int error, int lasts);
// The streams of now are gone: every handle is that of another stream.
void cuda_on_cpu_renumber_streams();
// Streams say that they are being captured; what is put on them runs nevertheless.
void cuda_on_cpu_pretend_capture(int is_capturing);
// The blocks of the last launch, the bytes of shared memory that each of them was given, and those
// of the arguments.
unsigned cuda_on_cpu_grid();
unsigned cuda_on_cpu_shared();
unsigned cuda_on_cpu_arguments();
// How many kernels were looked for, and how many were launched that were not.
void cuda_on_cpu_found(int* found, int* launched_unfound);
}
