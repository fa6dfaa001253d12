// The one table of supported dtypes, and the component type of each.
//
// The table generates the C++ switches, the Python list and the test parameters. A component is
// what the statistics count: an element, or the real and imaginary part of a complex element.
#pragma once

#include <cstdint>

namespace fastcheck {

// X(code, name, component, components per element)
#define FASTCHECK_FOR_EACH_DTYPE(X)        \
  X(0, float64, Float64, 1)                \
  X(1, float32, Float32, 1)                \
  X(2, float16, Float16, 1)                \
  X(3, bfloat16, BFloat16, 1)              \
  X(4, float8_e4m3fn, Float8E4M3FN, 1)     \
  X(5, float8_e5m2, Float8E5M2, 1)         \
  X(6, complex64, Float32, 2)              \
  X(7, complex128, Float64, 2)             \
  X(8, int8, Integer<std::int8_t>, 1)      \
  X(9, int16, Integer<std::int16_t>, 1)    \
  X(10, int32, Integer<std::int32_t>, 1)   \
  X(11, int64, Integer<std::int64_t>, 1)   \
  X(12, uint8, Integer<std::uint8_t>, 1)   \
  X(13, uint16, Integer<std::uint16_t>, 1) \
  X(14, uint32, Integer<std::uint32_t>, 1) \
  X(15, uint64, Integer<std::uint64_t>, 1) \
  X(16, bool, Boolean, 1)

enum class DType : std::uint8_t {
#define FASTCHECK_ENUM(code, name, component, components) k_##name = code,
  FASTCHECK_FOR_EACH_DTYPE(FASTCHECK_ENUM)
#undef FASTCHECK_ENUM
};

constexpr int kDTypeCount = 17;

// The type that the eight bytes of Record::min and Record::max hold.
enum class Extreme : std::uint8_t { kFloat64, kInt64, kUInt64 };

// A binary floating-point format, defined by its bits alone. Magnitudes (the bits without the sign)
// are ordered like the numbers they stand for, which is what every classification here rests on.
template <class Bits_, int kExponentBits, int kMantissaBits_, bool kHasInf_, class Accumulator_>
struct FloatFormat {
  using Bits = Bits_;
  using Accumulator = Accumulator_;  // the precision of the lane sums (docs/record-format.md)
  static constexpr bool kIsFloat = true;
  static constexpr bool kHasInf = kHasInf_;
  static constexpr Extreme kExtreme = Extreme::kFloat64;
  static constexpr int kMantissaBits = kMantissaBits_;
  static constexpr int kExponentBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr Bits kSign = static_cast<Bits>(Bits(1) << (kExponentBits + kMantissaBits));
  static constexpr Bits kMagnitude = static_cast<Bits>(kSign - 1);
  static constexpr Bits kMinNormal = static_cast<Bits>(Bits(1) << kMantissaBits);
  // The smallest magnitude that is not finite: infinity, or the only NaN of a format without one.
  static constexpr Bits kFirstNonfinite =
      kHasInf ? static_cast<Bits>(kMagnitude - (kMinNormal - 1)) : kMagnitude;
  static constexpr Bits kFirstNaN =
      kHasInf ? static_cast<Bits>(kFirstNonfinite + 1) : kFirstNonfinite;
  static constexpr Bits kMaxFinite = static_cast<Bits>(kFirstNonfinite - 1);
};

using Float64 = FloatFormat<std::uint64_t, 11, 52, true, double>;
using Float32 = FloatFormat<std::uint32_t, 8, 23, true, float>;
using Float16 = FloatFormat<std::uint16_t, 5, 10, true, float>;
using BFloat16 = FloatFormat<std::uint16_t, 8, 7, true, float>;
using Float8E5M2 = FloatFormat<std::uint8_t, 5, 2, true, float>;
using Float8E4M3FN = FloatFormat<std::uint8_t, 4, 3, false, float>;

template <class T>
struct Integer {
  using Bits = T;
  using Accumulator = double;
  static constexpr bool kIsFloat = false;
  static constexpr bool kSigned = T(-1) < T(0);
  static constexpr Extreme kExtreme = kSigned ? Extreme::kInt64 : Extreme::kUInt64;
  static constexpr T kMin = kSigned ? static_cast<T>(T(1) << (8 * sizeof(T) - 1)) : T(0);
  static constexpr T kMax = static_cast<T>(~kMin);
  static constexpr bool kCountsSaturation = true;
};

// A byte that is not zero counts as 1; torch writes 0 and 1, a reinterpreted buffer may not.
struct Boolean {
  using Bits = std::uint8_t;
  using Accumulator = double;
  static constexpr bool kIsFloat = false;
  static constexpr bool kSigned = false;
  static constexpr Extreme kExtreme = Extreme::kUInt64;
  static constexpr std::uint8_t kMin = 0;
  static constexpr std::uint8_t kMax = 1;
  static constexpr bool kCountsSaturation = false;
};

struct DTypeInfo {
  const char* name;
  int components;      // per element
  int component_size;  // bytes
  Extreme extreme;
};

constexpr DTypeInfo kDTypes[kDTypeCount] = {
#define FASTCHECK_INFO(code, name, component, components) \
  {#name, components, sizeof(component::Bits), component::kExtreme},
    FASTCHECK_FOR_EACH_DTYPE(FASTCHECK_INFO)
#undef FASTCHECK_INFO
};

}  // namespace fastcheck
