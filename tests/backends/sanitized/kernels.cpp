// Reads tensors of every dtype, depth, size, stride and alignment with each kernel of this machine,
// and compares each Record with the scalar kernel's. Built with sanitizers
// (tests/backends/test_sanitizers.py): every tensor is an allocation of exactly its bytes.
//
// `kernels threads` reads the same tensors by several threads at once, for a thread sanitizer.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/exponents.h"
#include "cpu/dispatch.h"
#include "cpu/exponents.h"
#include "cpu/reduce.h"

namespace {

using namespace fastcheck;

std::uint64_t random_bits() {  // Marsaglia's xorshift64*
  static std::uint64_t state = 88172645463325252ull;
  state ^= state >> 12;
  state ^= state << 25;
  state ^= state >> 27;
  return state * 2685821657736338717ull;
}

// kOrdinary: bytes that make ordinary values of every format. kSmallest: 0x80, the squares of which
// are the largest that integers of 8 bits have.
enum class Bytes { kAny, kOrdinary, kSmallest };

// `first` bytes before the tensor, none behind it.
class Memory {
 public:
  Memory(std::size_t first, std::size_t bytes, Bytes kind)
      : block_(new std::byte[first + bytes]), data_(block_.get() + first) {
    for (std::size_t i = 0; i < bytes; ++i) {
      const std::uint64_t bits = random_bits() >> 40;
      const std::uint64_t byte = kind == Bytes::kAny        ? bits
                                 : kind == Bytes::kOrdinary ? 0x35 + bits % 16
                                                            : 0x80;
      data_[i] = static_cast<std::byte>(byte);
    }
  }
  const std::byte* data() const { return data_; }

 private:
  std::unique_ptr<std::byte[]> block_;
  std::byte* data_;
};

struct Layout {
  std::vector<std::int64_t> sizes, strides;
  bool dense, contiguous;

  std::int64_t numel() const {
    std::int64_t n = 1;
    for (const std::int64_t size : sizes) n *= size;
    return n;
  }
  std::int64_t span() const {  // in elements
    std::int64_t last = 0;
    for (std::size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
    return numel() == 0 ? 0 : last + 1;
  }
};

Layout dense(std::int64_t numel) { return {{numel}, {1}, true, true}; }

std::vector<Layout> layouts() {
  std::vector<Layout> all;
  for (const int numel : {0, 1, 2, 3, 31, 63, 65, 1025, 4095, 4096, 4097, 2 * 4096 + 1000}) {
    all.push_back(dense(numel));
  }
  all.push_back({{37, 61}, {1, 37}, true, false});             // transposed
  all.push_back({{5, 7, 129}, {3000, 301, 2}, false, false});  // every second of some rows
  all.push_back({{64, 65}, {0, 1}, false, false});             // expanded
  return all;
}

void in_turn(std::int64_t count, const std::function<void(std::int64_t, std::int64_t)>& body) {
  body(0, count);
}

void in_threads(std::int64_t count, const std::function<void(std::int64_t, std::int64_t)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] { body(count * i / 4, count * (i + 1) / 4); });
  }
  for (std::thread& thread : threads) thread.join();
}

struct Reading {
  Record record;
  std::int64_t counts[kExponentWords];
};

Reading read(const Memory& memory, const Layout& layout, int dtype, int depth, int threads) {
  const cpu::TensorView view{memory.data(),       static_cast<DType>(dtype),
                             layout.numel(),      static_cast<int>(layout.sizes.size()),
                             layout.sizes.data(), layout.strides.data(),
                             layout.dense,        layout.contiguous};
  Reading reading;
  std::memset(&reading, 0, sizeof(reading));
  const auto run = threads > 1 ? in_threads : in_turn;
  cpu::reduce(view, static_cast<Depth>(depth), !layout.dense, threads, run, reading.record);
  const bool counts = depth == 3 && kDTypes[dtype].extreme == Extreme::kFloat64;
  if (counts) cpu::count_exponents(view, !layout.dense, threads, run, reading.counts);
  return reading;
}

int check(const char* isa, const Memory& memory, const Layout& layout, int dtype, int depth,
          int threads) {
  cpu::set_active_kernels("scalar");
  const Reading wanted = read(memory, layout, dtype, depth, 1);
  cpu::set_active_kernels(isa);
  const Reading got = read(memory, layout, dtype, depth, threads);
  if (std::memcmp(&got, &wanted, sizeof(got)) == 0) return 0;
  std::fprintf(stderr, "%s differs from scalar: %s, depth %d, %lld elements\n", isa,
               kDTypes[dtype].name, depth, static_cast<long long>(layout.numel()));
  return 1;
}

int check_all(const char* isa) {
  int failed = 0;
  for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
    const DTypeInfo& info = kDTypes[dtype];
    const auto element = static_cast<std::size_t>(info.components) * info.component_size;
    std::size_t first = 0;
    for (const Layout& layout : layouts()) {
      first += 3;
      const auto bytes = static_cast<std::size_t>(layout.span()) * element;
      for (const Bytes kind : {Bytes::kAny, Bytes::kOrdinary, Bytes::kSmallest}) {
        const Memory memory(first, bytes, kind);
        for (int depth = 1; depth <= 3; ++depth) {
          failed += check(isa, memory, layout, dtype, depth, 1);
        }
      }
    }
  }
  const Layout large = dense(200 * 1000);
  const Memory memory(5, 4 * 200 * 1000, Bytes::kAny);
  failed += check(isa, memory, large, static_cast<int>(DType::k_float32), 3, 4);
  return failed;
}

// Several threads read, each with threads of its own, while another one changes the kernels.
int check_threads() {
  const Layout large = dense(300 * 1000);
  const Memory memory(0, 4 * 300 * 1000, Bytes::kAny);
  const int dtype = static_cast<int>(DType::k_float32);
  cpu::set_active_kernels("scalar");
  const Reading wanted = read(memory, large, dtype, 3, 1);
  std::atomic<int> failed{0};
  std::atomic<bool> over{false};
  std::thread changes([&] {
    while (!over) {
      for (const char* isa : {"scalar", "auto"}) cpu::set_active_kernels(isa);
    }
  });
  std::vector<std::thread> readers;
  for (int i = 0; i < 4; ++i) {
    readers.emplace_back([&] {
      for (int k = 0; k < 5; ++k) {
        const Reading got = read(memory, large, dtype, 3, 4);
        failed += std::memcmp(&got, &wanted, sizeof(got)) != 0;
      }
    });
  }
  for (std::thread& reader : readers) reader.join();
  over = true;
  changes.join();
  return failed;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "threads") return check_threads();
  int failed = 0;
  for (const auto& status : cpu::isa_statuses()) {
    if (!status.usable || std::string(status.name) == "scalar") continue;
    std::printf("%s\n", status.name);
    failed += check_all(status.name);
  }
  return failed == 0 ? 0 : 1;
}
