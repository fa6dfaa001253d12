// The instructions that are known, and how each is defined.
//
// What one does is what the PTX ISA 9.0 says of it (chapter "Instruction Set"). Where that leaves a
// result open, the result is drawn at random.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <type_traits>
#include <utility>

#include "ptx_on_cpu/machine.h"

namespace ptx_on_cpu {

// F is known by its type alone: a lambda without a capture, or a class without members.
class Table {
 public:
  void define(const std::string& name, int operands, Execute execute) {
    if (!map_.emplace(name, Definition{execute, operands}).second) std::abort();
  }

  // d = f(a), f(a, b) or f(a, b, c), of one type.
  template <class Out, class In, class F>
  void unary(const std::string& name, F) {
    static_assert(std::is_empty_v<F>);
    define(name, 2, [](Thread& t, const Instruction& i) {
      t.put<Out>(i.operand[0], static_cast<Out>(F{}(t.get<In>(i.operand[1]))));
    });
  }
  template <class Out, class In, class F>
  void binary(const std::string& name, F) {
    static_assert(std::is_empty_v<F>);
    define(name, 3, [](Thread& t, const Instruction& i) {
      t.put<Out>(i.operand[0],
                 static_cast<Out>(F{}(t.get<In>(i.operand[1]), t.get<In>(i.operand[2]))));
    });
  }
  template <class T, class F>
  void ternary(const std::string& name, F) {
    static_assert(std::is_empty_v<F>);
    define(name, 4, [](Thread& t, const Instruction& i) {
      t.put<T>(i.operand[0], static_cast<T>(F{}(t.get<T>(i.operand[1]), t.get<T>(i.operand[2]),
                                                t.get<T>(i.operand[3]))));
    });
  }

  std::map<std::string, Definition> take() { return std::move(map_); }

 private:
  std::map<std::string, Definition> map_;
};

// A word of two halves, each on its own.
template <class Half, class Pick>
void define_packed(Table& table, const std::string& name) {
  table.binary<std::uint32_t, std::uint32_t>(name, [](std::uint32_t a, std::uint32_t b) {
    std::uint32_t out = 0;
    for (int shift = 0; shift < 32; shift += 16) {
      const Half half = Pick{}(static_cast<Half>(a >> shift), static_cast<Half>(b >> shift));
      out |= static_cast<std::uint32_t>(static_cast<std::uint16_t>(half)) << shift;
    }
    return out;
  });
}

void define_integers(Table& table);  // integers.cpp
void define_floats(Table& table);    // floats.cpp
void define_moves(Table& table);     // moves.cpp
void define_accesses(Table& table);  // accesses.cpp
void define_meetings(Table& table);  // meetings.cpp

}  // namespace ptx_on_cpu
