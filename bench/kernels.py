"""One pass over 256 MiB: fastcheck against a pure read of the same memory, x.sum(), and what torch offers otherwise.

python bench/kernels.py [--rounds N] [--only DTYPE]     writes bench/results/kernels.json, prints a Markdown table
"""

from __future__ import annotations

import argparse
import gc
from typing import Any, Optional

import harness
import numpy as np
import torch
from pure_read import PureRead

import fastcheck

SIZE_BYTES = 256 * 2**20
BUFFERS = 2  # read in turn: what the cache still holds is the other one

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
DEPTHS = ("health", "stats", "full")
SLOW = ("torch composite", "isfinite().all()")

# The least fraction of a pure read, and the most times one x.sum(): the project's own bars.
FRACTION_BARS = {
    ("float32", "full"): 0.85,
    ("float32", "stats"): 0.95,
    ("bfloat16", "full"): 0.5,
    ("bfloat16", "stats"): 0.6,
    ("float16", "full"): 0.5,
    ("float16", "stats"): 0.6,
}
SUM_BARS = {"float32": 1.4, "bfloat16": 2.0, "float16": 2.0}


def make_tensor(dtype: torch.dtype, data: str, seed: int) -> torch.Tensor:
    numel = SIZE_BYTES // dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    out = torch.empty(numel, dtype=dtype)
    step = 2**24  # in pieces: an 8-bit tensor is four times larger as float32
    for at in range(0, numel, step):
        n = min(step, numel - at)
        if dtype.is_floating_point:
            piece = torch.randn(n, generator=generator)
            if data == "half zeros":
                piece.relu_()
            elif data == "tiny":
                piece *= 2.0**-60
            out[at : at + n] = piece.to(dtype)
        else:
            out[at : at + n] = torch.randint(-128, 128, (n,), generator=generator).to(dtype)
    if data == "one NaN":
        out[numel // 3] = float("nan")
    return out


def check(x: torch.Tensor) -> None:
    """Correctness first: the record against torch and NumPy, piece by piece, and against itself on other threads."""
    s = fastcheck.stats(x)
    total = {"nan": 0, "zero": 0, "negative": 0, "abs_sum": 0.0}
    low, high = float("inf"), float("-inf")
    step = 2**24
    for piece in x.split(step):
        values = piece.double()
        nan = values.isnan()
        total["nan"] += int(nan.sum())
        values = values[~nan]
        total["zero"] += int((values == 0).sum())
        total["negative"] += int((values < 0).sum())
        total["abs_sum"] += float(values.abs().sum())
        low, high = min(low, float(values.min())), max(high, float(values.max()))
    expected = (total["nan"], total["zero"], total["negative"], low, high)
    got = (s.nan_count, s.zero_count, s.negative_count, float(s.min), float(s.max))
    assert got == expected, f"{x.dtype}: expected {expected}, came {got}"
    assert np.isclose(s.abs_sum, total["abs_sum"], rtol=1e-6), (s.abs_sum, total["abs_sum"])
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - threads)
    assert fastcheck.stats(x) == s, "the record depends on the number of threads"
    torch.set_num_threads(threads)


