"""Averages of a model, such as a teacher: one whose weights move and whose BatchNorm statistics do
not, one that is hardly an average, and one whose updates round away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Optional

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.monitor.weights.updates import checksums
from fastcheck.utils.torch.frames import values_at_hand
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import can_read_now

# Looks that read tensors, of which four tell.
_LOOKS = 5
# The update of an optimizer before which averages are measured first, the updates between two
# measurements, and their number.
_FIRST, _BETWEEN, _TURNS = 30, 10, 3
_MOST_KEPT, _RESIDUE = 0.6, 0.1
# The part of the elements of an average that is written to, which keep every bit of it.
_STILL = 0.9
_MOST_ELEMENTS = 4096
_MOST_TENSORS = 100_000


class StaleStatistics:
    """Looks now and then at one BatchNorm in evaluation mode whose weight no optimizer holds, where
    another of its size is trained: reads its weight and its running mean, a few times in a run, and
    waits for a device then.
    """

    def __init__(self) -> None:
        self._looks = 0
        # The node, its calls so far, and the checksums of its weight and mean, at the last look.
        self._last: Optional[tuple[ModuleNode, int, list[int]]] = None

    def look(self, nodes: Sequence[ModuleNode], held: Collection[int]) -> str:
        """Names it if since the last look it was called and its weight has moved, as have the
        statistics of the other, while its own have not. ``held``: what optimizers hold.
        """
        norms = [(n, m) for n in nodes if isinstance(m := n.module(), _BatchNorm)]
        trained = {m.num_features: m for _, m in norms if m.training and id(m.weight) in held}
        at_rest = ((n, m) for n, m in norms if not m.training and id(m.weight) not in held)
        pair = next(((n, m) for n, m in at_rest if m.num_features in trained), None)
        last, self._last = self._last, None
        if pair is None or self._looks == _LOOKS:
            return ""
        self._looks += 1
        node, module = pair
        read = module.weight, module.running_mean, trained[module.num_features].running_mean
        now = checksums([tensor for tensor in read if tensor is not None])
        self._last = node, node.total_calls, now
        if last is None or last[0] is not node or last[1] == node.total_calls or 0 in now:
            return ""
        are_same = [before == after for before, after in zip(last[2], now)]
        is_stale = are_same == [False, True, False]
        return f"{node.path} ({type(module).__name__})" if is_stale else ""


class Averages:
    """Measures in three updates how much averages keep of themselves: modules like one that is
    trained, or tensors like its parameters, in local variables of the program or attributes of
    these. Reads the beginning of one weight of each, and waits for a device then.
    """

    def __init__(self) -> None:
        # Elements of each before the last update, by name, and its version then.
        self._before: dict[str, tuple[torch.Tensor, int]] = {}
        # The names of those that have kept little, each with the shares that were measured.
        self._kept: dict[str, list[float]] = {}

    def is_due(self, updates: int) -> bool:
        """True before two updates in a row of each turn, as long as one has kept little."""
        turn, place = divmod(updates - _FIRST, _BETWEEN)
        return 0 <= turn < _TURNS and place < 2 and (turn == 0 or bool(self._kept))

    def look(
        self, updates: int, held: Collection[int], others: Collection[int]
    ) -> tuple[str, float]:
        """The name of an average that keeps little of itself, and the share, or that keeps all of
        it, in few bits, though it is written to (1); empty: none is known.
        ``updates``: of the optimizer that is about to step, and holds ``held``; ``others``: what
        all optimizers hold.
        """
        place = (updates - _FIRST) % _BETWEEN
        before, self._before = self._before, {}
        kept, self._kept = self._kept, {} if place else self._kept
        for name, trained, copy in _copies(held, others):
            if place == 0:
                self._before.setdefault(name, (_elements(copy), copy._version))
            elif name in before:
                then, version = before.pop(name)
                now, of = _elements(copy), _elements(trained)
                share = _share(now, then, of) if copy.dtype == trained.dtype else None
                is_little = share is not None and share < _MOST_KEPT
                is_written = copy.dtype.itemsize < 4 and copy._version != version
                # A rounded copy of the weights, as one to compute with, is no average.
                if is_written and bool((now != of.to(copy.dtype).double()).any()):
                    is_still = float((now == then).double().mean()) > _STILL
                    share = 1.0 if is_still else share
                    is_little |= is_still
                if is_little and share is not None:
                    self._kept[name] = [*kept.get(name, ()), share]
        return next(((n, max(s)) for n, s in self._kept.items() if len(s) == _TURNS), ("", 0.0))


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    with unobserved(), no_grad():
        return tensor.detach().reshape(-1)[:_MOST_ELEMENTS].double().cpu().clone()


def _share(now: torch.Tensor, then: torch.Tensor, trained: torch.Tensor) -> Optional[float]:
    """The share that a copy has kept of itself, if that is the same for all elements."""
    with unobserved(), no_grad():
        far, near = then - trained, now - trained
        if not (bool(near.any()) and bool(far.any())):
            return None
        share = float(near @ far / (far @ far))
        is_one = float((near - share * far).norm()) <= _RESIDUE * float(near.norm())
    return share if is_one else None


def _copies(
    held: Collection[int], others: Collection[int]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yields the name of each copy, a parameter that an optimizer holds, and the copy's of it."""
    tensors: list[tuple[str, dict[str, Any]]] = []
    for name, value in values_at_hand():
        if issubclass(type(value), torch.nn.Module):
            with contextlib.suppress(AttributeError):  # one whose __init__() has not run
                tensors.append((name, dict(torch.nn.Module.named_parameters(value))))
        elif type(value) is dict and len(value) <= _MOST_TENSORS:
            tensors.append((name, value.copy()))  # another thread may write to it
    holding = frozenset(held)
    trained = [of for _, of in tensors if not holding.isdisjoint(map(id, of.values()))]
    for name, own in tensors:
        like = (of for of in trained if all(_is_like(own.get(key), p) for key, p in of.items()))
        of = next(like, None)
        key = next((key for key, p in (of or {}).items() if id(p) in held), None)
        if not of or key is None or any(id(own[each]) in others for each in of):
            continue
        if can_read_now(own[key]) and can_read_now(of[key]):
            yield name, of[key], own[key]


def _is_like(tensor: Any, other: Any) -> bool:
    if not all(issubclass(type(one), torch.Tensor) for one in (tensor, other)):
        return False
    is_few = tensor.is_floating_point() and tensor.dtype.itemsize < 4
    return tensor.shape == other.shape and (is_few or tensor.dtype == other.dtype)
