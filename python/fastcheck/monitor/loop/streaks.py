"""Counts in how many updates, or looks, in a row a fact of a training loop holds, and tells of it
once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, Union

import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.stored import StoredTensor, parameters_of
from fastcheck.monitor.session.session import Session
from fastcheck.utils.text.layout import listed

from .chains import UPDATES

#: Things that hardly change are looked at in one update of so many, and so many of these looks
#: agree.
EVERY, LOOKS = 10, 3
# Parameters that are named.
_NAMED = 3
#: Updates after which a few kinds of things are not looked at any more.
LAST_LOOK = 50

_About = Union[str, torch.Tensor, None]


class _Streak(NamedTuple):
    """A number of updates, or looks, in a row in which a fact has held. ``since``: the number of
    updates before the first. ``about``: perhaps the number of a parameter.
    """

    times: int
    since: int
    about: Union[str, int]


class Streaks:
    """Counts the facts of a session's models, and tells the session's listeners of them."""

    def __init__(self, session: Session, nodes: Sequence[ModuleNode]) -> None:
        self._session = session
        #: Returns every parameter of the models.
        self.stored = functools.partial(parameters_of, nodes, None)
        #: The number of updates of all optimizers.
        self.updates = 0
        #: The facts that were told.
        self.told: set[str] = set()
        #: The facts that hold, by their names and what each is of.
        self.runs: dict[tuple[str, int], _Streak] = {}

    def count(
        self, fact: str, holds: bool, about: _About, key: int = 0, times: int = UPDATES
    ) -> None:
        """``about``: what it is seen at, perhaps a parameter. ``times``: how many in a row it has
        to hold.
        """
        if not holds:
            self.runs.pop((fact, key), None)
            return
        run = self.runs.get((fact, key), _Streak(0, self.updates, ""))
        of = about if isinstance(about, str) else id(about)
        self.runs[fact, key] = run = _Streak(run.times + 1, run.since, of)
        if run.times >= times:
            self.tell_once(fact, run.times, about)

    def end(self, *facts: str, key: int = 0) -> None:
        """Takes in that these do not hold any more."""
        for fact in facts:
            self.runs.pop((fact, key), None)

    def tell_early(self, forms: Sequence[str], optimizers: int) -> None:
        """The run stops: tells of the ``forms`` that the last look has shown, and of what has held
        in each update of all ``optimizers`` since the first.
        """
        for (fact, _), run in self.runs.items():
            if fact in forms or (run.times > 1 and run.since <= 3 * optimizers):
                self.tell_once(fact, run.times, run.about)

    def tell_once(self, fact: str, value: float, about: Union[_About, int] = None) -> None:
        if fact not in self.told:
            self.told.add(fact)
            self.tell(fact, value, about if isinstance(about, str) else self.name_of(about))

    def tell(self, fact: str, value: float, about: str) -> None:
        store = self._session.event_store
        with store.lock:
            for listener in store.listeners:
                listener.noticed(self._session.step.index, fact, value, about)

    def name_of(self, parameter: Union[int, torch.Tensor, None]) -> str:
        """``parameter``: perhaps its number."""
        number = parameter if isinstance(parameter, int) else id(parameter)
        names = (n.name_of(name) for n, name, p in self.stored() if id(p) == number)
        return next(names, "a parameter")


def names_of(parameters: Sequence[StoredTensor]) -> str:
    """Names the first of these."""
    return listed([node.name_of(name) for node, name, _ in parameters], _NAMED)