def composite(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What one writes without a tool: NaN and Inf counts, extremes and the sum of magnitudes."""
    low, high = torch.aminmax(x)
    return torch.isnan(x).sum(), torch.isinf(x).sum(), low, high, x.abs().sum()


def runs(function: harness.Case) -> Optional[str]:
    """None when it runs, else why not."""
    try:
        function(0)
    except (RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0][:120]
    return None


def measure(name: str, data: str, threads: int, rounds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    buffers = [make_tensor(DTYPES[name], data, seed) for seed in range(BUFFERS)]
    check(buffers[0])
    torch.set_num_threads(threads)
    read = PureRead(threads, buffers[0])

    def pick(index: int) -> torch.Tensor:
        return buffers[index % BUFFERS]

    cases: dict[str, harness.Case] = {"pure read": lambda i: read(pick(i))}
    if data == "normal":
        cases["x.sum()"] = lambda i: pick(i).sum()
    for depth in DEPTHS:
        cases[depth] = lambda i, depth=depth: fastcheck.stats(pick(i), depth=depth)
    slow: dict[str, harness.Case] = {}
    if data == "normal" and DTYPES[name].is_floating_point:
        slow["torch composite"] = lambda i: composite(pick(i))
        slow["isfinite().all()"] = lambda i: torch.isfinite(pick(i)).all()

    skipped = {}
    for group in (cases, slow):
        for case in list(group):
            reason = runs(group[case])
            if reason is not None:
                skipped[case] = reason
                del group[case]
    # A sum that torch does not vectorise would take the whole run's time.
    if "x.sum()" in cases and harness.median_seconds(cases["x.sum()"]) > 0.1:
        slow["x.sum()"] = cases.pop("x.sum()")

    seconds = harness.time_rounds(cases, rounds)
    pure = seconds["pure read"]
    if slow:
        slow_seconds = harness.time_rounds({"pure read": cases["pure read"], **slow}, 3, warmup=0)
        slow_pure = slow_seconds.pop("pure read")
        seconds |= slow_seconds
    total = seconds.get("x.sum()")
    rows = []
    for case, times in seconds.items():
        reference = slow_pure if case in slow else pure
        row = {
            "dtype": name,
            "data": data,
            "threads": threads,
            "case": case,
            "rounds": len(times),
            "seconds": harness.spread(times),
            "gb_per_s": harness.spread(SIZE_BYTES / times / 1e9),
            "fraction_of_pure_read": harness.ratio(reference, times),
        }
        if case == "pure read":
            row["load_bytes"] = read.width
        if case in DEPTHS and total is not None:
            same_rounds = len(total) == len(times)
            row["times_sum"] = harness.ratio(times, total if same_rounds else np.median(total))
        rows.append(row)
    rows += [
        {"dtype": name, "data": data, "threads": threads, "case": case, "skipped": why}
        for case, why in skipped.items()
    ]
    return rows


def missed_bars(rows: list[dict[str, Any]]) -> list[str]:
    missed = []
    for row in rows:
        if row["data"] != "normal" or "skipped" in row:
            continue
        where = f"{row['dtype']} {row['case']}, {row['threads']} thread(s)"
        bar = FRACTION_BARS.get((row["dtype"], row["case"]))
        if bar is not None and row["fraction_of_pure_read"]["median"] < bar:
            missed.append(f"{where}: {row['fraction_of_pure_read']['median']:.2f} < {bar}")
        most = SUM_BARS.get(row["dtype"])
        if most is not None and "times_sum" in row and row["times_sum"]["median"] > most:
            missed.append(f"{where}: {row['times_sum']['median']:.2f} x.sum() > {most}")
    return missed


def as_table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        start = [row["dtype"], row["data"], str(row["threads"]), row["case"]]
        if "skipped" in row:
            lines.append([*start, "not supported by torch", "", ""])
            continue
        lines.append(
            [
                *start,
                harness.with_spread(row["gb_per_s"], 1),
                harness.with_spread(row["fraction_of_pure_read"]),
                harness.with_spread(row["times_sum"]) if "times_sum" in row else "",
            ]
        )
    header = ["dtype", "data", "threads", "case", "GB/s", "of a pure read", "times x.sum()"]
    return harness.table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--only", choices=list(DTYPES), help="one dtype; nothing is written")
    arguments = parser.parse_args()
    rows = []
    for threads in harness.threads_to_try():
        for name in [arguments.only] if arguments.only else DTYPES:
            rows += measure(name, "normal", threads, arguments.rounds)
            if name in ("float32", "bfloat16", "float16"):
                for data in ("half zeros", "tiny", "one NaN"):
                    if name == "float16" and data == "tiny":
                        continue  # it has no such numbers
                    rows += measure(name, data, threads, max(5, arguments.rounds // 2))
            gc.collect()
    print(as_table(rows))
    missed = missed_bars(rows)
    print("\n" + ("Bars missed: " + "; ".join(missed) if missed else "All bars reached."))
    if not arguments.only:
        harness.write_results("kernels", rows, size_bytes=SIZE_BYTES, missed_bars=missed)


if __name__ == "__main__":
    main()
