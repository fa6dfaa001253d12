// Tensors for the collision search: words, base contents, and checksums recomputed one chain at a
// time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "collision_checksum.h"

// One tensor as words. A row of 64 elements has `width` word-lanes.
struct Words {
  std::vector<u32> word;
  int itemsize = 4;
  u64 nbytes = 0;
  size_t width() const { return size_t(16) * itemsize; }
  size_t numel() const { return nbytes / itemsize; }
  char* bytes() { return reinterpret_cast<char*>(word.data()); }
  const char* bytes() const { return reinterpret_cast<const char*>(word.data()); }
};

inline u64 checksum(const Words& t) {
  const size_t run = t.width() * kChainWords;
  u64 sum = length_terms(t.nbytes);
  for (size_t at = 0; at < t.word.size(); at += run) {
    sum = add_halves(sum, run_terms(&t.word[at], std::min(run, t.word.size() - at), t.width(),
                                    at / run * t.width()));
  }
  return sum;
}

inline u64 splitmix(u64 x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

struct Rng {
  u64 state;
  u64 next() { return splitmix(state++); }
  u64 below(u64 n) { return u64((unsigned __int128)next() * n >> 64); }
};

// A 64-bit name of the content that owes nothing to the checksum: equal names are the same tensor
// twice, which is no collision. Additive over words, so that a variant's name costs what it
// changed.
inline u64 name_of_word(size_t at, u32 word) { return splitmix(splitmix(at) ^ word); }
inline u64 name_of(const Words& t) {
  u64 sum = splitmix(~t.nbytes);
  for (size_t i = 0; i < t.word.size(); ++i) sum += name_of_word(i, t.word[i]);
  return sum;
}

// What a family made: name and checksum of every variant.
struct Found {
  std::vector<std::pair<u64, u64>> item;
  void add(const Words& t) { item.emplace_back(name_of(t), checksum(t)); }
};

// A base tensor whose variants touch few words: only the chains they touch are computed again.
class Base {
 public:
  struct Change {
    size_t at = 0;
    u32 value = 0;
  };
  explicit Base(Words t) : words(std::move(t)), total_(checksum(words)), name_(name_of(words)) {}

  void add_variant(Found& out, const Change* c, int n) const {
    u64 sum = total_, name = name_;
    for (int i = 0; i < n; ++i) {
      name += name_of_word(c[i].at, c[i].value) - name_of_word(c[i].at, words.word[c[i].at]);
      bool done = false;
      for (int j = 0; j < i; ++j) done |= chain(c[j].at) == chain(c[i].at);
      if (!done) sum = add_halves(sum, subtract_halves(term(c[i].at, c, n), term(c[i].at, c, 0)));
    }
    out.item.emplace_back(name, sum);
  }
  size_t chain(size_t at) const {
    return at / (words.width() * kChainWords) * words.width() + at % words.width();
  }
  const Words words;

 private:
  u64 term(size_t at, const Change* c, int n) const {
    const size_t w = words.width(), top = at / (w * kChainWords) * w * kChainWords + at % w;
    Chain h(chain(at));
    for (size_t q = top; q < words.word.size() && q < top + w * kChainWords; q += w) {
      u32 value = words.word[q];
      for (int i = 0; i < n; ++i) value = c[i].at == q ? c[i].value : value;
      h.add(value);
    }
    return h.term();
  }
  u64 total_, name_;
};

inline float normal(Rng& r) {
  const double u = (double(r.next() >> 11) + 1) / 9007199254740993.0;
  const double v = double(r.next() >> 11) / 9007199254740992.0;
  return float(std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * v));
}

// Stores one element: float64, float32, or the upper bits of the float32 (bfloat16; an 8-bit float
// of 7 exponent bits).
inline void put(Words& t, size_t element, float value) {
  if (t.itemsize == 8) {
    const double wide = value;
    std::memcpy(&t.word[2 * element], &wide, 8);
    return;
  }
  u32 bits;
  std::memcpy(&bits, &value, 4);
  bits >>= 32 - 8 * t.itemsize;
  std::memcpy(t.bytes() + element * t.itemsize, &bits, t.itemsize);
}

inline Words blank(size_t numel, int itemsize) {
  Words t;
  t.itemsize = itemsize;
  t.nbytes = numel * itemsize;
  t.word.assign((t.nbytes + 3) / 4, 0);
  return t;
}

inline Words make_base(const std::string& kind, size_t numel, int itemsize, u64 seed) {
  Words t = blank(numel, itemsize);
  Rng r{seed * 7919 + 17};
  if (kind == "zeros") return t;
  for (size_t i = 0; i < numel; ++i) {
    put(t, i,
        kind == "normal"     ? normal(r)
        : kind == "constant" ? 0.5f
        : kind == "smallint" ? float(r.below(4))
                             : float(i));
  }
  return t;
}

// The word that holds an element's sign, the sign in it, and all the signs of a word.
inline size_t sign_word(const Words& t, size_t e) {
  return t.itemsize == 8 ? 2 * e + 1 : e * t.itemsize / 4;
}
inline u32 sign_bit(const Words& t, size_t e) {
  return t.itemsize >= 4 ? 0x80000000u : 1u << (8 * (e * t.itemsize % 4 + t.itemsize) - 1);
}
inline u32 sign_mask(const Words& t) {
  return t.itemsize >= 4 ? 0x80000000u : t.itemsize == 2 ? 0x80008000u : 0x80808080u;
}
