"""Trains healthy architectures at level="op" and counts events; the expected number is 0.

    make accuracy SUITE="healthy [--steps N] [--seeds N]"

Writes bench/results/healthy.json. Each architecture of healthy_models.py and of
healthy_transformers.py trains in float32, under bfloat16 autocast, and under float16 autocast with
a GradScaler, which skips steps until its scale fits. The exit status is 1 if any event was counted.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any, Optional

import torch

import fastcheck
import harness
from accuracy import healthy_models
from accuracy.healthy_transformers import TRANSFORMERS
from fastcheck import Verdict

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
    for name in harness.few(MODELS):
        for precision in PRECISIONS:
            counted, verdicts, records, loss = 0, dict.fromkeys(tally_names(), 0), 0, 0.0
            for seed in range(options.seeds):
                monitor, loss = train(name, precision, options.steps, seed)
                counted += monitor.event_count
                records += len(monitor.records())
                for verdict, count in tally(monitor).items():
                    verdicts[verdict] = verdicts.get(verdict, 0) + count
                false_alarms += [
                    f"{name}, {precision}, step {e.step}: {e.verdict.name.lower()} at {e.site}: "
                    f"{e.reason} ({e.line})"
                    for e in monitor.events
                    if e.counted
                ]
            rows.append(
                {"model": name, "precision": precision, "counted": counted, "records": records}
                | {"last_loss": loss, **verdicts}
            )
    shown = ["intended", "absorbed", "benign", "scaled"]
    print(
        harness.table(
            ["model", "precision", "records", *shown, "counted"],
            [
                [
                    str(row["model"]),
                    str(row["precision"]),
                    f"{row['records']:,}",
                    *(str(row[verdict]) for verdict in shown),
                    str(row["counted"]),
                ]
                for row in rows
            ],
        )
    )
    for alarm in false_alarms:
        print(alarm)
    total = sum(int(row["counted"]) for row in rows)
    print(f"{len(rows)} runs of {options.steps} steps, {total} events counted")
    harness.write_results("healthy", rows, steps=options.steps, seeds=options.seeds)
    return 1 if total else 0


def tally_names() -> list[str]:
    return [verdict.name.lower() for verdict in NOT_COUNTED]


if __name__ == "__main__":
    sys.exit(main())
