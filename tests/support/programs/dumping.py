"""Helpers shared by the tests of Dumper: a step to dump, and readers of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np
import torch
from torch import nn

import fastcheck
from fastcheck.log.reader import read_log
from fastcheck.log.view import LogView
from support.programs.command_line import strict
from support.programs.training import Net

LEVELS = ("op", "module")
Step = Callable[[], object]


def dumped_run(
    directory: Optional[Path],
    *,
    steps: int = 2,
    model: Callable[[], nn.Module] = lambda: Net(dropout=0.25),
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    batch: Callable[[int, torch.Tensor], torch.Tensor] = lambda step, x: x,
    before_forward: Callable[[int, nn.Module], None] = lambda step, model: None,
    before_update: Callable[[int, nn.Module], None] = lambda step, model: None,
    seed: int = 0,
    **options: Any,
) -> tuple[list[float], nn.Module]:
    """Trains with cross-entropy on random batches of 6, every step dumped unless ``directory`` is
    None; the losses, and the model.
    """
    torch.manual_seed(seed)
    net, criterion = model(), nn.CrossEntropyLoss()
    update = optimizer(net.parameters())
    data = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        x = torch.randn(6, 8, generator=data)
        labels = torch.randint(0, 4, (6,), generator=data)
        before_forward(step, net)
        with fastcheck.Dumper(
            directory or "nowhere", step=step, enable=directory is not None, **options
        ):
            update.zero_grad()
            loss = criterion(net(batch(step, x)), labels)
            loss.backward()
            before_update(step, net)
            update.step()
        losses.append(loss.item())
    return losses, net


def place(directory: Path, step: int = 0) -> Path:
    return directory / f"step{step}" / "rank0"


def calls(directory: Path, step: int = 0) -> list[dict[str, Any]]:
    text = (place(directory, step) / "calls.jsonl").read_text()
    return [strict(line) for line in text.splitlines()]


def index(directory: Path, step: int = 0) -> dict[str, Any]:
    return strict((place(directory, step) / "index.json").read_text())


def log(directory: Path, step: int = 0) -> LogView:
    return read_log(place(directory, step))


def ops(directory: Path, step: int = 0, direction: str = "forward") -> list[str]:
    return [
        line["op"]
        for line in calls(directory, step)
        if line["kind"] == "op" and line["direction"] == direction
    ]


def record_of(view: LogView, entry: dict[str, Any]) -> np.void:
    """The record that an entry of the index names."""
    found = view.records[view.records["seq"] == entry["seq"]]
    assert len(found) == 1
    return found[0]


def values(directory: Path, step: int = 0) -> Callable[[dict[str, Any]], torch.Tensor]:
    """Loads the value of an entry of the index."""
    import safetensors.torch

    files: dict[str, Any] = {}

    def load(entry: dict[str, Any]) -> torch.Tensor:
        file, key = entry["value"]
        if file not in files:
            files[file] = safetensors.torch.load_file(place(directory, step) / file)
        return files[file][key]

    return load
