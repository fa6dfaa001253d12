"""Times training steps under tools, paired with steps without, in the Python that runs it.

    python step_worker.py THREADS ROUNDS TOOL...    prints one line of JSON

Every tool has a model of its own, identically initialised. A round takes one step of each, in an
order that rotates, on the same batch with the same dropout. The result includes whether the models
stayed bit-identical. Imports fastcheck only for its own tools, so that it also runs where only
another tool is installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from typing import Any, Callable

import torch

from transformer import Trainer

Step = Callable[[int], torch.Tensor]


def none(trainer: Trainer, scratch: str) -> Step:
    return trainer.step


def fastcheck(depth: str) -> Callable[[Trainer, str], Step]:
    def tool(trainer: Trainer, scratch: str) -> Step:
        from fastcheck import install

        install(trainer.model, record=depth)
        return trainer.step

    return tool


def detect_anomaly(trainer: Trainer, scratch: str) -> Step:
    def step(index: int) -> torch.Tensor:
        with torch.autograd.detect_anomaly():
            return trainer.step(index)

    return step


def debug_underflow_overflow(trainer: Trainer, scratch: str) -> Step:
    from transformers.debug_utils import DebugUnderflowOverflow

    tool = DebugUnderflowOverflow(trainer.model)

    def step(index: int) -> torch.Tensor:
        assert tool is not None  # it lives as long as it is referenced
        return trainer.step(index)

    return step


def msprobe(level: str, mode: str = "statistics") -> Callable[[Trainer, str], Step]:
    def tool(trainer: Trainer, scratch: str) -> Step:
        from msprobe.pytorch import PrecisionDebugger

        place = os.path.join(scratch, f"{level}-{mode}")
        os.makedirs(place)
        config = os.path.join(place, "config.json")
        with open(config, "w") as file:
            settings = {"task": "statistics", "dump_path": os.path.join(place, "dump"), "rank": []}
            settings |= {"step": [], "level": level}
            section = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": mode}
            json.dump({**settings, "statistics": section}, file)
        debugger = PrecisionDebugger(config_path=config)

        def step(index: int) -> torch.Tensor:
            debugger.start(model=trainer.model)
            loss = trainer.step(index)
            debugger.stop()
            debugger.step()
            return loss

        return step

    return tool


TOOLS = {
    "none": none,
    "none again (A/A)": none,
    "fastcheck full": fastcheck("full"),
    "fastcheck stats": fastcheck("stats"),
    "fastcheck health": fastcheck("health"),
    "detect_anomaly": detect_anomaly,
    "HF DebugUnderflowOverflow": debug_underflow_overflow,
    "msprobe L0 statistics": msprobe("L0"),
    "msprobe L1 statistics": msprobe("L1"),
    "msprobe L1 md5": msprobe("L1", "md5"),
}
PACKAGES = {
    "HF DebugUnderflowOverflow": "transformers",
    "msprobe L0 statistics": "mindstudio-probe",
    "msprobe L1 statistics": "mindstudio-probe",
    "msprobe L1 md5": "mindstudio-probe",
}


def same_weights(a: Trainer, b: Trainer) -> bool:
    return all(map(torch.equal, a.model.parameters(), b.model.parameters()))


def main(threads: int, rounds: int, names: list[str]) -> dict[str, Any]:
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as scratch:
        trainers = {name: Trainer() for name in names}
        # The output of tools goes to stderr, so that stdout has the line of JSON only.
        with contextlib.redirect_stdout(sys.stderr):
            steps = {name: TOOLS[name](trainers[name], scratch) for name in names}
            seconds: dict[str, list[float]] = {name: [] for name in names}
            for index in range(rounds + 1):
                shift = index % len(names)
                losses = {}
                for name in names[shift:] + names[:shift]:
                    start = time.perf_counter()
                    losses[name] = steps[name](index)
                    if index > 0:
                        seconds[name].append(time.perf_counter() - start)
    return {
        "threads": threads,
        "torch": str(torch.__version__),
        "seconds": seconds,
        "identical": {name: same_weights(trainers[names[0]], trainers[name]) for name in names},
        "packages": {name: version(PACKAGES[name]) for name in names if name in PACKAGES},
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])))
