"""Optimizers that hold copies of the model's parameters, of which the model gets nothing."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Optional

import torch
import torch.nn.functional as F

from fastcheck.calls.stored import StoredTensor
from fastcheck.monitor.weights.updates import UPDATES, UPDATES_OF_NONE, checksums, is_still
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import can_read, has_memory, may_wait
from fastcheck.utils.torch.sharding import local

# The cosine between two gradients that are equal, but for a factor and for rounding.
_SAME = 0.9999


class _Copies:
    """An optimizer that may hold copies. ``updates``: how many in a row have found it as before;
    ``sums``: the checksums of the model's parameters at the first of them.
    """

    __slots__ = ("are_copies", "have_gradients", "held", "is_over", "sums", "updates")

    def __init__(self) -> None:
        self.are_copies = self.have_gradients = self.is_over = False
        self.updates = 0
        # The ids of what the optimizer holds.
        self.held: set[int] = set()
        self.sums: Sequence[int] = ()


class StaleCopies:
    """Optimizers that hold copies of the model's parameters in place of these, and whether the
    model gets anything of what they make. Reads the parameters of the model twice for each, and
    waits for a device then.
    """

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Copies] = (
            weakref.WeakKeyDictionary()
        )

    def has(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if the parameters of the optimizer have had the shapes of all trained parameters."""
        known = self._of.get(optimizer)
        return known is not None and known.are_copies

    def look_at(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[StoredTensor], is_alone: bool
    ) -> Optional[str]:
        """``optimizer``, which holds no parameter of the model, is about to step. What to warn of,
        once: it has stepped several times, with the shapes of all trained parameters, without any
        gradient, or with just what another holds, while these have gradients and keep every bit.
        ``is_alone``: no optimizer of the model has stepped, and this one is given no closure.
        """
        known = self._of.setdefault(optimizer, _Copies())
        is_on = may_wait() and not known.is_over
        trained = [p for _, _, p in parameters if p.requires_grad] if is_on else []
        if not trained or not all(p.grad is not None for p in trained):
            return None
        held = [p for group in optimizer.param_groups for p in group["params"]]
        have_gradients = any(p.grad is not None for p in held)
        are_still = have_gradients and all(map(is_still, optimizer.param_groups))
        shapes, wanted = (Counter(tuple(p.shape) for p in many) for many in (held, trained))
        are_copies = shapes == wanted or _is_flat(held, trained)
        known.held = set(map(id, held))
        twins = [each for each in self._of.values() if each.held == known.held]
        has_twin = not are_copies and have_gradients and len(twins) > 1
        if are_still or not (are_copies or (is_alone and (has_twin or not have_gradients))):
            return None
        if have_gradients and _storages(trained) & _storages(held):
            return None  # other objects for the same values
        known.are_copies = are_copies
        if known.have_gradients != have_gradients:
            known.have_gradients, known.updates = have_gradients, 0
        known.updates += 1
        if known.updates == 1:
            known.sums = checksums(trained)
        # A weight in few bits may stay as it is while its copy moves.
        is_coarse = have_gradients and all(p.dtype.itemsize < 4 for p in trained)
        if known.updates < (UPDATES_OF_NONE if is_coarse else UPDATES):
            return None
        known.is_over = True
        is_moved = checksums(trained) != known.sums
        if is_moved or (are_copies and have_gradients and not _have_same_gradient(held, trained)):
            return None
        if has_twin:
            for twin in twins:
                twin.is_over = True
            return (
                f"{len(twins)} optimizers hold the same parameters, none of which is the model's: "
                f"one is {type(optimizer).__name__}. In {known.updates} updates the model's "
                "parameters had gradients and kept every bit. Was one of these optimizers to "
                "train the model? Give it the model's parameters"
            )
        which = f"those of {type(optimizer).__name__}"
        which += " have the same shapes and" if shapes == wanted else ""
        if have_gradients:
            return (
                f"an optimizer that holds none of the model's parameters: {which} had "
                f"gradients in {known.updates} updates, while the model's parameters kept every "
                "bit. Copies have to be written back to the model after each step()"
            )
        return (
            f"an optimizer that holds none of the model's parameters: {which} had no gradients in "
            f"{known.updates} updates, while the model's parameters had some and kept every bit. "
            "It may hold those of another model, or have been made before the model was copied, "
            "converted or replaced: give it the parameters of the model that is trained"
        )


def _have_same_gradient(held: Sequence[torch.Tensor], trained: Sequence[torch.Tensor]) -> bool:
    """True if one of ``held`` was given the gradient of the largest of ``trained``, whatever it was
    multiplied by: those of a twin, with a backward of its own, have others.
    """
    sizes = list(map(torch.Tensor.numel, trained))
    place = sizes.index(max(sizes))
    largest, row = trained[place], slice(None)
    given = [p.grad for p in held if p.shape == largest.shape and p.grad is not None]
    if _is_flat(held, trained):
        begin = sum(sizes[:place])
        row = slice(begin, begin + sizes[place])
        given = [p.grad for p in held if p.grad is not None]
    if largest.grad is None or not all(map(can_read, (largest.grad, *given))):
        return False
    with unobserved(), no_grad():
        # A copy may be on another device.
        wanted, *others = (g.flatten().cpu().double() for g in (largest.grad, *given))
        return any(float(F.cosine_similarity(wanted, g[row], 0)) > _SAME for g in others)


def _is_flat(held: Sequence[torch.Tensor], trained: Sequence[torch.Tensor]) -> bool:
    """True if an optimizer holds one row that may be all parameters, perhaps with padding."""
    count = sum(map(torch.Tensor.numel, trained))
    return len(held) == 1 < len(trained) and held[0].dim() == 1 and held[0].numel() >= count


def _storages(parameters: Sequence[torch.Tensor]) -> set[int]:
    """The addresses of the storages, of those that have some."""
    parts = [local(parameter) for parameter in parameters]
    return {part.untyped_storage().data_ptr() for part in parts if has_memory(part)}
