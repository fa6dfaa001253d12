// Reads tensors from stdin, writes their Records to stdout: how tests/backends/test_neon.py reaches
// the CPU kernels of another machine. `records isas` prints the kernels instead.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/reduce.h"

namespace {

using namespace fastcheck;

constexpr int kDims = 8;

// tests/fakes/neon/driver.py packs these.
struct Case {
  char isa[8];
  std::int32_t dtype, depth, logical, threads;
  std::int32_t dense, contiguous, alignment, ndim;
  std::uint64_t fpcr;
  std::int64_t numel, first_byte, bytes;
  std::int64_t sizes[kDims], strides[kDims];
};
static_assert(sizeof(Case) == 200);

struct Answer {
  Record record;
  std::uint64_t fpcr;     // afterwards
  std::uint64_t product;  // bits of 2^-100 * 2^-40 under the mode asked for, 0 where it flushes
};
static_assert(sizeof(Answer) == 208);

std::uint64_t fpcr() {
  std::uint64_t word;
  asm volatile("mrs %0, fpcr" : "=r"(word));
  return word;
}

void set_fpcr(std::uint64_t word) { asm volatile("msr fpcr, %0" ::"r"(word) : "memory"); }

// Threads with floating-point modes of their own, each with a share.
void parallel_for(int threads, std::uint64_t modes, std::int64_t count,
                  const std::function<void(std::int64_t, std::int64_t)>& body) {
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i) {
    running.emplace_back([&, i] {
      set_fpcr(modes);
      body(count * i / threads, count * (i + 1) / threads);
    });
  }
  for (std::thread& thread : running) thread.join();
}

Answer answer(const Case& asked, const std::byte* data) {
  cpu::set_active_kernels(asked.isa);
  const cpu::TensorView tensor{data + asked.first_byte,
                               static_cast<DType>(asked.dtype),
                               asked.numel,
                               asked.ndim,
                               asked.sizes,
                               asked.strides,
                               asked.dense != 0,
                               asked.contiguous != 0};
  Answer result{};
  const auto run = [&](std::int64_t count, const auto& body) {
    parallel_for(asked.threads, asked.fpcr, count, body);
  };
  const std::uint64_t before = fpcr();
  set_fpcr(asked.fpcr);
  volatile float x = 0x1p-100f, product = x * 0x1p-40f;
  cpu::reduce(tensor, static_cast<Depth>(asked.depth), asked.logical != 0, asked.threads, run,
              result.record);
  result.fpcr = fpcr();
  set_fpcr(before);
  const float seen = product;
  memcpy(&result.product, &seen, sizeof(seen));
  return result;
}

int answer_all() {
  Case asked;
  while (std::fread(&asked, sizeof(asked), 1, stdin) == 1) {
    std::vector<std::byte> block(static_cast<std::size_t>(asked.alignment + asked.bytes + 128),
                                 std::byte{0xa5});  // what lies around a tensor is not zero
    auto* data = block.data() + (64 - reinterpret_cast<std::uintptr_t>(block.data()) % 64) % 64 +
                 asked.alignment;
    const auto bytes = static_cast<std::size_t>(asked.bytes);
    if (std::fread(data, 1, bytes, stdin) != bytes) return 1;
    const Answer result = answer(asked, data);
    std::fwrite(&result, sizeof(result), 1, stdout);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc > 1 && std::string(argv[1]) == "isas") {
    for (const auto& status : fastcheck::cpu::isa_statuses()) {
      std::printf("%s %d %s\n", status.name, status.usable, status.reason.c_str());
    }
    std::printf("%s\n", fastcheck::cpu::active_kernels().name);
    return 0;
  }
  return answer_all();
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
