// ThreadedFor: a cpu::ParallelFor with threads of its own, which end with the call.
//
// No pool: nothing to lose in a fork, and nothing that competes with torch's threads between
// calls. A thread costs some 20 us, so it has to have as much to read as kBytesPerThread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace fastcheck {

constexpr std::int64_t kBytesPerThread = 2 * 1024 * 1024;

// The number of `threads` that are worth their start for a tensor of `bytes`.
inline int useful_threads(std::int64_t bytes, std::int64_t threads) {
  return static_cast<int>(std::max<std::int64_t>(1, std::min(threads, bytes / kBytesPerThread)));
}

class ThreadedFor {
 public:
  using Range = std::function<void(std::int64_t, std::int64_t)>;

  explicit ThreadedFor(int threads) : threads_(threads) {}

  // The threads take one of [0, count) at a time. Throws the first exception of a range.
  void operator()(std::int64_t count, const Range& range) const {
    std::atomic<std::int64_t> next{0};
    std::exception_ptr failure;
    std::mutex mutex;
    const auto work = [&] {
      try {
        for (std::int64_t i = next++; i < count; i = next++) range(i, i + 1);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!failure) failure = std::current_exception();
        next = count;
      }
    };
    std::vector<std::thread> others;
    try {
      for (int i = 1; i < threads_; ++i) others.emplace_back(work);
    } catch (const std::system_error&) {
      // The system gives no more threads: those that there are do all of it.
    }
    work();
    for (std::thread& other : others) other.join();
    if (failure) std::rethrow_exception(failure);
  }

 private:
  int threads_;
};

}  // namespace fastcheck
