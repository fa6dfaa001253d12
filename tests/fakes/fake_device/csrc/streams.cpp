// Streams (one worker thread each, in order), events, and errors of kernels that reach the host
// later.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "runtime.h"

namespace fake {
namespace {

// Leaked on purpose: worker threads and destructors of tensors may outlive static destruction.
struct StreamsGlobals {
  std::mutex mutex;
  std::array<std::array<std::unique_ptr<Stream>, kStreams>, kDevices> streams;
  std::array<int, kDevices> next_stream{};
  std::array<std::string, kDevices> errors;
  std::int64_t default_delay_us = 0;
  std::vector<std::string> launches;
  std::atomic<bool> recording{false}, stopping{false};
  std::array<std::atomic<bool>, kDevices> failed{}, lost{};
  std::atomic<AroundWait> around_wait{nullptr};
  const pid_t pid = getpid();
};

StreamsGlobals& streams_globals() {
  static StreamsGlobals* const instance = new StreamsGlobals;
  return *instance;
}

thread_local bool worker_thread = false;
thread_local int device_now = 0;
thread_local std::array<int, kDevices> current_stream_ids{};

void require_device(int device) {
  if (device < 0 || device >= kDevices)
    throw std::runtime_error("fake device: there are devices 0 and 1, not " +
                             std::to_string(device));
}

// What begins the streams' random numbers. 0: no kernel begins late.
const unsigned uneven_seed = [] {
  const char* const said = std::getenv("FAKE_DEVICE_UNEVEN");
  if (said == nullptr) return 0U;
  char* end = nullptr;
  const unsigned seed = static_cast<unsigned>(std::strtoul(said, &end, 10));
  if (end == said || *end != 0) {
    std::fprintf(stderr, "fake device: FAKE_DEVICE_UNEVEN: expected a number, got '%s'\n", said);
    std::abort();
  }
  return seed;
}();

}  // namespace

// ---- Completion and events
// ------------------------------------------------------------------------------------

void Completion::finish() {
  const std::lock_guard<std::mutex> lock(mutex);
  done = true;
  time = std::chrono::steady_clock::now();
  changed.notify_all();
}

bool Completion::query() {
  const std::lock_guard<std::mutex> lock(mutex);
  return done;
}

void Completion::wait() {
  std::unique_lock<std::mutex> lock(mutex);
  // The poll is for shutdown only: streams that wait for a held one must be able to end.
  while (!done && !streams_globals().stopping)
    changed.wait_for(lock, std::chrono::milliseconds(50));
}

void set_around_wait(AroundWait around) { streams_globals().around_wait = around; }

void Completion::wait_on_host() {
  const AroundWait around = streams_globals().around_wait;
  if (around == nullptr)
    wait_and_warn();
  else
    around([this] { wait_and_warn(); });
}

void Completion::wait_and_warn() {
  std::unique_lock<std::mutex> lock(mutex);
  const auto begin = std::chrono::steady_clock::now();
  for (bool told = false; !done && !streams_globals().stopping;) {
    changed.wait_for(lock, std::chrono::milliseconds(200));
    if (done || told || std::chrono::steady_clock::now() - begin < std::chrono::seconds(10))
      continue;
    told = true;
    for (int device = 0; device < kDevices; ++device)
      for (Stream* each : all_streams(device))
        if (each->held())
          std::fprintf(stderr,
                       "fake device: the host has waited for 10 s, and stream %d:%d is held\n",
                       device, each->id());
  }
}

void record(Event& event, Stream& on) {
  count(Counter::event_record);
  check_device_lost(on.device());
  event.device = on.device();
  const auto capture = on.capture();
  event.last = capture ? capture->record(on.id()) : on.record();
}

void wait(Event& event, Stream& on) {
  count(Counter::event_wait);
  if (!event.last) return;
  if (event.last->capture) return Capture::wait(*event.last, on);
  if (const auto capture = on.capture())
    capture->fail("its stream waits for an event that was recorded outside of the capture");
  on.wait_for(event.last);
}

double elapsed_ms(Event& start, Event& end) {
  if (!start.timing || !end.timing)
    throw std::runtime_error("fake device: both events need enable_timing=True");
  if (!start.last || !end.last)
    throw std::runtime_error("fake device: both events must be recorded first");
  if (!start.last->query() || !end.last->query())
    throw std::runtime_error("fake device: both events must be complete; synchronize first");
  return std::chrono::duration<double, std::milli>(end.last->time - start.last->time).count();
}

// ---- Stream
// ---------------------------------------------------------------------------------------------------

bool Stream::submit(TaskKind kind, std::string name, std::function<void()> work) {
  StreamsGlobals& g = streams_globals();
  if (getpid() != g.pid)
    throw std::runtime_error("fake device: not usable in a forked child; use spawn");
  if (worker_thread && kind == TaskKind::kernel)
    throw std::runtime_error("fake device: a kernel (" + name +
                             ") can't be launched from inside a kernel");
  if (kind == TaskKind::kernel) {
    check_device_error(device_);
    const auto capturing = capture();
    count(capturing ? Counter::captured : Counter::kernel);
    if (g.recording) {
      const std::lock_guard<std::mutex> lock(g.mutex);
      g.launches.push_back(std::to_string(device_) + ":" + std::to_string(id_) + " " + name);
    }
    if (capturing) {
      capturing->add(id_, {std::move(name), std::move(work)});
      return true;
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_) return false;
  queue_.push_back({kind, std::move(name), std::move(work)});
  if (!worker_.joinable()) worker_ = std::thread([this] { loop(); });
  if (may_run()) changed_.notify_all();  // a held stream's worker sleeps on
  return true;
}

std::shared_ptr<Completion> Stream::record() {
  auto completion = std::make_shared<Completion>();
  if (!submit(TaskKind::marker, "event", [completion] { completion->finish(); }))
    completion->finish();  // else whoever waits for it would do so for ever
  return completion;
}

void Stream::wait_for(std::shared_ptr<Completion> completion) {
  submit(TaskKind::marker, "wait", [completion] { completion->wait(); });
}

Stream::Stream(int device, int id)
    : device_(device), id_(id), chance_(uneven_seed + 977U * device + 31U * id) {}

void Stream::stumble() {
  if (uneven_seed == 0 || chance_() % 16 != 0) return;
  std::this_thread::sleep_for(std::chrono::microseconds(chance_() % 5000));
}

bool Stream::idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !running_;
}

void Stream::wait_idle() {
  record()->wait_on_host();
  check_device_error(device_);
}

void Stream::set_delay(std::int64_t microseconds) {
  const std::lock_guard<std::mutex> lock(mutex_);
  delay_us_ = microseconds;
}

void Stream::hold() {
  const std::lock_guard<std::mutex> lock(mutex_);
  held_ = true;
  allowed_ = 0;
  trailing_ = false;
}

void Stream::release() {
  const std::lock_guard<std::mutex> lock(mutex_);
  held_ = trailing_ = false;
  changed_.notify_all();
}

void Stream::advance(std::int64_t kernels) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!held_) throw std::runtime_error("fake device: advance() is for a held stream");
  allowed_ += kernels;
  changed_.notify_all();
}

