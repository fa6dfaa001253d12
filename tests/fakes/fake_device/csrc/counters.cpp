// Counters of operations that tests may forbid, by kind and by thread.
#include <pthread.h>

#include <atomic>

#include "runtime.h"

namespace fake {
namespace {

struct CountersGlobals {  // leaked: threads count until the very end
  std::mutex mutex;
  std::map<std::uint64_t, std::array<std::atomic<std::int64_t>, kCounters>> counts;
  Counts ended{};  // of threads whose identifier a later thread was given
  std::atomic<bool> sync_debug{false};
};

CountersGlobals& counters_globals() {
  static CountersGlobals* const instance = new CountersGlobals;
  return *instance;
}

std::array<std::atomic<std::int64_t>, kCounters>& my_counts() {
  thread_local auto* const mine = [] {
    CountersGlobals& g = counters_globals();
    const std::lock_guard<std::mutex> lock(g.mutex);
    auto& counts = g.counts[static_cast<std::uint64_t>(pthread_self())];
    for (int i = 0; i < kCounters; ++i) g.ended[i] += counts[i].exchange(0);
    return &counts;
  }();
  return *mine;
}

}  // namespace

const char* name_of(Counter counter) {
  static const char* const names[] = {
#define X(name) #name,
      FAKE_COUNTERS(X)
#undef X
  };
  return names[static_cast<int>(counter)];
}

bool is_synchronisation(Counter counter) {
  switch (counter) {
    case Counter::blocking_copy:
    case Counter::item:
    case Counter::data_dependent:
    case Counter::stream_synchronize:
    case Counter::event_synchronize:
    case Counter::device_synchronize: return true;
    default: return false;
  }
}

void count(Counter counter) {
  my_counts()[static_cast<int>(counter)].fetch_add(1, std::memory_order_relaxed);
}

void count_synchronisation(Counter counter) {
  if (on_worker())
    throw std::runtime_error(std::string("fake device: ") + name_of(counter) +
                             " inside a kernel would wait for itself");
  count(counter);
  if (counters_globals().sync_debug && counter != Counter::event_synchronize)
    throw std::runtime_error(std::string("fake device: a synchronising call (") + name_of(counter) +
                             ") while set_sync_debug_mode(\"error\")");
  check_not_capturing(name_of(counter));
}

std::map<std::uint64_t, Counts> counts_by_thread() {
  CountersGlobals& g = counters_globals();
  const std::lock_guard<std::mutex> lock(g.mutex);
  std::map<std::uint64_t, Counts> result;
  result[0] = g.ended;
  for (auto& [thread, counts] : g.counts)
    for (int i = 0; i < kCounters; ++i) result[thread][i] = counts[i].load();
  return result;
}

void reset_counts() {
  CountersGlobals& g = counters_globals();
  const std::lock_guard<std::mutex> lock(g.mutex);
  for (auto& entry : g.counts)
    for (auto& value : entry.second) value = 0;
  g.ended = {};
}

void set_sync_debug(bool raise) { counters_globals().sync_debug = raise; }
bool sync_debug() { return counters_globals().sync_debug; }

}  // namespace fake
