"""WeightProtection: keeps bad updates out of the weights, for one session: those with gradients
that are not finite and, on request, those whose norm is too large.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Callable, Optional

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastcheck.backends.table import backend_for
from fastcheck.errors import UnsupportedTensorError, first_line, warn_of_fault
from fastcheck.monitor.session.session import Session
from fastcheck.utils.torch.lost_device import is_lost
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import are_on_host
from fastcheck.utils.torch.sharding import is_sharded, join_reduction, reduce_found_inf
from fastcheck.utils.torch.versions import is_compiling

from .found_inf import UpdateGuard, gradients_by_device, has_step_of_torch
from .step_numbers import StepNumbers

_Taken = list[tuple[Tensor, Tensor]]

# Gradients that were taken from each optimizer whose step is under way, by whichever guard.
_under_way: weakref.WeakKeyDictionary[Optimizer, _Taken] = weakref.WeakKeyDictionary()


class _UndecidedError(RuntimeError):
    """The ranks could not decide together on an update of sharded weights."""

    def __init__(self, error: Exception) -> None:
        super().__init__(
            "the ranks could not decide together on an update of sharded weights "
            f"({first_line(error)}), and this one doesn't try again. A rank that has ended, or "
            "leaves out an update that the others make, lets them wait in that reduction, and its "
            "own next collective is taken for its part of it. Make the same updates on all ranks, "
            "or pass stop=fastcheck.Stop(protect_weights=False), with which nothing is reduced"
        )


class HostGuard:
    """The twin of UpdateGuard for optimizers in host memory; the arguments are the same.

    Not thread-safe: one optimizer is stepped by one thread at a time.
    """

    def __init__(
        self,
        found_nonfinite: Callable[[Sequence[Tensor]], Tensor],
        combine: Optional[Callable[[Tensor, Optimizer], None]] = None,
    ) -> None:
        self._found_nonfinite = found_nonfinite
        self._combine = combine
        self._mine: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def before_update(self, optimizer: Optimizer) -> Optional[Tensor]:
        """Takes the gradients away where any of them is not finite.

        Returns a 0-dim float32 tensor, 1.0: the update is held back. None: the parameters are not
        all in host memory, or the gradients can't be read.
        """
        self.after_update(optimizer)  # of a step that raised
        held = (p for group in optimizer.param_groups for p in group["params"])
        first = next(held, None)
        # On a device the first of many says so.
        if first is None or not first.is_cpu or is_compiling():
            return None
        parameters = [first, *held]
        if not are_on_host(parameters):
            return None
        gradients = [grad for many in gradients_by_device(optimizer).values() for grad in many]
        if not are_on_host(gradients):
            return None
        with no_grad():
            try:
                word = self._found_nonfinite(gradients or [Tensor([0.0])])
            except UnsupportedTensorError:
                return None
            if self._combine is not None:
                self._combine(word, optimizer)
        if float(word) and optimizer not in _under_way:
            taken = [(p, p.grad) for p in parameters if p.grad is not None]
            for parameter, _ in taken:
                parameter.grad = None
            _under_way[optimizer] = taken
            self._mine.add(optimizer)
        return word

    def after_update(self, optimizer: Optimizer) -> None:
        """Gives the gradients back."""
        if optimizer in self._mine:
            self._mine.discard(optimizer)
            for parameter, gradient in _under_way.pop(optimizer, ()):
                if parameter.grad is None:
                    parameter.grad = gradient

    def close(self) -> None:
        """Gives back what steps that raised have left."""
        for optimizer in list(self._mine):
            self.after_update(optimizer)


class WeightProtection:
    """Protects the weights from a bad update. Every method expects the session's lock to be held.
    ``norm_limit``: the largest norm of all gradients, without a loss scale, that an update may
    have; None, or what it returns: any. ``are_all_here``: whether the other ranks protect theirs;
    None: they do.
    """

    def __init__(
        self,
        session: Session,
        numbers: StepNumbers,
        norm_limit: Optional[Callable[[], Optional[float]]] = None,
        are_all_here: Optional[Callable[[], bool]] = None,
    ) -> None:
        self._session = session
        self._numbers = numbers
        self._norm_limit = norm_limit
        self._are_all_here = are_all_here
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        combine = self._combine if is_distributed else None
        self._guard = UpdateGuard(self._is_bad, combine)
        self._host_guard = HostGuard(self._is_bad, combine)
        # The factor of the gradients of the update that begins.
        self._scale: Optional[torch.Tensor] = None
        # Gradients that were clipped in the open step: their ids, and their norm before.
        self._clipped: list[tuple[frozenset[int], torch.Tensor]] = []
        self._clipped_in = -1
        self._is_loop_known = False
        self._cannot_protect = False
        # The ranks have decided on the update that begins, and on the last of each optimizer.
        self._has_combined = False
        self._combined: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        # An update was protected.
        self._is_used = False

    def before_update(self, optimizer: torch.optim.Optimizer, evaluation: int = 0) -> None:
        """The optimizer is about to use its gradients, unless it is to skip that.

        ``evaluation``: which call of the closure of its step has made them, from 1 on; 0: there is
        no closure.
        """
        session = self._session
        if not self._protects(evaluation):
            return
        if self._cannot_protect:
            self.join(optimizer, evaluation)
            return
        self._has_combined = False
        # The scale of a GradScaler that leaves it to the fused kernel to divide by it.
        self._scale = getattr(optimizer, "grad_scale", None)
        try:
            word = self._guard.before_update(optimizer)
            # A step of one's own may evaluate several times, and count on gradients after each.
            can_lack_gradients = not evaluation or has_step_of_torch(optimizer)
            if self._guard.why_unguarded is not None and can_lack_gradients:
                word = self._host_guard.before_update(optimizer)
        except Exception as error:
            # The ranks that hold the other shards wait for this rank, now and in later updates.
            self._cannot_protect = True
            self.release()
            if isinstance(error, _UndecidedError):
                self._are_all_here = lambda: False  # nothing is decided together any more
                warn_of_fault(str(error))
            else:
                self.join(optimizer, evaluation)
                session.report_internal_error("the protection of the weights", error)
            return
        self._combined[optimizer] = self._has_combined
        if word is not None:
            self._is_used = True
            session.step.update.guarded_count += evaluation <= 1
            if self._norm_limit is not None and session.is_open:
                self._numbers.skipped(word, optimizer)
            return
        reason = self._guard.why_unguarded
        if reason is None:
            return
        session.step.update.why_applied = reason
        note = f"the weights of {type(optimizer).__name__} are not protected: {reason}"
        if note not in session.faults.notes:
            session.faults.notes[note] = None
            if self._norm_limit is not None:
                session.event_store.warn_later(
                    f"Watch(skip_above=) skips no update of {type(optimizer).__name__}: {reason}"
                )
            if (
                session.config.stop.protect_weights is True
                or session.event_store.ranks.together > 1
            ):
                session.event_store.warn_later(
                    f"{note}. A stop comes one step after the event: by then an update has applied "
                    "what was not finite"
                )

    def before_clipping(self, gradients: Sequence[torch.Tensor]) -> None:
        """Notes that these gradients are about to be clipped, in whatever way."""
        if self._norm_limit is None or self._norm_limit() is None:
            return
        strided = [gradient for gradient in gradients if gradient.layout is torch.strided]
        if not strided:
            return
        step = self._session.step.index
        if step != self._clipped_in:
            self._clipped_in = step
            self._clipped.clear()
        with no_grad(), unobserved():
            self._clipped.append((frozenset(map(id, strided)), _norm(strided)))

    def changed_by_loop(self) -> None:
        """The training loop changes gradients itself, ahead of the update."""
        if self._norm_limit is None or self._is_loop_known:
            return
        self._is_loop_known = True
        self._session.event_store.warn_later(
            "Watch(skip_above=) compares the norm of gradients as the optimizer gets them, and the "
            "training loop changes them after backward(). Where that is clipping, no norm is large "
            "any more: clip with torch.nn.utils.clip_grad_norm_, whose gradients are read before"
        )

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has stepped, or its closure is called again."""
        self._has_combined = False
        if self._is_used:
            self._guard.after_update(optimizer)
            self._host_guard.after_update(optimizer)
        if self._clipped:
            # The next update of the step, or evaluation of the closure, has gradients of its own.
            used = {id(grad) for many in gradients_by_device(optimizer).values() for grad in many}
            self._clipped = [(ids - used, norm) for ids, norm in self._clipped]

    def join(self, optimizer: torch.optim.Optimizer, evaluation: int = 0) -> None:
        """Joins what other ranks reduce before this update, if this rank has not: they wait for
        it.
        """
        is_due = self._protects(evaluation) and self._combined.get(optimizer, True)
        if is_due and not self._has_combined and self._is_shared(optimizer):
            join_reduction(optimizer)
        self._has_combined = False

    def release(self) -> None:
        """Takes back what a step that raised has left on its optimizer."""
        self._guard.close()
        self._host_guard.close()

    def _protects(self, evaluation: int) -> bool:
        """True if the update may be applied before its gradients are known to be finite."""
        session, asked = self._session, self._session.config.stop.protect_weights
        if self._norm_limit is not None:
            return True
        if asked != "auto":
            return bool(asked)
        # Ranks meet after the first evaluation of a closure in the other modes, and not again: they
        # may differ in how many there are.
        are_apart = session.event_store.ranks.together > 1 and (
            session.config.sync == "never" or evaluation > 1
        )
        is_late = session.rings.is_deferred and session.config.sync == "never"
        return (is_late or are_apart) and session.config.may_stop

    def _is_bad(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """1.0 where any of them is not finite, or their norm is above the limit; else 0.0: a 0-dim
        float32 tensor of their device, which nothing waits for.
        """
        word = backend_for(tensors[0].device).found_nonfinite(tensors)
        limit = None if self._norm_limit is None else self._norm_limit()
        if limit is not None:
            with unobserved():
                norm = _norm(tensors)
                for before in self._norms_before_clipping(tensors):
                    norm = torch.maximum(norm, before.to(norm.device, non_blocking=True))
                if self._scale is not None:
                    norm = norm / self._scale.to(norm.device, non_blocking=True)
                word.logical_or_(norm > limit)
        return word

    def _norms_before_clipping(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The norms of these gradients before they were clipped, which count: after clipping no
        norm is large.
        """
        if self._clipped_in != self._session.step.index:
            return []
        ids = set(map(id, gradients))
        return [norm for clipped, norm in self._clipped if not clipped.isdisjoint(ids)]

    def _combine(self, word: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        self._has_combined = True
        if not self._is_shared(optimizer):
            return
        try:
            reduce_found_inf(word, optimizer)
        except Exception as error:
            if is_lost(error):
                raise  # an earlier kernel is to blame
            raise _UndecidedError(error) from error

    def _is_shared(self, optimizer: torch.optim.Optimizer) -> bool:
        return is_sharded(optimizer) and (self._are_all_here is None or self._are_all_here())


def _norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of all tensors together, 0-dim float32 on the device of the first."""
    norms = [torch.linalg.vector_norm(tensor, dtype=_wide(tensor)).float() for tensor in tensors]
    there = [norm.to(norms[0].device, non_blocking=True) for norm in norms]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(there))
    return norm


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which the squares of a gradient are added: those of float16 leave its range."""
    if tensor.is_complex():
        return torch.complex64 if tensor.dtype is not torch.complex128 else tensor.dtype
    return tensor.dtype if tensor.dtype is torch.float64 else torch.float32
