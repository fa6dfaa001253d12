"""Reads parameter gradients before clipping, or the training loop itself, changes them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Optional

import torch

from fastcheck.calls.stored import parameter_ids
from fastcheck.monitor.hooks.protect.protection import WeightProtection
from fastcheck.monitor.session.session import Session
from fastcheck.record.site import Site
from fastcheck.utils.torch.readable import can_hold_nonfinite, can_read
from fastcheck.utils.torch.sharding import is_part

from .state_reader import StateReader


class GradientWatcher:
    """Reads the gradients of parameters of a session's model. Every method expects the session's
    lock to be held; those that return a bool return whether they were about this model.

    ``optimizers``: the only ones whose parameters are read; None: all.
    """

    def __init__(
        self,
        session: Session,
        state: StateReader,
        optimizers: Optional[weakref.WeakSet[torch.optim.Optimizer]],
        protection: WeightProtection,
    ) -> None:
        self._session = session
        self._state = state
        self._given = optimizers
        self._protection = protection
        # The optimizer whose closure makes the gradients, within its step.
        self.evaluating: Optional[torch.optim.Optimizer] = None

    def before_clipping(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Gradients, or some of them, are about to be changed."""
        session = self._session
        if not self._is_open:
            return False
        self._state.hand_changes.excuse()
        is_ours = self._state.read_before_clipping(
            gradients, self._owned_by_given(), scaled=session.is_scaled
        )
        self._settle(is_ours)
        if is_ours:
            self._protection.before_clipping(gradients)
        return is_ours

    def after_clipping(
        self, gradients: Sequence[torch.Tensor], norm: Optional[torch.Tensor]
    ) -> bool:
        """Gradients were clipped; ``norm``: their total norm before."""
        session = self._session
        if not self._is_open or not self._state.were_clipped(gradients):
            return False
        if norm is None or is_part(norm):  # of the shards of this rank
            return True
        if can_hold_nonfinite(norm) and can_read(norm):
            site = Site("", "", "backward", "grad_norm", 0, "total norm of the gradients")
            session.level.read_norm(norm, session.sites.intern(site))
            self._settle(True)
        return True

    def after_backward(self) -> None:
        """A backward is over: where a closure has called it, its gradients are used at once, and
        where the training loop changes them by itself, that comes next.
        """
        if not self._is_open:
            return
        if self.evaluating is not None:
            self._state.read_gradients(self.evaluating, scaled=False, is_early=True)
            self._settle(True)
        elif self._may_be_changed():
            self._settle(self._state.after_backward(self._owned_by_given()))
            if self._state.hand_changes.was_seen:
                self._protection.changed_by_loop()

    def _may_be_changed(self) -> bool:
        """Whether gradients may be changed: not what a GradScaler unscales, and skips; nor in a
        graph that is being captured, whose replays run none of this.
        """
        return self._session.step.update.scaler is None and self._session.tape is None

    @property
    def _is_open(self) -> bool:
        return self._session.is_active and not self._session.is_closed

    def _settle(self, is_ours: bool) -> None:
        if is_ours and self._session.rings.settles_calls:
            self._session.settle_call()

    def _owned_by_given(self) -> Optional[set[int]]:
        if self._given is None:
            return None
        return {key for optimizer in self._given for key in parameter_ids(optimizer)}
