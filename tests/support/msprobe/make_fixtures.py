"""Writes the fixtures beside this file with msprobe itself, in an environment that has it:

    python -m venv msprobe-venv
    msprobe-venv/bin/pip install torch==2.13.0 mindstudio-probe==26.2.0
    msprobe-venv/bin/python tests/support/msprobe/make_fixtures.py

One or two training steps of a three-module network, dumped five times at module level: statistics,
statistics with CRC32 ("md5"), tensors, tensors with one weight changed, and statistics with a NaN
in the batch; and once at the level of APIs. What is kept is what msprobe wrote, without its
stack.json and with paths and process numbers that are no machine's.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from msprobe.pytorch import PrecisionDebugger
from torch import nn

HERE = Path(__file__).resolve().parent


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.act = nn.GELU()
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.act(self.first(x)))


def dump(target: Path, task: str, mode: str, nudge: float, steps: int, level: str) -> None:
    shutil.rmtree(target, ignore_errors=True)
    settings = {
        "task": task,
        "dump_path": str(target),
        "rank": [],
        "step": [],
        "level": level,
        "async_dump": False,
        "statistics": {
            "scope": [],
            "list": [],
            "data_mode": ["all"],
            "summary_mode": mode,
        },
        "tensor": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": mode},
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(settings, file)
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.head.weight[0, 0] += 0.0 if math.isnan(nudge) else nudge
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    debugger = PrecisionDebugger(config_path=file.name)
    for _ in range(steps):
        x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
        x[0, 0] *= float("nan") if math.isnan(nudge) else 1.0
        debugger.start(model=model)
        nn.functional.cross_entropy(model(x), y).backward()
        debugger.stop()
        debugger.step()
        optimizer.step()
        optimizer.zero_grad()
    clean(target)


def clean(target: Path) -> None:
    """Removes the fields that describe the machine that it ran on."""
    for file in target.glob("step*/proc*/dump.json"):
        found = json.loads(file.read_text())
        if found["dump_data_dir"]:
            found["dump_data_dir"] = "/elsewhere/dump_tensor_data"
        file.write_text(json.dumps(found))
        (file.parent / "stack.json").unlink()
        file.parent.rename(file.parent.parent / "proc1")


if __name__ == "__main__":
    if len(sys.argv) == 7:
        name, task, mode, nudge, steps, level = sys.argv[1:]
        dump(HERE / name, task, mode, float(nudge), int(steps), level)
    else:
        # There is one PrecisionDebugger a process.
        for line in (
            "statistics statistics statistics 0 2 L0",
            "crc32 statistics md5 0 2 L0",
            "tensors tensor statistics 0 1 L0",
            "nudged tensor statistics 0.5 1 L0",
            "with_nan statistics statistics nan 1 L0",
            "apis statistics md5 0 2 L1",
        ):
            subprocess.run([sys.executable, __file__, *line.split()], check=True)
