// The fake device's driver, with no torch in it: two devices, streams that are worker threads,
// events, protected device memory under a caching allocator, pinned host memory, and counters of
// everything a test may want to forbid.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace fake {

constexpr int kDevices = 2;
constexpr int kStreams =
    33;  // stream 0 is the default one; the others are handed out in turn, as CUDA does

// ---- Counters
// -------------------------------------------------------------------------------------------------

// clang-format off
#define FAKE_COUNTERS(X)                                                 \
  /* enqueued, the host goes on */                                       \
  X(kernel) X(device_copy) X(async_copy)                                 \
  X(captured) X(graph_launch)                                            \
  /* the host waits */                                                   \
  X(blocking_copy) X(item) X(data_dependent)                             \
  X(stream_synchronize) X(event_synchronize) X(device_synchronize)       \
  X(event_record) X(event_wait) X(event_query) X(stream_query)           \
  X(alloc) X(cache_hit) X(alloc_below_cache) X(free) X(free_below_cache) \
  X(pinned_alloc) X(pinned_alloc_below_cache)
// clang-format on

enum class Counter {
#define X(name) name,
  FAKE_COUNTERS(X)
#undef X
      count_
};
constexpr int kCounters = static_cast<int>(Counter::count_);
using Counts = std::array<std::int64_t, kCounters>;

const char* name_of(Counter counter);
bool is_synchronisation(Counter counter);
void count(Counter counter);
// Counts a wait of the host, and refuses it where it can only be a mistake: inside a kernel, or
// (event waits excepted, as with CUDA) while set_sync_debug("error") holds.
void count_synchronisation(Counter counter);
std::map<std::uint64_t, Counts>
counts_by_thread();  // key: pthread_self(), Python's threading.get_ident(); 0: threads long gone
void reset_counts();
void set_sync_debug(bool raise);
bool sync_debug();

// ---- Streams and events
// ---------------------------------------------------------------------------------------

class Capture;

// One recording of an event. Shared by the event, the queues that wait for it and the allocator.
struct Completion {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::chrono::steady_clock::time_point time;
  // Of an event that was recorded in a capture: where. It is a part of the graph, and never done.
  std::shared_ptr<Capture> capture;
  int captured_stream = -1;
  std::size_t captured_nodes = 0;

  void finish();
  bool query();
  void wait();          // of a stream's thread
  void wait_on_host();  // says so when it takes long and a stream is held

 private:
  void wait_and_warn();
};

// Runs `wait`, which blocks the host. module.cpp sets one that lets go of Python's GIL meanwhile:
// kernels may need it, and some of torch's bindings wait without releasing it.
using AroundWait = void (*)(const std::function<void()>& wait);
void set_around_wait(AroundWait around);

struct Event {
  int device = -1;
  bool timing = false;
  std::shared_ptr<Completion> last;  // null: never recorded, which counts as complete
};

enum class TaskKind {
  kernel,
  marker
};  // a marker (event, poison) is neither delayed nor counted by advance()

class Stream {
 public:
  Stream(int device, int id);
  int device() const { return device_; }
  int id() const { return id_; }

  // Appends work; returns at once. Kernels raise what an earlier kernel of the device threw.
  // False: the stream has ended with the process, and nothing will run.
  bool submit(TaskKind kind, std::string name, std::function<void()> work);
  std::shared_ptr<Completion> record();
  void wait_for(std::shared_ptr<Completion> completion);
  bool idle();
  void wait_idle();  // counts nothing: the caller knows why it waits

  void set_delay(std::int64_t microseconds);
  void hold();
  void release();
  void advance(std::int64_t kernels);  // lets a held stream run so many kernels and the markers
                                       // right behind them
  bool held();
  void stop();  // at exit: what is not held still runs

  // While it takes part in a capture, kernels become nodes of the graph. Null: it takes part in
  // none.
  std::shared_ptr<Capture> capture();
  void set_capture(std::shared_ptr<Capture> capture);

 private:
  struct Task {
    TaskKind kind;
    std::string name;
    std::function<void()> work;
  };
  void loop();
  bool may_run() const;
  void stumble();  // with FAKE_DEVICE_UNEVEN: waits, now and then

  const int device_, id_;
  std::minstd_rand chance_;  // of the stream's thread alone
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  std::thread worker_;
  bool running_ = false, held_ = false, stopping_ = false, trailing_ = false;
  std::shared_ptr<Capture> capture_;
  std::int64_t allowed_ = 0, delay_us_ = 0;
};

Stream& stream(int device, int id);
std::vector<Stream*> all_streams(int device);
int next_pool_stream(int device);
int current_device();
void set_current_device(int device);
// For calls before which torch doesn't make the device current: CUDA's runtime would make a context
// on the device that is, half a gigabyte of it.
void require_current(int device, const char* what);
int current_stream(int device);
void set_current_stream(int device, int id);
bool on_worker();

