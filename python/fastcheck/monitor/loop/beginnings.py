"""Facts of optimizers that begin: the moments and the loss scale that they begin with, how often
one is made, and whether two hold the same parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import torch

from fastcheck.calls.stored import parameter_ids
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import can_hold_nonfinite, can_read_now

from .streaks import Streaks, names_of

# The number of times that an optimizer of the same parameters begins without a state.
_MADE = 3


class Beginnings:
    """Notices facts of optimizers that begin. ``optimizers``: those that have stepped."""

    def __init__(self, streaks: Streaks, optimizers: Collection[torch.optim.Optimizer]) -> None:
        self._streaks = streaks
        self._optimizers = optimizers
        # The number of optimizers that began without a state, by class and the parameters that they
        # hold.
        self._made: Counter[tuple[type, frozenset[int]]] = Counter()

    def goes_on(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        """An optimizer is about to step for the first time here. Tells of a state that was lost, if
        it has stepped before. ``scaler``: the GradScaler that has it step.
        """
        updates = updates_of(optimizer)
        # A first update without gradients is how some loaders make the state that they fill.
        if updates < 2:
            return
        if "moments_lost" not in self._streaks.told and (lost := _lost_moments(optimizer)):
            self._streaks.tell_once("moments_lost", updates, lost)
        scale = 0.0 if scaler is None or self._streaks.updates else _new_scale(scaler)
        if scale > 1:
            self._streaks.tell_once("scale_anew", updates, f"{scale:g}")

    def begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step. Counts how often one of its class and the same parameters
        begins without a state.
        """
        # Without momentum it keeps none.
        if optimizer.state or not any(g.get("momentum", True) for g in optimizer.param_groups):
            return
        held = type(optimizer), frozenset(parameter_ids(optimizer))
        self._made[held] += 1
        if self._made[held] == _MADE:
            about = f"{type(optimizer).__name__}, {self._streaks.updates} updates together"
            self._streaks.tell_once("made_anew", _MADE, about)

    def look_at_holders(self) -> None:
        """Looks for parameters that two optimizers hold."""
        # A wrapper has the optimizer that it holds step.
        values = [value for optimizer in self._optimizers for value in vars(optimizer).values()]
        inner = {id(value) for value in values if isinstance(value, torch.optim.Optimizer)}
        outer = (optimizer for optimizer in self._optimizers if id(optimizer) not in inner)
        holders = Counter(key for optimizer in outer for key in parameter_ids(optimizer))
        shared = [stored for stored in self._streaks.stored() if holders[id(stored[2])] > 1]
        if shared:
            self._streaks.tell("held_twice", len(shared), names_of(shared))


def updates_of(optimizer: torch.optim.Optimizer) -> int:
    """The number of updates that an optimizer says it has made; 0: it does not count, or on a
    device.
    """
    for state in optimizer.state.values():
        count = state.get("step") if isinstance(state, dict) else None
        if isinstance(count, torch.Tensor):
            return int(count) if count.is_cpu and count.numel() == 1 else 0
        return int(count) if isinstance(count, (int, float)) else 0
    return 0


def _lost_moments(optimizer: torch.optim.Optimizer) -> str:
    """Names the moments of an optimizer, if all are 0; empty: they are not. Reads as a rule the
    first of them alone, and waits for a device then.
    """
    moments = [
        (name, value)
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step" and torch.is_tensor(value) and can_hold_nonfinite(value)
    ]
    if not moments or not all(can_read_now(value) for _, value in moments):
        return ""
    with unobserved(), no_grad():
        if any(bool(value.any()) for _, value in moments):
            return ""
    names = ", ".join(dict.fromkeys(name for name, _ in moments))
    return f"{type(optimizer).__name__}: {names}"


def _new_scale(scaler: Any) -> float:
    """The scale of a scaler that has none of its own yet; 0: a state was loaded."""
    # load_state_dict() writes both of these.
    is_new = getattr(scaler, "_init_growth_tracker", None) == 0
    return float(getattr(scaler, "_init_scale", 0.0)) if is_new else 0.0
