// One fiber per CUDA thread, and the operations at which fibers synchronise.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace cuda_on_cpu {

struct Dim {
  unsigned x = 0, y = 0, z = 0;
};

struct Thread {
  Dim thread, block, block_size, grid_size;
  int warp = 0;
  int lane = 0;
};

// A call of a barrier, a shuffle or a vote: all threads that meet must come from the same one.
struct Place {
  const char* file;
  int line;
};

const Thread& current_thread();

// Runs every thread of every block; false when a thread failed, and error_message() says how. Then
// the threads that were under way are dropped where they stood. `shared` is how many bytes
// block_memory() has.
bool run_grid(unsigned grid, unsigned block, const std::function<void()>& kernel,
              std::size_t shared = 0);
const char* error_message();
// Of a launch that did not begin.
void set_error_message(const std::string& what);

// Waits for all threads of the block.
void block_barrier(Place place);

// Waits for all threads of the warp; everyone's value, by lane. Valid until the thread's next call.
const std::array<std::uint64_t, 32>& warp_exchange(unsigned mask, std::uint64_t value, Place place);

// Lets another thread run, or not, as the seed has it.
void give_way();

// The next word of the seed's sequence.
std::uint64_t random_word();

// Ends the launch with an error.
[[noreturn]] void fail(const char* what);

// Memory that the block's threads share, one piece per key, filled with garbage at first.
void* shared_memory(const void* key, std::size_t bytes);
// The same, of the size that the launch was given; another one is a fault.
void* block_memory(std::size_t bytes);

}  // namespace cuda_on_cpu

// What the tests set: the seed of all schedules to come, and how many blocks are under way at once.
extern "C" {
void cuda_on_cpu_schedule(std::uint64_t seed, int resident_blocks);
const char* cuda_on_cpu_error();
}
