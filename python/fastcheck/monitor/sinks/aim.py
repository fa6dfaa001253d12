"""Aim: a run of its own, because aim has no active run; a Run that is given is used as it is."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any


def library() -> Any:
    """The module; ImportError if aim is not installed."""
    return importlib.import_module("aim")


def active() -> Aim:
    """Makes a run in the repository that aim finds, when something is written."""
    return Aim()


class Aim:
    def __init__(self) -> None:
        self._run: Any = None

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._open().track(dict(scalars), step=step)

    def text(self, name: str, text: str, step: int) -> None:
        self._open().track(library().Text(text), name=name, step=step)

    def alert(self, title: str, text: str, step: int) -> None:
        self.text("fastcheck/stop", f"{title}\n\n{text}", step)

    def close(self) -> None:
        if self._run is not None:
            self._run.close()

    def _open(self) -> Any:
        if self._run is None:
            self._run = library().Run(experiment="fastcheck", log_system_params=False)
        return self._run
