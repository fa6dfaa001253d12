"""Trackio: the active run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from fastcheck.errors import ConfigError, explain


def library() -> Any:
    """The module; ImportError if trackio is not installed."""
    return importlib.import_module("trackio")


def active() -> Trackio:
    """The run of trackio.init(); ConfigError if there is none."""
    run = library().context_vars.current_run.get()
    if run is None:
        raise ConfigError(
            explain(
                "sink 'trackio' has no run to write to",
                expected="an active run",
                got="trackio has none in this context",
                hint="call trackio.init() before fastcheck.install(), on the same thread",
            )
        )
    return Trackio(run)


class Trackio:
    """Writes to ``run``, which stays open. The current run is that of its context: the object is
    good on any thread.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def text(self, name: str, text: str, step: int) -> None:
        self._run.log({name: text}, step=step)

    def alert(self, title: str, text: str, step: int) -> None:
        level = library().AlertLevel.ERROR
        self._run.alert(title=title, text=text, level=level, step=step)
