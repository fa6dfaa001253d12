"""install(watch=True) and faults of the optimizer that no number of the step shows when they begin.

    make accuracy SUITE="watch_standing [--seeds N]"
    writes bench/results/watch-standing.json

*eps*: Adam's eps is 0.1 from the first step on, *beta2*: its beta2 is 0.5, *rate*: its learning
rate is 0.3. *scale*: under float16 autocast the loss scale is set to 2^40 at step 150, and the
scaler lowers it by a thousandth at each overflow. *none*: the same programs without a fault.
A fault is seen if there is a warning of the kind that names it.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from typing import Any

import torch

import fastcheck
import harness
from accuracy.watch_programs import PROGRAMS, Program

STEPS, STUCK_AT = 260, 150
FAULTS = {"eps": "settings", "beta2": "settings", "rate": "update", "scale": "loss_scale"}


def train(kind: str, seed: int, fault: str, is_faulty: bool) -> Any:
    program = Program(kind, seed)
    model, eps = program.model, 0.1 if fault == "eps" and is_faulty else 1e-8
    rate = 0.3 if fault == "rate" and is_faulty else 3e-3
    betas = (0.9, 0.5 if fault == "beta2" and is_faulty else 0.999)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, eps=eps, betas=betas)
    is_scaled = fault == "scale"
    scaler = torch.amp.GradScaler("cpu", enabled=is_scaled)
    autocast = torch.autocast("cpu", torch.float16) if is_scaled else contextlib.nullcontext()
    monitor = fastcheck.install(model, record="stats", overflow_nums=-1, watch=True)
    for step in range(STEPS):
        if is_scaled and is_faulty and step == STUCK_AT:
            scaler.update(2.0**40)
            scaler.set_backoff_factor(0.999)
        optimizer.zero_grad()
        with autocast:
            loss = program.loss(program.batch())
        scaler.scale(loss.float()).backward()
        scaler.step(optimizer)
        scaler.update()
    monitor.remove()
    return monitor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for fault, expected in harness.few(FAULTS.items()):
        for is_faulty in (True, False):
            for kind in harness.few(PROGRAMS):
                for seed in range(options.seeds):
                    events = train(kind, seed, fault, is_faulty).watch.events
                    steps = [e.step for e in events if e.kind == expected and e.is_warning]
                    others = [str(e) for e in events if e.is_warning and e.kind != expected]
                    row = {"fault": fault, "is_faulty": is_faulty, "program": kind, "seed": seed}
                    rows.append({**row, "step": min(steps, default=None), "others": others})
            mine = [r for r in rows if r["fault"] == fault and r["is_faulty"] is is_faulty]
            warned = [row["step"] for row in mine if row["step"] is not None]
            print(fault, "fault" if is_faulty else "none", len(mine), len(warned), warned,
                  sum(bool(row["others"]) for row in mine), sep=" | ", flush=True)  # fmt: skip
    harness.write_results("watch-standing", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
