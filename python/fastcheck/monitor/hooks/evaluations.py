"""Evaluations of the closure of an optimizer's step, which makes the gradients within the step."""

from __future__ import annotations

import weakref
from typing import Callable

from torch.optim import Optimizer

from fastcheck.monitor.session.session import Session
from fastcheck.verdict.entries import Moment

from .found_inf import UpdateGuard
from .protection import WeightProtection


class Evaluations:
    """The evaluations of the closures of steps under way, which make the gradients within the step:
    what is done before an update otherwise is done at the end of each of them. Every method expects
    the session's lock to be held.

    ``read_gradients``: reads what the optimizer uses next; called with it and ``scaled=``.
    """

    def __init__(
        self, session: Session, protection: WeightProtection, read_gradients: Callable[..., None]
    ) -> None:
        self._session = session
        self._protection = protection
        self._read_gradients = read_gradients
        #: The step in which each optimizer has stepped last.
        self.updated_in: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        # The number of steps that have ended in the optimizer's step.
        self._counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def step_began(self, optimizer: Optimizer) -> None:
        self._counts.pop(optimizer, None)

    def count(self, optimizer: Optimizer) -> int:
        return self._counts.get(optimizer, 0)

    def began(self, optimizer: Optimizer) -> bool:
        """The optimizer calls the closure of its step. False: no stop is due that is not raised at
        its end too.
        """
        # It is to find the gradients that it left.
        self._protection.after_update(optimizer)
        self._session.level.evaluation_began()
        if self.count(optimizer):
            self._session.step.update.is_partial = True
        return False

    def ended(self, optimizer: Optimizer) -> int:
        """The closure has made the gradients, which the optimizer uses next. Returns the number of
        evaluations.
        """
        session = self._session
        is_scaled = UpdateGuard.scaler_found_inf(optimizer) is not None
        if session.is_active:
            if not is_scaled:
                session.level.update_uses(optimizer)
            self._read_gradients(optimizer, scaled=is_scaled)
            if not is_scaled:
                session.due(Moment.UPDATE_DUE)
            session.settle_update()
        session.level.update_began()
        return self.count_up(optimizer)

    def count_up(self, optimizer: Optimizer) -> int:
        """Counts an evaluation. Returns their number."""
        self._counts[optimizer] = self.count(optimizer) + 1
        return self._counts[optimizer]
