"""Times alternatives to the record format's choices: tile rows, lanes, mixing of the checksum.

    python bench/choices.py     writes bench/results/choices.json, prints a Markdown table

Each case is the vector kernel of this machine, compiled from a temporary copy of csrc in which one
choice is replaced, with the flags of CMakeLists.txt. A pass is one thread over 256 KiB, which stay
in the L2 cache, so that instructions are measured and not memory. The passes of all cases are
interleaved. The result is the fastest of thousands of passes, which other load does not change.
Cycles are in units of a chain of dependent additions, timed beside every pass.

Differences of a few percent mean little, because each case also has another layout of the code. The
rest of the kernel is written for the chosen format, so that 32 lanes lack its packed sign masks.
The other tile sizes are only timed: that scaled sums of squares stay in range (core/order.h) was
shown for 64 rows."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fastcheck
import harness
from choices_variants import (
    CASES,
    DTYPES,
    EACH,
    FROZEN,
    MIXES,
    PASSES,
    Variant,
    compiler,
    vector_isa,
)

BUFFER_BYTES = 256 * 1024
ROUNDS = harness.size(400, 1)


# ---- correctness first ---------------------------------------------------------------------------


def sample(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    """Values for which no whole tile is read a second time."""
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
    """The difference of two checksums, half by half: length terms cancel if lengths are equal."""
    low, high = (x - y) & 0xFFFFFFFF, ((x >> 32) - (y >> 32)) & 0xFFFFFFFF
    return high << 32 | low


def check(variant: Variant) -> None:
    """The format's case equals the kernel byte for byte; other cases in counts and extremes, and
    nearly in sums.
    """
    case = variant.case
    for dtype in DTYPES.values():
        for numel in (1, 65, 4095, 4096, 3 * 4096 + 1030, 17 * 4096, 70001):
            ordinary = sample(dtype, numel, seed=numel)
            special = ordinary.clone()
            for at, value in enumerate((0.0, float("nan"), -0.0, float("-inf"), 1e-39, 2e30)):
                special[at * 4099 % numel] = value
            for x in (ordinary, special):
                got, frozen = variant.record(x), fastcheck.stats(x, record=case.depth).record
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
    """One row per case and dtype, and the seconds of a cycle."""
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
            halves = [min(half) for half in (seconds[::2], seconds[1::2]) if half]
            result.append(
                {
                    "case": variant.case.name,
                    "dtype": name,
                    "depth": variant.case.depth,
                    "nanoseconds_per_64_bytes": round(fastest * per_64 * 1e9, 4),
                    "cycles_per_64_bytes": round(fastest * per_64 / cycle, 3),
                    "times_frozen": round(fastest / frozen, 4),
                    # The precision of the figure: the same from even and from odd rounds only.
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
