"""Trains healthy programs that are awkward: NaN and infinities that the program itself removes.

    make accuracy SUITE="healthy_awkward [--seeds N]"

Writes bench/results/healthy_awkward.json. Each program of healthy_awkward_layers.py,
healthy_awkward_losses.py, healthy_awkward_runs.py, healthy_awkward_parts.py and
healthy_awkward_more.py runs without a monitor first: its losses,
gradients and weights have to be finite. Then it runs at op level, with every appearance counted
(count="all") and as is, and at module level. The exit status is 1 if any event was counted as it
is, anything was warned of, or a program is not healthy."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import nn

import fastcheck
import harness
from accuracy.healthy_awkward_more import PROGRAMS
from fastcheck.types import Verdict
from support.warned import warned

# A buffer that was finite and is not any more is an event at module level: what reads it is not
# seen where the module's own code does, and running statistics that turned into NaN are a fault
# whose only consequence may be the evaluation at the end of the run. allow_nonfinite() declares it.
NOT_AT_MODULE_LEVEL = {"run: the last batch, with missing values"}


def run(name: str, level: str = "op", count: str = "origin", seed: int = 0) -> list[str]:
    """The counted events of a program and its warnings, as text."""
    monitors: list[fastcheck.Monitor] = []

    def watch(model: nn.Module) -> None:
        stop = fastcheck.Stop(count=count)
        monitors.append(
            fastcheck.install(model, level=level, record="stats", overflow_nums=-1, stop=stop)
        )

    torch.manual_seed(seed)
    with warned() as texts:
        try:
            for _ in PROGRAMS[name](watch):
                pass
        finally:
            for monitor in monitors:
                monitor.remove()
    return [f"{name}, {level}: {text}" for text in texts] + [
        f"{name}, {level}: {event.site}: {event.reason} ({event.line})"
        for monitor in monitors
        for event in monitor.events
        if event.counted and event.verdict in (Verdict.ORIGIN, Verdict.ARRIVED)
    ]


def is_healthy(name: str, seed: int = 0) -> bool:
    """Whether all that the program trains stays finite, without a monitor."""
    torch.manual_seed(seed)
    found = list(PROGRAMS[name](lambda model: None))
    return bool(found) and all(bool(torch.isfinite(tensor).all()) for tensor in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    seeds = range(parser.parse_args().seeds)
    programs = harness.few(PROGRAMS)
    not_healthy = [name for name in programs if not all(is_healthy(name, seed) for seed in seeds)]
    rows: list[dict[str, Any]] = []
    for level, count in (("op", "all"), ("op", "origin"), ("module", "origin")):
        names = [name for name in programs if level == "op" or name not in NOT_AT_MODULE_LEVEL]
        alarms = [[run(name, level, count, seed) for seed in seeds] for name in names]
        accused = sum(any(found) for found in alarms)
        rows.append({"level": level, "count": count, "programs": len(names), "accused": accused})
        if count == "origin":
            print("\n".join(line for found in alarms for one in found for line in one))
    columns = ["level", "count", "programs", "accused"]
    print(harness.table(columns, [[str(row[key]) for key in columns] for row in rows]))
    for name in not_healthy:
        print(f"not healthy: {name}")
    harness.write_results("healthy_awkward", rows, programs=len(programs), seeds=len(seeds))
    return (
        1 if not_healthy or any(row["accused"] for row in rows if row["count"] == "origin") else 0
    )


if __name__ == "__main__":
    sys.exit(main())
