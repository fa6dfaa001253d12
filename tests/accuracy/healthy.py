"""Trains healthy architectures and counts events and warnings; the expected number of both is 0.

    make accuracy SUITE="healthy [--steps N] [--seeds N]"

Writes bench/results/healthy.json. Each architecture of healthy_models.py and of
healthy_transformers.py trains at both levels, watched as by default, in float32, under bfloat16
autocast, and under float16 autocast with a GradScaler, which skips steps until its scale fits. The
exit status is 1 if any event was counted, or anything was warned of.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from typing import Any, Optional

import torch

import fastcheck
import harness
from accuracy import healthy_models
from accuracy.healthy_transformers import TRANSFORMERS
from fastcheck.types import Verdict
from support.warned import warned

MODELS = {**healthy_models.MODELS, **TRANSFORMERS}
PRECISIONS: dict[str, Optional[torch.dtype]] = {
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
NOT_COUNTED = (
    Verdict.INTENDED,
    Verdict.ABSORBED,
    Verdict.BENIGN,
    Verdict.SCALED,
    Verdict.UNRESOLVED,
    Verdict.PROPAGATED,
)


def train(name: str, precision: str, steps: int, seed: int = 0, level: str = "op") -> Any:
    """The monitor after a healthy run, and the last loss."""
    torch.manual_seed(seed)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dtype = PRECISIONS[precision]
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    monitor = fastcheck.install(model, level=level, record="stats", overflow_nums=-1)
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        amp: Any = contextlib.nullcontext()
        if dtype is not None:
            amp = torch.autocast("cpu", dtype=dtype)
        with amp:
            loss = model()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    monitor.remove()
    return monitor, float(loss.detach())


def tally(monitor: Any) -> dict[str, int]:
    found = {verdict.name.lower(): 0 for verdict in NOT_COUNTED}
    for event in monitor.events:
        name = event.verdict.name.lower()
        found[name] = found.get(name, 0) + 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    rows, false_alarms = [], []
    cases = itertools.product(harness.few(MODELS), PRECISIONS, ("module", "op"))
    for name, precision, level in cases:
        counted, verdicts, records, loss = 0, dict.fromkeys(tally_names(), 0), 0, 0.0
        said: list[str] = []
        for seed in range(options.seeds):
            with warned() as texts:
                monitor, loss = train(name, precision, options.steps, seed, level)
            said += texts
            counted += monitor.event_count
            records += len(monitor.records())
            for verdict, count in tally(monitor).items():
                verdicts[verdict] = verdicts.get(verdict, 0) + count
            said += [
                f"step {e.step}: {e.verdict.name.lower()} at {e.site}: {e.reason} ({e.line})"
                for e in monitor.events
                if e.counted
            ]
        false_alarms += [f"{name}, {precision}, {level}: {text}" for text in said]
        rows.append(
            {"model": name, "precision": precision, "level": level, "counted": counted}
            | {"warned": len(said) - counted, "records": records, "last_loss": loss, **verdicts}
        )
    shown = ["intended", "absorbed", "benign", "scaled", "counted", "warned"]
    print(
        harness.table(
            ["model", "precision", "level", "records", *shown],
            [
                [row["model"], row["precision"], row["level"], f"{row['records']:,}"]
                + [str(row[name]) for name in shown]
                for row in rows
            ],
        )
    )
    for alarm in false_alarms:
        print(alarm)
    print(f"{len(rows)} runs of {options.steps} steps, {len(false_alarms)} events and warnings")
    harness.write_results("healthy", rows, steps=options.steps, seeds=options.seeds)
    return 1 if false_alarms else 0


def tally_names() -> list[str]:
    return [verdict.name.lower() for verdict in NOT_COUNTED]


if __name__ == "__main__":
    sys.exit(main())
