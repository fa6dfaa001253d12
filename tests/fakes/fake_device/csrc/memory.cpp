// Device memory and pinned host memory, each under a cache whose misses are counted.
//
// Per device two equal address ranges are reserved. Tensors get addresses in the first, which stays
// PROT_NONE for ever; the bytes are at the same offset in the second, where only allocated blocks
// are readable and writable, with an unmapped page behind each. So a host read of device memory
// faults whatever a kernel is doing at that moment (toggling one mapping would leave it open to
// every thread while any kernel runs), and so does a kernel that runs off the end of its block.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>
#include <unordered_map>

#include "runtime.h"

namespace fake {

struct Block {
  int device, stream;
  std::size_t offset, bytes, requested;
  std::set<int> used_by;                 // other streams, from record_stream
  std::shared_ptr<Pool> pool = nullptr;  // the graph's in whose capture it was allocated
};

struct PinnedBlock {
  char* address;
  std::size_t bytes;
  std::vector<std::shared_ptr<Completion>> uses;
};

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kArena = std::size_t{16} << 30;
constexpr int kPoison = 0xff;  // NaN in every float format, -1 in every signed integer

std::size_t round_up(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

// Size classes four to an octave: little waste, and a shape that comes back finds its block.
std::size_t size_class(std::size_t bytes) {
  std::size_t unit = 512;
  while (unit * 8 <= bytes) unit *= 2;
  return round_up(bytes, unit);
}

struct Arena {
  std::mutex mutex;
  char* addresses = nullptr;
  char* bytes = nullptr;
  std::size_t top = kPage;
  std::map<std::size_t, std::vector<std::size_t>>
      returned;  // size -> offsets given back by empty_cache
  std::map<std::pair<int, std::size_t>, std::vector<Block*>> cached;  // (stream, size)
  std::vector<std::pair<Block*, std::vector<std::shared_ptr<Completion>>>>
      waiting;                              // freed, still used elsewhere
  std::map<std::size_t, std::size_t> live;  // offset -> bytes, for backing()
  MemoryStats stats{0, 0, 0, 0, static_cast<std::int64_t>(kArena)};

  Arena() {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* first = mmap(nullptr, kArena, PROT_NONE, flags, -1, 0);
    void* second = mmap(nullptr, kArena, PROT_NONE, flags, -1, 0);
    if (first == MAP_FAILED || second == MAP_FAILED)
      throw OutOfMemory("fake device: can't reserve address space");
    addresses = static_cast<char*>(first);
    bytes = static_cast<char*>(second);
  }
};

struct PinnedPool {
  std::mutex mutex;
  std::map<const char*, PinnedBlock*> blocks;
  std::unordered_map<std::size_t, std::vector<PinnedBlock*>> cached;
  std::vector<PinnedBlock*> waiting;
};

Arena& arena(int device) {
  static Arena* const arenas = new Arena[kDevices];
  return arenas[device];
}

PinnedPool& pinned() {
  static PinnedPool* const pool = new PinnedPool;
  return *pool;
}

std::atomic<bool> poison_freed{true};

// In stream order: work enqueued before the free still sees its data, a stream that nobody told the
// allocator of sees the poison.
void poison(const Block& block) {
  if (!poison_freed) return;
  char* const begin = arena(block.device).bytes + block.offset;
  stream(block.device, block.stream).submit(TaskKind::marker, "poison", [begin, n = block.bytes] {
    std::memset(begin, kPoison, n);
  });
}

// Caller holds the arena's mutex, in the functions that follow.
void retire(Arena& a, Block* block) {
  poison(*block);
  block->used_by.clear();
  a.cached[{block->stream, block->bytes}].push_back(block);
}

void collect(Arena& a) {
  auto done = [&a](auto& entry) {
    for (auto& use : entry.second)
      if (!use->query()) return false;
    retire(a, entry.first);
    return true;
  };
  a.waiting.erase(std::remove_if(a.waiting.begin(), a.waiting.end(), done), a.waiting.end());
}

// Waits, and so unlocks meanwhile: a kernel that is waited for may need the mutex (to find its
// bytes) or the GIL, whose owner may need the mutex (to free a tensor).
void release_cached(Arena& a, std::unique_lock<std::mutex>& lock) {
  std::vector<Block*> going;
  for (auto& [key, blocks] : a.cached) {
    going.insert(going.end(), blocks.begin(), blocks.end());
    blocks.clear();
  }
  lock.unlock();
  // The poison may still be queued; wait for it rather than let it hit an unmapped page.
  std::set<Stream*> streams;
  for (const Block* block : going) streams.insert(&stream(block->device, block->stream));
  for (Stream* each : streams) each->record()->wait_on_host();
  lock.lock();
  for (Block* block : going) {
    count(Counter::free_below_cache);
    const std::size_t mapped = round_up(block->bytes, kPage);
    madvise(a.bytes + block->offset, mapped, MADV_DONTNEED);
    mprotect(a.bytes + block->offset, mapped, PROT_NONE);
    a.returned[mapped].push_back(block->offset);
    a.stats.reserved -= static_cast<std::int64_t>(block->bytes);
    delete block;
  }
}

Block* allocate_below_cache(Arena& a, std::unique_lock<std::mutex>& lock, int device,
                            std::size_t bytes) {
  if (a.stats.reserved + static_cast<std::int64_t>(bytes) > a.stats.limit) release_cached(a, lock);
  const std::size_t mapped = round_up(bytes, kPage);
  auto& reuse = a.returned[mapped];
  std::size_t offset = a.top;
  if (a.stats.reserved + static_cast<std::int64_t>(bytes) > a.stats.limit ||
      (reuse.empty() && offset + mapped + kPage > kArena))
    throw OutOfMemory("fake device " + std::to_string(device) +
                      ": out of memory; tried to allocate " + std::to_string(bytes) + " bytes, " +
                      std::to_string(a.stats.allocated) + " in use, limit " +
                      std::to_string(a.stats.limit));
  if (reuse.empty()) {
    a.top += mapped + kPage;
  } else {
    offset = reuse.back();
    reuse.pop_back();
  }
  count(Counter::alloc_below_cache);
  if (mprotect(a.bytes + offset, mapped, PROT_READ | PROT_WRITE) != 0)
    throw OutOfMemory("fake device: mprotect failed (vm.max_map_count?)");
  if (poison_freed) std::memset(a.bytes + offset, kPoison, mapped);
  a.stats.reserved += static_cast<std::int64_t>(bytes);
  a.stats.reserved_peak = std::max(a.stats.reserved_peak, a.stats.reserved);
  return new Block{device, 0, offset, bytes, 0, {}};
}

}  // namespace

Block* allocate(int device, int stream_id, std::size_t bytes) {
  if (bytes == 0) return nullptr;
  if (on_worker()) throw std::runtime_error("fake device: device memory allocated inside a kernel");
  count(Counter::alloc);
  Arena& a = arena(device);
  std::unique_lock<std::mutex> lock(a.mutex);
  collect(a);
  const std::size_t size = size_class(bytes);
  const auto capture = stream(device, stream_id).capture();
  const std::shared_ptr<Pool> pool = capture ? capture->pool : nullptr;
  auto& cached = pool ? pool->free[size] : a.cached[{stream_id, size}];
  Block* block = nullptr;
  if (cached.empty()) {
    block = allocate_below_cache(a, lock, device, size);
    block->stream = stream_id;
    block->pool = pool;
  } else {
    block = cached.back();
    cached.pop_back();
    count(Counter::cache_hit);
  }
  block->requested = bytes;
  a.live[block->offset] = block->bytes;
  a.stats.allocated += static_cast<std::int64_t>(block->bytes);
  a.stats.allocated_peak = std::max(a.stats.allocated_peak, a.stats.allocated);
  return block;
}

void* address_of(const Block* block) { return arena(block->device).addresses + block->offset; }

void deallocate(Block* block) noexcept try {
  count(Counter::free);
  Arena& a = arena(block->device);
  const std::lock_guard<std::mutex> lock(a.mutex);
  a.live.erase(block->offset);
  a.stats.allocated -= static_cast<std::int64_t>(block->bytes);
  if (block->pool && block->pool->is_alive) {
    block->pool->free[block->bytes].push_back(block);
    return;
  }
  if (block->pool) {
    block->used_by.insert(block->pool->streams.begin(), block->pool->streams.end());
    block->pool = nullptr;
  }
  if (block->used_by.empty()) {
    retire(a, block);
    return;
  }
  std::vector<std::shared_ptr<Completion>> uses;
  for (int id : block->used_by) uses.push_back(stream(block->device, id).record());
  a.waiting.emplace_back(block, std::move(uses));
} catch (const std::exception&) {
  // A forked child, or exit: the memory is lost, which nobody will notice there.
}

void give_back(int device, Pool& pool) {
  Arena& a = arena(device);
  const std::lock_guard<std::mutex> lock(a.mutex);
  pool.is_alive = false;
  for (auto& [size, blocks] : pool.free) {
    for (Block* block : blocks) {
      block->pool = nullptr;
      std::vector<std::shared_ptr<Completion>> uses;
      for (int id : pool.streams) uses.push_back(stream(device, id).record());
      a.waiting.emplace_back(block, std::move(uses));
    }
  }
  pool.free.clear();
}

void record_use(Block* block, int stream_id) {
  const std::lock_guard<std::mutex> lock(arena(block->device).mutex);
  if (stream_id != block->stream) block->used_by.insert(stream_id);
}

int device_of(const void* address) {
  const char* const p = static_cast<const char*>(address);
  for (int device = 0; device < kDevices; ++device) {
    const Arena& a = arena(device);
    if (p >= a.addresses && p < a.addresses + kArena) return device;
  }
  return -1;
}

char* backing(const void* address) {
  const int device = device_of(address);
  if (device < 0)
    throw std::runtime_error("fake device: a host address was taken for a device address");
  Arena& a = arena(device);
  const std::size_t offset = static_cast<const char*>(address) - a.addresses;
  const std::lock_guard<std::mutex> lock(a.mutex);
  auto next = a.live.upper_bound(offset);
  if (next == a.live.begin() || offset >= std::prev(next)->first + std::prev(next)->second)
    throw std::runtime_error(
        "fake device: device address in no allocated block (used after free?)");
  return a.bytes + offset;
}

char* backing_of_any(const void* address) {
  const int device = device_of(address);
  if (device < 0)
    throw std::runtime_error("fake device: a host address was taken for a device address");
  const Arena& a = arena(device);
  return a.bytes + (static_cast<const char*>(address) - a.addresses);
}

void empty_cache(int device) {
  synchronize_device(device);
  Arena& a = arena(device);
  std::unique_lock<std::mutex> lock(a.mutex);
  collect(a);
  release_cached(a, lock);
}

MemoryStats memory_stats(int device) {
  Arena& a = arena(device);
  const std::lock_guard<std::mutex> lock(a.mutex);
  return a.stats;
}

void reset_peaks(int device) {
  Arena& a = arena(device);
  const std::lock_guard<std::mutex> lock(a.mutex);
  a.stats.allocated_peak = a.stats.allocated;
  a.stats.reserved_peak = a.stats.reserved;
}

void set_memory_limit(int device, std::int64_t bytes) {
  Arena& a = arena(device);
  const std::lock_guard<std::mutex> lock(a.mutex);
  a.stats.limit = std::min(bytes, static_cast<std::int64_t>(kArena));
}

void set_poison(bool on) { poison_freed = on; }

// ---- Pinned host memory
// ---------------------------------------------------------------------------------------

PinnedBlock* allocate_pinned(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  count(Counter::pinned_alloc);
  PinnedPool& pool = pinned();
  const std::lock_guard<std::mutex> lock(pool.mutex);
  auto done = [&pool](PinnedBlock* block) {
    for (auto& use : block->uses)
      if (!use->query()) return false;
    block->uses.clear();
    pool.cached[block->bytes].push_back(block);
    return true;
  };
  pool.waiting.erase(std::remove_if(pool.waiting.begin(), pool.waiting.end(), done),
                     pool.waiting.end());
  const std::size_t size = round_up(size_class(bytes), kPage);
  auto& cached = pool.cached[size];
  if (!cached.empty()) {
    PinnedBlock* const block = cached.back();
    cached.pop_back();
    return block;
  }
  count(Counter::pinned_alloc_below_cache);
  void* const memory =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw OutOfMemory("fake device: out of pinned host memory");
  auto* const block = new PinnedBlock{static_cast<char*>(memory), size, {}};
  pool.blocks[block->address] = block;
  return block;
}

void* address_of(const PinnedBlock* block) { return block->address; }

void deallocate(PinnedBlock* block) noexcept {
  PinnedPool& pool = pinned();
  const std::lock_guard<std::mutex> lock(pool.mutex);
  pool.waiting.push_back(block);
}

namespace {
PinnedBlock* find_pinned(PinnedPool& pool, const void* address) {
  const char* const p = static_cast<const char*>(address);
  auto next = pool.blocks.upper_bound(p);
  if (next == pool.blocks.begin()) return nullptr;
  PinnedBlock* const block = std::prev(next)->second;
  return p < block->address + block->bytes ? block : nullptr;
}
}  // namespace

bool is_pinned(const void* address) {
  PinnedPool& pool = pinned();
  const std::lock_guard<std::mutex> lock(pool.mutex);
  return find_pinned(pool, address) != nullptr;
}

bool record_pinned_use(const void* inside, Stream& on) {
  PinnedPool& pool = pinned();
  const std::lock_guard<std::mutex> lock(pool.mutex);
  PinnedBlock* const block = find_pinned(pool, inside);
  if (block == nullptr) return false;
  auto& uses = block->uses;
  uses.erase(std::remove_if(uses.begin(), uses.end(), [](auto& use) { return use->query(); }),
             uses.end());
  uses.push_back(on.record());
  return true;
}

}  // namespace fake
