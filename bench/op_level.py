"""What level="op" costs: for a single op, and for a training step of a small float32 transformer.

python bench/op_level.py [--rounds N]     writes bench/results/op_level.json, prints Markdown tables

The op is an addition of two one-element tensors, so that all of the difference is overhead. The
step is that of bench/train_step.py; a step under the observer and one with its filters closed are
taken in turn, on two models that are made alike.
"""

from __future__ import annotations

import argparse
from typing import Any, Callable

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastcheck
import harness
from fastcheck import _C
from fastcheck._record import DTYPES
from transformer import Trainer

OPS = 2000
DEPTHS = {"health": 1, "stats": 2, "full": 3}


class Empty(TorchDispatchMode):
    """What every tool in Python pays at least."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def additions() -> None:
    a, b = torch.ones(1), torch.ones(1)
    for _ in range(OPS):
        a = torch.add(a, b)


def observed(depth: int, active: bool = True, **filters: Any) -> Callable[[int], None]:
    observer = _C.op_observer()

    def case(_: int) -> None:
        run = observer.start(depth, str, **filters)
        observer.set_active(active)
        additions()
        observer.stop(run)

    return case


def in_mode(_: int) -> None:
    with Empty():
        additions()


def per_op(rounds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    cases: dict[str, harness.Case] = {"none": lambda _: additions()}
    cases["observer, a step left out"] = observed(1, False)
    cases["observer, filters closed"] = observed(1, ops=["none"], outside=False)
    cases |= {f"observer, {name}": observed(depth) for name, depth in DEPTHS.items()}
    cases["empty TorchDispatchMode"] = in_mode
    seconds = harness.time_rounds(cases, rounds)
    plain = seconds.pop("none")
    rows = []
    for name, values in seconds.items():
        added = (values - plain) / OPS * 1e6
        rows.append({"case": name, "added_us_per_op": harness.spread(added)})
    return rows


def step(threads: int, record: str, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    plain, watched = Trainer(), Trainer()
    monitor = fastcheck.install(watched.model, level="op", record=record, history=2)
    observer = _C.op_observer()

    def without(index: int) -> None:
        observer.pause(1)
        plain.step(index)
        observer.pause(-1)

    seconds = harness.time_rounds({"none": without, "op": watched.step}, rounds)
    records = monitor.records()
    last = records[records["step"] == records["step"].max() - 1]
    sizes = np.array([row.component_bytes * row.components for row in DTYPES])
    monitor.remove()
    same = all(map(torch.equal, plain.model.parameters(), watched.model.parameters()))
    return {
        "record": record,
        "threads": threads,
        "times_none": harness.ratio(seconds["op"], seconds["none"]),
        "seconds": harness.spread(seconds["op"]),
        "records_per_step": len(last),
        "bytes_per_step": int((last["numel"] * sizes[last["dtype"]]).sum()),
        "identical_weights": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    ops = per_op(rounds)
    print(
        harness.table(
            ["", "added, us per op"],
            [[row["case"], harness.with_spread(row["added_us_per_op"])] for row in ops],
        )
    )
    steps = [
        step(threads, record, max(5, rounds // 2))
        for threads in harness.threads_to_try()
        for record in ("stats", "full")
    ]
    print()
    print(
        harness.table(
            ["record", "threads", "times a step without", "records", "GB read", "same weights"],
            [
                [
                    row["record"],
                    str(row["threads"]),
                    harness.with_spread(row["times_none"], 3),
                    f"{row['records_per_step']:,}",
                    f"{row['bytes_per_step'] / 1e9:.2f}",
                    "yes" if row["identical_weights"] else "no",
                ]
                for row in steps
            ],
        )
    )
    harness.write_results("op_level", ops + steps)


if __name__ == "__main__":
    main()
