"""The losses of one update: those that a GradScaler was given and has made, sums and criteria."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Optional

import torch

from fastcheck.utils.torch.flatten import flatten
from fastcheck.utils.torch.memory_ref import MemoryRef, memory_ref

from .loss_forms import never_negative, sum_of

# The last losses that a scaler was given.
_SCALED = 16


class UpdateLosses:
    """The losses on which backward() was called since the last update. ``given_is_root``: a loss
    that GradScaler.scale() was given is among them. ``scaler``: it has made the last of them.
    """

    def __init__(self) -> None:
        # A frozen model never has an update that clears them.
        self._given: deque[MemoryRef] = deque(maxlen=_SCALED)
        self.given_is_root = False
        # The results of GradScaler.scale(), with the scaler.
        self._made: deque[tuple[MemoryRef, Any]] = deque(maxlen=_SCALED)
        self.scaler: Any = None
        #: The number of times that a gradient was there and was cleared before the next call.
        self.cleared = 0
        self._had_gradient = False
        #: Criteria that are never negative; empty: a loss is none of them.
        self.criteria: set[str] = set()
        #: autograd.grad() was asked for the derivative of the model's output with respect to an
        #: input, and its result has no graph.
        self.is_without_graph = False
        #: It was asked for the derivative of a derivative, which is 0.
        self.has_no_second = False
        #: A loss of this update is a sum, one of whose terms is that of the update before.
        self.is_total = False
        # The number of the sum that the last loss is, and that of the update before.
        self._sum = self._sum_before = -1
        # The last of them, its version, and the number of the operation that made it: where a CUDA
        # graph is replayed all losses have one memory.
        self._root: Optional[tuple[MemoryRef, int, int]] = None

    def scaled(self, scaler: Any, outputs: Any, results: Any) -> None:
        self._given.extend(memory_ref(tensor) for _, tensor in flatten(outputs, ""))
        ref = weakref.ref(scaler)
        self._made.extend((memory_ref(tensor), ref) for _, tensor in flatten(results, ""))

    def backward_began(self, roots: Sequence[torch.Tensor]) -> bool:
        """True if it is on the same loss as the call before."""
        if self._given:
            self.given_is_root |= any(ref.is_of(root) for ref in self._given for root in roots)
        made = self._made and [r() for of, r in self._made for root in roots if of.is_of(root)]
        self.scaler = made[0] if made else None
        before, self._root = self._root, None
        root = roots[0] if len(roots) == 1 else None
        if root is None or root.grad_fn is None or root.numel() != 1:
            return False
        self._root = memory_ref(root), root._version, root.grad_fn._sequence_nr()
        if before is None or not before[0].is_of(root) or before[1:] != self._root[1:]:
            return False
        return root.untyped_storage().nbytes() > 0

    @property
    def last_scaler(self) -> Any:
        """The scaler that has made a loss of this update; None: none has, or it is gone."""
        return self._made[-1][1]() if self._made else None

    @property
    def is_sum(self) -> bool:
        """True if a loss of this update is a sum."""
        return self._sum >= 0

    def look_at_sums(self, roots: Sequence[torch.Tensor]) -> None:
        """Compares the sums that these losses are with those of the update before."""
        for root in roots:
            total = sum_of(root)
            if total is not None:
                self._sum = total._sequence_nr()
                terms = (term for term, _ in total.next_functions if term is not None)
                self.is_total |= self._sum_before in [term._sequence_nr() for term in terms]

    def look_at_criteria(self, roots: Sequence[torch.Tensor]) -> None:
        self.criteria.update(never_negative(root, self.scaler is not None) for root in roots)

    def gradient_is(self, parameter: Optional[torch.Tensor], is_before: bool) -> None:
        """Takes in whether there is a gradient, as a call begins or has ended."""
        had, self._had_gradient = self._had_gradient, getattr(parameter, "grad", None) is not None
        self.cleared += is_before and had and not self._had_gradient

    def update_comes(self) -> None:
        if self._given or self._made:
            self._given.clear()
            self._made.clear()
        self.criteria.clear()
        self.given_is_root = self.is_without_graph = self.has_no_second = False
        if self._sum >= 0:
            self._sum, self._sum_before, self.is_total = -1, self._sum, False
        self._root = None
