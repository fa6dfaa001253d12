"""Times the choices that the record format froze: tile rows, lanes, how the checksum mixes.

python bench/choices.py     writes bench/results/choices.json, prints a Markdown table

Each case is the vector kernel of this machine, compiled from a temporary copy of csrc with one
choice replaced in its text, with the flags of CMakeLists.txt. A pass is one thread over 256 KiB,
which stay in the L2 cache: what is measured is instructions, not memory. The passes of all cases
are interleaved, and the fastest of thousands stands, which a busy machine leaves alone.
Cycles are in units of a chain of dependent additions, timed beside every pass.

Differences of some percent say little: another case is also another layout of the code. The rest
of the kernel is what was written for the frozen choice, so that 32 lanes do without its packed
sign masks. The other tile sizes are timed only: that the scaled sums of squares stay in range
(core/order.h) was shown for 64 rows.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fastcheck
import harness
from fastcheck import _C

BUFFER_BYTES = 256 * 1024
ROUNDS = 400
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
    """One replacement in one file below csrc; the pattern must be there exactly once."""

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
CASES = [
    FROZEN,
    *(Case(f"{n} rows", rows(n)) for n in (32, 128, 256)),
    *(Case(f"{n} lanes", lanes(n)) for n in (32, 128)),
    EACH,
    Case("no checksum (depth stats)", depth="stats"),
]


# ---- building ------------------------------------------------------------------------------------


def vector_isa() -> str:
    for name, usable, _ in _C.cpu_isas():
        if usable and name.startswith("avx"):
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
        "-O3",
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
        code = next(code for code, name, *_ in _C.dtype_table() if DTYPES.get(name) is x.dtype)
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


# ---- correctness first ---------------------------------------------------------------------------


def sample(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    """Values of which no whole tile needs a second reading."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)
    assert bool((x.abs() > 2.0**-40).all())
    return x


def place_constants(name: str) -> list[int]:
    text = (harness.ROOT / "csrc" / "core" / "checksum.h").read_text()
    return [int(value, 16) for value in re.findall(rf"{name} = (0x\w+)u;", text)]


def each_word_terms(x: torch.Tensor) -> int:
    """The checksum of EACH_WORD without its term for the length."""
    words = x.view(torch.uint8).numpy().view("<u4").astype(np.uint64)
    width, run_rows = 16 * x.element_size(), 16
    index = np.arange(len(words), dtype=np.uint64)
    chain = index // (width * run_rows) * width + index % width
    row = index // width % run_rows
    constants = zip(*map(place_constants, ("kStart", "kPlaceLow", "kPlaceHigh")), MIXES.values())
    halves = []
    for start, low, high, (first, second, shift) in constants:
        h = (words + start + chain * low + row * high) & 0xFFFFFFFF
        h ^= h >> 16
        h = h * first & 0xFFFFFFFF
        h ^= h >> shift
        h = h * second & 0xFFFFFFFF
        h ^= h >> 16
        halves.append(int(h.sum()) & 0xFFFFFFFF)
    return halves[1] << 32 | halves[0]


def minus(x: int, y: int) -> int:
    """The difference of two checksums, half by half: equal lengths cancel."""
    low, high = (x - y) & 0xFFFFFFFF, ((x >> 32) - (y >> 32)) & 0xFFFFFFFF
    return high << 32 | low


