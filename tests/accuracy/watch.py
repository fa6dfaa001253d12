"""install(watch=True): alarms in healthy runs, faults that are seen, and forecasts.

    make accuracy SUITE="watch [--steps N] [--seeds N] [--minutes N] [--only PART]
    [--faults-of SET]"
    writes bench/results/watch-PART.json for each part: healthy, faults, forecast; --only runs
    one of them. Faults of another set than "tuned": bench/results/watch-faults-SET.json

Healthy runs: the models of healthy_models.py in float32 and, with a GradScaler, in float16, the
programs of watch_programs.py with warm-up and decay, and those of watch_healthy.py. Faults: the
programs of watch_programs.py, one fault in each run, at a step that the seed decides. The rules
were chosen with the set "tuned" in sight, whose faults come at steps 180 to 208. A held-out set has
other seeds, one for each run, and faults soon after the warm-up of the ranges, in the middle, and
late; once a rule is changed for what it shows, it is held out no longer, and the next one is taken.
A fault is seen if an event comes within five steps of its beginning, of a kind that had none in the
hundred steps before; its cause is right if an event within these steps names one of those that the
fault has. Beside it, on the same losses and norms, the rules of watch_peers.py. The exit status is
1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Optional

import torch

import fastcheck
import harness
from accuracy import healthy_models
from accuracy.watch_healthy import LOOPS
from accuracy.watch_peers import PEERS
from accuracy.watch_programs import FAULTS, PROGRAMS, Program, rate_at
from fastcheck.log.step_table import StepRow

FAULT_STEPS, WITHIN, BEFORE = 260, 5, 100
#: Of the held-out sets: the first seed. A run has a seed of its own.
HELD_OUT = {"held-out": 1000}
#: The first and the last step of a fault in them, and how many runs a program has of each fault.
TIMES, RUNS_OF_TIME = {"early": (70, 90), "middle": (150, 300), "late": (380, 420)}, 2
#: By part and result: the least share, of the faults and of the overflows.
BARS = {
    ("faults", "seen"): 0.95,
    ("faults", "cause"): 0.90,
    ("forecast", "ten_steps_before"): 0.90,
    ("forecast", "inside"): 0.80,
}


def peers_of(rows: list[StepRow]) -> dict[str, list[int]]:
    """The alarms of the rules of others."""
    found = {}
    for name, (rule, column) in PEERS.items():
        values = [getattr(row, column) for row in rows]
        values = [value if value is not None and math.isfinite(value) else 0.0 for value in values]
        found[name] = rule(values)
    return found


def train_model(name: str, precision: str, steps: int, seed: int) -> Any:
    torch.manual_seed(seed)
    model = healthy_models.MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    is_half = precision == "float16"
    scaler = torch.amp.GradScaler("cpu", enabled=is_half)
    monitor = fastcheck.install(model, record="stats", overflow_nums=-1, watch=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * rate_at(step, steps)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16) if is_half else contextlib.nullcontext():
            loss = model()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    monitor.remove()
    return monitor


def train_loop(name: str, steps: int, seed: int) -> Any:
    torch.manual_seed(seed)
    models, iterate = LOOPS[name](steps)
    monitor = fastcheck.install(*models, record="stats", overflow_nums=-1, watch=True)
    for step in range(steps):
        iterate(step)
    monitor.remove()
    return monitor


def train_program(kind: str, steps: int, seed: int, fault: str = "", at: int = -1) -> Any:
    program = Program(kind, seed)
    monitor = fastcheck.install(program.model, record="stats", overflow_nums=-1, watch=True)
    lasts, entered, changed, _ = FAULTS[fault] if fault else (0, None, None, ())
    with contextlib.ExitStack() as stack:
        for step in range(steps):
            if step == at + lasts:
                stack.close()
            if not fault:
                for group in program.optimizer.param_groups:
                    group["lr"] = 3e-3 * rate_at(step, steps)
            if step == at and entered is not None:
                stack.enter_context(entered(program))
            batch = program.batch()
            if at <= step < at + lasts and changed is not None:
                batch = changed(program, batch)
            program.optimizer.zero_grad()
            program.loss(batch).backward()
            program.optimizer.step()
    monitor.remove()
    return monitor


def healthy(steps: int, seeds: int, minutes: float) -> dict[str, Any]:
    rows, began = [], time.perf_counter()
    for seed in range(seeds):
        jobs = [(kind, "program") for kind in PROGRAMS] + [(name, "loop") for name in LOOPS]
        jobs += [(name, p) for name in healthy_models.MODELS for p in ("float32", "float16")]
        for name, precision in harness.few(jobs):
            if time.perf_counter() - began > 60 * minutes:
                break
            if precision == "loop":
                monitor = train_loop(name, steps, seed)
            elif precision == "program":
                monitor = train_program(name, steps, seed)
            else:
                monitor = train_model(name, precision, steps, seed)
            events = monitor.watch.events
            rows.append(
                {
                    "model": name,
                    "precision": precision,
                    "seed": seed,
                    "warnings": [str(event) for event in events if event.is_warning],
                    "notes": [str(event) for event in events if not event.is_warning],
                    "peers": {k: len(v) for k, v in peers_of(monitor.step_table()).items()},
                }
            )
            print(name, precision, seed, len(rows[-1]["warnings"]), len(rows[-1]["notes"]),
                  *rows[-1]["warnings"], sep=" | ", flush=True)  # fmt: skip
    return {
        "steps": steps,
        "minutes": round((time.perf_counter() - began) / 60, 1),
        "runs": len(rows),
        "runs_with_a_warning": sum(bool(row["warnings"]) for row in rows),
        "warnings": sum(len(row["warnings"]) for row in rows),
        "notes": sum(len(row["notes"]) for row in rows),
        "peers": {name: sum(row["peers"][name] for row in rows) for name in PEERS},
        "rows": rows,
    }


def place_of(event: Any) -> str:
    """The module that an event names first."""
    mover = event.first_mover
    site = event.site if mover is None else mover.site
    return "" if site is None else site.module


def after(steps: Sequence[int], at: int) -> Optional[int]:
    """How many steps after ``at`` the first of these is that is soon enough."""
    return min((step - at for step in steps if at <= step <= at + WITHIN), default=None)


def median(values: Iterable[Optional[int]]) -> Optional[float]:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def fault_runs(of: str, seeds: int) -> Iterator[tuple[str, str, int, str, int]]:
    """Each run of a set: the fault, the program, the seed, and when: a name, and the step."""
    number = HELD_OUT.get(of, 0)
    for fault in FAULTS:
        for kind in PROGRAMS:
            if fault == "a batch x30" and kind == "gpt":
                continue  # its tokens have no scale
            if of not in HELD_OUT:
                for seed in range(seeds):
                    yield fault, kind, seed, "middle", 180 + 7 * (seed % 5)
                continue
            for when, (first, last) in TIMES.items():
                for _ in range(RUNS_OF_TIME):
                    yield fault, kind, number, when, random.Random(number).randint(first, last)
                    number += 1


def judged(monitor: Any, fault: str, kind: str, at: int) -> dict[str, Any]:
    """What a run has of the fault that began at this step."""
    causes = FAULTS[fault][-1]
    events = [e for e in monitor.watch.events if at <= e.step <= at + WITHIN]
    early = {e.kind for e in monitor.watch.events if at - BEFORE <= e.step < at}
    new = [e.step for e in events if e.kind not in early]
    peers = {name: after(steps, at) for name, steps in peers_of(monitor.step_table()).items()}
    named = [e for e in events if e.cause in causes]
    if "layer" in causes:
        place = Program(kind, 0).layer_name()
        named = [e for e in named if place_of(e) == place]
    return {
        "seen": bool(new),
        "warned": any(event.is_warning for event in events),
        "cause": bool(named),
        "steps_until_seen": after(new, at),
        "events": [str(event) for event in events],
        "kinds_before": sorted(early),
        "peers": {name: steps is not None for name, steps in peers.items()},
        "steps_until_peers": peers,
    }


def shares_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What share of these runs is seen, warned of, and has the right cause."""
    shares = {n: sum(row[n] for row in rows) / len(rows) for n in ("seen", "warned", "cause")}
    return {"faults": len(rows), **shares}


