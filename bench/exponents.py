"""Counting exponents, alone and in the pass of a record, beside a pure read of as much memory.

    python bench/exponents.py [--rounds N]

Writes bench/results/exponents.json, prints a Markdown table.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import fastcheck
import harness
from fastcheck.backends.table import backend_for
from fastcheck.record.format import RECORD_BYTES
from pure_read import PureRead

# In memory, and in the cache; and rows of a larger matrix, which have to be gathered.
LARGE = harness.size(2**26, 2**20)
SIZES = {"64 MiB": LARGE, "256 KiB": 2**18, "64 MiB, rows apart": LARGE}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
# Of a pure read, the project's own bar for float32.
BAR = 0.85
# record="range" counts in one of so many steps.
STEPS = 32
STEPS_CASE = f"a record in each of {STEPS} steps, exponents in one"
FULL = 3


def measure(dtype: torch.dtype, size: str, rounds: int) -> list[dict[str, Any]]:
    count = SIZES[size] // dtype.itemsize
    memory = torch.randn(count, generator=torch.Generator().manual_seed(1)).mul_(0.02).to(dtype)
    x, other = memory, memory.clone()
    if "rows" in size:
        x, other = (
            torch.cat([one.view(-1, 2048), one[: count // 2048, None]], 1)[:, :2048]
            for one in (memory, other)
        )
    inputs = (x, other)
    found = fastcheck.exponents(x)
    assert found.elements.sum() == found.count == int((x.float() != 0).sum())
    read = PureRead(1, memory)
    backend = backend_for(x.device)
    assert backend.exponents is not None and backend.observe_and_count is not None
    slots = torch.zeros((1, RECORD_BYTES), dtype=torch.uint8)
    cases: dict[str, harness.Case] = {
        "pure read": lambda i: read(memory),
        "record": lambda i: backend.observe(inputs[i % 2], slots, 0, FULL),
        "exponents": lambda i: backend.exponents(inputs[i % 2], False),
        "record, then exponents": lambda i: (
            backend.observe(inputs[i % 2], slots, 0, FULL),
            backend.exponents(inputs[i % 2], False),
        ),
        "record with exponents": lambda i: backend.observe_and_count(inputs[i % 2], slots, 0),
    }
    seconds = harness.time_rounds(cases, rounds)
    # Of STEPS steps, in one of which the tensor is counted too.
    both = seconds["record with exponents"]
    seconds[STEPS_CASE] = seconds["record"] + (both - seconds["record"]) / STEPS
    shares = {"record with exponents": harness.ratio(both, seconds["record, then exponents"])}
    return [
        {
            "dtype": str(dtype).removeprefix("torch."),
            "size": size,
            "case": case,
            "rounds": rounds,
            "seconds": harness.spread(times),
            "gb_per_s": harness.spread(x.nbytes / times / 1e9),
            "fraction_of_pure_read": harness.ratio(seconds["pure read"], times),
            "of_two_passes": shares.get(case),
        }
        for case, times in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = [row for dtype in DTYPES for size in SIZES for row in measure(dtype, size, rounds)]
    lines = [
        [
            row["dtype"],
            row["size"],
            row["case"],
            harness.with_spread(row["gb_per_s"], 1),
            harness.with_spread(row["fraction_of_pure_read"]),
            harness.with_spread(row["of_two_passes"]) if row["of_two_passes"] else "",
        ]
        for row in rows
    ]
    print(
        harness.table(["dtype", "size", "case", "GB/s", "of a pure read", "of two passes"], lines)
    )
    missed = [
        f"{row['dtype']}, {row['size']}, {row['case']}: "
        f"{row['fraction_of_pure_read']['median']:.2f} < {BAR}"
        for row in rows
        if row["case"] in ("record with exponents", STEPS_CASE)
        and row["dtype"] == "float32"
        and row["size"] == "64 MiB"
        and row["fraction_of_pure_read"]["median"] < BAR
    ]
    print("\n" + ("Bars missed: " + "; ".join(missed) if missed else "All bars reached."))
    harness.write_results("exponents", rows, missed_bars=missed)


if __name__ == "__main__":
    main()