void synchronize_device(int device);
// Raises what a kernel threw: once, or always once the device is lost.
void check_device_error(int device);
void check_device_lost(int device);
// In its turn on a stream, a kernel fails in a way that CUDA does not recover from: nothing that
// was launched runs any more, and every call on the device raises `message`.
void lose_device(Stream& on, const std::string& message);
void find_device_again(int device);
void set_default_delay(std::int64_t microseconds);
void shutdown();

void record(Event& event, Stream& on);
void wait(Event& event, Stream& on);
double elapsed_ms(Event& start, Event& end);

// Names of what was enqueued ("device:stream name"), while recording is on.
void record_launches(bool on);
std::vector<std::string> take_launches();

// ---- Graphs (graphs.cpp)
// ---------------------------------------------------------------------------------------

enum class CaptureMode { global, thread_local_, relaxed };
struct Pool;

struct Node {
  std::string name;
  std::function<void()> work;
};

// A capture under way: what is launched on its streams, in order.
class Capture {
 public:
  Capture(Stream& origin, CaptureMode mode, std::shared_ptr<Pool> pool);
  // Throws, and so does the end of the capture.
  [[noreturn]] void fail(const std::string& why);
  void add(int stream, Node node);
  std::shared_ptr<Completion> record(int stream);
  // Another of the device's streams waits for an event of this capture, and so takes part in it.
  static void wait(const Completion& event, Stream& on);
  // The nodes; no stream takes part any longer. Throws if the capture went wrong.
  std::vector<Node> end(Stream& on);

  const CaptureMode mode;
  const std::thread::id thread;
  const std::shared_ptr<Pool> pool;

 private:
  std::mutex mutex_;
  Stream& origin_;
  bool is_over_ = false;
  std::string problem_;
  std::vector<Node> nodes_;
  // Side streams that took part, and how many nodes there were after their last one.
  std::map<int, std::size_t> sides_;
  std::set<int> unjoined_;
};

// What makes the host look at the device, or wait for it, ends a capture in failure, and raises.
void check_not_capturing(const char* what);
// Of this thread: 0, or 2 where its queries end no other thread's capture.
int exchange_capture_mode(int mode);

class Graph {
 public:
  ~Graph() { reset(); }
  void capture_begin(CaptureMode mode);  // of the current stream of the current device
  void capture_end();
  void replay();  // on the current stream of its device, after its last replay
  void reset();

 private:
  int device_ = -1;
  std::shared_ptr<Capture> capture_;
  std::shared_ptr<Pool> pool_;
  std::shared_ptr<const std::vector<Node>> nodes_;
  std::shared_ptr<Completion> last_;
};

// Makes torch.accelerator.Graph work, where this torch has it; after the backend was renamed.
void register_graphs();

// ---- Memory
// ---------------------------------------------------------------------------------------------------

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Block;

// The memory of a graph: what was allocated in its capture is used again by nothing else before the
// graph is gone.
struct Pool {
  bool is_alive = true;
  std::set<int> streams;  // on which the graph was replayed
  std::map<std::size_t, std::vector<Block*>> free;
};
void give_back(int device, Pool& pool);

struct MemoryStats {
  std::int64_t allocated, allocated_peak, reserved, reserved_peak, limit;
};

// A device address is only reserved, never mapped: whoever follows it faults, host or kernel.
// Kernels get at the bytes through backing(), which only this library calls.
Block* allocate(int device, int stream, std::size_t bytes);  // null for 0 bytes; OutOfMemory
void* address_of(const Block* block);
void deallocate(Block* block) noexcept;
void record_use(Block* block, int stream);
char* backing(
    const void* device_address);  // raises for anything that is not an allocated device address
// The same for a kernel that was launched before its memory was freed, and runs after: what lies
// there in the order of the stream.
char* backing_of_any(const void* device_address);
int device_of(const void* address);  // -1: not device memory
void empty_cache(int device);
MemoryStats memory_stats(int device);
void reset_peaks(int device);
void set_memory_limit(int device, std::int64_t bytes);
void set_poison(bool on);

struct PinnedBlock;
PinnedBlock* allocate_pinned(std::size_t bytes);
void* address_of(const PinnedBlock* block);
void deallocate(PinnedBlock* block) noexcept;
bool record_pinned_use(const void* inside, Stream& on);  // false: not pinned memory
bool is_pinned(const void* address);

}  // namespace fake

// ---- C interface for kernels that are not torch ops
// -----------------------------------------------------------
extern "C" {
#pragma GCC visibility push(default)
// `native_stream` is Stream.native_handle, and its device is current, as CUDA has it. Runs fn(arg)
// on that stream after what was enqueued before, and once for each replay if it is captured; then
// drop(arg), unless that is null.
void fake_device_launch(void* native_stream, const char* name, void (*fn)(void*), void* arg,
                        void (*drop)(void*));
// Whether what is launched there becomes part of a graph.
int fake_device_is_capturing(void* native_stream);
// 0 (global) or 2 (relaxed): whether queries of this thread end captures in failure. What it was.
int fake_device_exchange_capture_mode(int mode);
// The bytes behind a device address, which was allocated at launch; aborts unless called from a
// kernel.
void* fake_device_memory(const void* device_address);
#pragma GCC visibility pop
}
