// Reads memory and does nothing with it: the baseline of the kernels' bandwidth. Compiled and
// called through ctypes by bench/pure_read.py.
//
// Every byte is loaded into accumulators, whose sum is returned so that no load can be dropped.
// Which width of load is fastest differs between processors (on a Zen 4, 32 bytes beat 64 by 14%):
// the caller tries them. Threads are started by the call: some tens of microseconds, of the ten
// milliseconds that 256 MiB take.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

template <int kWidth, int kAccumulators>
std::uint64_t read_part(const char* data, std::size_t bytes) {
  typedef std::uint64_t Block __attribute__((vector_size(kWidth), aligned(1), may_alias));
  constexpr std::size_t kStride = kAccumulators * kWidth;
  Block sum[kAccumulators] = {};
  std::size_t at = 0;
  for (; at + kStride <= bytes; at += kStride) {
#pragma GCC unroll 16
    for (int i = 0; i < kAccumulators; ++i) {
      sum[i] += *reinterpret_cast<const Block*>(data + at + i * kWidth);
    }
  }
  std::uint64_t result = 0;
  for (; at < bytes; ++at) result += static_cast<unsigned char>(data[at]);
  std::uint64_t words[kStride / 8];
  std::memcpy(words, sum, sizeof(words));
  for (std::uint64_t word : words) result += word;
  return result;
}

}  // namespace

// width: 16, 32 or 64 bytes a load. Returns the sum of the 64-bit words.
extern "C" std::uint64_t pure_read(const char* data, std::size_t bytes, int threads, int width) {
  std::vector<std::uint64_t> results(threads);
  std::vector<std::thread> workers;
  const std::size_t part = (bytes / threads + 4095) / 4096 * 4096;
  const auto run = [&](int i) {
    const std::size_t from = part * i < bytes ? part * i : bytes;
    const std::size_t size = bytes - from < part ? bytes - from : part;
    results[i] = width == 64   ? read_part<64, 8>(data + from, size)
                 : width == 32 ? read_part<32, 16>(data + from, size)
                               : read_part<16, 16>(data + from, size);
  };
  for (int i = 1; i < threads; ++i) workers.emplace_back(run, i);
  run(0);
  for (auto& worker : workers) worker.join();
  std::uint64_t result = 0;
  for (std::uint64_t r : results) result += r;
  return result;
}
