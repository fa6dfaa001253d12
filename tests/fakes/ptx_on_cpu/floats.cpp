// Floating point. Which of two zeros is the smaller, and what is in a NaN of 64 bits, is drawn; a
// NaN of 32 or 16 bits that an instruction makes is 0x7fffffff or 0x7fff.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "ptx_on_cpu/table.h"

namespace ptx_on_cpu {
namespace {

using std::int16_t, std::int32_t, std::int64_t, std::int8_t;
using std::uint16_t, std::uint32_t, std::uint64_t, std::uint8_t;

float result(float x) {
  if (x == x) return x;
  const uint32_t bits = 0x7fffffff;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
double result(double x) {
  if (x == x) return x;
  const uint64_t bits = cuda_on_cpu::random_word() | 0x7ff8ull << 48;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// A NaN is dropped where there is a number beside it.
struct Smaller {
  template <class T>
  T operator()(T a, T b) const {
    if (a != a || b != b) return result(a != a ? b : a);
    return a == b ? (draw() ? a : b) : a < b ? a : b;
  }
};
struct Larger {
  template <class T>
  T operator()(T a, T b) const {
    if (a != a || b != b) return result(a != a ? b : a);
    return a == b ? (draw() ? a : b) : a > b ? a : b;
  }
};

void floats(Table& table) {
  table.binary<float, float>("add.rn.f32", [](float a, float b) { return result(a + b); });
  table.binary<double, double>("add.rn.f64", [](double a, double b) { return result(a + b); });
  table.binary<float, float>("mul.rn.f32", [](float a, float b) { return result(a * b); });
  table.binary<double, double>("mul.rn.f64", [](double a, double b) { return result(a * b); });
  table.ternary<float>("fma.rn.f32",
                       [](float a, float b, float c) { return result(std::fma(a, b, c)); });
  table.ternary<double>("fma.rn.f64",
                        [](double a, double b, double c) { return result(std::fma(a, b, c)); });
  table.unary<float, float>("abs.f32", [](float a) { return result(std::fabs(a)); });
  table.unary<double, double>("abs.f64", [](double a) { return std::fabs(a); });
  table.unary<float, float>("neg.f32", [](float a) { return result(-a); });
  table.unary<double, double>("neg.f64", [](double a) { return -a; });
  table.binary<float, float>("min.f32", Smaller{});
  table.binary<double, double>("min.f64", Smaller{});
  table.binary<float, float>("max.f32", Larger{});
  table.binary<double, double>("max.f64", Larger{});
  table.binary<float, float>("max.NaN.f32", [](float a, float b) {
    return a != a || b != b ? result(a + b) : Larger{}(a, b);
  });
}

// f of both float32 of a register of 64 bits.
template <class F>
uint64_t of_both(F f, uint64_t a, uint64_t b, uint64_t c) {
  uint64_t out = 0;
  for (int shift = 0; shift < 64; shift += 32) {
    const uint64_t words[] = {a >> shift, b >> shift, c >> shift};
    float x[3];
    for (int i = 0; i < 3; ++i) std::memcpy(&x[i], &words[i], sizeof(float));
    const float value = result(f(x[0], x[1], x[2]));
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    out |= static_cast<uint64_t>(bits) << shift;
  }
  return out;
}

void two_floats(Table& table) {
  table.binary<uint64_t, uint64_t>("add.rn.f32x2", [](uint64_t a, uint64_t b) {
    return of_both([](float x, float y, float) { return x + y; }, a, b, 0);
  });
  table.binary<uint64_t, uint64_t>("mul.rn.f32x2", [](uint64_t a, uint64_t b) {
    return of_both([](float x, float y, float) { return x * y; }, a, b, 0);
  });
  table.ternary<uint64_t>("fma.rn.f32x2", [](uint64_t a, uint64_t b, uint64_t c) {
    return of_both([](float x, float y, float z) { return std::fma(x, y, z); }, a, b, c);
  });
}

// 16-bit floats by their bits: order of the numbers as order of integers, both zeros 0.
int order(uint16_t half) { return (half & 0x8000) != 0 ? -(half & 0x7fff) : half & 0x7fff; }

constexpr int kHalf = 0x7c00, kBrain = 0x7f80;  // infinity

template <int kInfinity>
bool is_nan(uint16_t half) {
  return (half & 0x7fff) > kInfinity;
}

template <int kInfinity>
struct SmallerHalf {
  uint16_t operator()(uint16_t a, uint16_t b) const {
    if (is_nan<kInfinity>(a) && is_nan<kInfinity>(b)) return 0x7fff;
    if (is_nan<kInfinity>(a) || is_nan<kInfinity>(b)) return is_nan<kInfinity>(a) ? b : a;
    return order(a) == order(b) ? (draw() ? a : b) : order(a) < order(b) ? a : b;
  }
};

template <int kInfinity>
struct LargerHalfOrNan {
  uint16_t operator()(uint16_t a, uint16_t b) const {
    if (is_nan<kInfinity>(a) || is_nan<kInfinity>(b)) return 0x7fff;
    return order(a) == order(b) ? (draw() ? a : b) : order(a) > order(b) ? a : b;
  }
};

// The smaller magnitude, with the signs' difference as its sign.
template <int kInfinity>
struct SmallerMagnitude {
  uint16_t operator()(uint16_t a, uint16_t b) const {
    const uint16_t least = SmallerHalf<kInfinity>{}(a & 0x7fff, b & 0x7fff);
    return static_cast<uint16_t>((least & 0x7fff) | ((a ^ b) & 0x8000));
  }
};

float float_of_half(uint16_t half) {
  const int exponent = half >> 10 & 31;
  const int mantissa = half & 1023;
  float magnitude = 0;
  if (exponent == 31) {
    magnitude = mantissa == 0 ? std::numeric_limits<float>::infinity()
                              : std::numeric_limits<float>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(mantissa), -24);
  } else {
    magnitude = std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
  }
  return result((half & 0x8000) != 0 ? -magnitude : magnitude);
}

// Rounded to nearest, even.
uint16_t half_of(float x) {
  if (x != x) return 0x7fff;
  int exponent = 0;
  std::frexp(x, &exponent);
  // That of the first bit; that of subnormals and of zeros is the least.
  exponent = x == 0 ? -14 : std::max(exponent - 1, -14);
  const auto steps = std::lrint(std::ldexp(std::fabs(x), 10 - exponent));
  const auto magnitude = std::min<long>((exponent + 14) * 1024 + steps, kHalf);
  return static_cast<uint16_t>(magnitude | (std::signbit(x) ? 0x8000 : 0));
}

uint16_t half_of_e4m3(unsigned byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if (exponent == 15 && mantissa == 7) return 0x7fff;
  const int significand = exponent == 0 ? mantissa : 8 + mantissa;
  const float magnitude = std::ldexp(static_cast<float>(significand), std::max(exponent, 1) - 10);
  return half_of((byte & 0x80) != 0 ? -magnitude : magnitude);
}

struct HalvesMultiplied {
  uint16_t operator()(uint16_t a, uint16_t b) const {
    return half_of(float_of_half(a) * float_of_half(b));
  }
};

void packed_floats(Table& table) {
  define_packed<uint16_t, SmallerHalf<kHalf>>(table, "min.f16x2");
  define_packed<uint16_t, SmallerHalf<kBrain>>(table, "min.bf16x2");
  define_packed<uint16_t, LargerHalfOrNan<kHalf>>(table, "max.NaN.f16x2");
  define_packed<uint16_t, LargerHalfOrNan<kBrain>>(table, "max.NaN.bf16x2");
  define_packed<uint16_t, SmallerMagnitude<kHalf>>(table, "min.xorsign.abs.f16x2");
  define_packed<uint16_t, SmallerMagnitude<kBrain>>(table, "min.xorsign.abs.bf16x2");
  define_packed<uint16_t, HalvesMultiplied>(table, "mul.rn.f16x2");
  table.unary<uint32_t, uint16_t>("cvt.rn.f16x2.e4m3x2", [](uint16_t pair) {
    return static_cast<uint32_t>(half_of_e4m3(pair >> 8) << 16 | half_of_e4m3(pair & 0xff));
  });
  table.unary<double, float>("cvt.f64.f32", [](float a) { return result(static_cast<double>(a)); });
  table.unary<float, double>("cvt.rn.f32.f64",
                             [](double a) { return result(static_cast<float>(a)); });
  table.unary<float, uint16_t>("cvt.f32.f16", [](uint16_t a) { return float_of_half(a); });
}

}  // namespace

void define_floats(Table& table) {
  floats(table);
  two_floats(table);
  packed_floats(table);
}

}  // namespace ptx_on_cpu
