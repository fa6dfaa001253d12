// Families of structured variants: each fills a list with (name, checksum) of many variants of one
// base tensor.
#pragma once

#include <functional>
#include <map>
#include <numeric>

#include "collision_tensors.h"

// The tensor a family starts from, and how many variants are wanted.
struct Case {
  std::string kind;
  size_t numel;
  int itemsize;
  u64 count;
};
using Family = std::function<void(Found&, const Case&)>;

// `places` changes: `pick` chooses elements, `edit` changes the word that holds their sign.
template <class Pick, class Edit>
void change_some(Found& out, const Base& base, u64 count, int places, Pick pick, Edit edit) {
  Rng r{count + places};
  for (u64 k = 0; k < count; ++k) {
    Base::Change c[16];
    int n = 0;
    size_t first = 0;
    for (int p = 0; p < places; ++p) {
      const size_t e = pick(r, p, first), at = sign_word(base.words, e);
      if (p == 0) first = e;
      int i = 0;
      while (i < n && c[i].at != at) ++i;
      if (i == n) c[n++] = {at, base.words.word[at]};
      c[i].value = edit(r, e, c[i].value);
    }
    base.add_variant(out, c, n);
  }
}

// Every choice of bits (i, j) at a random place: `edits(place, i, j, changes)` returns how many
// words it changes, 0 to pass.
template <class Edits>
Family all_bits(u64 seed, int second_bits, Edits edits) {
  return [=](Found& out, const Case& c) {
    const Base base(make_base(c.kind, c.numel, c.itemsize, seed));
    if (base.words.word.size() <= 2 * base.words.width()) return;
    Rng r{seed};
    while (out.item.size() < c.count) {
      const size_t at = r.below(base.words.word.size() - 2 * base.words.width()), other = r.next();
      for (int i = 0; i < 32; ++i) {
        for (int j = 0; j < second_bits; ++j) {
          Base::Change change[4];
          const int n = edits(base, at, other, i, j, change);
          if (n > 0) base.add_variant(out, change, n);
        }
      }
    }
  };
}

// Variants that touch everything: `make(variant, base, random, index)`, hashed whole, as many as 64
// elements each would allow.
template <class Make>
Family rebuilt(Make make) {
  return [=](Found& out, const Case& c) {
    const Words base = make_base(c.kind, c.numel, c.itemsize, 10);
    Rng r{c.numel + c.itemsize};
    for (u64 i = 0, n = std::min<u64>(c.count, 64 * c.count / c.numel); i < n; ++i) {
      Words t = base;
      make(t, base, r, i);
      out.add(t);
    }
  };
}

// Units permuted (rolls and up to four swaps). A term depends on (place, content) alone: a table of
// them makes all variants.
template <class Content>
Family units_permuted(Content content) {
  return [=](Found& out, const Case& c) {
    constexpr size_t n = 64;
    const std::string kind = c.kind == "constant" || c.kind == "zeros" ? "smallint" : c.kind;
    Rng r{n + c.itemsize};
    std::vector<u64> table(n * n), names(n * n);
    for (size_t i = 0; i < n * n; ++i) {
      const auto [name, term] = content(kind, c.itemsize, i / n, i % n);
      names[i] = name, table[i] = term;
    }
    std::vector<size_t> p(n);
    for (u64 i = 0; i < c.count; ++i) {
      std::iota(p.begin(), p.end(), 0);
      if (i % 2) std::rotate(p.begin(), p.begin() + r.below(n), p.end());
      for (int swaps = int(r.below(5)); swaps > 0; --swaps) std::swap(p[r.below(n)], p[r.below(n)]);
      u64 sum = 0, name = 0;
      for (size_t q = 0; q < n; ++q)
        sum = add_halves(sum, table[q * n + p[q]]), name += names[q * n + p[q]];
      out.item.emplace_back(name, sum);
    }
  };
}

// A unit of whole runs: `elements` of content `c` at `place`.
inline auto run_unit(size_t elements) {
  return [=](const std::string& kind, int itemsize, size_t place, size_t c) {
    const Words t = make_base(kind, elements, itemsize, 100 + c);
    const size_t run = t.width() * kChainWords, runs = t.word.size() / run;
    u64 sum = 0, name = 0;
    for (size_t q = 0; q < runs; ++q) {
      sum = add_halves(sum,
                       run_terms(&t.word[q * run], run, t.width(), (place * runs + q) * t.width()));
    }
    for (size_t q = 0; q < t.word.size(); ++q)
      name += name_of_word(place * t.word.size() + q, t.word[q]);
    return std::make_pair(name, sum);
  };
}

