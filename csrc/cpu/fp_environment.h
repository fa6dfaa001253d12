// Denormals kept and rounding to nearest while a kernel runs, whatever the caller set.
//
// torch.set_flush_denormal(True) sets FTZ and DAZ per thread. A record must not depend on it, so
// each thread that runs a kernel holds one of these; the caller's setting comes back afterwards.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace fastcheck {

class FpEnvironment {
 public:
  FpEnvironment() : saved_(read()) { write(kDefault); }
  ~FpEnvironment() { write(saved_); }
  FpEnvironment(const FpEnvironment&) = delete;
  FpEnvironment& operator=(const FpEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  using Word = std::uint32_t;
  static constexpr Word kDefault = 0x1f80;  // Intel SDM volume 1, 10.2.3: MXCSR after reset
  static Word read() { return _mm_getcsr(); }
  static void write(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = std::uint64_t;
  static constexpr Word kDefault = 0;  // Arm ARM, FPCR: FZ, FZ16 and AH clear, round to nearest
  static Word read() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void write(Word word) { asm volatile("msr fpcr, %0" ::"r"(word) : "memory"); }
#else
#error "fastcheck's CPU kernels know x86-64 and aarch64"
#endif
  Word saved_;
};

}  // namespace fastcheck