bool Stream::held() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return held_;
}

std::shared_ptr<Capture> Stream::capture() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return capture_;
}

void Stream::set_capture(std::shared_ptr<Capture> capture) {
  const std::lock_guard<std::mutex> lock(mutex_);
  capture_ = std::move(capture);
}

bool Stream::may_run() const {
  if (queue_.empty()) return false;
  return !held_ || allowed_ > 0 || (trailing_ && queue_.front().kind == TaskKind::marker);
}

void Stream::stop() {
  std::deque<Task> dropped;  // dies unlocked: what a kernel captured may need the GIL to go
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    delay_us_ = 0;
    if (held_) dropped.swap(queue_);
    changed_.notify_all();
  }
  if (worker_.joinable()) worker_.join();
}

void Stream::loop() {
  worker_thread = true;
  device_now = device_;
  current_stream_ids[device_] = id_;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    if (!may_run()) trailing_ = false;
    changed_.wait(lock, [this] { return may_run() || (stopping_ && queue_.empty()); });
    if (queue_.empty()) return;
    Task task = std::move(queue_.front());
    queue_.pop_front();
    running_ = true;
    if (held_ && task.kind == TaskKind::kernel) trailing_ = --allowed_ == 0;
    const std::int64_t delay = task.kind == TaskKind::kernel ? delay_us_ : 0;
    lock.unlock();
    if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
    if (task.kind == TaskKind::kernel) stumble();
    try {
      // Events complete all the same, so that no thread waits for ever.
      if (task.kind == TaskKind::marker || !streams_globals().lost[device_]) task.work();
    } catch (const std::exception& error) {
      // Spelt before the lock: what() of a Python error takes the GIL, whose owner may want the
      // lock.
      std::string message =
          "fake device: kernel " + task.name + " failed (reported asynchronously): " + error.what();
      StreamsGlobals& g = streams_globals();
      const std::lock_guard<std::mutex> guard(g.mutex);
      if (g.errors[device_].empty()) g.errors[device_] = std::move(message);
      g.failed[device_] = true;
    }
    task.work = nullptr;  // what the kernel captured goes before the stream counts as idle
    lock.lock();
    running_ = false;
  }
}

