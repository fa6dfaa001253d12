"""How far a NaN travels through fastcheck's Python files: from the hook that read it until the
exception, and in the whole of that step.

    python bench/path.py        writes bench/results/path.json

A model of three layers trains with default options, at module level and at op level; in its third
step the middle layer returns NaN. ``sys.setprofile`` sees each function that is called or returned
from; a move is one that leads from one file of fastcheck to another. Three things that run before
the exception, whose message has them, are not counted: what report/page does for the page of the
stop, what monitor/watching.py does to judge the last steps, and what monitor/origin/makers.py does
to find the operator, which is to run the module's call again with a second monitor. Exit status 1
above the bars, which are of module level.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import fastcheck
import harness

_ROOT = str(Path(fastcheck.__file__).parent)
_ASIDE = ("report/page/", "monitor/watching.py", "monitor/origin/makers.py")
BARS = {"files": 15, "moves": 170}
POISONED_STEP = 2


class Journey:
    """The files that control passes through, in order, without what is set aside."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._depth_aside = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "return"):
            return
        name = _file_of(frame)
        if name.startswith(_ASIDE):
            self._depth_aside += 1 if event == "call" else -1
            return
        if self._depth_aside:
            return
        if event == "return":
            back: Any = frame.f_back
            name = _file_of(back) if back is not None else ""
        if name and (not self.files or self.files[-1] != name):
            self.files.append(name)


def _file_of(frame: FrameType) -> str:
    name = frame.f_code.co_filename
    return name[len(_ROOT) + 1 :] if name.startswith(_ROOT) else ""


class Poisoned(nn.Module):
    """Returns NaN once it is told to; the path begins with the hook that reads that."""

    def __init__(self, journey: Journey) -> None:
        super().__init__()
        self.is_bad = False
        self.start = 0
        self._journey = journey

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_bad:
            self.start = len(self._journey.files)
            return x * float("nan")
        return x * 1.0


def travel(level: str) -> dict[str, Any]:
    journey = Journey()
    poison = Poisoned(journey)
    model = nn.Sequential(nn.Linear(8, 8), poison, nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tempfile.TemporaryDirectory() as folder:
        monitor = fastcheck.install(model, overflow_nums=1, level=level, log_dir=folder)
        for step in range(POISONED_STEP + 1):
            poison.is_bad = step == POISONED_STEP
            optimizer.zero_grad()
            if poison.is_bad:
                sys.setprofile(journey)
            try:
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
            except fastcheck.OverflowDetected:
                break
            finally:
                sys.setprofile(None)
        else:
            raise SystemExit("expected a stop")
        monitor.remove()
    parts = {"": journey.files[poison.start :], "step_": journey.files}
    row: dict[str, Any] = {"level": level}
    for prefix, files in parts.items():
        row |= {f"{prefix}files": len(set(files)), f"{prefix}moves": len(files) - 1}
    return {**row, "names": sorted(set(parts[""]))}


def main() -> None:
    for level in ("module", "op"):  # what is imported at the first stop is not part of the path
        travel(level)
    rows = [travel(level) for level in ("module", "op")]
    columns = ("level", "files", "moves", "step_files", "step_moves")
    print(harness.table(columns, [[str(row[name]) for name in columns] for row in rows]))
    bars = [
        harness.bar(f"{what} until the exception, module level", rows[0][what], at_most=most)
        for what, most in BARS.items()
    ]
    harness.print_bars(bars)
    harness.write_results("path", rows, bars=bars)
    sys.exit(not all(bar["is_met"] for bar in bars))


if __name__ == "__main__":
    main()
