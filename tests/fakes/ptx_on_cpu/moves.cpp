// Conversions, comparisons, selections, and where to go next.
#include <initializer_list>

#include "ptx_on_cpu/table.h"

namespace ptx_on_cpu {
namespace {

using std::int16_t, std::int32_t, std::int64_t, std::int8_t;
using std::uint16_t, std::uint32_t, std::uint64_t, std::uint8_t;

void conversions(Table& table) {
  const auto as_it_is = [](auto a) { return a; };
  // A result narrower than its register is extended to it.
  table.unary<int16_t, int32_t>("cvt.s8.s32", [](int32_t a) { return static_cast<int8_t>(a); });
  table.unary<int16_t, int8_t>("cvt.s16.s8", as_it_is);
  table.unary<int32_t, int8_t>("cvt.s32.s8", as_it_is);
  table.unary<int64_t, int8_t>("cvt.s64.s8", as_it_is);
  table.unary<int32_t, int16_t>("cvt.s32.s16", as_it_is);
  table.unary<int64_t, int16_t>("cvt.s64.s16", as_it_is);
  table.unary<int64_t, int32_t>("cvt.s64.s32", as_it_is);
  table.unary<uint32_t, uint16_t>("cvt.u32.u16", as_it_is);
  table.unary<uint64_t, uint16_t>("cvt.u64.u16", as_it_is);
  table.unary<uint64_t, uint32_t>("cvt.u64.u32", as_it_is);
  table.unary<uint16_t, uint32_t>("cvt.u16.u32", as_it_is);
  table.unary<uint32_t, uint64_t>("cvt.u32.u64", as_it_is);
  table.unary<double, int32_t>("cvt.rn.f64.s32", as_it_is);
  table.unary<double, uint32_t>("cvt.rn.f64.u32", as_it_is);
  table.unary<double, int64_t>("cvt.rn.f64.s64", as_it_is);
  table.unary<double, uint64_t>("cvt.rn.f64.u64", as_it_is);
}

template <class T>
void comparisons(Table& table, std::initializer_list<const char*> types) {
  for (const std::string type : types) {
    table.binary<bool, T>("setp.eq." + type, [](T a, T b) { return a == b; });
    table.binary<bool, T>("setp.ne." + type, [](T a, T b) { return a != b && a == a && b == b; });
    table.binary<bool, T>("setp.lt." + type, [](T a, T b) { return a < b; });
    table.binary<bool, T>("setp.le." + type, [](T a, T b) { return a <= b; });
    table.binary<bool, T>("setp.gt." + type, [](T a, T b) { return a > b; });
    table.binary<bool, T>("setp.ge." + type, [](T a, T b) { return a >= b; });
    if constexpr (std::is_floating_point_v<T>) {
      table.binary<bool, T>("setp.neu." + type, [](T a, T b) { return a != b; });
      table.binary<bool, T>("setp.nan." + type, [](T a, T b) { return a != a || b != b; });
      table.binary<bool, T>("setp.num." + type, [](T a, T b) { return a == a && b == b; });
    }
  }
}

template <class T>
void moves(Table& table, std::initializer_list<const char*> types) {
  for (const std::string type : types) {
    table.unary<T, T>("mov." + type, [](T a) { return a; });
    if (type == "pred") continue;
    table.define("selp." + type, 4, [](Thread& t, const Instruction& i) {
      t.put<T>(i.operand[0], t.get<T>(i.operand[t.get<bool>(i.operand[3]) ? 1 : 2]));
    });
  }
}

// mov with braces on one side (parse.cpp): the first is the lower half.
template <class Whole, class Half>
void halves(Table& table, const std::string& name) {
  table.define(name + ".pack", 3, [](Thread& t, const Instruction& i) {
    const Whole low = t.get<Half>(i.operand[1]), high = t.get<Half>(i.operand[2]);
    t.put<Whole>(i.operand[0], high << (8 * sizeof(Half)) | low);
  });
  table.define(name + ".unpack", 3, [](Thread& t, const Instruction& i) {
    const auto both = t.get<Whole>(i.operand[2]);
    t.put<Half>(i.operand[0], static_cast<Half>(both));
    t.put<Half>(i.operand[1], static_cast<Half>(both >> (8 * sizeof(Half))));
  });
}

void choices(Table& table) {
  comparisons<int16_t>(table, {"s16"});
  comparisons<uint16_t>(table, {"u16", "b16"});
  comparisons<int32_t>(table, {"s32"});
  comparisons<uint32_t>(table, {"u32", "b32"});
  comparisons<int64_t>(table, {"s64"});
  comparisons<uint64_t>(table, {"u64", "b64"});
  comparisons<float>(table, {"f32"});
  comparisons<double>(table, {"f64"});
  moves<bool>(table, {"pred"});
  moves<uint16_t>(table, {"u16", "s16", "b16"});
  moves<uint32_t>(table, {"u32", "s32", "b32", "f32"});
  moves<uint64_t>(table, {"u64", "s64", "b64", "f64"});
  halves<uint64_t, uint32_t>(table, "mov.b64");
  halves<uint32_t, uint16_t>(table, "mov.b32");
}

// ---- control ------------------------------------------------------------------------------------

void control(Table& table) {
  table.define("bra", 0, [](Thread& t, const Instruction& i) { t.next = i.target; });
  table.define("ret", 0, [](Thread& t, const Instruction&) { t.has_returned = true; });
  table.define("call.uni", 0, [](Thread& t, const Instruction& i) { call(t, i.target); });
}

}  // namespace

void define_moves(Table& table) {
  conversions(table);
  choices(table);
  control(table);
}

}  // namespace ptx_on_cpu
