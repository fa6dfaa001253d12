"""Reads the scheduled values of a run: learning rates, weight decay, momentum, clip threshold."""

from __future__ import annotations

import numbers
from collections.abc import Iterator
from typing import Any

import torch

from .event_store import EventStore

# A warm-up's first step, and the end of a schedule, have fewer.
STILL_STEPS = 10

_OPTIONS = ("lr", "weight_decay", "momentum", "betas", "eps")


class Schedule:
    """Writes a line to the log whenever one of them changes."""

    def __init__(self, event_store: EventStore) -> None:
        self._event_store = event_store
        self._last: dict[str, Any] = {}
        self._rates = _RateWatch()

    def take_warning(self) -> str:
        """That no learning rate is other than 0, once; empty where there is nothing to tell."""
        warning, self._rates.warning = self._rates.warning, ""
        return warning

    def follow(self, step: int, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Looks at the groups of an optimizer that is about to step. Its first values are in the
        meta file.
        """
        rates: list[float] = []
        kind = type(optimizer).__name__.lower()
        # Divides by the root of a mean of squares.
        is_adam = "adam" in kind and kind != "adamax"
        for group, options in enumerate(optimizer.param_groups):
            for name, value in _numbers(options):
                if name == "lr":
                    rates.append(value)
                full_name = f"optimizers[{number}].groups[{group}].{name}"
                self._note(step, full_name, value, False, is_adam)

        # Of a rate that a device has nothing is known.
        self._rates.follow(step, not any(rates) and len(rates) == len(optimizer.param_groups))

    def clipped(self, step: int, threshold: Any) -> None:
        """Gradients were clipped to ``threshold``."""
        for _, value in _numbers({"lr": threshold}):
            self._note(step, "clipping.threshold", value, True)

    def _note(
        self, step: int, name: str, value: float, tells_first: bool, is_adam: bool = False
    ) -> None:
        is_first = name not in self._last
        if not is_first and self._last[name] == value:
            return
        if not is_first or is_adam:
            with self._event_store.lock:
                for listener in self._event_store.listeners:
                    listener.setting_changed(name, self._last.get(name), value)
        self._last[name] = value
        log = self._event_store.log
        if log is not None and (tells_first or not is_first):
            with self._event_store.lock:
                log.append_line("schedule", {"step": step, "name": name, "value": value})


class _RateWatch:
    """Counts the steps in a row in which every learning rate is 0."""

    def __init__(self) -> None:
        self.warning = ""
        self._is_done = False
        self._moved = self._last = -1
        self._since = self._steps = 0

    def follow(self, step: int, is_still: bool) -> None:
        """An optimizer steps, whose learning rates are all 0 or not."""
        if self._is_done:
            return
        if not is_still:
            self._moved, self._steps = step, 0
        elif step not in (self._moved, self._last):
            self._since = self._since if self._steps else step
            self._steps += 1
            self._last = step
        if self._steps > STILL_STEPS:  # in the last of these another optimizer might move something
            self._is_done = True
            when = f"has been 0 since step {self._since:,}: no weight moves any more"
            if self._moved < 0:
                when = f"was 0 in the first {STILL_STEPS} steps: no weight has moved"
            self.warning = f"the learning rate of every parameter group {when}"


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
