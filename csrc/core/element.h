// One component of a tensor: its class by bit pattern, its exact value, and its rank in an
// ordering.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/dtypes.h"
#include "core/platform.h"

namespace fastcheck {

template <class To, class From>
FASTCHECK_FN To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

template <class Format>
FASTCHECK_FN constexpr typename Format::Bits magnitude(typename Format::Bits bits) {
  return bits & Format::kMagnitude;
}

template <class Format>
FASTCHECK_FN constexpr bool is_finite(typename Format::Bits bits) {
  return magnitude<Format>(bits) < Format::kFirstNonfinite;
}

// The exact value, in the precision of the lane sums. A narrow format's magnitude, shifted to
// float32's mantissa, is the value times 2^(bias - 127): one exact multiplication, subnormals
// included, as long as denormals are not flushed (cpu/fp_environment.h).
template <class Component>
FASTCHECK_FN typename Component::Accumulator value(typename Component::Bits bits) {
  if constexpr (!Component::kIsFloat) {
    if constexpr (Component::kCountsSaturation) return static_cast<double>(bits);
    return bits != 0 ? 1.0 : 0.0;
  } else if constexpr (sizeof(bits) >= 4) {
    return bit_cast<typename Component::Accumulator>(bits);
  } else {
    constexpr std::uint32_t kRescale = static_cast<std::uint32_t>(254 - Component::kExponentBias)
                                       << 23;
    const std::uint32_t shifted = static_cast<std::uint32_t>(magnitude<Component>(bits))
                                  << (23 - Component::kMantissaBits);
    const float absolute = bit_cast<float>(shifted) * bit_cast<float>(kRescale);
    return (bits & Component::kSign) != 0 ? -absolute : absolute;
  }
}

// Extremes are compared as 64-bit keys whose unsigned order is the order of the values, so that
// one merge serves every dtype: a double (never NaN), an int64 or a uint64.
FASTCHECK_FN std::uint64_t key(double x) {
  const auto bits = bit_cast<std::uint64_t>(x == 0.0 ? 0.0 : x);  // a zero of either sign as +0.0
  return (bits >> 63) != 0 ? ~bits : bits | (1ull << 63);
}
FASTCHECK_FN std::uint64_t key(std::int64_t x) {
  return static_cast<std::uint64_t>(x) ^ (1ull << 63);
}
FASTCHECK_FN std::uint64_t key(std::uint64_t x) { return x; }

template <class Component>
FASTCHECK_FN std::uint64_t key_of(typename Component::Bits bits) {
  if constexpr (Component::kIsFloat) {
    return key(static_cast<double>(value<Component>(bits)));
  } else if constexpr (!Component::kCountsSaturation) {
    return bits != 0 ? 1 : 0;
  } else if constexpr (Component::kSigned) {
    return key(static_cast<std::int64_t>(bits));
  } else {
    return key(static_cast<std::uint64_t>(bits));
  }
}

// The eight bytes of Record::min and Record::max that a key stands for.
FASTCHECK_FN std::uint64_t extreme_bits(std::uint64_t key, Extreme extreme) {
  constexpr std::uint64_t kTop = 1ull << 63;
  switch (extreme) {
    case Extreme::kFloat64: return (key & kTop) != 0 ? key ^ kTop : ~key;
    case Extreme::kInt64: return key ^ kTop;
    case Extreme::kUInt64: break;
  }
  return key;
}

}  // namespace fastcheck