inline std::pair<u64, u64> lane_unit(const std::string& kind, int itemsize, size_t place,
                                     size_t c) {
  const Words t = make_base(kind, 64, itemsize, 100 + c);
  Chain h(place);
  u64 name = 0;
  for (int q = 0; q < kChainWords; ++q)
    h.add(t.word[q]), name += name_of_word(place * kChainWords + q, t.word[q]);
  return {name, h.term()};
}

inline void permute_blocks(Words& t, const Words& base, Rng& r, size_t block) {
  std::vector<size_t> p(t.nbytes / block);
  std::iota(p.begin(), p.end(), 0);
  for (size_t i = p.size(); i > 1; --i) std::swap(p[i - 1], p[r.below(i)]);
  for (size_t i = 0; i < p.size(); ++i)
    std::memcpy(t.bytes() + i * block, base.bytes() + p[i] * block, block);
}

inline void swap_elements(Found& out, const Case& c) {
  const Base base(make_base(c.kind, c.numel, c.itemsize, 9));
  Rng r{9};
  for (u64 i = 0; i < c.count; ++i) {
    const size_t size = c.itemsize, x = r.below(c.numel) * size, y = r.below(c.numel) * size;
    Base::Change change[4];
    int n = 0;
    const auto set = [&](size_t byte, char value) {
      int q = 0;
      while (q < n && change[q].at != byte / 4) ++q;
      if (q == n) change[n++] = {byte / 4, base.words.word[byte / 4]};
      const int shift = int(byte % 4 * 8);
      change[q].value =
          (change[q].value & ~(255u << shift)) | u32(static_cast<unsigned char>(value)) << shift;
    };
    for (size_t j = 0; j < size; ++j)
      set(x + j, base.words.bytes()[y + j]), set(y + j, base.words.bytes()[x + j]);
    base.add_variant(out, change, n);
  }
}

// Each prefix of a long tensor (of zeros: the zero-padded lengths), one word more each time.
inline void prefixes(Found& out, const Case& c) {
  const Words t = make_base(c.kind, c.count, c.itemsize, 12);
  const size_t w = t.width();
  std::vector<Chain> chain(w);
  u64 sum = 0, name = 0;
  for (size_t at = 0; at < t.word.size(); ++at) {
    Chain& h = chain[at % w];
    if (at % (w * kChainWords) < w)
      h = Chain(at / (w * kChainWords) * w + at % w);
    else
      sum = subtract_halves(sum, h.term());
    h.add(t.word[at]);
    sum = add_halves(sum, h.term());
    name += name_of_word(at, t.word[at]);
    const u64 nbytes = 4 * (at + 1);
    if (nbytes % c.itemsize == 0)
      out.item.emplace_back(name + splitmix(~nbytes), add_halves(sum, length_terms(nbytes)));
  }
}

inline void all_equal(Found& out, const Case& c) {
  if (c.kind != "constant" || c.itemsize == 1) return;  // 256 values do not make 10^8 pairs
  Words t = blank(c.numel, c.itemsize);
  for (u64 i = 0, n = std::min<u64>(c.itemsize == 2 ? 65536 : c.count, 256 * c.count / c.numel);
       i < n; ++i) {
    for (size_t e = 0; e < t.word.size(); ++e) {
      t.word[e] = c.itemsize == 2   ? u32(i) * 65537u
                  : c.itemsize == 4 ? u32(i) << (c.numel > 64 ? 7 : 0)
                  : e & 1           ? u32(i) << 12
                                    : 0;
    }
    out.add(t);
  }
}

inline void rolled(Found& out, const Case& c) {
  const Words base = make_base(c.kind, c.numel, c.itemsize, 11);
  for (size_t i = 0; i < std::min<size_t>(c.numel, 16384); ++i) {
    Words t = base;
    std::rotate(t.bytes(), t.bytes() + i * c.itemsize, t.bytes() + t.nbytes);
    out.add(t);
  }
}

