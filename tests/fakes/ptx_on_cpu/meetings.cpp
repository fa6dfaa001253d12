// Barriers, shuffles, votes and fences.
#include <algorithm>
#include <array>

#include "ptx_on_cpu/table.h"

namespace ptx_on_cpu {
namespace {

using std::int16_t, std::int32_t, std::int64_t, std::int8_t;
using std::uint16_t, std::uint32_t, std::uint64_t, std::uint8_t;

void fence(Thread& t, const Instruction&) {
  cuda_on_cpu::give_way();
  t.launch.memory.fence(t);
  cuda_on_cpu::give_way();
}

void fence_for_host(Thread& t, const Instruction&) {
  cuda_on_cpu::give_way();
  t.launch.memory.fence_for_host(t);
  cuda_on_cpu::give_way();
}

// What a barrier orders: all that came before it is there for those who meet.
template <class Wait>
void meet(Thread& t, Wait wait) {
  t.launch.memory.show(t);
  t.block.seen = std::max(t.block.seen, t.seen);
  wait();
  t.seen = std::max(t.seen, t.block.seen);
  ++t.epoch.warp;
}

// By lane; the threads of a warp may come from different places, but by the same instruction.
const std::array<uint64_t, 32>& exchange(const Instruction& i, uint32_t mask, uint64_t value) {
  return cuda_on_cpu::warp_exchange(mask, value, {i.name.c_str(), 0});
}

template <bool kButterfly>
void shuffle(Thread& t, const Instruction& i) {
  const auto& lanes = exchange(i, t.get<uint32_t>(i.operand[5]), t.get<uint32_t>(i.operand[2]));
  const uint32_t lane = t.index % 32;
  const uint32_t b = t.get<uint32_t>(i.operand[3]) & 31, c = t.get<uint32_t>(i.operand[4]);
  const uint32_t mask = c >> 8 & 31;
  const uint32_t least = lane & mask, most = least | (c & 31 & ~mask);
  const uint32_t from = kButterfly ? lane ^ b : least | (b & ~mask);
  t.put<uint32_t>(i.operand[0], static_cast<uint32_t>(lanes[from <= most ? from : lane]));
  t.put<bool>(i.operand[1], from <= most);
}

void meetings(Table& table) {
  table.define("membar.gl", 0, fence);
  table.define("membar.sys", 0, fence_for_host);
  table.define("bar.sync", 1, [](Thread& t, const Instruction& i) {
    if (t.get<uint32_t>(i.operand[0]) != 0) fail(t, "another barrier than the first");
    meet(t, [&] { cuda_on_cpu::block_barrier({t.launch.module.name.c_str(), i.line}); });
    ++t.epoch.block;
  });
  table.define("bar.warp.sync", 1, [](Thread& t, const Instruction& i) {
    meet(t, [&] { exchange(i, t.get<uint32_t>(i.operand[0]), 0); });
  });
  table.define("shfl.sync.bfly.b32", 6, shuffle<true>);
  table.define("shfl.sync.idx.b32", 6, shuffle<false>);
  table.define("vote.sync.any.pred", 3, [](Thread& t, const Instruction& i) {
    bool any = false;
    for (const uint64_t lane :
         exchange(i, t.get<uint32_t>(i.operand[2]), t.get<bool>(i.operand[1])))
      any |= lane != 0;
    t.put<bool>(i.operand[0], any);
  });
  table.define("vote.sync.all.pred", 3, [](Thread& t, const Instruction& i) {
    bool all = true;
    for (const uint64_t lane :
         exchange(i, t.get<uint32_t>(i.operand[2]), t.get<bool>(i.operand[1])))
      all &= lane != 0;
    t.put<bool>(i.operand[0], all);
  });
  table.define("redux.sync.max.u32", 3, [](Thread& t, const Instruction& i) {
    uint32_t most = 0;
    for (const uint64_t lane :
         exchange(i, t.get<uint32_t>(i.operand[2]), t.get<uint32_t>(i.operand[1]))) {
      most = std::max(most, static_cast<uint32_t>(lane));
    }
    t.put<uint32_t>(i.operand[0], most);
  });
  table.define("redux.sync.add.u32", 3, [](Thread& t, const Instruction& i) {
    uint32_t sum = 0;
    for (const uint64_t lane :
         exchange(i, t.get<uint32_t>(i.operand[2]), t.get<uint32_t>(i.operand[1]))) {
      sum += static_cast<uint32_t>(lane);
    }
    t.put<uint32_t>(i.operand[0], sum);
  });
}

}  // namespace

void define_meetings(Table& table) { meetings(table); }

}  // namespace ptx_on_cpu
