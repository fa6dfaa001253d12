#include "ptx_on_cpu/machine.h"

#include <algorithm>
#include <utility>

namespace ptx_on_cpu {
namespace {

void set_place(Frame& frame, int place, unsigned value) {
  if (place >= 0) frame.place[static_cast<std::size_t>(place)] = value;
}

void run_function(Thread& thread, const Function& function, std::vector<std::uint64_t> incoming) {
  Frame frame{function.frame, std::move(incoming), {}};
  const cuda_on_cpu::Thread& at = cuda_on_cpu::current_thread();
  set_place(frame, function.tid, at.thread.x);
  set_place(frame, function.ntid, at.block_size.x);
  set_place(frame, function.ctaid, at.block.x);
  set_place(frame, function.nctaid, at.grid_size.x);
  Frame* const caller = std::exchange(thread.frame, &frame);
  const int back = std::exchange(thread.next, 0);
  for (thread.has_returned = false; !thread.has_returned;) {
    const Instruction& instruction = function.code[static_cast<std::size_t>(thread.next++)];
    ++thread.executed;
    if (instruction.guard >= 0 &&
        (thread.get<bool>(instruction.guard) == instruction.guard_is_negated)) {
      continue;
    }
    thread.instruction = &instruction;
    instruction.execute(thread, instruction);
  }
  thread.has_returned = false;
  thread.next = back;
  thread.frame = caller;
}

void run_thread(Launch& launch) {
  const cuda_on_cpu::Thread& at = cuda_on_cpu::current_thread();
  std::unique_ptr<Block>& block = launch.blocks[at.block.x];
  if (block == nullptr) {
    SharedVariable variable;
    if (launch.kernel.shared >= 0) {
      variable = launch.module.shared[static_cast<std::size_t>(launch.kernel.shared)];
    }
    if (variable.is_of_launch) variable.end = variable.begin + launch.shared;
    block.reset(new Block{SharedMemory(variable.begin, variable.end), {}, {}, 0, at.block_size.x});
  }
  Thread thread(launch, *block, at.block.x, at.thread.x);
  run_function(thread, launch.kernel, {});
  launch.longest = std::max(launch.longest, thread.executed);
  launch.memory.show(thread);
  if (--block->threads_left == 0) {
    launch.memory.finish(thread);
    launch.blocks.erase(at.block.x);
  }
}

}  // namespace

Count counted;

void call(Thread& thread, int index) {
  const Function& function = thread.launch.module.functions[static_cast<std::size_t>(index)];
  const auto& given = thread.frame->outgoing;
  run_function(thread, function, {given.begin(), given.begin() + function.parameters});
}

void fail(const Thread& thread, const std::string& what) {
  const Instruction& at = *thread.instruction;
  cuda_on_cpu::fail(
      (what + ": " + at.name + " at " + thread.launch.module.name + ":" + std::to_string(at.line))
          .c_str());
}

bool run(const Module& module, const Function& kernel, unsigned grid, unsigned block,
         unsigned shared, const void* arguments, std::vector<Range> ranges) {
  const auto* bytes = static_cast<const unsigned char*>(arguments);
  Launch launch{module, kernel, shared, bytes, GlobalMemory(std::move(ranges)), {}, 0};
  const bool ok = cuda_on_cpu::run_grid(grid, block, [&launch] { run_thread(launch); });
  ++counted.launches;
  counted.longest += launch.longest;
  return ok;
}

}  // namespace ptx_on_cpu
