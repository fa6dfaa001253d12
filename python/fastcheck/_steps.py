"""Finds the step boundaries: what an optimizer and a GradScaler do, and what it means for one
session.

Any optimizer step that is not run by a GradScaler closes the step, and so does GradScaler.update():
a step that the scaler skips never reaches the optimizer. Once monitor.step() was called, only it
does.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Optional

import torch

from ._flatten import flatten
from ._readable import can_hold_nonfinite, can_read
from ._session import Session
from ._site import Site
from ._state import StateReader

__all__ = ["StepWatcher"]


class StepWatcher:
    """Told by _boundaries of every optimizer and scaler of the process; acts on those of the
    observed model.
    """

    def __init__(self, session: Session, state: StateReader) -> None:
        self.session = session
        self._state = state
        self._is_off = False
        optimizers = session.config.optimizers
        self._given = None if optimizers is None else weakref.WeakSet(optimizers)
        scaler = session.config.scaler
        self._scaler = weakref.ref(scaler) if isinstance(scaler, torch.amp.GradScaler) else None
        # Within GradScaler.step(): that scaler's update() will close the step.
        self._in_scaler = False
        self._update_reached = False
        # What the scaler did with the optimizers of this session since its last update().
        self._scaler_skipped: Optional[bool] = None

    # Optimizers

    def before_update(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        """An optimizer is about to step: the parameters and gradients are as it will use them."""
        if not self._concerns(optimizer):
            return
        self._update_reached = True
        if self.session.is_active:
            self._state.read_for_update(
                optimizer,
                # A closure makes the gradients only now, within the step.
                gradients=not has_closure,
                scaled=getattr(optimizer, "found_inf", None) is not None,
            )

    def after_update(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        """An optimizer has stepped."""
        if not self._concerns(optimizer):
            return
        session = self.session
        if has_closure and session.is_active:
            self._state.read_gradients(optimizer, scaled=False)
        session.update_count += 1
        if self._in_scaler:
            return
        if session.has_own_scaling and session.is_active:
            # Gradients that were not finite at the update have been judged there: what is still
            # held belongs to an iteration whose update the user's own loss scaling skipped.
            session.settle_scaled(skipped=session.judge.has_held_gradients)
        if not session.is_explicit:
            session.close_step()

    # GradScaler

    def scaling(self, scaler: torch.amp.GradScaler) -> None:
        """GradScaler.scale(): the gradients of this step will carry the scale."""
        if self._follows(scaler):
            self.session.begin_step_if_closed()
            self.session.scaled_by(scaler)

    def scaler_step_began(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
    ) -> None:
        """GradScaler.step(optimizer): it decides whether the optimizer runs."""
        if self._follows(scaler):
            self._in_scaler = True
            self._update_reached = False

    def scaler_step_ended(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, found_inf: bool
    ) -> None:
        """``found_inf``: the scaler saw non-finite gradients and had the update skipped."""
        if not self._follows(scaler) or not self._concerns(optimizer):
            return
        skipped = found_inf or not self._update_reached
        self._scaler_skipped = bool(self._scaler_skipped) or skipped
        if not self._update_reached and self.session.is_active:
            self._state.read_gradients(optimizer, scaled=True)

    def scaler_step_left(self) -> None:
        """GradScaler.step() is over, by an exception or not."""
        self._in_scaler = False

    def scaler_updated(self, scaler: torch.amp.GradScaler) -> None:
        """GradScaler.update(): the iteration is over, skipped or not."""
        if not self._follows(scaler) or self._scaler_skipped is None:
            return
        skipped, self._scaler_skipped = self._scaler_skipped, None
        if self.session.is_active:
            self.session.settle_scaled(skipped)
        if not self.session.is_explicit:
            self.session.close_step()

    # monitor.step()

    def explicit_step(self, loss: Any) -> None:
        """monitor.step(loss=...): closes the step; from now on nothing else does."""
        session = self.session
        session.is_explicit = True
        if session.is_active:
            self._read_loss(loss)
            if session.gradients and not session.state_read:
                # No optimizer of torch.optim: the training loop updates the weights by itself.
                self._state.read_for_update(None, scaled=session.is_scaled)
            if session.has_own_scaling:
                session.settle_scaled(skipped=session.judge.has_held_gradients)
        session.close_step()

    def _read_loss(self, loss: Any) -> None:
        session = self.session
        if isinstance(loss, (float, int)):
            loss = torch.tensor(float(loss), dtype=torch.float64)
        for position, (label, tensor) in enumerate(flatten(loss, "loss")):
            if not can_hold_nonfinite(tensor) or not can_read(tensor):
                continue
            token = session.seen.add(tensor, session.ring.next_seq)
            if token >= 0:
                session.judge.known_loss(token)
                session.take_changes()
                continue
            site = session.sites.intern(Site("", "", "forward", "loss", position, label))
            seq = session.ring.next_seq
            if session.ring.observe(tensor, site, 0, session.step, 0):
                session.judge.loss(session.found(seq, "loss"))
                session.take_changes()

    # Shared

    def _concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._given is not None:
            return optimizer in self._given
        return self._state.owned_by(optimizer)

    def _follows(self, scaler: torch.amp.GradScaler) -> bool:
        return self._scaler is None or self._scaler() is scaler

    def guarded(self, what: str, method: Callable[..., None], *args: Any) -> None:
        """Calls one of the methods above. An error of fastcheck's own is said once and switches
        this watcher off.
        """
        session = self.session
        if self._is_off or session.removed:
            return
        try:
            with session.lock:
                method(self, *args)
        except Exception as error:
            self._is_off = True
            session.trouble(what, error)
        if session.due:
            session.deliver()