def faults(of: str, seeds: int) -> dict[str, Any]:
    rows = []
    for fault, kind, seed, when, at in harness.few(fault_runs(of, seeds)):
        steps = at + FAULT_STEPS // 10 if of in HELD_OUT else FAULT_STEPS
        monitor = train_program(kind, steps, seed, fault, at)
        run = {"fault": fault, "program": kind, "seed": seed, "when": when, "step": at}
        rows.append({**run, **judged(monitor, fault, kind, at)})
        print(*list(rows[-1].values())[:8], sep=" | ", flush=True)
    count = len(rows)
    return {
        **shares_of(rows),
        "of": {
            name: shares_of([r for r in rows if r["fault"] == name])
            for name in dict.fromkeys(row["fault"] for row in rows)
        },
        "when": {
            name: shares_of([r for r in rows if r["when"] == name])
            for name in dict.fromkeys(row["when"] for row in rows)
        },
        "steps_until_seen": median(row["steps_until_seen"] for row in rows),
        "peers": {n: sum(row["peers"][n] for row in rows) / count for n in PEERS},
        "steps_until_peers": {
            n: median(row["steps_until_peers"][n] for row in rows) for n in PEERS
        },
        "rows": rows,
    }


class Growing(torch.nn.Module):
    """Float16 layers of which one grows: by the same factor at each step, by the same amount, or
    faster and faster.
    """

    def __init__(self, growth: str, rate: float, place: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16).half() for _ in range(4))
        self.growth, self.rate, self.place, self.count = growth, rate, place, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        t = max(0, self.count - 30)
        factor = {
            "exponential": 2.0 ** (self.rate * t),
            "linear": 1 + 40 * self.rate * t,
            "quadratic": 1 + 4 * (self.rate * t) ** 2,
        }[self.growth]
        for number, layer in enumerate(self.layers):
            y = layer(x * (factor * 50 if number == self.place else 1.0))
            total = total + y.float().mean() * 1e-6
        return total


