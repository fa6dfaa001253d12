"""The cost of level="op" for a single operator, and for a step of a small float32 transformer.

    python bench/op_level.py [--rounds N] [--without-msprobe]

Beside it: an empty TorchDispatchMode, torch's DebugMode with hashes, and msprobe. Writes
bench/results/op_level.json, prints Markdown tables and the missed bars.

The operator adds two one-element tensors, so that the whole difference is overhead; with "health"
that is the provenance and the smallest reading. The step is that of bench/train_step.py. Steps
under the observer and steps for which it is paused alternate, on identically initialised models.
msprobe runs in an environment of its own (environments.py), beside a "none" of its own."""

from __future__ import annotations

import argparse
import subprocess
from typing import Any, Callable

import numpy as np
import torch
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import environments
import fastcheck
import harness
from fastcheck import _C
from fastcheck.record.format import DTYPES
from pure_read import PureRead
from train_step import work
from transformer import Trainer

OPS = harness.size(2000, 100)
DEPTHS = {"health": 1, "stats": 2, "full": 3}
MSPROBE = ["msprobe L1 statistics", "msprobe L1 md5"]
CLOSED_BAR_US = 0.3  # added to an op, all filters closed
OPEN_BAR_US = 0.8  # with provenance
MODE_BAR = 1 / 3  # and of what an empty TorchDispatchMode adds
STEP_BARS = {"stats": 1.20, "full": 1.25}  # times a step without, at 1 thread
PEER_ROUNDS = 5


class Empty(TorchDispatchMode):
    """An empty mode: the least that a tool in Python costs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


# ---- One op -------------------------------------------------------------------------------------


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


# ---- A training step ----------------------------------------------------------------------------


def step(threads: int, record: str, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    plain, watched = Trainer(), Trainer()
    monitor = fastcheck.install(
        watched.model, level="op", record=record, log=fastcheck.Log(None, history=2)
    )
    seconds = harness.time_rounds({"none": paused(plain.step), "op": watched.step}, rounds)
    records = monitor.records()
    last = records[records["step"] == records["step"].max() - 1]
    sizes = np.array([row.component_bytes * row.components for row in DTYPES])
    monitor.remove()
    same = all(map(torch.equal, plain.model.parameters(), watched.model.parameters()))
    bytes_read = int((last["numel"] * sizes[last["dtype"]]).sum())
    none = harness.spread(seconds["none"])
    return {
        "record": record,
        "threads": threads,
        "times_none": harness.ratio(seconds["op"], seconds["none"]),
        "seconds": harness.spread(seconds["op"]),
        "records_per_step": len(last),
        "bytes_per_step": bytes_read,
        "pure_read_share": bytes_read * read_speed(threads) / none["median"],
        "identical_weights": same,
    }


def paused(case: harness.Case) -> harness.Case:
    def run(index: int) -> object:
        with _C.Unread():
            return case(index)

    return run


def read_speed(threads: int) -> float:
    """Seconds per byte of a pure read, for tensors of the sizes of the step."""
    sample = torch.ones(1 << 20)
    read = PureRead(threads, sample)
    seconds = harness.time_rounds({"read": lambda _: read(sample)}, 20)["read"]
    return float(np.median(seconds)) / sample.nbytes


def peers(threads: int, rounds: int) -> list[dict[str, Any]]:
    """Tools of torch itself, in this process."""
    torch.set_num_threads(threads)
    names = ["none", "empty TorchDispatchMode", "DebugMode, hashes"]
    trainers = {name: Trainer() for name in names}

    def with_mode(index: int) -> object:
        with Empty():
            return trainers["empty TorchDispatchMode"].step(index)

    def with_hashes(index: int) -> object:
        with DebugMode(), DebugMode.log_tensor_hashes(hash_fn="hash_tensor"):
            return trainers["DebugMode, hashes"].step(index)

    seconds = harness.time_rounds(
        dict(zip(names, (trainers["none"].step, with_mode, with_hashes))), rounds
    )
    return [
        {
            "tool": name,
            "threads": threads,
            "rounds": rounds,
            "times_none": harness.ratio(seconds[name], seconds["none"]),
            "seconds": harness.spread(seconds[name]),
        }
        for name in names[1:]
    ]


def msprobe(threads: int, rounds: int) -> tuple[list[dict[str, Any]], str]:
    """msprobe in its environment, or the reason why it has none."""
    try:
        python = environments.python(environments.MSPROBE)
    except (OSError, environments.MissingToolError, subprocess.SubprocessError) as error:
        return [], f"msprobe is left out: {error}"
    rows = work(python, threads, rounds, MSPROBE)
    return [row for row in rows if row["tool"] in MSPROBE], ""


# ---- The bars -----------------------------------------------------------------------------------


def missed_bars(ops: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[str]:
    added = {row["case"]: row["added_us_per_op"]["median"] for row in ops}
    closed, is_open = added["observer, filters closed"], added["observer, health"]
    mode = added["empty TorchDispatchMode"]
    missed = []
    if closed > CLOSED_BAR_US:
        missed.append(f"filters closed: {closed:.2f} us > {CLOSED_BAR_US}")
    if is_open > OPEN_BAR_US:
        missed.append(f"with provenance: {is_open:.2f} us > {OPEN_BAR_US}")
    if is_open > mode * MODE_BAR:
        missed.append(f"with provenance: {is_open / mode:.2f} of an empty mode > {MODE_BAR:.2f}")
    for row in steps:
        times, bar = row["times_none"]["median"], STEP_BARS[row["record"]]
        if row["threads"] == 1 and times > bar:
            missed.append(f"a step, {row['record']}: {times:.3f} > {bar}")
        if not row["identical_weights"]:
            missed.append(f"{row['record']} changed the weights")
    return missed


def show(
    ops: list[dict[str, Any]], steps: list[dict[str, Any]], others: list[dict[str, Any]]
) -> None:
    print(
        harness.table(
            ["", "added, us per op"],
            [[row["case"], harness.with_spread(row["added_us_per_op"])] for row in ops],
        )
    )
    header = ["record", "threads", "times a step without", "records", "GB read"]
    rows = [
        [
            row["record"],
            str(row["threads"]),
            harness.with_spread(row["times_none"], 3),
            f"{row['records_per_step']:,}",
            f"{row['bytes_per_step'] / 1e9:.2f}",
            f"{row['pure_read_share']:.3f}",
            "yes" if row["identical_weights"] else "no",
        ]
        for row in steps
    ]
    print("\n" + harness.table([*header, "a pure read, of a step", "same weights"], rows))
    rows = [
        [row["tool"], str(row["threads"]), harness.with_spread(row["times_none"], 3)]
        for row in others
    ]
    print("\n" + harness.table(["other tool", "threads", "times a step without"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--without-msprobe", action="store_true")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    ops = per_op(rounds)
    steps = [
        step(threads, record, max(2, rounds // 2))
        for threads in harness.threads_to_try()
        for record in STEP_BARS
    ]
    others = peers(1, min(PEER_ROUNDS, rounds))
    absent = "msprobe was left out, as asked"
    if not arguments.without_msprobe:
        found, absent = msprobe(1, min(PEER_ROUNDS, rounds))
        others += found
    show(ops, steps, others)
    missed = missed_bars(ops, steps)
    print("\n" + ("Bars missed: " + "; ".join(missed) if missed else "All bars reached."))
    if absent:
        print(f"\n{absent}")
    harness.write_results("op_level", ops + steps + others, missed_bars=missed, absent=absent)


if __name__ == "__main__":
    main()
