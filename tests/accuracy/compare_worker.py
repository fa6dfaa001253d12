"""Trains programs of compare_programs.py in this process, with a log each: a machine of
compare_healthy.py.

    python -m accuracy.compare_worker DIRECTORY JOBS.json

A job is [name of the log, program, number of a fault or null, "eager" or "compile"].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Optional

import torch
from torch import nn

import fastcheck
from accuracy.compare_programs import CLASSES, FAULTS, PROGRAMS, Fault

STEPS = 4


def save(program: str, path: Path, seed: int = 0) -> None:
    """The weights and batches that all runs of a program begin with."""
    made = PROGRAMS[program]
    torch.manual_seed(seed)
    model, draw = made.make(), torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    batches = [
        (made.batch(draw), torch.randint(0, CLASSES, (4,), generator=draw)) for _ in range(STEPS)
    ]
    torch.save({"weights": model.state_dict(), "batches": batches}, path)


def train(
    program: str,
    start: Path,
    log: Path,
    fault: Optional[Fault] = None,
    is_compiled: bool = False,
    **options: Any,
) -> None:
    made, saved = PROGRAMS[program], torch.load(start)
    model: Any = made.make()
    model.load_state_dict(saved["weights"])
    model.to(made.dtype)
    if fault is not None:
        fault(model)
    criterion = nn.CrossEntropyLoss()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if made.is_adam:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run = torch.compile(model) if is_compiled else model
    with fastcheck.install(
        model, criterion, training=fastcheck.Training(optimizer=optimizer), log_dir=log, **options
    ):
        for x, labels in saved["batches"]:
            optimizer.zero_grad()
            x = x.to(made.dtype) if x.is_floating_point() else x
            criterion(run(x).float(), labels).backward()
            optimizer.step()


def main() -> None:
    directory = Path(sys.argv[1])
    for name, program, fault, mode in json.loads(Path(sys.argv[2]).read_text()):
        start = directory / f"{program}.pt"
        change = None if fault is None else FAULTS[fault][2]
        train(program, start, directory / name, change, mode == "compile")


if __name__ == "__main__":
    main()