inline std::map<std::string, Family> families() {
  std::map<std::string, Family> f;
  const auto anywhere = [](const Words& t) {
    return [n = t.numel()](Rng& r, int, size_t) { return size_t(r.below(n)); };
  };
  const auto one_run =
      [](const Words& t) {  // one lane's run of 16 rows: one chain, or two in float64
        return [n = t.numel()](Rng& r, int p, size_t first) {
          if (p == 0) return size_t(r.below(n));
          const size_t start = first / 1024 * 1024, top = start + first % 64;
          return top + size_t(r.below((std::min(n, start + 1024) - top + 63) / 64)) * 64;
        };
      };
  const auto last_rows = [](const Words& t) {
    return [n = t.numel()](Rng& r, int, size_t) {
      const size_t end = std::min(n, (r.below((n + 1023) / 1024) + 1) * 1024);
      return end - 1 - size_t(r.below(std::min<size_t>(64, end)));
    };
  };
  const auto flip_sign = [](const Words& t) {
    return [&t](Rng&, size_t e, u32 v) { return v ^ sign_bit(t, e); };
  };
  const auto low_bits = [](const Words&) {
    return [](Rng& r, size_t, u32 v) { return v + u32(r.below(8)) - 4u; };
  };
  const auto some = [](int places, u64 seed, auto pick, auto edit) -> Family {
    return [=](Found& out, const Case& c) {
      const Base base(make_base(c.kind, c.numel, c.itemsize, seed));
      change_some(out, base, c.count, places, pick(base.words), edit(base.words));
    };
  };

  f["sign flip, one"] = [](Found& out, const Case& c) {
    const Base base(make_base(c.kind, c.numel, c.itemsize, 1));
    for (size_t e = 0; e < c.numel; ++e) {
      const size_t at = sign_word(base.words, e);
      const Base::Change change{at, base.words.word[at] ^ sign_bit(base.words, e)};
      base.add_variant(out, &change, 1);
    }
  };
  for (int places : {2, 3, 4, 8}) {
    f["sign flips, " + std::to_string(places) + " anywhere"] = some(places, 2, anywhere, flip_sign);
    f["sign flips, " + std::to_string(places) + " in one lane's run"] =
        some(places, 3, one_run, flip_sign);
  }
  f["sign flips, 2 in last rows"] = some(2, 4, last_rows, flip_sign);
  f["low bits, 2 anywhere"] = some(2, 7, anywhere, low_bits);
  f["low bits, 4 in one lane's run"] = some(4, 8, one_run, low_bits);
  f["swap of two elements"] = swap_elements;
  f["one-hot pairs in zeros"] = [=](Found& out, const Case& c) {
    if (c.kind != "zeros") return;
    const Base base(blank(c.numel, c.itemsize));
    change_some(out, base, c.count, 2, anywhere(base.words), [](Rng& r, size_t, u32) {
      constexpr u32 kPool[8] = {1,      0x3f80,     0x3f800000, 0x80000000,
                                0x8000, 0x3f803f80, 0x7f,       0x01010101};
      return kPool[r.below(8)];
    });
  };

  // Changes that could cancel inside a chain: rows r and r+1 (words x and x + width) of the same
  // word-lane.
  f["bit flips, adjacent rows of a chain"] =
      all_bits(5, 32, [](const Base& b, size_t x, size_t, int i, int j, auto* c) {
        const size_t y = x + b.words.width();
        c[0] = {x, b.words.word[x] ^ 1u << i}, c[1] = {y, b.words.word[y] ^ 1u << j};
        return 2;
      });
  f["words +2^i, +-2^j, adjacent rows of a chain"] =
      all_bits(6, 64, [](const Base& b, size_t x, size_t, int i, int j, auto* c) {
        const size_t y = x + b.words.width();
        c[0] = {x, b.words.word[x] + (1u << i)},
        c[1] = {y, b.words.word[y] + (j & 1 ? 1u : -1u) * (1u << j / 2)};
        return 2;
      });
  f["bit flips, adjacent rows of two chains"] =
      all_bits(14, 32, [](const Base& b, size_t x, size_t other, int i, int j, auto* c) {
        const size_t w = b.words.width(), y = other % (b.words.word.size() - w);
        if (b.chain(x) == b.chain(y)) return 0;
        c[0] = {x, b.words.word[x] ^ 1u << i}, c[1] = {x + w, b.words.word[x + w] ^ 1u << j};
        c[2] = {y, b.words.word[y] ^ 1u << i}, c[3] = {y + w, b.words.word[y + w] ^ 1u << j};
        return 4;
      });
  f["bit flips, three adjacent rows of a chain"] =
      all_bits(15, 1024, [](const Base& b, size_t x, size_t, int i, int j, auto* c) {
        const size_t y = x + b.words.width(), z = y + b.words.width();
        c[0] = {x, b.words.word[x] ^ 1u << i}, c[1] = {y, b.words.word[y] ^ 1u << j % 32},
        c[2] = {z, b.words.word[z] ^ 1u << j / 32};
        return 3;
      });
  f["bit flips, two in one row"] =
      all_bits(13, 32, [](const Base& b, size_t x, size_t other, int i, int j, auto* c) {
        const size_t w = b.words.width(), rows = b.words.word.size() / w,
                     row = other & 1 ? rows - 1 : x / w;
        const size_t u = row * w + x % w,
                     v = row * w +
                         (other >> 8) % w;  // every other time the last row, nearest the end
        if (u == v) return 0;
        c[0] = {u, b.words.word[u] ^ 1u << i}, c[1] = {v, b.words.word[v] ^ 1u << j};
        return 2;
      });
  f["sign patterns of one word-lane's run"] = [](Found& out, const Case& c) {
    const Base base(make_base(c.kind, c.numel, c.itemsize, 16));
    const size_t w = base.words.width(), run = w * kChainWords;
    if (base.words.word.size() < run) return;
    Rng r{16};
    for (u64 i = 0; i < c.count; ++i) {
      const size_t top = r.below(base.words.word.size() / run) * run +
                         (c.itemsize == 8 ? r.below(w / 2) * 2 + 1 : r.below(w));
      const u64 rows = r.next();
      Base::Change change[kChainWords];
      for (int q = 0; q < kChainWords; ++q) {
        const u32 flips =
            c.itemsize >= 4 ? u32(rows >> q & 1) << 31 : u32(r.next()) & sign_mask(base.words);
        change[q] = {top + q * w, base.words.word[top + q * w] ^ flips};
      }
      base.add_variant(out, change, kChainWords);
    }
  };

  // Rows of 64 elements.
  f["rows permuted"] = rebuilt(
      [](Words& t, const Words& b, Rng& r, u64) { permute_blocks(t, b, r, 64 * t.itemsize); });
  f["blocks permuted (16, 64, 256 elements)"] =
      rebuilt([](Words& t, const Words& b, Rng& r, u64 i) {
        permute_blocks(t, b, r, (size_t(16) << 2 * (i % 3)) * t.itemsize);
      });
  f["two rows swapped, two more rolled"] = rebuilt([](Words& t, const Words& b, Rng& r, u64) {
    const size_t row = 64 * t.itemsize, rows = t.nbytes / row, x = r.below(rows) * row,
                 y = r.below(rows) * row;
    std::memcpy(t.bytes() + x, b.bytes() + y, row);
    std::memcpy(t.bytes() + y, b.bytes() + x, row);
    for (int i = 0; i < 2; ++i) {
      char* at = t.bytes() + r.below(rows) * row;
      std::rotate(at, at + r.below(64) * t.itemsize, at + row);
    }
  });
  f["every row rolled by its own amount"] = rebuilt([](Words& t, const Words&, Rng& r, u64) {
    const size_t row = 64 * t.itemsize;
    for (char* at = t.bytes(); at + row <= t.bytes() + t.nbytes; at += row) {
      std::rotate(at, at + r.below(64) * t.itemsize, at + row);
    }
  });
  f["rows negated, any subset"] = rebuilt([](Words& t, const Words&, Rng& r, u64) {
    for (size_t at = 0; at + t.width() <= t.word.size(); at += t.width()) {
      if (r.next() & 1) continue;
      for (size_t i = t.itemsize == 8; i < t.width(); i += t.itemsize == 8 ? 2 : 1)
        t.word[at + i] ^= sign_mask(t);
    }
  });
  f["tensor rolled"] = rolled;

  // Contents.
  f["small integers"] = rebuilt([](Words& t, const Words&, Rng& r, u64 i) {
    const int range = 2 + int(i % 3);
    for (size_t e = 0; e < t.numel(); ++e) {
      const int v = int(r.below(range)) - (range == 3);
      if (i & 4)
        put(t, e, float(v));
      else
        std::memset(t.bytes() + e * t.itemsize, 0, t.itemsize), t.bytes()[e * t.itemsize] = char(v);
    }
  });
  f["constant runs"] = rebuilt([](Words& t, const Words&, Rng& r, u64) {
    constexpr float kPool[] = {1, -1, 0.5f, 2, 3, 100, 1e-3f, 65504};
    const size_t n = t.numel(), from = r.below(n), to = from + 1 + r.below(n - from);
    const float v = kPool[r.below(8)];
    for (size_t e = from; e < to; ++e) put(t, e, v);
  });
  f["all elements equal"] = all_equal;
  f["lengths (prefixes of a long tensor)"] = prefixes;

  f["tiles permuted"] = units_permuted(run_unit(4096));
  f["runs permuted"] = units_permuted(run_unit(1024));
  f["lanes permuted"] = units_permuted(lane_unit);
  return f;
}
