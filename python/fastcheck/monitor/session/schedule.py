"""Reads the scheduled values of a run: learning rates, weight decay, momentum, clip threshold."""

from __future__ import annotations

import numbers
from collections.abc import Iterator
from typing import Any

import torch

from .event_store import EventStore

__all__ = ["Schedule"]

_OPTIONS = ("lr", "weight_decay", "momentum", "betas")


class Schedule:
    """Writes a line to the log whenever one of them changes."""

    def __init__(self, event_store: EventStore) -> None:
        self._event_store = event_store
        self._last: dict[str, Any] = {}

    def follow(self, step: int, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Looks at the groups of an optimizer that is about to step. Its first values are in the
        meta file.
        """
        for group, options in enumerate(optimizer.param_groups):
            for name, value in _numbers(options):
                self._note(step, f"optimizers[{number}].groups[{group}].{name}", value, False)

    def clipped(self, step: int, threshold: Any) -> None:
        """Gradients were clipped to ``threshold``."""
        for _, value in _numbers({"lr": threshold}):
            self._note(step, "clipping.threshold", value, True)

    def _note(self, step: int, name: str, value: float, tells_first: bool) -> None:
        is_first = name not in self._last
        if not is_first and self._last[name] == value:
            return
        self._last[name] = value
        log = self._event_store.log
        if log is not None and (tells_first or not is_first):
            with self._event_store.lock:
                log.append_schedule({"step": step, "name": name, "value": value})


def _numbers(options: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name in _OPTIONS:
        value = options.get(name)
        if isinstance(value, (tuple, list)):
            parts = [(f"{name}[{place}]", part) for place, part in enumerate(value)]
        else:
            parts = [(name, value)]
        for label, part in parts:
            # Reading a tensor on a device would make the host wait.
            if isinstance(part, torch.Tensor):
                part = part.item() if part.is_cpu and part.numel() == 1 else None
            if isinstance(part, numbers.Real) and not isinstance(part, bool):
                yield label, float(part)
