"""One pass over 256 MiB: fastcheck, a pure read of the same memory, x.sum() and other torch ops.

    python bench/kernels.py [--rounds N] [--only DTYPE]

Writes bench/results/kernels.json, prints a Markdown table.
"""

from __future__ import annotations

import argparse
from typing import Any, Optional

import numpy as np
import torch

import fastcheck
import harness
from fastcheck import _kernels
from pure_read import PureRead

SIZE_BYTES = harness.size(256 * 2**20, 2**20)
DRAWN = harness.size(2**24, 2**16)  # random elements, repeated
CHECKED = harness.size(2**21, 2**10)  # of them, on either side of the NaN
BUFFERS = 2  # read in turn: what the cache still holds is the other one
SLOW_SHARE = 8  # a case that takes a second reads an eighth of the memory, its time taken times 8

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
    "int16": torch.int16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
# Data out of the ordinary. float16 has no numbers below 2^-40.
DATA = {
    "float32": ("normal", "half zeros", "tiny", "one NaN"),
    "bfloat16": ("normal", "half zeros", "tiny", "one NaN"),
    "float16": ("normal", "half zeros", "one NaN"),
}
DEPTHS = ("health", "stats", "full")
# The instruction set without the instructions that serve a dtype alone.
WITHOUT = {
    "int8": ("avx512", "VNNI"),
    "uint8": ("avx512", "VNNI"),
    "float8_e4m3fn": ("avx512_vnni", "VBMI"),
}
SUM_IS_SLOW = ("int8", "uint8", "bool", "int16")  # torch adds them one by one

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
    """``SIZE_BYTES`` of ``DRAWN`` random elements, repeated."""
    numel = SIZE_BYTES // dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        values = torch.randn(DRAWN, generator=generator)
        if data == "half zeros":
            values.relu_()
        elif data == "tiny":
            values *= 2.0**-60
    elif dtype is torch.bool:
        values = torch.randint(0, 2, (DRAWN,), generator=generator)
    else:
        values = torch.randint(-128, 128, (DRAWN,), generator=generator)
    out = values.to(dtype).repeat(numel // len(values))
    if data == "one NaN":
        out[numel // 3] = float("nan")
    return out


def check(x: torch.Tensor) -> None:
    """Correctness first: against torch for a part, against other threads for all of it."""
    middle = len(x) // 3  # where the NaN is
    part = x[middle - CHECKED : middle + CHECKED + 1000]
    s = fastcheck.stats(part)
    values = part.double()
    nan = values.isnan()
    finite = values[~nan]
    expected = (int(nan.sum()), int((finite == 0).sum()), int((finite < 0).sum()))
    assert (s.nan_count, s.zero_count, s.negative_count) == expected
    assert s.min == float(finite.min()) and s.max == float(finite.max())
    assert s.abs_sum is not None and np.isclose(s.abs_sum, float(finite.abs().sum()), rtol=1e-6)
    records = []
    for threads in harness.threads_to_try():
        torch.set_num_threads(threads)
        records.append(fastcheck.stats(x))
    assert all(r == records[0] for r in records), "the record depends on the number of threads"


def composite(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same checks without a tool: NaN and Inf counts, extremes and the sum of magnitudes."""
    low, high = torch.aminmax(x)
    return torch.isnan(x).sum(), torch.isinf(x).sum(), low, high, x.abs().sum()


def with_isa(isa: str, x: torch.Tensor, depth: str) -> None:
    _kernels.set_cpu_isa(isa)
    fastcheck.stats(x, record=depth)
    _kernels.set_cpu_isa("auto")


def runs(function: harness.Case) -> Optional[str]:
    """None if it runs, else the reason why not."""
    try:
        function(0)
    except (RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0][:120]
    return None


def measure(
    name: str, data: str, threads: int, rounds: int, buffers: list[torch.Tensor]
) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    read = PureRead(threads, buffers[0])
    parts = [x[: len(x) // SLOW_SHARE] for x in buffers]

    def pick(index: int) -> torch.Tensor:
        return buffers[index % BUFFERS]

    def part(index: int) -> torch.Tensor:
        return parts[index % BUFFERS]

    cases: dict[str, harness.Case] = {"pure read": lambda i: read(pick(i))}
    for depth in DEPTHS:
        cases[depth] = lambda i, depth=depth: fastcheck.stats(pick(i), record=depth)
        # Most cloud machines have no more.
        if threads == 1 and _kernels.cpu_isa().startswith("avx512"):
            cases[f"{depth}, AVX2"] = lambda i, depth=depth: with_isa("avx2", pick(i), depth)
        if threads == 1 and _kernels.cpu_isa().startswith("avx512_") and name in WITHOUT:
            isa, missing = WITHOUT[name]
            cases[f"{depth}, no {missing}"] = lambda i, isa=isa, depth=depth: with_isa(
                isa, pick(i), depth
            )
    slow: dict[str, harness.Case] = {}
    if data == "normal":
        if name in SUM_IS_SLOW:
            slow["x.sum()"] = lambda i: part(i).sum()
        else:
            cases["x.sum()"] = lambda i: pick(i).sum()
        if DTYPES[name].is_floating_point:
            slow["torch composite"] = lambda i: composite(part(i))
            slow["isfinite().all()"] = lambda i: torch.isfinite(part(i)).all()

    skipped = {}
    for group in (cases, slow):
        for case in list(group):
            reason = runs(group[case])
            if reason is not None:
                skipped[case] = reason
                del group[case]
    pause = 0.01 if threads > 1 else 0.0
    seconds = harness.time_rounds(cases, rounds, pause_seconds=pause)
    pure = seconds["pure read"]
    if slow:
        slow_seconds = harness.time_rounds(
            {"pure read": cases["pure read"], **slow}, 3, warmup=0, pause_seconds=pause
        )
        slow_pure = slow_seconds.pop("pure read")
        seconds |= {case: SLOW_SHARE * times for case, times in slow_seconds.items()}
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
    for name in [arguments.only] if arguments.only else DTYPES:
        for data in DATA.get(name, ("normal",)):
            buffers = [make_tensor(DTYPES[name], data, seed) for seed in range(BUFFERS)]
            check(buffers[0])
            rounds = arguments.rounds if data == "normal" else max(5, arguments.rounds // 2)
            for threads in harness.threads_to_try():
                rows += measure(name, data, threads, rounds, buffers)
    print(as_table(rows))
    missed = missed_bars(rows)
    print("\n" + ("Bars missed: " + "; ".join(missed) if missed else "All bars reached."))
    if not arguments.only:
        harness.write_results("kernels", rows, size_bytes=SIZE_BYTES, missed_bars=missed)


if __name__ == "__main__":
    main()
