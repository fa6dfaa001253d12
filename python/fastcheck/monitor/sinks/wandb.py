"""Weights & Biases: scalars join the rows of the active run.

Rows of a W&B run have one increasing number, which each ``run.log()`` of the user moves on. A row
that fastcheck committed would move it too, and a ``run.log(..., step=)`` of the user with a lower
number would be lost. So the scalars are left for the user's next row (``commit=False``), with their
step beside them as the axis of their plots.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from fastcheck.errors import ConfigError, explain


def library() -> Any:
    """The module; ImportError if wandb is not installed."""
    return importlib.import_module("wandb")


def active() -> Wandb:
    """The run of wandb.init(); ConfigError if there is none."""
    run = library().run
    if run is None:
        raise ConfigError(
            explain(
                "sink 'wandb' has no run to write to",
                expected="an active run",
                got="wandb.run is None",
                hint="call wandb.init() before fastcheck.install()",
            )
        )
    return Wandb(run)


class Wandb:
    """Writes to ``run``, which stays open."""

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric("fastcheck/step", hidden=True)
        run.define_metric("fastcheck/*", step_metric="fastcheck/step")

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log({**scalars, "fastcheck/step": step}, commit=False)

    def text(self, name: str, text: str, step: int) -> None:
        self._run.log({name: text}, commit=False)

    def alert(self, title: str, text: str, step: int) -> None:
        self._run.summary["fastcheck/stop"] = text
        self._run.alert(title=title[:63], text=text, level="ERROR")
