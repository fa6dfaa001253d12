"""Scaling: what a GradScaler has done with the optimizers of a session since its last update()."""

from __future__ import annotations

import weakref
from typing import Any, Optional

import torch

from fastcheck.utils.torch.versions import GradScaler


class Scaling:
    """Remembers what a GradScaler has done with the optimizers of a session since its last
    update(). ``given``: the only scaler that is followed, if it is a scaler.
    """

    def __init__(self, given: object) -> None:
        self._given = weakref.ref(given) if isinstance(given, GradScaler) else None
        # The optimizer that GradScaler.step() is about: that scaler's update() will close the step.
        self.optimizer: Optional[torch.optim.Optimizer] = None
        self.update_reached = False
        # None: it has stepped none.
        self.skipped: Optional[bool] = None
        self.stepped_by: Optional[weakref.ref[GradScaler]] = None
        self.stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        # The records of the scaler's own found_inf, where its value is on a device.
        self.words: list[int] = []
        # The norm to which the gradients of this step were clipped while they carried the scale.
        self.clipped_to: object = None

    @property
    def has_given(self) -> bool:
        return self._given is not None

    def follows(self, scaler: GradScaler) -> bool:
        return self._given is None or self._given() is scaler

    def has_stepped(self, scaler: GradScaler) -> bool:
        is_its = self.stepped_by is not None and self.stepped_by() is scaler
        return is_its and self.skipped is not None


def found_by(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The findings of the scaler: one word per device, not zero if it saw non-finite gradients and
    has the update skipped; empty when torch no longer has them.
    """
    states: dict[int, dict[str, Any]] = getattr(scaler, "_per_optimizer_states", {})
    return list(states.get(id(optimizer), {}).get("found_inf_per_device", {}).values())
