"""NextSteps: a log of the steps that a model takes next, which ends by itself."""

from __future__ import annotations

import weakref
from typing import Callable

import torch

from fastcheck.monitor.hooks.optimizers import step_ends
from fastcheck.monitor.session.config import Config
from fastcheck.monitor.session.options import Log, Stop

from .install import _install

#: Objects by model: where a model has several, the last goes on.
_running: weakref.WeakKeyDictionary[torch.nn.Module, NextSteps] = weakref.WeakKeyDictionary()


class NextSteps:
    """Writes the records of the next ``count`` steps of ``model`` to a log in ``directory``, then
    takes its hooks off and calls ``done``. It counts no event and meets no other rank.

    Raises ConfigError for a model that can't be observed, LogError when the log can't be written.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        directory: str,
        count: int,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        former = _running.pop(model, None)
        if former is not None:
            former._close()
        config = Config(overflow_nums=-1, stop=Stop(protect_weights=False), log=Log(directory))
        self._count, self._done = count, done
        self._monitor = _install(config, (model,), is_alone=True)
        _running[model] = self
        step_ends.connect(self)

    def step_ended(self) -> None:
        """An optimizer or a GradScaler is done with its step, perhaps with one of this model."""
        if self._monitor._watcher.ends.closed_steps >= self._count:
            self._close()
            self._done()

    def _close(self) -> None:
        step_ends.disconnect(self)
        self._monitor._remove(waits_for_ranks=False)
