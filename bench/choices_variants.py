"""The alternatives that choices.py times: each one an edit of csrc, compiled and loaded."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fastcheck
import harness
from fastcheck import _kernels

PASSES = 50  # of one case in one round
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEPTHS = {"stats": 2, "full": 3}

# Compiled into each variant: a record, and the seconds of the fastest pass and addition.
DRIVER = """
#include <algorithm>
#include <chrono>
#include "cpu/fp_environment.h"
#include "cpu/vector_@ISA@.h"
//
#include "cpu/vector_kernel.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
using namespace fastcheck;

static cpu::ReduceTiles kernel(int dtype, int depth) {
  static constexpr Depth kStats = Depth::kStats, kFull = Depth::kFull;
  if (dtype == static_cast<int>(DType::k_float32)) {
    return depth == 2 ? cpu::Reduce<Float32, kStats>::run : cpu::Reduce<Float32, kFull>::run;
  }
  return depth == 2 ? cpu::Reduce<BFloat16, kStats>::run : cpu::Reduce<BFloat16, kFull>::run;
}

EXPORT void record(int dtype, int depth, const std::byte* data, std::int64_t numel, Record* out) {
  const FpEnvironment environment;
  Partial part;
  kernel(dtype, depth)(data, numel, 0, &part);
  finalise(part, static_cast<DType>(dtype), kDTypes[dtype], numel, static_cast<Depth>(depth),
           Order::kStorage, *out);
}

