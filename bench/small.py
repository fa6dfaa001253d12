"""Small tensors: the cost of one call from Python, and of each tensor of a list in one call.

    python bench/small.py [--rounds N]     writes bench/results/small.json, prints a Markdown table

"again" is the same list a second time, at once. glibc sorts its fast bins at the first large
request after many small ones, which here is the 192 KB of the list's records. With
GLIBC_TUNABLES=glibc.malloc.mxfast=0 there are no fast bins, and no difference.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

import fastcheck
import harness

SIZES = harness.size((1, 16, 64, 256, 1024, 4096), (1, 64))
DTYPES = {"float32": torch.float32, "float16": torch.float16}
DEPTHS = ("health", "stats", "full")
LIST_LENGTH = harness.size(1000, 100)

# The project's bars, in microseconds.
CALL_BAR = 3.0
LIST_BAR = 0.3  # each, above the reading itself


def check(tensors: list[torch.Tensor]) -> None:
    """Correctness first: the list call agrees with single calls, and these with torch."""
    together = fastcheck.stats(tensors)
    for x, s in zip(tensors, together):
        assert fastcheck.stats(x) == s
        assert s.nan_count == 0 and s.min == float(x.min()) and s.max == float(x.max())


def measure(name: str, numel: int, rounds: int) -> list[dict[str, Any]]:
    """A round takes every case over all the 1000 tensors, call by call or at once."""
    generator = torch.Generator().manual_seed(numel)
    tensors = [torch.randn(numel, generator=generator).to(DTYPES[name]) for _ in range(LIST_LENGTH)]
    check(tensors[:50])
    joined = torch.cat(tensors)

    def each(call: Any) -> harness.Case:
        def case(_: int) -> None:
            for x in tensors:
                call(x)

        return case

    cases: dict[str, harness.Case] = {
        "empty call": each(lambda x: None),
        "x.sum()": each(torch.sum),
        "isfinite().all()": each(lambda x: torch.isfinite(x).all()),
    }
    for depth in DEPTHS:
        cases[f"one call, {depth}"] = each(lambda x, depth=depth: fastcheck.stats(x, record=depth))
        for case in (f"list of {LIST_LENGTH}, {depth}", f"list of {LIST_LENGTH}, {depth}, again"):
            cases[case] = lambda _, depth=depth: fastcheck.stats(tensors, record=depth)
        # "The reading itself": the same bytes, as one tensor.
        cases[f"as one tensor, {depth}"] = lambda _, depth=depth: fastcheck.stats(
            joined, record=depth
        )
    seconds = harness.time_rounds(cases, rounds, warmup=2)
    microseconds = {case: 1e6 * times / LIST_LENGTH for case, times in seconds.items()}
    for depth in DEPTHS:
        microseconds[f"list above reading, {depth}"] = (
            microseconds[f"list of {LIST_LENGTH}, {depth}"]
            - microseconds[f"as one tensor, {depth}"]
        )
    return [
        {
            "dtype": name,
            "numel": numel,
            "case": case,
            "rounds": rounds,
            "microseconds": harness.spread(np.asarray(values)),
        }
        for case, values in microseconds.items()
    ]


def missed_bars(rows: list[dict[str, Any]]) -> list[str]:
    missed = []
    for row in rows:
        value = row["microseconds"]["median"]
        bar = (
            CALL_BAR
            if row["case"].startswith("one call")
            else LIST_BAR
            if row["case"].startswith("list above")
            else None
        )
        if bar is not None and value > bar:
            missed.append(f"{row['dtype']} x {row['numel']}, {row['case']}: {value:.2f} us > {bar}")
    return missed


def as_table(rows: list[dict[str, Any]]) -> str:
    cases = list(dict.fromkeys(row["case"] for row in rows if not row["case"].startswith("as one")))
    lines = []
    for name in DTYPES:
        for case in cases:
            values = [
                harness.with_spread(row["microseconds"])
                for row in rows
                if row["dtype"] == name and row["case"] == case
            ]
            lines.append([name, case, *values])
    header = ["dtype", "microseconds a tensor", *(f"{n} elements" for n in SIZES)]
    return harness.table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a call that starts a thread is no small one
    rows = []
    for name in DTYPES:
        for numel in SIZES:
            rows += measure(name, numel, arguments.rounds)
    print(as_table(rows))
    missed = missed_bars(rows)
    print("\n" + ("Bars missed: " + "; ".join(missed) if missed else "All bars reached."))
    harness.write_results("small", rows, threads=1, missed_bars=missed)


if __name__ == "__main__":
    main()
