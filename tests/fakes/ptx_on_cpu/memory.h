// The memory of a PTX kernel: what it may access, and what it sees, which is as little as the PTX
// memory model guarantees.
//
// Every access is held to the ranges that the launch was given and to its alignment. Shared memory
// knows who read and wrote each byte since which barrier. A store to global memory stays with its
// thread until a barrier shows it to the block, or a fence to everyone; and until a reader has met
// it by an atomic, a fence behind that, and a barrier if that was another thread's, it may still be
// given what was there before. What the host may read at any time, after the device is lost in the
// middle of a launch, must be ordered by fences for the whole system.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ptx_on_cpu {

struct Thread;

enum class Use {
  kRead,     // never written by the launch
  kWrite,    // only written
  kScratch,  // written before it is read
  kState,    // holds something when the launch begins
  kBox,      // the same, of BoxRows, which the host reads at any time if the device is lost
};

struct Range {
  std::uintptr_t begin, end;
  Use use;
  const char* name;
};

using Bytes = std::array<unsigned char, 16>;

// ---- global memory ------------------------------------------------------------------------------

// The last one of each byte.
using Stores = std::unordered_map<std::uintptr_t, unsigned char>;

class GlobalMemory {
 public:
  explicit GlobalMemory(std::vector<Range> ranges) : ranges_(std::move(ranges)) {}

  Bytes load(Thread& thread, std::uint64_t address, int size, bool is_constant);
  void store(Thread& thread, std::uint64_t address, int size, const Bytes& bytes);
  // The bytes for an atomic, and what it makes of them: every atomic sees that at once, a load only
  // behind a fence, as with a store.
  Bytes load_newest(Thread& thread, std::uint64_t address, int size);
  void store_by_atomic(Thread& thread, std::uint64_t address, int size, const Bytes& bytes);
  // What the thread, and those whose stores it has been shown, stored is there for everyone; and
  // what was there when it last looked by an atomic, it sees from now on.
  void fence(Thread& thread);
  // The same for the host too.
  void fence_for_host(Thread& thread);
  // Shows the thread's stores to its block.
  void show(Thread& thread);
  // The block has ended.
  void finish(Thread& thread);

 private:
  struct Change {
    unsigned char before;
    std::uint64_t number;
    unsigned block;
  };

  // Of a BoxRow, what was stored to since a fence for the host.
  struct Unfenced {
    bool body = false, stretch = false;
  };

  const Range& find(Thread& thread, std::uint64_t address, int size, bool is_store) const;
  void commit(Thread& thread, const Stores& stores);
  void commit(Thread& thread, std::uint64_t address, int size, const Bytes& bytes);
  // No fence is behind these changes by atomics; there is one now.
  void release(std::vector<std::uintptr_t>& atomics);
  void check_box(Thread& thread, const Range& range, std::uint64_t address);

  std::vector<Range> ranges_;
  std::unordered_map<std::uintptr_t, Change> changes_;  // the last one of each byte
  std::uint64_t number_ = 0;                            // of changes so far
  std::map<std::pair<const Thread*, std::uint64_t>, Unfenced> unfenced_;  // by thread and row
};

// ---- shared memory ------------------------------------------------------------------------------

// How far a thread has come: it has seen all that others did in earlier epochs.
struct Epoch {
  std::uint16_t block = 1;  // barriers of the block
  std::uint16_t warp = 1;   // those, and bar.warp.sync
};

class SharedMemory {
 public:
  // The one variable of a kernel; empty where it has none.
  SharedMemory(std::uint32_t begin, std::uint32_t end) : begin_(begin), bytes_(end - begin) {}

  Bytes load(Thread& thread, std::uint64_t address, int size);
  void store(Thread& thread, std::uint64_t address, int size, const Bytes& bytes);
  // The bytes for an atomic, and what becomes of them. Atomics of any threads follow on each other;
  // between them and any other access there has to be a barrier of the block.
  Bytes load_for_atomic(Thread& thread, std::uint64_t address, int size);
  void store_by_atomic(Thread& thread, std::uint64_t address, int size, const Bytes& bytes);

 private:
  struct Byte {
    unsigned char value = 0;
    bool is_written = false;
    bool is_by_atomic = false;
    std::int16_t writer = -1;  // thread
    Epoch written;
    // The warps that read it in the block's epoch of the last read, and the lanes of the last of
    // them that did in its own.
    std::uint8_t read_warps = 0;
    std::uint8_t last_warp = 0;
    std::uint32_t read_lanes = 0;
    Epoch read;
  };

  Byte* find(Thread& thread, std::uint64_t address, int size);
  void check_written(Thread& thread, std::uint64_t address, const Byte& byte) const;
  void check_read(Thread& thread, std::uint64_t address, const Byte& byte) const;

  std::uint32_t begin_;
  std::vector<Byte> bytes_;
};

}  // namespace ptx_on_cpu
