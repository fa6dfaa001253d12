#include "ptx_on_cpu/memory.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "cuda/launch.h"
#include "ptx_on_cpu/machine.h"

namespace ptx_on_cpu {
namespace {

std::string hex(std::uint64_t x) {
  char text[24];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

std::string bytes_at(int size, std::uint64_t address) {
  return std::to_string(size) + " bytes at " + hex(address);
}

// Of a change by an atomic with no fence behind it.
constexpr std::uint64_t kUnreleased = ~0ull;

bool has(const Stores& stores, std::uintptr_t begin, int size) {
  for (int i = 0; i < size; ++i) {
    if (stores.count(begin + static_cast<unsigned>(i)) != 0) return true;
  }
  return false;
}

void check_alignment(Thread& thread, std::uint64_t address, int size) {
  if (address % static_cast<unsigned>(size) != 0) {
    fail(thread, "misaligned access of " + bytes_at(size, address));
  }
}

}  // namespace

// ---- global memory ------------------------------------------------------------------------------

const Range& GlobalMemory::find(Thread& thread, std::uint64_t address, int size,
                                bool is_store) const {
  check_alignment(thread, address, size);
  for (const Range& range : ranges_) {
    if (address < range.begin || address + static_cast<unsigned>(size) > range.end) continue;
    if (is_store && range.use == Use::kRead) fail(thread, std::string("a store to ") + range.name);
    return range;
  }
  fail(thread, "out of bounds: " + bytes_at(size, address));
}

Bytes GlobalMemory::load(Thread& thread, std::uint64_t address, int size, bool is_constant) {
  const Range& range = find(thread, address, size, false);
  Bytes bytes{};
  if (range.use == Use::kRead) {
    std::memcpy(bytes.data(), reinterpret_cast<const void*>(address),
                static_cast<std::size_t>(size));
    return bytes;
  }
  if (is_constant) fail(thread, std::string("ld.global.nc of ") + range.name);
  if (range.use == Use::kWrite) fail(thread, std::string("a load of ") + range.name);
  const bool is_late = draw();
  for (int i = 0; i < size; ++i) {
    const std::uintptr_t at = address + static_cast<unsigned>(i);
    unsigned char& byte = bytes[static_cast<std::size_t>(i)];
    if (const auto own = thread.stores.find(at); own != thread.stores.end()) {
      byte = own->second;
      continue;
    }
    if (const auto shown = thread.block.stores.find(at); shown != thread.block.stores.end()) {
      byte = shown->second;
      continue;
    }
    const auto change = changes_.find(at);
    if (change == changes_.end()) {
      if (range.use == Use::kScratch) {
        fail(thread, std::string("uninitialised: ") + range.name + ", " + bytes_at(size, address));
      }
      byte = *reinterpret_cast<const unsigned char*>(at);
    } else if (is_late && change->second.number > thread.seen &&
               change->second.block != thread.block_index) {
      byte = change->second.before;
    } else {
      byte = *reinterpret_cast<const unsigned char*>(at);
    }
  }
  return bytes;
}

void GlobalMemory::commit(Thread& thread, const Stores& stores) {
  for (const auto& [at, now] : stores) {
    auto* const byte = reinterpret_cast<unsigned char*>(at);
    changes_[at] = {*byte, ++number_, thread.block_index};
    *byte = now;
  }
}

void GlobalMemory::commit(Thread& thread, std::uint64_t address, int size, const Bytes& bytes) {
  Stores stores;
  for (int i = 0; i < size; ++i) {
    stores[address + static_cast<unsigned>(i)] = bytes[static_cast<std::size_t>(i)];
  }
  commit(thread, stores);
}

void GlobalMemory::store_by_atomic(Thread& thread, std::uint64_t address, int size,
                                   const Bytes& bytes) {
  commit(thread, address, size, bytes);
  for (int i = 0; i < size; ++i) {
    const std::uintptr_t at = address + static_cast<unsigned>(i);
    changes_[at].number = kUnreleased;
    thread.atomics.push_back(at);
  }
}

void GlobalMemory::release(std::vector<std::uintptr_t>& atomics) {
  for (const std::uintptr_t at : atomics) {
    Change& change = changes_[at];
    if (change.number == kUnreleased) change.number = ++number_;
  }
  atomics.clear();
}

// The host takes a row for whole that has the number of its stretch: what stands in the row and the
// number must never be on their way together.
void GlobalMemory::check_box(Thread& thread, const Range& range, std::uint64_t address) {
  const std::uint64_t offset = address - range.begin;
  const bool is_stretch =
      offset % sizeof(fastcheck::cuda::BoxRow) >= offsetof(fastcheck::cuda::BoxRow, stretch);
  Unfenced& row = unfenced_[{&thread, offset / sizeof(fastcheck::cuda::BoxRow)}];
  if (is_stretch ? row.body : row.stretch) {
    fail(thread, "the host may see a row that is not whole: " + bytes_at(8, address));
  }
  (is_stretch ? row.stretch : row.body) = true;
}

void GlobalMemory::store(Thread& thread, std::uint64_t address, int size, const Bytes& bytes) {
  const Range& range = find(thread, address, size, true);
  if (range.use == Use::kBox) check_box(thread, range, address);
  if (draw() && !has(thread.stores, address, size)) return commit(thread, address, size, bytes);
  for (int i = 0; i < size; ++i) {
    thread.stores[address + static_cast<unsigned>(i)] = bytes[static_cast<std::size_t>(i)];
  }
}

Bytes GlobalMemory::load_newest(Thread& thread, std::uint64_t address, int size) {
  find(thread, address, size, true);
  if (has(thread.stores, address, size)) fail(thread, "an atomic on what the thread itself stored");
  thread.met = number_;
  Bytes bytes{};
  std::memcpy(bytes.data(), reinterpret_cast<const void*>(address), static_cast<std::size_t>(size));
  return bytes;
}

void GlobalMemory::fence(Thread& thread) {
  commit(thread, thread.block.stores);
  commit(thread, thread.stores);
  thread.block.stores.clear();
  thread.stores.clear();
  release(thread.block.atomics);
  release(thread.atomics);
  thread.seen = std::max(thread.seen, thread.met);
}

void GlobalMemory::fence_for_host(Thread& thread) {
  fence(thread);
  for (auto& [of, row] : unfenced_) {
    if (of.first == &thread) row = {};
  }
}

void GlobalMemory::show(Thread& thread) {
  for (const auto& [at, now] : thread.stores) thread.block.stores[at] = now;
  thread.stores.clear();
  auto& shown = thread.block.atomics;
  shown.insert(shown.end(), thread.atomics.begin(), thread.atomics.end());
  thread.atomics.clear();
}

void GlobalMemory::finish(Thread& thread) {
  commit(thread, thread.block.stores);
  thread.block.stores.clear();
}

// ---- shared memory ------------------------------------------------------------------------------

namespace {

[[noreturn]] void fail_race(Thread& thread, std::uint64_t address, const char* what,
                            unsigned other) {
  fail(thread, "race: shared memory at " + hex(address) + " was " + what + " by thread " +
                   std::to_string(other) + " with no barrier since");
}

}  // namespace

SharedMemory::Byte* SharedMemory::find(Thread& thread, std::uint64_t address, int size) {
  check_alignment(thread, address, size);
  if (address < begin_ || address - begin_ + static_cast<unsigned>(size) > bytes_.size()) {
    fail(thread, "out of bounds of shared memory: " + bytes_at(size, address));
  }
  return &bytes_[address - begin_];
}

// Only the thread itself, or those whom its warp or its block has met since, may go on from there.
void SharedMemory::check_written(Thread& thread, std::uint64_t address, const Byte& byte) const {
  const auto writer = static_cast<unsigned>(byte.writer);
  if (byte.writer < 0 || byte.written.block != thread.epoch.block) return;
  if (byte.is_by_atomic) fail_race(thread, address, "changed by an atomic", writer);
  if (writer == thread.index) return;
  if (writer / 32 == thread.warp() && byte.written.warp != thread.epoch.warp) return;
  fail_race(thread, address, "written", writer);
}

// As check_written, of all who have read it.
void SharedMemory::check_read(Thread& thread, std::uint64_t address, const Byte& byte) const {
  if (byte.read.block != thread.epoch.block) return;
  const std::uint32_t others = byte.read_warps & ~(1u << thread.warp());
  if (others != 0) {
    fail(thread, "race: shared memory at " + hex(address) + " was read by warp " +
                     std::to_string(__builtin_ctz(others)) + " with no barrier since");
  }
  if (byte.read.warp != thread.epoch.warp) return;
  const std::uint32_t lanes = byte.read_lanes & ~(1u << thread.index % 32);
  if (lanes != 0) {
    fail_race(thread, address, "read",
              thread.warp() * 32 + static_cast<unsigned>(__builtin_ctz(lanes)));
  }
}

Bytes SharedMemory::load(Thread& thread, std::uint64_t address, int size) {
  Byte* const from = find(thread, address, size);
  Bytes bytes{};
  for (int i = 0; i < size; ++i) {
    Byte& byte = from[i];
    if (!byte.is_written) {
      fail(thread, "uninitialised: shared memory, " + bytes_at(size, address));
    }
    check_written(thread, address, byte);
    if (byte.read.block != thread.epoch.block) byte.read_warps = 0;
    if (byte.last_warp != thread.warp() || byte.read.warp != thread.epoch.warp) byte.read_lanes = 0;
    byte.read_warps = static_cast<std::uint8_t>(byte.read_warps | 1u << thread.warp());
    byte.read_lanes |= 1u << thread.index % 32;
    byte.last_warp = static_cast<std::uint8_t>(thread.warp());
    byte.read = thread.epoch;
    bytes[static_cast<std::size_t>(i)] = byte.value;
  }
  return bytes;
}

void SharedMemory::store(Thread& thread, std::uint64_t address, int size, const Bytes& bytes) {
  Byte* const to = find(thread, address, size);
  for (int i = 0; i < size; ++i) {
    Byte& byte = to[i];
    check_written(thread, address, byte);
    check_read(thread, address, byte);
    byte.value = bytes[static_cast<std::size_t>(i)];
    byte.is_written = true;
    byte.is_by_atomic = false;
    byte.writer = static_cast<std::int16_t>(thread.index);
    byte.written = thread.epoch;
  }
}

Bytes SharedMemory::load_for_atomic(Thread& thread, std::uint64_t address, int size) {
  const Byte* const from = find(thread, address, size);
  Bytes bytes{};
  for (int i = 0; i < size; ++i) {
    const Byte& byte = from[i];
    if (!byte.is_written) {
      fail(thread, "uninitialised: shared memory, " + bytes_at(size, address));
    }
    if (!byte.is_by_atomic) check_written(thread, address, byte);
    check_read(thread, address, byte);
    bytes[static_cast<std::size_t>(i)] = byte.value;
  }
  return bytes;
}

void SharedMemory::store_by_atomic(Thread& thread, std::uint64_t address, int size,
                                   const Bytes& bytes) {
  Byte* const to = find(thread, address, size);
  for (int i = 0; i < size; ++i) {
    to[i].value = bytes[static_cast<std::size_t>(i)];
    to[i].is_by_atomic = true;
    to[i].writer = static_cast<std::int16_t>(thread.index);
    to[i].written = thread.epoch;
  }
}

}  // namespace ptx_on_cpu
