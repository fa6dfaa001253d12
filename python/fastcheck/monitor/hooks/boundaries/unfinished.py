"""Finds iterations that end without an update: a loop that scales its loss itself skips the
optimizer when its gradients have overflowed, clears them, and continues with the next batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Callable, Optional

import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.stored import StoredTensor, parameter_at
from fastcheck.monitor.session.session import Session
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import can_read, has_memory
from fastcheck.utils.torch.sharding import local

#: A module, the name of a parameter in it, and the version of its gradient.
_Probe = tuple[ModuleNode, str, int]

_PROBES = 3
# After so many backward passes in a row that left no gradient (of a model that is not trained), the
# parameters are searched once in so many passes.
_MOST_FRUITLESS = 64


class UnfinishedSteps:
    """Of one session. Every method expects its lock to be held.

    That gradients were cleared is no proof: a step may have several backward passes, and clear them
    in between. So it counts only where something shows why the update was left out: a gradient that
    is not finite, or a loss scale that install() was given.
    """

    def __init__(self, session: Session, parameters: Callable[[], list[StoredTensor]]) -> None:
        self._session = session
        self._parameters = parameters
        #: Whether there was one since the last update.
        self.has_skipped = False
        self._step = -1
        # Parameters that had a gradient when the last backward() ended.
        self._probes: list[_Probe] = []
        # Backward passes in a row after which no parameter had a gradient.
        self._fruitless = 0

    def after_backward(self) -> None:
        """Gradients were made in the open step."""
        session = self._session
        probes = _probes((node, name, parameter_at(node, name)) for node, name, _ in self._probes)
        if not probes:
            if self._fruitless < _MOST_FRUITLESS or self._fruitless % _MOST_FRUITLESS == 0:
                probes = _spread(_probes(self._parameters()))
            self._fruitless = 0 if probes else self._fruitless + 1
        self._step = session.step.index
        self._probes = probes

    def is_over(self) -> bool:
        """Called where a forward or backward pass begins: whether the open step has ended, without
        an update. Then its gradients are settled.
        """
        session = self._session
        step = session.step
        if step.index != self._step or not self._probes or session.is_explicit:
            return False
        if session.is_closed or not session.is_active or session.tape is not None:
            return False
        if step.update_count or step.scaler is not None or not torch.is_grad_enabled():
            return False
        if not session.backwards.owns_gradients:
            return False
        is_shown = session.config.training.has_own_scaling or step.findings.has_unused_gradients
        if not is_shown or not all(map(_is_cleared, *zip(*self._probes))):
            return False
        self._step = -1
        self.has_skipped = True
        session.note(session.event_store.settle_unfinished, step)
        return True


def _probes(
    parameters: Iterable[tuple[ModuleNode, str, Optional[torch.Tensor]]],
) -> list[_Probe]:
    """Of those that have a gradient its version."""
    return [
        (node, name, local(parameter.grad)._version)
        for node, name, parameter in parameters
        if parameter is not None and parameter.grad is not None
    ]


def _spread(probes: Sequence[_Probe]) -> list[_Probe]:
    last = len(probes) - 1
    places = {last * number // (_PROBES - 1) for number in range(_PROBES)} if probes else set()
    return [probes[place] for place in sorted(places)]


def _is_cleared(node: ModuleNode, name: str, version: int) -> bool:
    parameter = parameter_at(node, name)
    gradient = None if parameter is None else parameter.grad
    if gradient is None:
        return True
    gradient = local(gradient)
    is_plain = gradient.is_cpu and can_read(gradient) and has_memory(gradient)
    if not is_plain or gradient._version == version:
        return False
    with unobserved(), no_grad():
        return not bool(gradient.any())
