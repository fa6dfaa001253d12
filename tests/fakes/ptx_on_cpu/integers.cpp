// Integers and bits.
#include <algorithm>
#include <limits>

#include "ptx_on_cpu/table.h"

namespace ptx_on_cpu {
namespace {

using std::int16_t, std::int32_t, std::int64_t, std::int8_t;
using std::uint16_t, std::uint32_t, std::uint64_t, std::uint8_t;

// ---- arithmetic ---------------------------------------------------------------------------------

struct Least {
  template <class T>
  T operator()(T a, T b) const {
    return std::min(a, b);
  }
};
struct Greatest {
  template <class T>
  T operator()(T a, T b) const {
    return std::max(a, b);
  }
};

// Signed overflow wraps: both signs share the unsigned arithmetic.
void integers(Table& table) {
  const auto add = [](auto a, auto b) { return a + b; };
  const auto sub = [](auto a, auto b) { return a - b; };
  const auto mul = [](auto a, auto b) { return a * b; };
  const Least min;
  const Greatest max;
  const auto neg = [](auto a) { return 0 - a; };
  table.binary<uint16_t, uint16_t>("add.s16", add);
  table.binary<uint32_t, uint32_t>("add.s32", add);
  table.binary<uint64_t, uint64_t>("add.s64", add);
  table.binary<uint16_t, uint16_t>("sub.s16", sub);
  table.binary<uint32_t, uint32_t>("sub.s32", sub);
  table.binary<uint64_t, uint64_t>("sub.s64", sub);
  table.binary<uint16_t, uint16_t>("mul.lo.s16", [](uint32_t a, uint32_t b) { return a * b; });
  table.binary<uint16_t, uint16_t>("mul.hi.u16",
                                   [](uint32_t a, uint32_t b) { return a * b >> 16; });
  table.binary<uint32_t, uint32_t>("mul.lo.s32", mul);
  table.binary<uint64_t, uint64_t>("mul.lo.s64", mul);
  table.ternary<uint16_t>("mad.lo.s16",
                          [](uint32_t a, uint32_t b, uint32_t c) { return a * b + c; });
  table.ternary<uint32_t>("mad.lo.s32", [](auto a, auto b, auto c) { return a * b + c; });
  table.ternary<uint64_t>("mad.lo.s64", [](auto a, auto b, auto c) { return a * b + c; });
  table.binary<int32_t, int16_t>("mul.wide.s16", [](int32_t a, int32_t b) { return a * b; });
  table.unary<uint32_t, uint32_t>("popc.b32", [](uint32_t a) { return __builtin_popcount(a); });
  table.unary<uint32_t, uint32_t>("clz.b32",
                                  [](uint32_t a) { return a == 0 ? 32 : __builtin_clz(a); });
  table.unary<uint32_t, uint64_t>("clz.b64",
                                  [](uint64_t a) { return a == 0 ? 64 : __builtin_clzll(a); });
  table.binary<uint32_t, uint16_t>("mul.wide.u16", [](uint32_t a, uint32_t b) { return a * b; });
  table.binary<int32_t, int32_t>("mul.hi.s32", [](int64_t a, int64_t b) { return a * b >> 32; });
  table.binary<int64_t, int32_t>("mul.wide.s32", [](int64_t a, int64_t b) { return a * b; });
  table.binary<uint64_t, uint32_t>("mul.wide.u32", [](uint64_t a, uint64_t b) { return a * b; });
  table.unary<uint32_t, uint32_t>("neg.s32", neg);
  table.unary<uint64_t, uint64_t>("neg.s64", neg);
  table.unary<uint32_t, int32_t>("abs.s32", [](int32_t a) {
    return a < 0 ? 0 - static_cast<uint32_t>(a) : static_cast<uint32_t>(a);
  });
  table.binary<uint32_t, uint32_t>("min.u32", min);
  table.binary<int32_t, int32_t>("min.s32", min);
  table.binary<uint64_t, uint64_t>("min.u64", min);
  table.binary<int64_t, int64_t>("min.s64", min);
  table.binary<uint32_t, uint32_t>("max.u32", max);
  table.binary<int32_t, int32_t>("max.s32", max);
  table.binary<uint64_t, uint64_t>("max.u64", max);
  table.binary<int64_t, int64_t>("max.s64", max);
}

template <class T, bool kRemainder>
void divide(Thread& t, const Instruction& i) {
  const T a = t.get<T>(i.operand[1]), b = t.get<T>(i.operand[2]);
  if (b == 0) fail(t, "a division by zero");
  if constexpr (std::is_signed_v<T>) {
    if (a == std::numeric_limits<T>::min() && b == -1) fail(t, "a quotient that does not fit");
  }
  t.put<T>(i.operand[0], kRemainder ? a % b : a / b);
}

void divisions(Table& table) {
  table.define("div.u16", 3, divide<uint16_t, false>);
  table.define("div.u32", 3, divide<uint32_t, false>);
  table.define("div.u64", 3, divide<uint64_t, false>);
  table.define("div.s64", 3, divide<int64_t, false>);
  table.define("rem.s32", 3, divide<int32_t, true>);
}

// ---- bits ---------------------------------------------------------------------------------------

// Amounts beyond the width count as the width.
template <class T>
T shift_left(T a, uint32_t n) {
  return n >= 8 * sizeof(T) ? T{0} : static_cast<T>(a << n);
}
template <class T>
T shift_right(T a, uint32_t n) {
  constexpr uint32_t kLast = 8 * sizeof(T) - 1;
  if (n > kLast && std::is_unsigned_v<T>) return 0;
  return static_cast<T>(a >> std::min(n, kLast));
}

template <class T>
void shifts(Table& table, const char* left, const char* right) {
  if (left != nullptr) {
    table.define(left, 3, [](Thread& t, const Instruction& i) {
      t.put<T>(i.operand[0], shift_left(t.get<T>(i.operand[1]), t.get<uint32_t>(i.operand[2])));
    });
  }
  table.define(right, 3, [](Thread& t, const Instruction& i) {
    t.put<T>(i.operand[0], shift_right(t.get<T>(i.operand[1]), t.get<uint32_t>(i.operand[2])));
  });
}

// Each nibble of c picks a byte of a (0-3) or b (4-7); with 8 added, its sign bit eight times.
uint32_t permute(uint32_t a, uint32_t b, uint32_t c) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t pick = c >> (4 * i) & 0xf;
    auto byte = static_cast<uint8_t>(bytes >> (8 * (pick & 7)));
    if ((pick & 8) != 0) byte = static_cast<int8_t>(byte) < 0 ? 0xff : 0;
    out |= static_cast<uint32_t>(byte) << (8 * i);
  }
  return out;
}

