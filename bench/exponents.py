"""Counting exponents, beside a record and a pure read of the same memory.

    python bench/exponents.py [--rounds N]

Writes bench/results/exponents.json, prints a Markdown table.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import fastcheck
import harness
from pure_read import PureRead

# In memory, and in the cache, where a tensor is that was just read for its record.
SIZES = {"64 MiB": 2**26, "256 KiB": 2**18}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
# Of a pure read, the project's own bar for float32.
BAR = 0.85
# record="range" counts in one of so many steps.
STEPS = 32
STEPS_CASE = f"a record in each of {STEPS} steps, exponents in one"


def measure(dtype: torch.dtype, size: str, rounds: int) -> list[dict[str, Any]]:
    count = SIZES[size] // dtype.itemsize
    x = torch.randn(count, generator=torch.Generator().manual_seed(1)).mul_(0.02).to(dtype)
    other = x.clone()
    inputs = (x, other)
    found = fastcheck.exponents(x)
    assert found.elements.sum() == found.count == int((x.float() != 0).sum())
    read = PureRead(1, x)
    cases: dict[str, harness.Case] = {
        "pure read": lambda i: read(inputs[i % 2]),
        "record": lambda i: fastcheck.stats(inputs[i % 2]),
        "exponents": lambda i: fastcheck.exponents(inputs[i % 2]),
        "record, then exponents": lambda i: (
            fastcheck.stats(inputs[i % 2]),
            fastcheck.exponents(inputs[i % 2]),
        ),
    }
    seconds = harness.time_rounds(cases, rounds)
    # Of STEPS steps, in one of which the tensor is counted too.
    seconds[STEPS_CASE] = seconds["record"] + seconds["exponents"] / STEPS
    return [
        {
            "dtype": str(dtype).removeprefix("torch."),
            "size": size,
            "case": case,
            "rounds": rounds,
            "seconds": harness.spread(times),
            "gb_per_s": harness.spread(x.nbytes / times / 1e9),
            "fraction_of_pure_read": harness.ratio(seconds["pure read"], times),
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
        ]
        for row in rows
    ]
    print(harness.table(["dtype", "size", "case", "GB/s", "of a pure read"], lines))
    missed = [
        f"{row['dtype']}, {row['size']}, {row['case']}: "
        f"{row['fraction_of_pure_read']['median']:.2f} < {BAR}"
        for row in rows
        if row["case"] in ("exponents", STEPS_CASE)
        and row["dtype"] == "float32"
        and row["fraction_of_pure_read"]["median"] < BAR
    ]
    print("\n" + ("Bars missed: " + "; ".join(missed) if missed else "All bars reached."))
    harness.write_results("exponents", rows, missed_bars=missed)


if __name__ == "__main__":
    main()
