"""The CUDA kernels on a GPU: bandwidth, small tensors, lists, host time of a call, and the Triton
kernels beside them.

    python bench/gpu.py [--rounds N]

Needs a GPU and an extension with CUDA kernels. Bandwidth is compared with a copy of device memory.
Writes bench/results/gpu.json, prints Markdown tables. Device times are taken between two events
around launches that were all queued behind a pause, so that host time is not included.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

import harness
from fastcheck import _C
from fastcheck.backends import table
from fastcheck.backends.portable.traversal import dtype_and_order
from fastcheck.ring.depths import Depths
from fastcheck.ring.device import DeviceRing
from fastcheck.utils.torch.streams import streams_of

MIB = 2**20
SIZES_BYTES = (64 * MIB, 512 * MIB)
CACHE_BYTES = 512 * MIB  # read in turn, far more than any L2 cache holds
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
}
# One of each component type.
FIRST_DTYPES = (
    *DTYPES.values(),
    *(torch.float8_e5m2, torch.bool, torch.uint8, torch.int16, torch.uint16),
    *(torch.int32, torch.uint32, torch.int64, torch.uint64),
)
DATA = {"float32": ("normal", "half zeros", "one NaN"), "bfloat16": ("normal", "half zeros")}
DEPTHS = {"health": 1, "stats": 2, "full": 3}
# The least fraction of the copy's bandwidth: the project's own bars.
BARS = {
    ("float32", "full"): 0.9,
    ("float64", "full"): 0.9,
    ("bfloat16", "full"): 0.8,
    ("float16", "full"): 0.8,
    ("float8_e4m3fn", "full"): 0.5,
    ("int8", "full"): 0.5,
    ("float32", "health"): 0.92,
    ("bfloat16", "health"): 0.92,
    ("float16", "health"): 0.92,
    ("float32", "record and exponents"): 0.85,
}
SMALL_MICROSECONDS = 7.0  # 1 MiB, device
LIST_MICROSECONDS = 25.0  # 1000 tensors of 4 KiB, device
HOST_MICROSECONDS = 4.0  # one observe
FIRST_SECONDS = 0.1  # a first launch while the device is busy, with the buffers of its stream
SUM_TIMES = 1.15  # of one x.sum() of the same tensor

Call = Callable[[int], object]
cuda = torch.device("cuda")


def device_seconds(call: Call, launches: int, rounds: int) -> np.ndarray:
    """Device seconds of one of ``launches`` calls, in each round."""
    seconds = np.empty(rounds)
    call(0)
    torch.cuda.synchronize()
    for index in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)  # some 2 ms, in which all calls are queued
        start.record()
        for launch in range(launches):
            call(launch)
        end.record()
        end.synchronize()
        seconds[index] = start.elapsed_time(end) / 1e3 / launches
    return seconds


def host_seconds(call: Call, calls: int, rounds: int) -> np.ndarray:
    """Host seconds of one call while the device is busy with other work."""
    seconds = np.empty(rounds)
    call(0)
    for index in range(rounds):
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        start = time.perf_counter()
        for launch in range(calls):
            call(launch)
        seconds[index] = (time.perf_counter() - start) / calls
    torch.cuda.synchronize()
    return seconds


def first_launches(entry: table.Backend) -> list[dict[str, Any]]:
    """Host seconds of the first launch of each kernel, with the device busy for two seconds: all
    were loaded with the backend, so that none waits. Comes before all other launches. Never run
    yet."""
    tensors = {
        str(dtype).removeprefix("torch."): torch.zeros(4096, device=cuda).to(dtype)
        for dtype in FIRST_DTYPES
    }
    slots = torch.zeros(4, 192, dtype=torch.uint8, device=cuda)
    torch.cuda.synchronize()
    # Cycles of the multiprocessors' clock, at most 2 GHz. CUDA 13 does not tell its rate.
    torch.cuda._sleep(4_000_000_000)
    rows = []
    for dtype, x in tensors.items():
        for depth, level in DEPTHS.items():
            start = time.perf_counter()
            entry.observe(x, slots, 0, level)
            rows.append({"dtype": dtype, "depth": depth, "seconds": time.perf_counter() - start})
        if not x.dtype.is_floating_point:
            continue
        assert entry.exponents is not None and entry.observe_and_count is not None
        for name, call in (
            ("found_nonfinite", partial(entry.found_nonfinite, [x])),
            ("exponents", partial(entry.exponents, x, False)),
            ("record and exponents", partial(entry.observe_and_count, x, slots, 0)),
        ):
            start = time.perf_counter()
            call()
            rows.append({"dtype": dtype, "depth": name, "seconds": time.perf_counter() - start})
    torch.cuda.synchronize()
    return rows


def tensor(dtype: torch.dtype, data: str, size_bytes: int) -> torch.Tensor:
    numel = size_bytes // dtype.itemsize
    if not dtype.is_floating_point:
        return torch.randint(-128, 128, (numel,), device=cuda, dtype=dtype)
    x = torch.empty(numel, dtype=dtype, device=cuda)
    for part in x.split(16 * MIB):
        values = torch.randn(part.numel(), device=cuda)
        if data == "half zeros":
            values *= torch.randint(0, 2, (part.numel(),), device=cuda)
        part.copy_(values)
    if data == "one NaN":
        x[numel // 3] = float("nan")
    return x


def composite(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same statistics from torch operations."""
    low, high = x.aminmax()
    return x.isnan().sum(), x.isinf().sum(), low, high, x.abs().sum()


