"""The portable backend: launches and temporaries, and time beside common checks written in torch.

    python bench/portable.py [--rounds N]     writes bench/results/portable.json, prints tables

Launches and the bytes of temporaries are counted on the fake accelerator of the tests (built on
first use, needs g++). Times are those of plain CPU tensors on one thread, where the compiled kernel
would normally run. A launch or a byte costs something else on an accelerator, but the operations
are the same."""

from __future__ import annotations

import argparse
from typing import Any, Callable

import torch

import harness
from fastcheck.backends.portable import backend as portable
from fastcheck.backends.portable.backend import any_nonfinite

SIZES = harness.size((64, 4096, 768 * 768, 4 * 1024 * 1024), (64, 4096))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEPTHS = {"health": 1, "stats": 2, "full": 3}
LIST_LENGTH = 200


def by_hand(x: torch.Tensor) -> list[torch.Tensor]:
    """The counts of common checks, each in a pass of its own."""
    return [torch.isnan(x).sum(), torch.isinf(x).sum()]


def by_hand_with_numbers(x: torch.Tensor) -> list[torch.Tensor]:
    """And the statistics of common loggers; a NaN makes all of them NaN."""
    low, high = torch.aminmax(x)
    wide = x.float()
    return [*by_hand(x), low, high, wide.sum(), wide.abs().sum(), wide.square().sum()]


def parameters(dtype: torch.dtype) -> list[torch.Tensor]:
    """Sizes of a small transformer's parameters: matrices, biases, norms."""
    sizes = (256 * 256, 256, 256, 1024)
    return [torch.randn(sizes[k % 4]).to(dtype) for k in range(LIST_LENGTH)]


def cases_for(
    x: torch.Tensor, xs: list[torch.Tensor], slots: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """The measurements of one tensor, and of the list if there is one."""
    cases: dict[str, Callable[[], object]] = {}
    for depth, number in DEPTHS.items():
        if xs:
            cases[depth] = lambda n=number: portable.observe_list(xs, slots, 0, n)
        else:
            cases[depth] = lambda n=number: portable.observe(x, slots, 0, n)
    if xs:
        cases["found_nonfinite"] = lambda: any_nonfinite(xs)
        cases["isnan, isinf"] = lambda: [by_hand(x) for x in xs]
        cases["and numbers"] = lambda: [by_hand_with_numbers(x) for x in xs]
    else:
        cases["found_nonfinite"] = lambda: any_nonfinite([x])
        cases["isnan, isinf"] = lambda: by_hand(x)
        cases["and numbers"] = lambda: by_hand_with_numbers(x)
    return cases


def check(x: torch.Tensor, slots: torch.Tensor) -> None:
    """Correctness first: the counts equal torch's."""
    y = x.clone()
    y[::7] = float("nan")
    y[3::70] = float("-inf")
    wanted = [int(count) for count in by_hand(y)]
    portable.observe(y, slots, 0, 3)
    portable.observe_list([x, y], slots, 1, 3)
    for row in (0, 2):
        nan_count, posinf_count, neginf_count = slots.view(torch.int64)[row, 1:4].tolist()
        assert [nan_count, posinf_count + neginf_count] == wanted
    assert float(any_nonfinite([x, y])) == 1.0 and not any_nonfinite([x])


def launches(fake: Any, call: Callable[[], object]) -> tuple[int, float]:
    """The number of launches, and the peak of temporaries in MiB."""
    call()
    fake.synchronize()
    fake.reset_peak_memory_stats()
    before = fake.memory_allocated()
    with fake.recorded_launches() as names:
        call()
    fake.synchronize()
    return len(names), (fake.max_memory_allocated() - before) / (1 << 20)


def measure(dtype_name: str, size: int, rounds: int, fake: Any) -> list[dict[str, Any]]:
    dtype = DTYPES[dtype_name]
    torch.manual_seed(size)
    x = torch.randn(size or 4096).to(dtype)
    xs = [] if size else parameters(dtype)
    slots = torch.zeros(LIST_LENGTH, 192, dtype=torch.uint8)
    check(x, slots)
    on_host = cases_for(x, xs, slots)
    there = cases_for(x.to(fake.name()), [t.to(fake.name()) for t in xs], slots.to(fake.name()))
    timed: dict[str, harness.Case] = {name: lambda _, c=call: c() for name, call in on_host.items()}
    counted = {name: launches(fake, call) for name, call in there.items()}
    seconds = harness.time_rounds(timed, rounds, warmup=2)
    numel = size or sum(t.numel() for t in xs)
    return [
        {
            "dtype": dtype_name,
            "tensors": len(xs) or 1,
            "numel": numel,
            "case": name,
            "launches": counted[name][0],
            "temporary_mib": round(counted[name][1], 2),
            "microseconds": harness.spread(values * 1e6),
            "to_isnan_isinf": harness.ratio(values, seconds["isnan, isinf"]),
        }
        for name, values in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    from fakes import fake_device

    fake = fake_device.load()
    torch.set_num_threads(1)  # threads that wait for each other would be most of a small case
    rows = [
        row
        for dtype in DTYPES
        for size in (*SIZES, 0)  # 0: the list
        for row in measure(dtype, size, rounds, fake)
    ]
    path = harness.write_results("portable", rows, rounds=rounds, threads=torch.get_num_threads())
    print(
        harness.table(
            [
                "dtype",
                "tensors",
                "elements",
                "case",
                "launches",
                "temporaries, MiB",
                "us",
                "times isnan + isinf",
            ],
            [
                [
                    row["dtype"],
                    str(row["tensors"]),
                    f"{row['numel']:,}",
                    row["case"],
                    str(row["launches"]),
                    f"{row['temporary_mib']:.1f}",
                    harness.with_spread(row["microseconds"], 0),
                    harness.with_spread(row["to_isnan_isinf"]),
                ]
                for row in rows
            ],
        )
    )
    print(f"\n{path}")


if __name__ == "__main__":
    main()
