"""FlatOptimizer: optimizers that keep flat or sharded copies of the parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Callable

import torch

from fastcheck.verdict.entries import ScaleDecided

from .step_watcher import StepWatcher

#: A parameter, its gradient or this rank's part of it, and whether it is a part.
GradientParts = Iterable[tuple[torch.nn.Parameter, torch.Tensor, bool]]


class FlatOptimizer:
    """Closes the steps of one monitor whose optimizer torch's hooks do not see (DeepSpeed's,
    Megatron's distributed optimizer). before() and after() are to be called around each update, as
    the optimizer is about to use the gradients and when it has or has skipped them. Raises
    OverflowDetected as hooks do. From the first call on nothing else closes a step.

    Args:
        watcher: that of the monitor.
        gradients: returns them, before the update.
        rates: what has the learning rates in its ``param_groups``; None: nothing.
    """

    def __init__(
        self,
        watcher: StepWatcher,
        gradients: Callable[[], GradientParts],
        rates: Any,
    ) -> None:
        self._watcher = watcher
        self._gradients = gradients
        self._rates = rates

    @property
    def step_index(self) -> int:
        return self._watcher.session.step.index

    def before(self) -> None:
        """The update is about to be made."""
        self._watcher.guarded("optimizer steps", self._before)

    def after(self, skipped: bool) -> None:
        """The update was made, or loss scaling has ``skipped`` it."""
        self._watcher.guarded("optimizer steps", self._after, skipped)

    def _before(self, watcher: StepWatcher) -> bool:
        session, state = watcher.session, watcher._state
        session.is_explicit = True
        if session.is_active:
            if self._rates is not None:
                state.numbers.learning_rates(self._rates)
            scaled = session.is_scaled
            state.read_flat_gradients(list(self._gradients()), scaled=scaled)
            state.read_for_update(None, gradients=False, scaled=scaled)
            session.settle_update()
        if session.config.sync != "never":
            watcher.ends.reach_boundary()
        return True

    def _after(self, watcher: StepWatcher, skipped: bool) -> bool:
        session = watcher.session
        session.step.update.count += not skipped
        if session.is_active:
            session.due(ScaleDecided(skipped))
        watcher.close_step()
        return True
