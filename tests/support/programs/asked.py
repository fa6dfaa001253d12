"""A small training run that can be asked for op level or a dump while it goes on."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Callable, Optional

import torch
from torch import nn

import fastcheck
from fastcheck.log.reader import read_log
from support.programs.training import Apply, Net, batches

ASKED = signal.SIGUSR1


def nothing(step: int) -> None:
    pass


def ask(step: int, *at: int) -> None:
    """The signal, in this thread, if the step is one of these."""
    if step in at:
        signal.raise_signal(ASKED)


class Run:
    """A small training run that can be asked."""

    def __init__(self, tmp_path: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.place = tmp_path / "more"
        self.model = nn.Sequential(Net(dropout=0.5), Apply())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        more = {"signal": "SIGUSR1", "steps": 2, "dir": self.place, **options.pop("more", {})}
        request = fastcheck.OnRequest(**more)
        self.monitor = fastcheck.install(self.model, on_request=request, **options)

    def train(
        self,
        steps: int,
        within: Callable[[int], None] = nothing,
        scaler: Optional[torch.amp.GradScaler] = None,
    ) -> list[float]:
        losses = []
        for step, x in enumerate(batches(steps)):
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            within(step)
            if scaler is None:
                loss.backward()
                self.optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(self.optimizer)
                scaler.update()
            losses.append(float(loss.detach()))
        return losses

    def steps(self, name: str) -> list[int]:
        """Those in a log under the place."""
        return sorted(set(read_log(self.place / name).records["step"].tolist()))

    @property
    def summary(self) -> str:
        return " ".join(self.monitor.summary().split())


def bare(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = Net(dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for x in batches(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
