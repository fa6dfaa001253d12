// The scheduler: ucontext fibers on one host thread, picked at random among those that can go on.
//
// Fibers begin through makecontext, on a stack of their own; from then on they change hands by
// _setjmp and _longjmp, which leave the signal mask alone and so cost no system call.
#include "cuda_on_cpu/fibers.h"

#include <ucontext.h>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace cuda_on_cpu {
namespace {

constexpr std::size_t kStackBytes = 128 * 1024;
constexpr int kWarp = 32;

enum class State { kReady, kAtBarrier, kAtExchange, kDone };

struct Block;

// A fiber that has ended leaves its stack in begin(), where the next one goes on: a context of its
// own would take two system calls.
struct Stack {
  std::unique_ptr<char[]> memory{new char[kStackBytes]};
  bool begun = false;
  ucontext_t context;
  jmp_buf resume;
};

struct Fiber {
  Thread thread;
  Block* block = nullptr;
  bool slow = false;
  State state = State::kReady;
  Place place{"", 0};  // where it waits, or did last
  Stack* stack = nullptr;
};

struct Warp {
  // Two sets in turn: a thread may be at the next exchange while another still reads this one, but
  // not two ahead.
  std::array<std::uint64_t, kWarp> values[2];
  int current = 0;
  int arrived = 0;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::map<const void*, std::vector<std::uint64_t>> shared;
  int waiting = 0;
  int done = 0;
};

std::uint64_t random_state = 1;
int resident_limit = 3;
std::string message;

Fiber* running = nullptr;
jmp_buf scheduler;
const std::function<void()>* kernel_body = nullptr;
std::size_t launched_shared = 0;
std::vector<Fiber*> ready;
std::vector<Stack*> spare_stacks;

enum Event : int { kYielded = 1, kFailed = 2 };

void to_scheduler(int event) {
  if (_setjmp(running->stack->resume) == 0) _longjmp(scheduler, event);
}

// Takes a fiber out of the ready ones, hardly ever a slow one while there are others.
Fiber* pick() {
  constexpr int kTries = 24;
  std::size_t index = 0;
  for (int i = 0; i < kTries; ++i) {
    const std::uint64_t draw = random_word();
    index = draw % ready.size();
    if (!ready[index]->slow || draw >> 56 == 0) break;
  }
  Fiber* const fiber = ready[index];
  ready[index] = ready.back();
  ready.pop_back();
  return fiber;
}

void make_ready(Fiber& fiber) {
  fiber.state = State::kReady;
  ready.push_back(&fiber);
}

std::string name(const Place& place) {
  const char* slash = std::strrchr(place.file, '/');
  return std::string(slash != nullptr ? slash + 1 : place.file) + ":" + std::to_string(place.line);
}

std::string name(const Fiber& fiber) {
  return "thread " + std::to_string(fiber.thread.thread.x) + " of block " +
         std::to_string(fiber.thread.block.x);
}

bool same(const Place& left, const Place& right) {
  return left.line == right.line && std::strcmp(left.file, right.file) == 0;
}

[[noreturn]] void fail_with(const std::string& what) {
  message = what;
  _longjmp(scheduler, kFailed);
}

[[noreturn]] void begin() {
  for (;;) {
    (*kernel_body)();
    Fiber& me = *running;
    me.state = State::kDone;
    ++me.block->done;
    to_scheduler(kYielded);
  }
}

void start(Block& block, unsigned index, unsigned size, unsigned grid) {
  block.fibers = std::vector<Fiber>(size);
  block.warps = std::vector<Warp>((size + kWarp - 1) / kWarp);
  // In every other block some warps fall far behind the rest, further than an even draw would let
  // them.
  const std::uint64_t draw = random_word();
  const auto slow_warps = (draw & 1) != 0 ? static_cast<std::uint32_t>(draw >> 32) : 0;
  for (unsigned i = 0; i < size; ++i) {
    Fiber& fiber = block.fibers[i];
    fiber.thread = {
        {i}, {index}, {size}, {grid}, static_cast<int>(i / kWarp), static_cast<int>(i % kWarp)};
    fiber.block = &block;
    fiber.slow = slow_warps >> (fiber.thread.warp % 32) & 1;
    if (spare_stacks.empty()) spare_stacks.push_back(new Stack);
    fiber.stack = spare_stacks.back();
    spare_stacks.pop_back();
    make_ready(fiber);
  }
}

// A thread that was dropped has left its stack in the middle of the kernel.
void finish(Block& block) {
  for (Fiber& fiber : block.fibers) {
    if (fiber.state != State::kDone) fiber.stack->begun = false;
    spare_stacks.push_back(fiber.stack);
  }
}

[[noreturn]] void go_on(Stack& stack) {
  if (stack.begun) _longjmp(stack.resume, 1);
  stack.begun = true;
  getcontext(&stack.context);
  stack.context.uc_stack.ss_sp = stack.memory.get();
  stack.context.uc_stack.ss_size = kStackBytes;
  stack.context.uc_link = nullptr;
  makecontext(&stack.context, begin, 0);
  setcontext(&stack.context);
  std::abort();  // it has failed
}

// What stands in the way when no thread can go on.
std::string stuck(const std::vector<std::unique_ptr<Block>>& blocks) {
  std::string text = "divergent barrier:";
  for (const auto& block : blocks) {
    const Fiber* last = nullptr;
    for (const Fiber& fiber : block->fibers) {
      if (last != nullptr && last->state == fiber.state && same(last->place, fiber.place)) continue;
      last = &fiber;
      text += " " + name(fiber) +
              (fiber.state == State::kDone        ? " has left the kernel"
               : fiber.state == State::kAtBarrier ? " waits for its block at " + name(fiber.place)
                                                  : " waits for its warp at " + name(fiber.place)) +
              ";";
    }
  }
  return text;
}

}  // namespace

