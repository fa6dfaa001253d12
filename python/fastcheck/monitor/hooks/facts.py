"""Facts of a training loop that no record holds, for the invariants of the watch.

Each is an order of calls or a flag of a module, found without reading a tensor: whether gradients
were cleared between two updates, when they were clipped, what scaler.scale() was given, in which
mode the model is. A fact is told when it has held in so many updates in a row, once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.stored import StoredTensor
from fastcheck.monitor.session.session import Session
from fastcheck.monitor.weight_updates import StaleCopies
from fastcheck.utils.torch.flatten import flatten
from fastcheck.utils.torch.memory_ref import MemoryRef
from fastcheck.utils.torch.readable import is_materialised

from .stored.state_reader import StateReader

#: Updates in a row in which a fact has to hold.
UPDATES = 10
# Modes of modules are looked at in one update of so many, and all of these looks agree.
_EVERY, _LOOKS = 10, 3
# Passes without gradients in a row, between two that have some.
_PASSES = 3
_MOST_TRAINED = 0.02
_NAMED = 3


class _Chain:
    """The gradient of one parameter of an optimizer, from update to update."""

    def __init__(self) -> None:
        self.parameter: Optional[weakref.ref[torch.Tensor]] = None
        # The gradient as the last update, backward() or clipping has left it.
        self._left: Optional[tuple[MemoryRef, int]] = None
        # Since the last update: every backward() has begun with what was left, and there was one.
        self.is_whole = self.has_backward = False
        # backward() has left a gradient since the last update.
        self.had_gradient = False

    @property
    def gradient(self) -> Optional[torch.Tensor]:
        parameter = None if self.parameter is None else self.parameter()
        return None if parameter is None else parameter.grad

    def is_as_left(self) -> bool:
        gradient = self.gradient
        if gradient is None or self._left is None:
            return False
        return self._left[0].is_of(gradient) and self._left[1] == gradient._version

    def leave(self) -> None:
        gradient = self.gradient
        self._left = None if gradient is None else (MemoryRef(gradient), gradient._version)

    def backward_ended(self, optimizer: torch.optim.Optimizer) -> None:
        if self.gradient is None:
            held = (p for group in optimizer.param_groups for p in group["params"])
            first = next((p for p in held if p.grad is not None), None)
            self.parameter = None if first is None else weakref.ref(first)
            self.is_whole = False
        self.leave()
        self.had_gradient = self._left is not None

    def update_ended(self) -> None:
        self.leave()
        self.is_whole, self.has_backward, self.had_gradient = True, False, False


class Facts:
    """Of one session. Every method expects the session's lock to be held."""

    def __init__(
        self, session: Session, state: StateReader, nodes: Sequence[ModuleNode], *, is_on: bool
    ) -> None:
        #: Whether anyone is told of them, but of copies.
        self.is_on = is_on
        self.copies = StaleCopies()
        self._session = session
        self._state = state
        self._nodes = nodes
        self._chains: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Chain] = (
            weakref.WeakKeyDictionary()
        )
        # By fact and what it is of: in how many updates in a row it has held.
        self._runs: dict[tuple[str, int], int] = {}
        self._told: set[str] = set()
        self._updates = 0
        self._threshold = math.nan
        # What scaler.scale() was given since the last update, and whether backward() began there.
        self._unscaled: list[MemoryRef] = []
        self._is_unscaled = False

    def pass_without_gradients(self, node: ModuleNode) -> None:
        """A forward pass is over, of this module, in which no gradients were enabled."""
        module = node.module()
        if module is None or not node.is_primary or "dropout_on" in self._told:
            return
        drops = [m for m in module.modules() if isinstance(m, _DropoutNd) and m.p and m.training]
        about = f"{type(drops[0]).__name__}, p={drops[0].p:g}" if drops else ""
        self._count("dropout_on", bool(drops), about, updates=_PASSES)

    def backward_began(self, roots: Sequence[torch.Tensor]) -> None:
        """backward() is called on these."""
        self._runs.pop(("dropout_on", 0), None)
        for chain in self._chains.values():
            chain.has_backward = True
            chain.is_whole = chain.is_whole and chain.is_as_left()
        self._is_unscaled |= any(one.is_of(root) for one in self._unscaled for root in roots)

    def backward_ended(self) -> None:
        """It has made gradients."""
        for optimizer, chain in self._chains.items():
            chain.backward_ended(optimizer)

    def scaled(self, outputs: Any) -> None:
        """GradScaler.scale() was given these."""
        self._unscaled += [MemoryRef(tensor) for _, tensor in flatten(outputs, "")]

    def clipping(self, gradients: Sequence[torch.Tensor]) -> None:
        """These are about to be clipped."""
        for chain in self._chains.values():
            gradient = chain.gradient
            if gradient is None or chain.parameter is None:
                continue
            if any(gradient is one for one in gradients):
                is_late = not chain.has_backward and chain.is_as_left()
                self._count("clipped_late", is_late, "")
            if chain.has_backward:
                name = self._name_of(chain.parameter())
                self._count("clipped_none", not gradients, name)

    def clipped(self, norm: Optional[torch.Tensor], threshold: object) -> None:
        """They were, to ``threshold``; ``norm``: None where each element was."""
        for chain in self._chains.values():
            chain.leave()
        if norm is not None and isinstance(threshold, (int, float)):
            if threshold != self._threshold and 0 < threshold < math.inf:
                self._tell("norm_threshold", threshold, "")
            self._threshold = threshold

    def before_update(self, optimizer: torch.optim.Optimizer, is_scaled: bool) -> None:
        """It is about to step. ``is_scaled``: a GradScaler has divided its gradients."""
        chain = self._chains.get(optimizer)
        if chain is not None and chain.has_backward:
            parameter = None if chain.parameter is None else chain.parameter()
            name, key = self._name_of(parameter), id(optimizer)
            is_kept = chain.is_whole and (chain.is_as_left() or is_scaled)
            self._count("not_cleared", is_kept, name, key)
            is_lost = chain.had_gradient and chain.gradient is None and parameter is not None
            self._count("cleared_early", is_lost, name, key)
        if is_scaled:
            self._count("not_multiplied", self._is_unscaled, "")
        self._unscaled.clear()
        self._is_unscaled = False
        self._updates += 1
        if self._updates % _EVERY == 0:
            self._look_at_modes()
        if self._updates == _EVERY:
            self._look_at_shares()

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped."""
        chain = self._chains.get(optimizer)
        if chain is None:
            chain = self._chains[optimizer] = _Chain()
        chain.update_ended()

    def _look_at_modes(self) -> None:
        modules = [module for node in self._nodes if (module := node.module()) is not None]
        roots = [node.module() for node in self._nodes if node.is_primary]
        modal = [module for module in modules if _has_modes(module)]
        is_off = bool(modal) and not any(m is not None and m.training for m in (*modal, *roots))
        kinds = dict.fromkeys(type(module).__name__ for module in modal)
        about = f"{', '.join(kinds)} (in all {len(modal)})"
        self._count("evaluation_mode", is_off, about, updates=_LOOKS, factor=_EVERY)

    def _look_at_shares(self) -> None:
        parameters = [s for s in self._state.parameters() if is_materialised(s[2])]
        trained = [stored for stored in parameters if stored[2].requires_grad]
        whole = sum(p.numel() for _, _, p in parameters)
        part = sum(p.numel() for _, _, p in trained)
        if trained and part <= _MOST_TRAINED * whole:
            names = list(map(_name, trained))
            more = len(names) - _NAMED
            named = ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")
            self._tell("frozen", part, f"{part:,} of {whole:,}: {named}")

    def _count(
        self, fact: str, holds: bool, about: str, key: int = 0, updates: int = UPDATES,
        factor: int = 1,
    ) -> None:  # fmt: skip
        """``about``: what it is seen at. ``updates``: how many looks have to agree, each of which
        stands for ``factor`` updates.
        """
        run = self._runs[fact, key] = self._runs.get((fact, key), 0) + 1 if holds else 0
        if run >= updates and fact not in self._told:
            self._told.add(fact)
            self._tell(fact, run * factor, about)

    def _tell(self, fact: str, value: float, about: str) -> None:
        store = self._session.event_store
        with store.lock:
            for listener in store.listeners:
                listener.noticed(self._session.step.index, fact, value, about)

    def _name_of(self, parameter: Optional[torch.Tensor]) -> str:
        found = (stored for stored in self._state.parameters() if stored[2] is parameter)
        return next(map(_name, found), "a parameter")


def _name(stored: StoredTensor) -> str:
    node, name, _ = stored
    return f"{node.path}.{name}" if node.path else name


def _has_modes(module: torch.nn.Module) -> bool:
    """Whether it computes something else in evaluation."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return isinstance(module, _BatchNorm) and module.track_running_stats
