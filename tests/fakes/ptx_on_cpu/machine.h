// Runs a kernel of a PTX module: every thread a fiber (cuda_on_cpu/fibers.h), an instruction at a
// time.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda_on_cpu/fibers.h"
#include "ptx_on_cpu/memory.h"
#include "ptx_on_cpu/program.h"

namespace ptx_on_cpu {

struct Block {
  SharedMemory shared;
  Stores stores;                        // that its threads have shown to each other
  std::vector<std::uintptr_t> atomics;  // what they have changed by atomics, ahead of a fence
  std::uint64_t seen = 0;               // the last change that one of them has seen for certain
  unsigned threads_left = 0;
};

struct Launch {
  const Module& module;
  const Function& kernel;
  unsigned shared;  // bytes of a block
  const unsigned char* arguments;
  GlobalMemory memory;
  std::map<unsigned, std::unique_ptr<Block>> blocks;
  std::int64_t longest = 0;  // instructions of a thread
};

struct Frame {
  std::vector<std::uint64_t> place;
  std::vector<std::uint64_t> incoming;
  std::array<std::uint64_t, 8> outgoing{};
};

struct Thread {
  Thread(Launch& of, Block& in, unsigned block_number, unsigned number)
      : launch(of), block(in), block_index(block_number), index(number) {}

  Launch& launch;
  Block& block;
  const unsigned block_index;
  const unsigned index;  // in the block
  Frame* frame = nullptr;
  int next = 0;  // instruction of the function
  const Instruction* instruction = nullptr;
  bool has_returned = false;
  Epoch epoch;
  Stores stores;                        // that nobody else has been shown
  std::vector<std::uintptr_t> atomics;  // what it has changed by atomics, ahead of a fence
  std::uint64_t met = 0;                // changes so far when it last looked by an atomic
  std::uint64_t seen = 0;               // all changes up to this one are visible to it
  std::int64_t executed = 0;

  template <class T>
  T get(int place) const {
    if constexpr (std::is_same_v<T, bool>) {
      return frame->place[static_cast<std::size_t>(place)] != 0;
    }
    T value;
    std::memcpy(&value, &frame->place[static_cast<std::size_t>(place)], sizeof(T));
    return value;
  }
  template <class T>
  void put(int place, T value) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    frame->place[static_cast<std::size_t>(place)] = bits;
  }
  unsigned warp() const { return index / 32; }
};

// Heads or tails, as the seed has it.
inline bool draw() { return (cuda_on_cpu::random_word() >> 63) != 0; }

// Ends the launch; what is wrong, and where.
[[noreturn]] void fail(const Thread& thread, const std::string& what);

void call(Thread& thread, int function);

// What ran since it was last set to zero: launches, and the instructions of the longest thread of
// each of them, those of functions that it called included.
struct Count {
  std::int64_t launches = 0;
  std::int64_t longest = 0;
};
extern Count counted;

// False: it failed, and cuda_on_cpu::error_message() says how.
bool run(const Module& module, const Function& kernel, unsigned grid, unsigned block,
         unsigned shared, const void* arguments, std::vector<Range> ranges);

}  // namespace ptx_on_cpu