template <class Byte>
uint32_t dot(uint32_t a, uint32_t b, uint32_t c) {
  for (int shift = 0; shift < 32; shift += 8) {
    c += static_cast<uint32_t>(static_cast<Byte>(a >> shift) * static_cast<Byte>(b >> shift));
  }
  return c;
}

void bits(Table& table) {
  const auto conjunction = [](auto a, auto b) { return a & b; };
  const auto disjunction = [](auto a, auto b) { return a | b; };
  const auto difference = [](auto a, auto b) { return a ^ b; };
  table.binary<bool, bool>("and.pred", conjunction);
  table.binary<uint16_t, uint16_t>("and.b16", conjunction);
  table.binary<uint32_t, uint32_t>("and.b32", conjunction);
  table.binary<uint64_t, uint64_t>("and.b64", conjunction);
  table.binary<bool, bool>("or.pred", disjunction);
  table.binary<uint16_t, uint16_t>("or.b16", disjunction);
  table.binary<uint32_t, uint32_t>("or.b32", disjunction);
  table.binary<uint64_t, uint64_t>("or.b64", disjunction);
  table.binary<bool, bool>("xor.pred", difference);
  table.binary<uint16_t, uint16_t>("xor.b16", difference);
  table.binary<uint32_t, uint32_t>("xor.b32", difference);
  table.binary<uint64_t, uint64_t>("xor.b64", difference);
  table.unary<bool, bool>("not.pred", [](bool a) { return !a; });
  table.unary<uint32_t, uint32_t>("not.b32", [](auto a) { return ~a; });
  table.unary<uint64_t, uint64_t>("not.b64", [](auto a) { return ~a; });
  shifts<uint16_t>(table, "shl.b16", "shr.u16");
  shifts<int16_t>(table, nullptr, "shr.s16");
  shifts<uint32_t>(table, "shl.b32", "shr.u32");
  shifts<int32_t>(table, nullptr, "shr.s32");
  shifts<uint64_t>(table, "shl.b64", "shr.u64");
  shifts<int64_t>(table, nullptr, "shr.s64");
  table.ternary<uint32_t>("prmt.b32", [](auto a, auto b, auto c) { return permute(a, b, c); });
  table.ternary<uint32_t>("shf.l.wrap.b32", [](uint32_t a, uint32_t b, uint32_t c) {
    return static_cast<uint32_t>((static_cast<uint64_t>(b) << 32 | a) << (c & 31) >> 32);
  });
  table.ternary<uint32_t>("shf.r.wrap.b32", [](uint32_t a, uint32_t b, uint32_t c) {
    return static_cast<uint32_t>((static_cast<uint64_t>(b) << 32 | a) >> (c & 31));
  });
  table.ternary<uint32_t>("dp4a.s32.s32",
                          [](auto a, auto b, auto c) { return dot<int8_t>(a, b, c); });
  table.ternary<uint32_t>("dp4a.u32.u32",
                          [](auto a, auto b, auto c) { return dot<uint8_t>(a, b, c); });
  table.define("bfe.s32", 4, [](Thread& t, const Instruction& i) {
    const uint32_t at = t.get<uint8_t>(i.operand[2]), length = t.get<uint8_t>(i.operand[3]);
    if (length == 0 || at + length > 32) fail(t, "a field beyond the word");
    const auto top = shift_left(t.get<uint32_t>(i.operand[1]), 32 - at - length);
    t.put<int32_t>(i.operand[0], shift_right(static_cast<int32_t>(top), 32 - length));
  });
  table.define("bfi.b64", 5, [](Thread& t, const Instruction& i) {
    const uint32_t at = t.get<uint8_t>(i.operand[3]), length = t.get<uint8_t>(i.operand[4]);
    const uint64_t ones = shift_left(~(length >= 64 ? 0 : ~0ull << length), at);
    t.put<uint64_t>(i.operand[0], (t.get<uint64_t>(i.operand[2]) & ~ones) |
                                      (shift_left(t.get<uint64_t>(i.operand[1]), at) & ones));
  });
}

void packed_integers(Table& table) {
  define_packed<int16_t, Least>(table, "min.s16x2");
  define_packed<int16_t, Greatest>(table, "max.s16x2");
  define_packed<uint16_t, Least>(table, "min.u16x2");
  define_packed<uint16_t, Greatest>(table, "max.u16x2");
}

}  // namespace

void define_integers(Table& table) {
  integers(table);
  divisions(table);
  bits(table);
  packed_integers(table);
}

}  // namespace ptx_on_cpu