template <class Body>
static double seconds_of(Body body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

EXPORT void fastest(int dtype, int depth, const std::byte* data, std::int64_t numel, int passes,
                    double* pass, double* addition) {
  const FpEnvironment environment;
  const cpu::ReduceTiles run = kernel(dtype, depth);
  *pass = *addition = 1.0;
  std::uint64_t x = 0;
  const std::uint64_t one = 1;  // in a register: some processors add constants for nothing
  for (int i = 0; i < passes; ++i) {
    Partial part;
    *pass = std::min(*pass, seconds_of([&] { run(data, numel, 0, &part); }));
    *addition = std::min(*addition, seconds_of([&] {
      for (int n = 0; n < 500; ++n) {
        asm volatile(".rept 16\\n\\tadd %1, %0\\n\\t.endr" : "+r"(x) : "r"(one) : "cc");
      }
    }) / (500 * 16));
  }
}
"""

# The first design of the checksum. A word's place is S + chain * P + row * Q; S, P and Q are
# those of core/checksum.h.
EACH_WORD = """
template <std::uint32_t kFirst, std::uint32_t kSecond, int kShift>
FASTCHECK_FN Words mix(Words h) {
  h ^= h >> 16;
  h *= kFirst;
  h ^= h >> kShift;
  h *= kSecond;
  return h ^ (h >> 16);
}

template <int kVectors>
struct Chains {
  Words a, b;  // sums of terms already
  Words place_a, place_b;

  FASTCHECK_FN_MEMBER void start(std::uint64_t row, int lane) {
    a = b = Words{};
    place_a = seeds<ChecksumA>(row, lane);
    place_b = seeds<ChecksumB>(row, lane);
  }
  FASTCHECK_FN_MEMBER void add(int j, Words word) { add(j, word, splat(~0u)); }
  FASTCHECK_FN_MEMBER void add_some(const std::byte* words, int count, bool) {
    for (int j = 0; j < kVectors; ++j) {
      const auto lanes = (Vec<std::int32_t>)word_iota();
      const Words some = (Words)(lanes < splat(count - j * kWordLanes));
      add(j, load<std::uint32_t>(words + j * kVectorBytes), some);
    }
  }
  FASTCHECK_FN_MEMBER void end(ChecksumTerms& terms) {
    terms.a += a;
    terms.b += b;
  }

 private:
  FASTCHECK_FN_MEMBER void add(int j, Words word, Words mask) {
    a += mix<@MIX_A@>(word + place_a) & mask;
    b += mix<@MIX_B@>(word + place_b) & mask;
    place_a += next<ChecksumA>(j);
    place_b += next<ChecksumB>(j);
  }
  // From the place of vector j of a row to that of what comes next.
  template <class Half>
  FASTCHECK_FN_MEMBER static std::uint32_t next(int j) {
    constexpr std::uint32_t kBeside = kWordLanes * Half::kPlaceLow;
    return j + 1 < kVectors ? kBeside : Half::kPlaceHigh - (kVectors - 1) * kBeside;
  }
};
"""
# First and second multiplier, middle shift: MurmurHash3's, and Wellons' lowbias32.
MIXES = {"@MIX_A@": (0x85EBCA6B, 0xC2B2AE35, 13), "@MIX_B@": (0x7FEB352D, 0x846CA68B, 15)}


def each_word() -> str:
    text = EACH_WORD
    for name, (first, second, shift) in MIXES.items():
        text = text.replace(name, f"{first:#x}u, {second:#x}u, {shift}")
    return text


@dataclass(frozen=True)
class Edit:
    """One replacement in one file below csrc; the pattern must occur exactly once."""

    path: str
    pattern: str
    replacement: str

    def apply(self, csrc: Path) -> None:
        path = csrc / self.path
        text, count = re.subn(
            self.pattern, lambda _: self.replacement, path.read_text(), flags=re.DOTALL
        )
        assert count == 1, f"{self.pattern!r} is {count} times in {self.path}"
        path.write_text(text)


def rows(count: int) -> tuple[Edit, ...]:
    return (Edit("core/order.h", r"kRows = \d+;", f"kRows = {count};"),)


def lanes(count: int) -> tuple[Edit, ...]:
    return (
        Edit("core/order.h", r"kLanes = \d+;", f"kLanes = {count};"),
        Edit("core/checksum.h", r"16 \* component_size", "kLanes / 4 * component_size"),
    )


MIX_EACH_WORD = (
    Edit(
        "cpu/vector_checksum.h",
        r"template <int kVectors>\nstruct Chains \{.*?\n\};\n",
        each_word(),
    ),
)


@dataclass(frozen=True)
class Case:
    name: str
    edits: tuple[Edit, ...] = ()
    depth: str = "full"


FROZEN = Case("frozen: 64 rows, 64 lanes, chains", rows(64) + lanes(64))
EACH = Case("checksum: each word mixed on its own", MIX_EACH_WORD)
CASES = harness.few(
    [
        FROZEN,
        *(Case(f"{n} rows", rows(n)) for n in (32, 128, 256)),
        *(Case(f"{n} lanes", lanes(n)) for n in (32, 128)),
        EACH,
        Case("no checksum (depth stats)", depth="stats"),
    ]
)


# ---- building ------------------------------------------------------------------------------------


def vector_isa() -> str:
    for name, usable, _ in _kernels.cpu_isas():
        if usable and name in ("avx512", "avx2"):
            return name
    raise SystemExit("choices.py times the AVX-512 or the AVX2 kernel; this machine runs neither")


def flags(isa: str) -> list[str]:
    """Those of the real build for this kernel, less its warnings."""
    sources = ("CMakeLists.txt", "csrc/cpu/kernels.cmake")
    text = "\n".join((harness.ROOT / source).read_text() for source in sources)

    def find(pattern: str) -> str:
        found = re.search(pattern, text)
        assert found, f"{' and '.join(sources)} have no {pattern!r}"
        return found.group(1)

    return [
        "-std=c++" + find(r"CMAKE_CXX_STANDARD (\d+)"),
        "-fPIC",
        "-fvisibility=hidden",
        *(f for f in find(r"set\(FASTCHECK_OPTIONS ([^)]*)\)").split() if f[:2] != "-W"),
        *find(rf"fastcheck_vector_kernel\({isa} ([^)]*)\)").split(),
        "-w",
        harness.size("-O3", "-O0"),  # in small nothing is timed
        "-DNDEBUG",
    ]


def compiler() -> str:
    return os.environ.get("CXX", "g++")


class Variant:
    """A case, compiled and loaded."""

    def __init__(self, case: Case, isa: str, original: Path, scratch: Path) -> None:
        self.case = case
        csrc = scratch / "csrc"
        shutil.copytree(original, csrc)
        for edit in case.edits:
            edit.apply(csrc)
        source, library = scratch / "driver.cpp", scratch / "driver.so"
        source.write_text(DRIVER.replace("@ISA@", isa))
        command = [compiler(), *flags(isa), "-shared", f"-I{csrc}", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        self._library = ctypes.CDLL(str(library))

    def _arguments(self, x: torch.Tensor) -> list[Any]:
        code = next(
            code for code, name, *_ in _kernels.dtype_table() if DTYPES.get(name) is x.dtype
        )
        address = ctypes.c_void_p(x.data_ptr())
        return [code, DEPTHS[self.case.depth], address, ctypes.c_int64(x.numel())]

    def record(self, x: torch.Tensor) -> np.ndarray:
        out = np.zeros((), fastcheck.stats(x).record.dtype)
        self._library.record(*self._arguments(x), ctypes.c_void_p(out.ctypes.data))
        return out

    def fastest(self, x: torch.Tensor) -> tuple[float, float]:
        """Seconds of the fastest pass, and of the fastest dependent addition."""
        times = ctypes.c_double(), ctypes.c_double()
        self._library.fastest(*self._arguments(x), PASSES, *map(ctypes.byref, times))
        return times[0].value, times[1].value
