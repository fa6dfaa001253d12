// Loads, stores and atomics: which memory an address is of, and that what comes there is allowed.
#include <cstring>
#include <initializer_list>

#include "ptx_on_cpu/table.h"

namespace ptx_on_cpu {
namespace {

using std::int16_t, std::int32_t, std::int64_t, std::int8_t;
using std::uint16_t, std::uint32_t, std::uint64_t, std::uint8_t;

enum class Space { kGeneric, kGlobal, kConstant, kShared, kParam };

const unsigned char* parameter(Thread& t, uint64_t address, int size) {
  const uint64_t at = address & ~kMarks;
  if ((address & kMarks) == kArguments) {
    if (at + static_cast<unsigned>(size) > t.launch.kernel.argument_bytes)
      fail(t, "out of bounds of the arguments");
    if (at % static_cast<unsigned>(size) != 0) fail(t, "misaligned load of an argument");
    return t.launch.arguments + at;
  }
  if ((address & kMarks) != kIncoming) fail(t, "ld.param of what is no parameter");
  return reinterpret_cast<const unsigned char*>(t.frame->incoming.data()) + at;
}

template <Space kSpace>
Bytes load(Thread& t, uint64_t address, int size) {
  const uint64_t mark = address & kMarks;
  if constexpr (kSpace == Space::kShared) {
    if (mark != 0) fail(t, "ld.shared of a generic address");
    return t.block.shared.load(t, address, size);
  } else {
    if (kSpace == Space::kParam || (kSpace == Space::kGeneric && mark == kArguments)) {
      Bytes bytes{};
      std::memcpy(bytes.data(), parameter(t, address, size), static_cast<std::size_t>(size));
      return bytes;
    }
    if (kSpace == Space::kGeneric && mark == kShared)
      return t.block.shared.load(t, address & ~kMarks, size);
    return t.launch.memory.load(t, address, size, kSpace == Space::kConstant);
  }
}

template <Space kSpace>
void store(Thread& t, uint64_t address, int size, const Bytes& bytes) {
  const uint64_t mark = address & kMarks;
  if constexpr (kSpace == Space::kShared) {
    if (mark != 0) fail(t, "st.shared to a generic address");
    t.block.shared.store(t, address, size, bytes);
  } else if constexpr (kSpace == Space::kParam) {
    if (mark != kOutgoing) fail(t, "st.param to what is no argument of a call");
    std::memcpy(&t.frame->outgoing[(address & ~kMarks) / kParameterBytes], bytes.data(),
                static_cast<std::size_t>(size));
  } else if (kSpace == Space::kGeneric && mark == kShared) {
    t.block.shared.store(t, address & ~kMarks, size, bytes);
  } else {
    t.launch.memory.store(t, address, size, bytes);
  }
}

// Of [a + offset]. An address of 32 bits wraps, as that of an element at a negative index does.
uint64_t address_in(Thread& t, const Instruction& i, int operand) {
  const auto base = t.get<uint64_t>(i.operand[operand]);
  const uint64_t address = base + static_cast<uint64_t>(i.offset);
  return base >> 32 == 0 ? address & 0xffffffff : address;
}

template <Space kSpace, class T, int kCount, bool kGivesWay = false>
void execute_load(Thread& t, const Instruction& i) {
  if (kGivesWay) cuda_on_cpu::give_way();
  const uint64_t address = address_in(t, i, kCount);
  const Bytes bytes = load<kSpace>(t, address, kCount * sizeof(T));
  for (int n = 0; n < kCount; ++n) {
    T value;
    std::memcpy(&value, bytes.data() + n * sizeof(T), sizeof(T));
    t.put<T>(i.operand[n], value);
  }
}

template <Space kSpace, class T, int kCount>
void execute_store(Thread& t, const Instruction& i) {
  const uint64_t address = address_in(t, i, 0);
  Bytes bytes{};
  for (int n = 0; n < kCount; ++n) {
    const T value = t.get<T>(i.operand[n + 1]);
    std::memcpy(bytes.data() + n * sizeof(T), &value, sizeof(T));
  }
  store<kSpace>(t, address, kCount * sizeof(T), bytes);
}

template <class T>
void accesses(Table& table, std::initializer_list<const char*> types) {
  for (const std::string type : types) {
    table.define("ld." + type, 2, execute_load<Space::kGeneric, T, 1>);
    table.define("ld.param." + type, 2, execute_load<Space::kParam, T, 1>);
    table.define("ld.shared." + type, 2, execute_load<Space::kShared, T, 1>);
    table.define("ld.global." + type, 2, execute_load<Space::kGlobal, T, 1>);
    table.define("ld.global.cg." + type, 2, execute_load<Space::kGlobal, T, 1, true>);
    table.define("ld.global.nc." + type, 2, execute_load<Space::kConstant, T, 1>);
    table.define("st." + type, 2, execute_store<Space::kGeneric, T, 1>);
    table.define("st.param." + type, 2, execute_store<Space::kParam, T, 1>);
    table.define("st.shared." + type, 2, execute_store<Space::kShared, T, 1>);
    table.define("st.global." + type, 2, execute_store<Space::kGlobal, T, 1>);
    table.define("ld.v2." + type, 3, execute_load<Space::kGeneric, T, 2>);
    table.define("ld.shared.v2." + type, 3, execute_load<Space::kShared, T, 2>);
    table.define("ld.global.nc.v2." + type, 3, execute_load<Space::kConstant, T, 2>);
    table.define("st.v2." + type, 3, execute_store<Space::kGeneric, T, 2>);
    table.define("st.shared.v2." + type, 3, execute_store<Space::kShared, T, 2>);
    table.define("ld.param.v2." + type, 3, execute_load<Space::kParam, T, 2>);
    if constexpr (sizeof(T) == 4) {
      table.define("ld.shared.v4." + type, 5, execute_load<Space::kShared, T, 4>);
      table.define("ld.global.nc.v4." + type, 5, execute_load<Space::kConstant, T, 4>);
      table.define("st.shared.v4." + type, 5, execute_store<Space::kShared, T, 4>);
    }
  }
}

// d = what was at [a]; what is there becomes f(that, b).
template <Space kSpace, class T, class F>
void execute_atomic(Thread& t, const Instruction& i) {
  cuda_on_cpu::give_way();
  const uint64_t address = address_in(t, i, 1);
  Bytes bytes;
  if constexpr (kSpace == Space::kShared) {
    bytes = t.block.shared.load_for_atomic(t, address, sizeof(T));
  } else {
    bytes = t.launch.memory.load_newest(t, address, sizeof(T));
  }
  T old;
  std::memcpy(&old, bytes.data(), sizeof(T));
  const T now = F{}(old, t.get<T>(i.operand[2]));
  std::memcpy(bytes.data(), &now, sizeof(T));
  if constexpr (kSpace == Space::kShared) {
    t.block.shared.store_by_atomic(t, address, sizeof(T), bytes);
  } else {
    t.launch.memory.store_by_atomic(t, address, sizeof(T), bytes);
  }
  t.put<T>(i.operand[0], old);
  cuda_on_cpu::give_way();
}

template <class T, class F>
void atomic(Table& table, const std::string& name, F) {
  table.define("atom." + name, 3, execute_atomic<Space::kGeneric, T, F>);
  table.define("atom.global." + name, 3, execute_atomic<Space::kGlobal, T, F>);
  table.define("atom.shared." + name, 3, execute_atomic<Space::kShared, T, F>);
}

void accesses(Table& table) {
  accesses<uint8_t>(table, {"u8", "b8"});
  accesses<uint16_t>(table, {"u16", "b16"});
  accesses<uint32_t>(table, {"u32", "s32", "b32", "f32"});
  accesses<uint64_t>(table, {"u64", "s64", "b64", "f64"});
  const auto add = [](auto old, auto b) { return old + b; };
  atomic<uint32_t>(table, "add.u32", add);
  atomic<uint64_t>(table, "add.u64", add);
  atomic<uint64_t>(table, "or.b64", [](auto old, auto b) { return old | b; });
  atomic<uint64_t>(table, "exch.b64", [](auto, auto b) { return b; });
  atomic<uint64_t>(table, "max.u64", [](auto old, auto b) { return old < b ? b : old; });
  atomic<int32_t>(table, "min.s32", [](auto old, auto b) { return old < b ? old : b; });
  // Its operands: where the old value goes, the address, what is expected there, what is written.
  const auto compare_and_swap = [](Thread& t, const Instruction& i) {
    cuda_on_cpu::give_way();
    const uint64_t address = address_in(t, i, 1);
    Bytes bytes = t.launch.memory.load_newest(t, address, 8);
    uint64_t old;
    std::memcpy(&old, bytes.data(), 8);
    if (old == t.get<uint64_t>(i.operand[2])) {
      const uint64_t now = t.get<uint64_t>(i.operand[3]);
      std::memcpy(bytes.data(), &now, 8);
      t.launch.memory.store_by_atomic(t, address, 8, bytes);
    }
    t.put<uint64_t>(i.operand[0], old);
    cuda_on_cpu::give_way();
  };
  table.define("atom.cas.b64", 4, compare_and_swap);
  table.define("atom.relaxed.cas.b64", 4, compare_and_swap);  // the same, as sm_100 spells it
  atomic<uint32_t>(table, "inc.u32", [](auto old, auto b) { return old >= b ? 0 : old + 1; });
  const auto as_it_is = [](uint64_t a) { return a; };
  table.unary<uint64_t, uint64_t>("cvta.param.u64", as_it_is);
  table.unary<uint64_t, uint64_t>("cvta.to.global.u64", as_it_is);
  table.unary<uint64_t, uint64_t>("cvta.shared.u64", [](uint64_t a) { return a | kShared; });
  table.define("cvta.to.shared.u64", 2, [](Thread& t, const Instruction& i) {
    const auto address = t.get<uint64_t>(i.operand[1]);
    if ((address & kMarks) != kShared) fail(t, "the address is not in shared memory");
    t.put<uint64_t>(i.operand[0], address & ~kMarks);
  });
}

}  // namespace

void define_accesses(Table& table) { accesses(table); }

}  // namespace ptx_on_cpu
