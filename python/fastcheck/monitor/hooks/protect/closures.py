"""The closure of an optimizer's step makes the gradients within the step. So it is wrapped, and
what is done before an update otherwise is done at the end of each of its evaluations.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, Optional

from torch.optim import Optimizer

from fastcheck.monitor.session.session import Session

from .found_inf import UpdateGuard
from .protection import WeightProtection


class Evaluations:
    """The evaluations of the closures of steps under way. Every method expects the session's lock
    to be held.

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
        # How many have ended in the optimizer's step.
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
                session.note(session.event_store.ensure_event, session.step)
            session.settle_update()
        self._counts[optimizer] = self.count(optimizer) + 1
        session.level.update_began()
        return self._counts[optimizer]


def closure_of(args: Any, kwargs: Any) -> Optional[Callable[..., Any]]:
    """The closure among the arguments of an optimizer's step; ``args[0]`` is the optimizer."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure if callable(closure) else None


def with_watched_closure(
    optimizer: Optimizer,
    args: Any,
    kwargs: Any,
    began: Callable[[Optimizer], None],
    ended: Callable[[Optimizer], None],
) -> Any:
    """The arguments of its step with a closure that calls ``began`` before each evaluation and
    ``ended`` after it, unless it raised. None: there is no closure, or it is such a one already.
    """
    closure = closure_of(args, kwargs)
    if closure is None or getattr(closure, "_fastcheck_optimizer", None) == id(optimizer):
        return None

    @functools.wraps(closure)
    def evaluate(*given: Any, **named: Any) -> Any:
        began(optimizer)
        result = closure(*given, **named)
        ended(optimizer)
        return result

    evaluate._fastcheck_optimizer = id(optimizer)  # type: ignore[attr-defined]  # not twice
    if len(args) > 1:
        return (args[0], evaluate, *args[2:]), kwargs
    return args, {**kwargs, "closure": evaluate}
