"""Optimizers that take turns in one iteration, such as those of a generator and a critic: the run's
step ends with the last of them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Callable, Optional

import torch
from torch.optim import Optimizer

from fastcheck.calls.stored import parameter_ids


class Turns:
    """An iteration is over when each optimizer has stepped that is expected to.

    At first these are all there are, later those that had a turn in the iteration before. Where
    they don't take turns (five steps of one for each of the other), each step ends an iteration.
    """

    def __init__(self, given: Optional[Iterable[Optimizer]]) -> None:
        self._expected: weakref.WeakSet[Optimizer] = weakref.WeakSet(given or ())
        self._is_begun = given is not None
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # They had no turn where they were expected.
        self._left_out: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # Several have taken turns at least once.
        self._is_known = False
        self._has_repeated = False
        self._each_ends = False

    def ends(self, optimizer: Optimizer, others: Callable[[], Iterable[Optimizer]]) -> bool:
        """``optimizer`` has stepped, or a GradScaler has skipped that. Whether the iteration is
        over. ``others``: asked once, for the other optimizers of the model.
        """
        if not self._is_begun:
            self._is_begun = True
            self._expected.update(others())
            self._expected.add(optimizer)
        if self._each_ends:
            return True
        if optimizer in self._stepped:
            return self._repeat()
        is_new = optimizer not in self._expected
        self._expected.add(optimizer)
        self._stepped.add(optimizer)
        if is_new:
            self._each_ends = optimizer in self._left_out
            self.reset()
            return True
        if not self._expected <= self._stepped:
            return False
        self._is_known = len(self._expected) > 1
        self.reset()
        return True

    def reset(self) -> None:
        """A step of the run has ended, for whatever reason."""
        self._stepped.clear()
        self._has_repeated = False

    def _repeat(self) -> bool:
        """An optimizer's turn comes again before that of others."""
        if self._is_known and not self._has_repeated:
            self._has_repeated = True  # an iteration may be broken off
            return False
        self._each_ends = self._is_known
        self._left_out.update(self._expected - self._stepped)
        self._expected &= self._stepped
        self.reset()
        return True


def other_optimizers(
    optimizer: Optimizer, parameters: Iterable[torch.Tensor]
) -> Iterator[Optimizer]:
    """Those of this process that update others of ``parameters``, and none that ``optimizer`` or
    another one of them updates. Looks for them only where a trained parameter is left.
    """
    left = {id(p) for p in parameters if p.requires_grad} - parameter_ids(optimizer)
    taken = parameter_ids(optimizer)
    for candidate in _living() if left else ():
        ids = parameter_ids(candidate)
        if ids & left and not ids & taken:
            taken |= ids
            yield candidate


def _living() -> list[Optimizer]:
    """torch keeps no list of them. Only those whose step() calls the hooks of optimizers."""
    return [
        one
        for one in gc.get_objects()
        if issubclass(type(one), Optimizer)
        and getattr(type(one).step, "hooked", False)
        and "param_groups" in vars(one)
    ]
