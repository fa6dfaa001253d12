// Graphs: the launches of a capture, in the order in which they were made, and their replays.
//
// As strict as CUDA where a test would go wrong unnoticed: a captured stream waits for no event
// from outside, a side stream has to come back, and asking the device for anything in the middle of
// a capture ends it in failure.
#include <algorithm>
#include <atomic>
#include <utility>

#include "runtime.h"

namespace fake {
namespace {

struct UnderWay {
  std::mutex mutex;
  std::vector<std::shared_ptr<Capture>> captures;
  std::atomic<int> count{0};
};

UnderWay& under_way() {
  static UnderWay* const instance = new UnderWay;
  return *instance;
}

}  // namespace

Capture::Capture(Stream& origin, CaptureMode capture_mode, std::shared_ptr<Pool> memory)
    : mode(capture_mode),
      thread(std::this_thread::get_id()),
      pool(std::move(memory)),
      origin_(origin) {}

void Capture::fail(const std::string& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (problem_.empty()) problem_ = why;
  throw std::runtime_error("fake device: not permitted while a graph is captured: " + why);
}

void Capture::add(int stream, Node node) {
  const std::lock_guard<std::mutex> lock(mutex_);
  nodes_.push_back(std::move(node));
  if (stream == origin_.id()) return;
  sides_[stream] = nodes_.size();
  unjoined_.insert(stream);
}

std::shared_ptr<Completion> Capture::record(int stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto event = std::make_shared<Completion>();
  event->capture = origin_.capture();
  event->captured_stream = stream;
  event->captured_nodes = nodes_.size();
  return event;
}

void Capture::wait(const Completion& event, Stream& on) {
  const std::shared_ptr<Capture> capture = event.capture;
  const auto other = on.capture();
  if (other && other != capture) other->fail("its stream waits for an event of another capture");
  const std::lock_guard<std::mutex> lock(capture->mutex_);
  if (capture->is_over_)
    throw std::runtime_error("fake device: the event was recorded in a capture that is over");
  if (&on == &capture->origin_) {
    const auto side = capture->sides_.find(event.captured_stream);
    if (side != capture->sides_.end() && event.captured_nodes >= side->second)
      capture->unjoined_.erase(event.captured_stream);
    return;
  }
  on.set_capture(capture);
  capture->sides_[on.id()] = capture->nodes_.size();
  capture->unjoined_.insert(on.id());
}

std::vector<Node> Capture::end(Stream& on) {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_over_ = true;
  for (const auto& side : sides_) stream(origin_.device(), side.first).set_capture(nullptr);
  origin_.set_capture(nullptr);
  if (problem_.empty() && &on != &origin_) problem_ = "it ended on a stream that is not its own";
  if (problem_.empty() && !unjoined_.empty())
    problem_ = "stream " + std::to_string(*unjoined_.begin()) +
               " took part, and its last work was not waited for";
  if (!problem_.empty()) throw std::runtime_error("fake device: the capture failed: " + problem_);
  return std::move(nodes_);
}

namespace {
thread_local int capture_mode_of_thread = 0;
}

int exchange_capture_mode(int mode) { return std::exchange(capture_mode_of_thread, mode); }

void check_not_capturing(const char* what) {
  UnderWay& all = under_way();
  if (all.count == 0 || capture_mode_of_thread == 2) return;
  std::vector<std::shared_ptr<Capture>> captures;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    captures = all.captures;
  }
  for (const auto& capture : captures) {
    const bool is_ours = capture->thread == std::this_thread::get_id();
    if (capture->mode == CaptureMode::global ||
        (capture->mode == CaptureMode::thread_local_ && is_ours))
      capture->fail(what);
  }
}

void Graph::capture_begin(CaptureMode mode) {
  if (capture_ || nodes_)
    throw std::runtime_error("fake device: the graph was captured already; reset() it first");
  const int device = current_device();
  Stream& on = stream(device, current_stream(device));
  if (on.id() == 0)
    throw std::runtime_error("fake device: the default stream can't be captured; use another one");
  if (on.capture()) throw std::runtime_error("fake device: the stream is being captured already");
  device_ = device;
  pool_ = std::make_shared<Pool>();
  capture_ = std::make_shared<Capture>(on, mode, pool_);
  UnderWay& all = under_way();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.captures.push_back(capture_);
  ++all.count;
  on.set_capture(capture_);
}

void Graph::capture_end() {
  if (!capture_) throw std::runtime_error("fake device: the graph is not being captured");
  const auto capture = std::exchange(capture_, nullptr);
  {
    UnderWay& all = under_way();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.captures.erase(std::find(all.captures.begin(), all.captures.end(), capture));
    --all.count;
  }
  try {
    nodes_ = std::make_shared<const std::vector<Node>>(
        capture->end(stream(device_, current_stream(device_))));
  } catch (...) {
    reset();
    throw;
  }
}

void Graph::replay() {
  if (!nodes_) throw std::runtime_error("fake device: the graph holds nothing to replay");
  Stream& on = stream(device_, current_stream(device_));
  if (const auto capture = on.capture()) capture->fail("a graph was replayed");
  pool_->streams.insert(on.id());
  if (last_) on.wait_for(last_);
  count(Counter::graph_launch);
  on.submit(TaskKind::kernel, "graph", [nodes = nodes_] {
    for (const Node& node : *nodes) node.work();
  });
  last_ = on.record();
}

void Graph::reset() {
  if (pool_) give_back(device_, *pool_);
  pool_ = nullptr;
  nodes_ = nullptr;
  last_ = nullptr;
}

}  // namespace fake