// ---- Devices
// --------------------------------------------------------------------------------------------------

Stream& stream(int device, int id) {
  require_device(device);
  if (id < 0 || id >= kStreams)
    throw std::runtime_error("fake device: no stream " + std::to_string(id));
  StreamsGlobals& g = streams_globals();
  const std::lock_guard<std::mutex> lock(g.mutex);
  auto& slot = g.streams[device][id];
  if (!slot) {
    slot = std::make_unique<Stream>(device, id);
    slot->set_delay(g.default_delay_us);
  }
  return *slot;
}

std::vector<Stream*> all_streams(int device) {
  require_device(device);
  StreamsGlobals& g = streams_globals();
  const std::lock_guard<std::mutex> lock(g.mutex);
  std::vector<Stream*> result;
  for (auto& slot : g.streams[device])
    if (slot) result.push_back(slot.get());
  return result;
}

int next_pool_stream(int device) {
  require_device(device);
  StreamsGlobals& g = streams_globals();
  const std::lock_guard<std::mutex> lock(g.mutex);
  return 1 + g.next_stream[device]++ % (kStreams - 1);
}

int current_device() { return device_now; }
void set_current_device(int device) {
  require_device(device);
  device_now = device;
}
void require_current(int device, const char* what) {
  if (device != device_now)
    throw std::runtime_error("fake device: " + std::string(what) + " of device " +
                             std::to_string(device) + " while device " +
                             std::to_string(device_now) + " was current");
}
int current_stream(int device) {
  require_device(device);
  return current_stream_ids[device];
}
void set_current_stream(int device, int id) {
  require_device(device);
  current_stream_ids[device] = id;
}
bool on_worker() { return worker_thread; }

void synchronize_device(int device) {
  for (Stream* each : all_streams(device)) each->wait_idle();
  check_device_error(device);
}

void check_device_lost(int device) {
  StreamsGlobals& g = streams_globals();
  if (!g.lost[device]) return;
  const std::lock_guard<std::mutex> lock(g.mutex);
  throw std::runtime_error(g.errors[device]);
}

void check_device_error(int device) {
  StreamsGlobals& g = streams_globals();
  if (!g.failed[device].load(std::memory_order_relaxed)) return;
  std::string error;
  {
    const std::lock_guard<std::mutex> lock(g.mutex);
    if (g.lost[device]) throw std::runtime_error(g.errors[device]);
    error.swap(g.errors[device]);
    g.failed[device] = false;
  }
  if (!error.empty()) throw std::runtime_error(error);
}

void lose_device(Stream& on, const std::string& message) {
  const int device = on.device();
  on.submit(TaskKind::kernel, "kernel that fails", [device, message] {
    StreamsGlobals& g = streams_globals();
    const std::lock_guard<std::mutex> lock(g.mutex);
    g.errors[device] = message;
    g.failed[device] = g.lost[device] = true;
  });
}

void find_device_again(int device) {
  StreamsGlobals& g = streams_globals();
  const std::lock_guard<std::mutex> lock(g.mutex);
  g.errors[device].clear();
  g.failed[device] = g.lost[device] = false;
}

void set_default_delay(std::int64_t microseconds) {
  StreamsGlobals& g = streams_globals();
  const std::lock_guard<std::mutex> lock(g.mutex);
  g.default_delay_us = microseconds;
  for (auto& device : g.streams)
    for (auto& slot : device)
      if (slot) slot->set_delay(microseconds);
}

void shutdown() {
  StreamsGlobals& g = streams_globals();
  if (getpid() != g.pid) return;
  for (int device = 0; device < kDevices; ++device)
    for (Stream* each : all_streams(device))
      if (each->held()) g.stopping = true;  // nobody will complete what waits for it
  for (int device = 0; device < kDevices; ++device) {
    for (Stream* each : all_streams(device)) each->stop();
    if (!g.errors[device].empty()) std::fprintf(stderr, "%s\n", g.errors[device].c_str());
  }
  g.stopping = true;
}

void record_launches(bool on) {
  StreamsGlobals& g = streams_globals();
  const std::lock_guard<std::mutex> lock(g.mutex);
  g.recording = on;
  if (on) g.launches.clear();
}

std::vector<std::string> take_launches() {
  StreamsGlobals& g = streams_globals();
  const std::lock_guard<std::mutex> lock(g.mutex);
  return std::exchange(g.launches, {});
}

}  // namespace fake