def others(dtype: torch.dtype) -> dict[str, Callable[[torch.Tensor], object]]:
    if dtype.itemsize == 1:
        return {}
    return {
        "x.sum()": lambda x: x.sum(),
        "torch.any(torch.isnan(x))": lambda x: torch.any(torch.isnan(x)),
        "torch composite": composite,
    }


def check(x: torch.Tensor, entry: table.Backend, slots: torch.Tensor) -> None:
    """Correctness first: compares with the CPU's record."""
    part = x[: 4 * MIB]
    entry.observe(part, slots, 0, 3)
    if not torch.equal(slots[0].cpu(), _C.record(part.cpu())):
        raise RuntimeError(f"the record of {x.dtype} is not the CPU's")


def large(entry: table.Backend, rounds: int, size: int) -> list[dict[str, Any]]:
    slots = torch.zeros(4, 192, dtype=torch.uint8, device=cuda)
    rows: list[dict[str, Any]] = []

    def add(case: str, dtype: str, data: str, size: int, seconds: np.ndarray, read: int) -> None:
        rows.append(
            {
                "case": case,
                "dtype": dtype,
                "data": data,
                "bytes": size,
                "seconds": harness.spread(seconds),
                "gb_per_second": read / float(np.median(seconds)) / 1e9,
            }
        )

    buffers = max(2, CACHE_BYTES // size)
    launches = max(4, 1024 * MIB // size)
    for name, dtype in DTYPES.items():
        for data in DATA.get(name, ("normal",)):
            xs = [tensor(dtype, data, size) for _ in range(buffers)]
            check(xs[0], entry, slots)
            target = torch.empty_like(xs[0])

            def timed(
                call: Callable[[torch.Tensor], object], xs: Any = xs, launches: int = launches
            ) -> np.ndarray:
                return device_seconds(lambda i: call(xs[i % len(xs)]), launches, rounds)

            add("copy", name, data, size, timed(lambda x, to=target: to.copy_(x)), 2 * size)
            for depth, level in DEPTHS.items():
                seconds = timed(lambda x, level=level: entry.observe(x, slots, 1, level))
                add(depth, name, data, size, seconds, size)
            seconds = timed(lambda x: entry.found_nonfinite([x]))
            add("found_nonfinite", name, data, size, seconds, size)
            if dtype.is_floating_point and data == "normal":
                assert entry.exponents is not None and entry.observe_and_count is not None
                seconds = timed(lambda x: entry.exponents(x, False))
                add("exponents", name, data, size, seconds, size)
                seconds = timed(lambda x: entry.observe_and_count(x, slots, 1))
                add("record and exponents", name, data, size, seconds, size)
            if data == "normal":
                for case, call in others(dtype).items():
                    add(case, name, data, size, timed(call), size)
            del xs, target
    copies = {(r["dtype"], r["data"], r["bytes"]): r for r in rows if r["case"] == "copy"}
    for row in rows:
        copy = copies[row["dtype"], row["data"], row["bytes"]]["gb_per_second"]
        row["fraction_of_copy"] = row["gb_per_second"] / copy
        row["bar"] = BARS.get((row["dtype"], row["case"])) if row["data"] == "normal" else None
    return rows


def triton_beside(entry: table.Backend, rounds: int) -> list[dict[str, Any]]:
    """The Triton kernels on the same data: equal but for the last bits of the sums, and their
    speed. Empty where triton is missing or its compiler fails.
    """
    other = table.triton.triton_backend("cuda")
    slots = torch.zeros(4, 192, dtype=torch.uint8, device=cuda)
    rows: list[dict[str, Any]] = []
    for name in ("float32", "bfloat16", "int8"):
        xs = [tensor(DTYPES[name], "normal", SIZES_BYTES[-1]) for _ in range(2)]
        entry.observe(xs[0], slots, 0, 3)
        other.observe(xs[0], slots, 1, 3)
        refused = table.triton.remarks()
        if refused:
            print(*refused, sep="\n")
            return []
        cells = slots.view(torch.int64)[:2].cpu()
        exact = [*range(10), 13]
        sums = slots.view(torch.float64)[:2, 10:13].cpu()
        allowed = 1e-6 * sums[0, [1, 1, 2]]
        if not torch.equal(cells[0, exact], cells[1, exact]) or bool(
            ((sums[0] - sums[1]).abs() > allowed).any()
        ):
            raise RuntimeError(f"the Triton record of {name} is not the CUDA kernel's")
        for backend in (entry, other):
            for depth, level in DEPTHS.items():
                seconds = device_seconds(
                    lambda i, xs=xs, b=backend, level=level: b.observe(xs[i % 2], slots, 2, level),
                    4,
                    rounds,
                )
                rows.append(
                    {
                        "backend": backend.name,
                        "dtype": name,
                        "depth": depth,
                        "bytes": SIZES_BYTES[-1],
                        "seconds": harness.spread(seconds),
                        "gb_per_second": SIZES_BYTES[-1] / float(np.median(seconds)) / 1e9,
                    }
                )
    return rows


def _observe_list(entry: Any, tensors: Any, slots: Any, level: int, _: int) -> None:
    entry.observe_list(tensors, slots, 0, level)


def small(entry: table.Backend, rounds: int) -> list[dict[str, Any]]:
    rows = []
    slots = torch.zeros(1024, 192, dtype=torch.uint8, device=cuda)

    def add(case: str, where: str, seconds: np.ndarray, bar: Any = None) -> None:
        scaled = harness.spread(1e6 * seconds)
        rows.append({"case": case, "of": where, "microseconds": scaled, "bar": bar})

    for size, dtype in ((4096, "float32"), (65536, "float32"), (MIB, "float32"), (MIB, "bfloat16")):
        x = tensor(DTYPES[dtype], "normal", size)
        for depth, level in DEPTHS.items():
            seconds = device_seconds(
                lambda i, x=x, level=level: entry.observe(x, slots, 0, level), 100, rounds
            )
            bar = SMALL_MICROSECONDS if (size, depth) == (MIB, "full") else None
            add(f"{size >> 10} KiB {dtype}, {depth}", "device", seconds, bar)
        add(
            f"{size >> 10} KiB {dtype}, x.sum()",
            "device",
            device_seconds(lambda i, x=x: x.sum(), 100, rounds),
        )
    many = [torch.randn(1024, device=cuda) for _ in range(1000)]
    for depth, level in DEPTHS.items():
        call = partial(_observe_list, entry, many, slots, level)
        bar = LIST_MICROSECONDS if depth == "full" else None
        add(f"1000 x 4 KiB in a list, {depth}", "device", device_seconds(call, 4, rounds), bar)
    add("1000 x 4 KiB in a list, full", "host", host_seconds(call, 4, rounds))
    add(
        "1000 x 4 KiB, found_nonfinite",
        "device",
        device_seconds(lambda i: entry.found_nonfinite(many), 4, rounds),
    )

    x = torch.randn(1024, device=cuda)
    add(
        "observe",
        "host",
        host_seconds(lambda i: entry.observe(x, slots, 0, 3), 400, rounds),
        HOST_MICROSECONDS,
    )
    add("x.sum()", "host", host_seconds(lambda i: x.sum(), 400, rounds))
    streams = streams_of(torch.device("cuda", torch.cuda.current_device()))
    assert streams is not None
    ring, kind = DeviceRing(streams, entry, Depths(3)), dtype_and_order(x)
    add(
        "DeviceRing.observe",
        "host",
        host_seconds(lambda i: ring.observe(x, (i, 0, 0, 0, 0, *kind)), 100, min(rounds, 10)),
    )
    return rows


def bars_of(
    rows: list[dict[str, Any]], little: list[dict[str, Any]], first: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Every bar, and the figure that is compared with it."""
    bars = []
    seconds = {
        (r["bytes"], r["dtype"], r["case"]): r["seconds"]["median"]
        for r in rows
        if r["data"] == "normal"
    }
    for row in rows:
        if row["bar"] is not None:
            what = f"{row['bytes'] >> 20} MiB {row['dtype']}, {row['case']}: fraction of a copy"
            bars.append(harness.bar(what, row["fraction_of_copy"], at_least=row["bar"]))
    for size, dtype, case in seconds:
        ours = seconds[size, dtype, "full"]
        what = f"{size >> 20} MiB {dtype}, full: times "
        if case == "x.sum()":
            value = ours / seconds[size, dtype, case]
            bars.append(harness.bar(what + case, value, at_most=SUM_TIMES))
        elif case == "torch.any(torch.isnan(x))":
            value = ours / seconds[size, dtype, case]
            bars.append(harness.bar(what + case, value, at_most=1.0))
    for row in little:
        if row["bar"] is not None:
            what = f"{row['case']}: us of the {row['of']}"
            bars.append(harness.bar(what, row["microseconds"]["median"], at_most=row["bar"]))
    for row in first:
        what = f"first launch, {row['dtype']} {row['depth']}: host seconds on a busy device"
        bars.append(harness.bar(what, row["seconds"], at_most=FIRST_SECONDS))
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    problem = table.cuda.cuda_problem()
    if problem is not None:
        raise SystemExit(f"no kernels to measure: {problem}")
    entry = table.backend_for(cuda)
    gpu = {
        "name": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30),
        "cuda": torch.version.cuda,
    }
    print("# CUDA", gpu["name"], "", sep="\n")
    table.prepare(cuda)
    parts: dict[str, Any] = {"first": first_launches(entry), "small": [], "triton": []}
    rows: list[dict[str, Any]] = []

    def write() -> list[dict[str, Any]]:
        """What is there so far: the run may be out of time later."""
        bars = bars_of(rows, parts["small"], parts["first"])
        harness.write_results("gpu", rows, gpu=gpu, bars=bars, **parts)
        return bars

    write()
    little = parts["small"] = small(entry, rounds)
    write()
    cells = [
        [r["case"], r["of"], harness.with_spread(r["microseconds"]), str(r["bar"] or "")]
        for r in little
    ]
    print(harness.table(("case", "time of the", "us (10%-90%)", "bar"), cells), "", sep="\n")
    for size in SIZES_BYTES:
        rows += large(entry, rounds, size)
        write()
    cells = [
        [
            f"{r['bytes'] >> 20} MiB {r['dtype']}, {r['data']}",
            r["case"],
            f"{r['gb_per_second']:.0f}",
            f"{r['fraction_of_copy']:.2f}",
            str(r["bar"] or ""),
        ]
        for r in rows
    ]
    print(harness.table(("data", "case", "GB/s", "of a copy", "bar"), cells))
    beside = parts["triton"] = triton_beside(entry, rounds)
    cells = [[r["backend"], r["dtype"], r["depth"], f"{r['gb_per_second']:.0f}"] for r in beside]
    if cells:
        print("", harness.table(("kernels", "dtype", "depth", "GB/s"), cells), sep="\n")
    print()
    harness.print_bars(write())


if __name__ == "__main__":
    main()
