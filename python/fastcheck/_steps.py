"""Finds the step boundaries: what an optimizer and a GradScaler do, and what it means for one
session.

Any optimizer step that is not run by a GradScaler closes the step, and so does GradScaler.update():
a step that the scaler skips never reaches the optimizer. Once monitor.step() was called, only it
does.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Callable, Optional

import torch

from ._compat import GradScaler
from ._device import streams_of
from ._errors import FastcheckWarning
from ._flatten import flatten
from ._protect import UpdateGuard
from ._readable import can_hold_nonfinite, can_read
from ._session import Session
from ._shards import is_sharded, reduce_found_inf, take_part
from ._site import Site
from ._state import StateReader
from ._verdict import Judge
from .backends import backend_for

__all__ = ["StepWatcher"]


class StepWatcher:
    """Told by _boundaries of every optimizer and scaler of the process; acts on those of the
    observed model.

    What it is told returns whether it was about this model: only then may a stop that is due be
    raised there. Another model's training, perhaps on another thread, is none of its business.
    """

    def __init__(
        self,
        session: Session,
        state: StateReader,
        meet: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None,
    ) -> None:
        self.session = session
        # Told of every optimizer of this model that is about to step.
        self._meet = meet
        self._state = state
        self._is_off = False
        optimizers = session.config.optimizers
        self._given = None if optimizers is None else weakref.WeakSet(optimizers)
        scaler = session.config.scaler
        self._scaler = weakref.ref(scaler) if isinstance(scaler, GradScaler) else None
        # The optimizer that GradScaler.step() is about: that scaler's update() will close the step.
        self._in_scaler: Optional[torch.optim.Optimizer] = None
        self._update_reached = False
        # What the scaler did with the optimizers of this session since its last update().
        self._scaler_skipped: Optional[bool] = None
        # The records of the scaler's own found_inf, where only a device knows it.
        self._scaler_words: list[int] = []
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._guard = UpdateGuard(_found_nonfinite, self._combine if is_distributed else None)
        # Set by the owner: what follows captured graphs lives as long as this.
        self.graphs: Optional[object] = None
        self._cannot_protect = False
        self._has_combined = False
        self._meets = False

    # Optimizers

    def before_update(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> bool:
        """An optimizer is about to step: the parameters and gradients are as it will use them."""
        if not self._concerns(optimizer):
            return False
        self._update_reached = True
        self._meet(optimizer)
        if self.session.is_active:
            self._state.read_for_update(
                optimizer,
                # A closure makes the gradients only now, within the step.
                gradients=not has_closure,
                # What another monitor's guard has set is no loss scaling.
                scaled=UpdateGuard.theirs(optimizer) is not None,
            )
            self.session.settle_update()
        if self.session.config.sync != "never":
            # Every rank knows what it has read: none applies what one of them stops for.
            self._reach_boundary()
        if self._protects():
            self._protect(optimizer, has_closure)
        self.session.update_began()
        return True

    def _reach_boundary(self) -> None:
        step = self.session.step
        self._meets = self._meets or not step.has_met
        step.has_met = True

    def _protects(self) -> bool:
        """Whether the update may be applied before its gradients are known to be finite."""
        session, asked = self.session, self.session.config.protect_weights
        if asked == "auto":
            is_late = session.is_deferred or session.world_size > 1
            return is_late and session.config.sync == "never" and session.config.may_stop
        return bool(asked)

    def _protect(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        session = self.session
        if self._cannot_protect:
            take_part(optimizer)
            return
        self._has_combined = False
        try:
            word = self._guard.before_update(optimizer, has_closure=has_closure)
        except Exception as error:
            # The ranks that hold the other shards wait for this one, now and in later updates.
            self._cannot_protect = True
            self._guard.close()
            if not self._has_combined:
                take_part(optimizer)
            session.trouble("the protection of the weights", error)
            return
        if word is not None:
            session.step.is_protected = True
            return
        reason = self._guard.why_unguarded
        if reason is None:
            return
        note = f"the weights of {type(optimizer).__name__} are not protected: {reason}"
        if note not in session.notes:
            session.notes[note] = None
            if session.config.protect_weights is True:
                warnings.warn(note, FastcheckWarning, stacklevel=4)

    def _combine(self, word: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        self._has_combined = True
        if is_sharded(optimizer):
            reduce_found_inf(word, optimizer)

    def after_update(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> bool:
        """An optimizer has stepped."""
        self._guard.after_update(optimizer)
        if not self._concerns(optimizer):
            return False
        session = self.session
        session.update_ended()
        if has_closure and session.is_active:
            self._state.read_gradients(optimizer, scaled=False)
        session.step.update_count += 1
        if self._in_scaler is optimizer:
            return True
        if session.config.has_own_scaling and session.is_active:
            session.note(session.ledger.settle_own_scaling, session.step)
        if not session.is_explicit:
            self.close_step()
        return True

    def close_step(self) -> None:
        """The step that is open is over; the ranks meet outside of the lock."""
        self.session.close_step()
        self._reach_boundary()

    # GradScaler

    def scaling(self, scaler: GradScaler) -> bool:
        """GradScaler.scale(): the gradients of this step will carry the scale. Whose loss it is,
        nobody tells.
        """
        if self._follows(scaler):
            self.session.begin_step_if_closed()
            self.session.scaled_by(scaler)
        return False

    def scaled(self, scaler: GradScaler, outputs: Any) -> bool:
        """GradScaler.scale(outputs) has returned."""
        scale = getattr(scaler, "_scale", None)
        is_run = self.session.tape is None  # not only captured
        if is_run and self._follows(scaler) and isinstance(scale, torch.Tensor):
            self.session.scaling.scaled(self.session.step.index, outputs, scale)
        return False

    def scaler_step_began(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
        """GradScaler.step(optimizer): it decides whether the optimizer runs."""
        if not self._follows(scaler) or not self._concerns(optimizer):
            return False
        self._in_scaler = optimizer
        self._update_reached = False
        return True

    def scaler_step_ended(
        self,
        scaler: GradScaler,
        optimizer: torch.optim.Optimizer,
        found_inf: Sequence[torch.Tensor],
    ) -> bool:
        """``found_inf``: one word per device, not zero if the scaler saw non-finite gradients and
        has the update skipped.
        """
        if not self._follows(scaler) or not self._concerns(optimizer):
            return False
        skipped = not self._update_reached
        for word in found_inf:
            if word.is_cpu or self.session.config.may_wait:
                skipped = skipped or bool(word)
            elif self.session.is_active and streams_of(word.device) is not None:
                # Reading it here would make the host wait.
                self._scaler_words.append(self.session.observe(word, self._word_site(), 0, 0)[0])
        self._scaler_skipped = bool(self._scaler_skipped) or skipped
        if self.session.tape is None:
            self.session.scaling.decided(self.session.step.index, found_inf, skipped)
        if not self._update_reached and self.session.is_active:
            self._state.read_gradients(optimizer, scaled=True)
        return True

    def _word_site(self) -> int:
        site = Site("", "GradScaler", "optimizer", "found_inf", 0, "found_inf")
        return self.session.sites.intern(site)

    def scaler_step_left(self, optimizer: torch.optim.Optimizer) -> None:
        """GradScaler.step(optimizer) is over, by an exception or not."""
        if self._in_scaler is optimizer:
            self._in_scaler = None

    def scaler_updated(self, scaler: GradScaler) -> bool:
        """GradScaler.update(): the iteration is over, skipped or not."""
        if not self._follows(scaler) or self._scaler_skipped is None:
            return False
        skipped, self._scaler_skipped = self._scaler_skipped, None
        session = self.session
        if session.is_active:
            words, self._scaler_words = self._scaler_words, []
            session.note(session.ledger.settle_scaled, session.step, skipped, words)
        if not self.session.is_explicit:
            self.close_step()
        return True

    # monitor.step()

    def explicit_step(self, loss: Any) -> bool:
        """monitor.step(loss=...): closes the step; from now on nothing else does."""
        session = self.session
        session.is_explicit = True
        if session.is_active:
            self._read_loss(loss)
            if session.step.gradients and not session.step.state_read:
                # No optimizer of torch.optim: the training loop updates the weights by itself.
                self._state.read_for_update(None, scaled=session.is_scaled)
            if session.config.has_own_scaling:
                session.note(session.ledger.settle_own_scaling, session.step)
        self.close_step()
        return True

    def _read_loss(self, loss: Any) -> None:
        session = self.session
        if isinstance(loss, (float, int)):
            loss = torch.tensor(float(loss), dtype=torch.float64, device="cpu")
        for position, (label, tensor) in enumerate(flatten(loss, "loss")):
            if not can_hold_nonfinite(tensor) or not can_read(tensor):
                continue
            token = session.seen.add(tensor, session.next_seq)
            if token >= 0:
                session.note(session.step.judge.known_loss, token)
                continue
            site = session.sites.intern(Site("", "", "forward", "loss", position, label))
            seq, is_bad = session.observe(tensor, site, 0, 0)
            session.judge(is_bad, seq, "loss", None, Judge.loss)

    def say_movement(self) -> None:
        """Warns of weights that don't move, outside of all locks."""
        movement = self._state.movement
        for text in () if movement is None else movement.take_unsaid():
            warnings.warn(text, FastcheckWarning, stacklevel=4)

    def release(self) -> None:
        """Takes back what a step that raised has left on its optimizer."""
        self._guard.close()

    # Shared

    def _concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._given is not None:
            return optimizer in self._given
        return self._state.owned_by(optimizer)

    def _follows(self, scaler: GradScaler) -> bool:
        return self._scaler is None or self._scaler() is scaler

    def guarded(self, what: str, method: Callable[..., bool], *args: Any) -> None:
        """Calls one of the methods above. An error of fastcheck's own is said once and switches
        this watcher off.
        """
        session = self.session
        if self._is_off or session.removed:
            return
        is_ours = False
        try:
            with session.lock:
                if not session.removed:
                    is_ours = method(self, *args)
        except Exception as error:
            self._is_off = True
            self._guard.close()
            session.trouble(what, error)
        meets, self._meets = self._meets, False
        self.say_movement()
        if meets and session.tape is None:
            session.meet()
        elif is_ours and session.ledger.due:
            session.deliver()


def _found_nonfinite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return backend_for(tensors[0].device).found_nonfinite(tensors)
