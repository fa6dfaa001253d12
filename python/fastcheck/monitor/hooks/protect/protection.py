"""WeightProtection: keeps updates with non-finite gradients out of the weights, for one session."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastcheck.backends.table import backend_for
from fastcheck.monitor.session.session import Session
from fastcheck.utils.torch.sharding import is_sharded, join_reduction, reduce_found_inf

from .found_inf import UpdateGuard
from .hold_back import HostGuard

__all__ = ["WeightProtection"]


class WeightProtection:
    """Every method expects the session's lock to be held."""

    def __init__(self, session: Session) -> None:
        self._session = session
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        combine = self._combine if is_distributed else None
        self._guard = UpdateGuard(_found_nonfinite, combine)
        self._host_guard = HostGuard(_found_nonfinite, combine)
        self._cannot_protect = False
        self._has_combined = False
        self._warnings: list[str] = []

    def before_update(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        """The optimizer is about to step, unless it is to skip that."""
        session = self._session
        if not self._protects():
            return
        if self._cannot_protect:
            join_reduction(optimizer)
            return
        self._has_combined = False
        try:
            word = self._guard.before_update(optimizer, has_closure=has_closure)
            if self._guard.why_unguarded is not None and not has_closure:
                word = self._host_guard.before_update(optimizer)
        except Exception as error:
            # The ranks that hold the other shards wait for this one, now and in later updates.
            self._cannot_protect = True
            self.release()
            if not self._has_combined:
                join_reduction(optimizer)
            session.report_internal_error("the protection of the weights", error)
            return
        if word is not None:
            session.step.guarded_count += 1
            return
        reason = self._guard.why_unguarded
        if reason is None:
            return
        session.step.why_updated = reason
        note = f"the weights of {type(optimizer).__name__} are not protected: {reason}"
        if note not in session.notes:
            session.notes[note] = None
            if session.config.stop.protect_weights is True or session.world_size > 1:
                self._warnings.append(
                    f"{note}. A stop comes one step after the event: by then an update has applied "
                    "what was not finite"
                )

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped."""
        self._guard.after_update(optimizer)
        self._host_guard.after_update(optimizer)

    def take_warnings(self) -> list[str]:
        """What is to be warned of since the last time."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def release(self) -> None:
        """Takes back what a step that raised has left on its optimizer."""
        self._guard.close()
        self._host_guard.close()

    def _protects(self) -> bool:
        """Whether the update may be applied before its gradients are known to be finite."""
        session, asked = self._session, self._session.config.stop.protect_weights
        if asked == "auto":
            is_late = session.is_deferred or session.world_size > 1
            return is_late and session.config.sync == "never" and session.config.may_stop
        return bool(asked)

    def _combine(self, word: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        self._has_combined = True
        if is_sharded(optimizer):
            reduce_found_inf(word, optimizer)


def _found_nonfinite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return backend_for(tensors[0].device).found_nonfinite(tensors)