def check(variant: Variant) -> None:
    """The frozen format: every byte. Another: the counts and extremes, and the sums nearly."""
    case = variant.case
    for dtype in DTYPES.values():
        for numel in (1, 65, 4095, 4096, 3 * 4096 + 1030, 17 * 4096, 70001):
            ordinary = sample(dtype, numel, seed=numel)
            special = ordinary.clone()
            for at, value in enumerate((0.0, float("nan"), -0.0, float("-inf"), 1e-39, 2e30)):
                special[at * 4099 % numel] = value
            for x in (ordinary, special):
                got, frozen = variant.record(x), fastcheck.stats(x, depth=case.depth).record
                assert got.tobytes()[:80] == frozen.tobytes()[:80], case.name
                if case is FROZEN or case.depth == "stats":
                    assert got.tobytes() == frozen.tobytes(), case.name
                for name in ("sum", "abs_sum", "sum_sq"):
                    size = float(frozen["sum_sq" if name == "sum_sq" else "abs_sum"])
                    assert abs(float(got[name]) - float(frozen[name])) <= 1e-5 * size, case.name
        if case is EACH:
            x, y = (sample(dtype, 16 * 4096 + 1030, seed) for seed in (1, 2))
            records = [int(variant.record(tensor)["checksum"]) for tensor in (x, y)]
            assert minus(*records) == minus(each_word_terms(x), each_word_terms(y)), case.name


# ---- timing --------------------------------------------------------------------------------------


def measure(variants: list[Variant]) -> tuple[list[dict[str, Any]], float]:
    """One row per case and dtype; and the seconds of a cycle."""
    buffers = {
        name: sample(dtype, BUFFER_BYTES // dtype.itemsize, 0) for name, dtype in DTYPES.items()
    }
    passes: dict[tuple[str, str], list[float]] = {}
    additions: list[float] = []

    def timer(variant: Variant, name: str) -> Callable[[int], None]:
        seconds = passes[name, variant.case.name] = []

        def run(_: int) -> None:
            one, addition = variant.fastest(buffers[name])
            seconds.append(one)
            additions.append(addition)

        return run

    cases = {f"{name} {v.case.name}": timer(v, name) for v in variants for name in DTYPES}
    harness.time_rounds(cases, ROUNDS)
    cycle = min(additions)
    result = []
    for name in DTYPES:
        frozen = min(passes[name, FROZEN.name])
        for variant in variants:
            seconds = passes[name, variant.case.name]
            fastest, per_64 = min(seconds), 64 / BUFFER_BYTES
            halves = min(seconds[::2]), min(seconds[1::2])
            result.append(
                {
                    "case": variant.case.name,
                    "dtype": name,
                    "depth": variant.case.depth,
                    "nanoseconds_per_64_bytes": round(fastest * per_64 * 1e9, 4),
                    "cycles_per_64_bytes": round(fastest * per_64 / cycle, 3),
                    "times_frozen": round(fastest / frozen, 4),
                    # How well the figure is known: the same of even and of odd rounds alone.
                    "even_and_odd_rounds_differ": round(max(halves) / min(halves) - 1, 4),
                }
            )
    return result, cycle


def as_table(measured: list[dict[str, Any]]) -> str:
    header = ["choice"]
    for name in DTYPES:
        header += [f"{name}: ns per 64 bytes", "cycles", "times frozen"]
    lines = []
    for case in CASES:
        line = [case.name]
        for name in DTYPES:
            (row,) = (r for r in measured if (r["case"], r["dtype"]) == (case.name, name))
            line.append(f"{row['nanoseconds_per_64_bytes']:.2f}")
            line.append(f"{row['cycles_per_64_bytes']:.2f}")
            line.append(f"{row['times_frozen']:.2f}")
        lines.append(line)
    return harness.table(header, lines)


def main() -> None:
    isa = vector_isa()
    with tempfile.TemporaryDirectory() as scratch:
        original = Path(scratch) / "csrc"  # one state for all, whatever is edited meanwhile
        shutil.copytree(harness.ROOT / "csrc", original)
        variants = []
        for number, case in enumerate(CASES):
            variants.append(Variant(case, isa, original, Path(scratch) / str(number)))
            check(variants[-1])
        measured, cycle = measure(variants)
    print(as_table(measured))
    version = subprocess.run([compiler(), "--version"], check=True, capture_output=True, text=True)
    harness.write_results(
        "choices",
        measured,
        kernel=isa,
        kernel_compiler=version.stdout.splitlines()[0],
        buffer_bytes=BUFFER_BYTES,
        passes=ROUNDS * PASSES,
        gigahertz=round(1e-9 / cycle, 3),
    )


if __name__ == "__main__":
    main()