def forecast(seeds: int) -> dict[str, Any]:
    rows = []
    for growth in harness.few(("exponential", "linear", "quadratic")):
        for seed in range(seeds):
            torch.manual_seed(seed)
            place, rate = seed % 4, 0.04 * 1.3 ** (seed % 10)
            model = Growing(growth, rate, place)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            monitor = fastcheck.install(model, record="stats", overflow_nums=-1, watch=True)
            truth = None
            while truth is None and model.count < 4000:
                optimizer.zero_grad()
                loss = model(torch.randn(32, 16).half())
                truth = None if bool(torch.isfinite(loss)) else model.count
                loss.backward()
                optimizer.step()
                model.count += 1
            monitor.remove()
            warned = [e for e in monitor.watch.events if e.kind == "headroom"]
            first = warned[0] if warned else None
            low, high = (0.0, 0.0) if first is None else first.interval
            rows.append(
                {
                    "growth": growth,
                    "seed": seed,
                    "rate": rate,
                    "truth": truth,
                    "warned": None if first is None else first.step,
                    "is_right": first is not None and first.site.module == f"layers.{place}",
                    "interval": [low, high],
                    "is_inside": first is not None
                    and math.floor(low) <= truth - first.step <= math.ceil(high),
                }
            )
            print(*rows[-1].values(), sep=" | ", flush=True)
    early = [row["is_right"] and row["truth"] - row["warned"] >= 10 for row in rows if row["truth"]]
    return {
        "overflows": len(early),
        "ten_steps_before": sum(early) / len(early),
        "inside": sum(row["is_inside"] for row in rows) / len(rows),
        "rows": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=["healthy", "faults", "forecast"])
    parser.add_argument("--minutes", type=float, default=1e6, help="of healthy runs at most")
    parser.add_argument("--faults-of", choices=["tuned", *HELD_OUT], default="tuned")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    parts = {
        "forecast": lambda: forecast(harness.size(10, 1)),
        "faults": lambda: faults(options.faults_of, options.seeds),
        "healthy": lambda: healthy(options.steps, 1, options.minutes),
    }
    found = {n: run() for n, run in parts.items() if options.only in (None, n)}
    for name, part in found.items():
        print(name, {key: value for key, value in part.items() if key != "rows"})
        is_other = name == "faults" and options.faults_of in HELD_OUT
        file = f"watch-{name}-{options.faults_of}" if is_other else f"watch-{name}"
        harness.write_results(file, [], **{name: part})
    missed = [key for key, bar in BARS.items() if found.get(key[0], {}).get(key[1], bar) < bar]
    print("bars missed:", missed or "none")
    return 1 if missed and not harness.IS_SMOKE else 0  # a share of one run is none


if __name__ == "__main__":
    sys.exit(main())