std::uint64_t random_word() {  // xorshift64*
  random_state ^= random_state >> 12;
  random_state ^= random_state << 25;
  random_state ^= random_state >> 27;
  return random_state * 0x2545F4914F6CDD1Dull;
}

const Thread& current_thread() { return running->thread; }
const char* error_message() { return message.c_str(); }
void set_error_message(const std::string& what) { message = what; }
void fail(const char* what) { fail_with(std::string(what) + " in " + name(*running)); }

void give_way() {
  if ((random_word() >> 60) < 8) return;
  ready.push_back(running);
  to_scheduler(kYielded);
}

void block_barrier(Place place) {
  Fiber& me = *running;
  Block& block = *me.block;
  me.place = place;
  for (const Fiber& other : block.fibers) {
    if (other.state == State::kAtBarrier && !same(other.place, place)) {
      fail_with("divergent barrier: " + name(me) + " at " + name(place) + ", " + name(other) +
                " at " + name(other.place));
    }
    if (other.state == State::kDone) {
      fail_with("divergent barrier: " + name(me) + " at " + name(place) + ", " + name(other) +
                " has left the kernel");
    }
    if (other.state == State::kAtBarrier) break;  // the others were compared when they came
  }
  if (++block.waiting < static_cast<int>(block.fibers.size())) {
    me.state = State::kAtBarrier;
    to_scheduler(kYielded);
    return;
  }
  block.waiting = 0;
  for (Fiber& other : block.fibers) {
    if (&other != &me) make_ready(other);
  }
  ready.push_back(&me);
  to_scheduler(kYielded);
}

const std::array<std::uint64_t, 32>& warp_exchange(unsigned mask, std::uint64_t value,
                                                   Place place) {
  Fiber& me = *running;
  Block& block = *me.block;
  Warp& warp = block.warps[me.thread.warp];
  if (mask != 0xffffffffu) fail("a mask that is not the whole warp");
  me.place = place;
  const int set = warp.current;
  warp.values[set][me.thread.lane] = value;
  Fiber* lanes = &block.fibers[me.thread.warp * kWarp];
  for (int i = 0; warp.arrived > 0 && i < kWarp; ++i) {
    if (lanes[i].state == State::kAtExchange) {
      if (!same(lanes[i].place, place)) {
        fail_with("divergent warp: " + name(me) + " at " + name(place) + ", " + name(lanes[i]) +
                  " at " + name(lanes[i].place));
      }
      break;
    }
  }
  if (++warp.arrived < kWarp) {
    me.state = State::kAtExchange;
    to_scheduler(kYielded);
    return warp.values[set];
  }
  warp.arrived = 0;
  warp.current = 1 - set;
  for (int i = 0; i < kWarp; ++i) {
    if (i != me.thread.lane) make_ready(lanes[i]);
  }
  ready.push_back(&me);
  to_scheduler(kYielded);
  return warp.values[set];
}

void* shared_memory(const void* key, std::size_t bytes) {
  std::vector<std::uint64_t>& piece = running->block->shared[key];
  if (piece.empty()) {
    piece.resize((bytes + 7) / 8);
    for (std::uint64_t& word : piece) word = random_word();
  }
  return piece.data();
}

void* block_memory(std::size_t bytes) {
  static const char key = 0;
  if (bytes != launched_shared) {
    fail_with("a kernel of " + std::to_string(bytes) +
              " bytes of shared memory was launched with " + std::to_string(launched_shared));
  }
  return shared_memory(&key, bytes);
}

bool run_grid(unsigned grid, unsigned block_size, const std::function<void()>& kernel,
              std::size_t shared) {
  message.clear();
  launched_shared = shared;
  if (block_size == 0 || block_size % kWarp != 0 || grid == 0) {
    message = "a launch of no threads, or of a part of a warp";
    return false;
  }
  kernel_body = &kernel;
  std::vector<std::unique_ptr<Block>> blocks;
  ready.clear();
  // Changed between _setjmp and _longjmp, so not in registers.
  volatile unsigned next_block = 0;
  volatile bool failed = false;
  for (;;) {
    for (std::size_t i = 0; i < blocks.size();) {
      if (blocks[i]->done == static_cast<int>(blocks[i]->fibers.size())) {
        finish(*blocks[i]);
        blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ++i;
      }
    }
    while (static_cast<int>(blocks.size()) < resident_limit && next_block < grid) {
      blocks.push_back(std::make_unique<Block>());
      start(*blocks.back(), next_block, block_size, grid);
      next_block = next_block + 1;
    }
    if (blocks.empty()) break;
    bool block_left = false;
    while (!block_left) {
      if (ready.empty()) {
        message = stuck(blocks);
        failed = true;
        break;
      }
      running = pick();
      const int event = _setjmp(scheduler);
      if (event == 0) go_on(*running->stack);
      if (event == kFailed) {
        failed = true;
        break;
      }
      block_left = running->state == State::kDone &&
                   running->block->done == static_cast<int>(running->block->fibers.size());
    }
    if (failed) break;
  }
  for (const auto& block : blocks) finish(*block);
  running = nullptr;
  return !failed;
}

}  // namespace cuda_on_cpu

extern "C" {

void cuda_on_cpu_schedule(std::uint64_t seed, int resident_blocks) {
  cuda_on_cpu::random_state = seed * 0x9E3779B97F4A7C15ull + 0x1234567;
  if (cuda_on_cpu::random_state == 0) cuda_on_cpu::random_state = 1;
  cuda_on_cpu::resident_limit = resident_blocks;
}

const char* cuda_on_cpu_error() { return cuda_on_cpu::error_message(); }
}
