"""Helpers shared by the tests of fastcheck.compat: scripts, a way to run them, their output."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Optional

import torch
from torch import nn

import fastcheck
from fastcheck.compat import ptdbg
from support.processes import run_python

SCRIPTS = Path(__file__).parent / "compat_scripts"


def run_script(
    name: str, *arguments: object, at: Path, env: Optional[dict[str, str]] = None
) -> subprocess.CompletedProcess[str]:
    """Runs a script of compat_scripts in the directory ``at``."""
    return run_python(SCRIPTS / name, *arguments, cwd=at, env=env)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def calls_of(step: Path) -> list[dict[str, Any]]:
    """What was dumped of a step: ``dump/step0``."""
    return lines_of(step / "rank0" / "calls.jsonl")


def overflows_of(dump_path: Path) -> list[dict[str, Any]]:
    """The record file of overflow_check."""
    return lines_of(dump_path / "overflow" / "overflows-rank0.jsonl")


def overflows_on_rank_1(rank: int, dump_path: str) -> Any:
    """Trains until it is stopped: (API, step, rank) of what did it."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ptdbg.set_dump_path(dump_path)
    ptdbg.register_hook(net, ptdbg.overflow_check)
    try:
        for step in range(6):
            x = torch.ones(1, 2)
            if (rank, step) == (1, 2):
                with torch.no_grad():
                    net.weight.fill_(3e38)
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except fastcheck.OverflowDetected as stop:
        return stop.culprit.api, stop.step, stop.report.rank
    return None
