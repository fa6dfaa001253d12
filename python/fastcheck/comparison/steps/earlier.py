"""The first difference beside the step before it: gradients that are not cleared, buffers that do
not move any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fastcheck.comparison.block import Phase
from fastcheck.comparison.measure import PairState
from fastcheck.record.format import Depth

from .pairs import Pairs

_SIDES = ("actual", "reference")
#: The relative difference of two sums that are equal but for rounding, and the smallest part of the
#: magnitudes that a sum has to be to say anything.
_SUMMED, _SIGNIFICANT = 1e-5, 1e-3
_FEW = 3


def causes_of(now: Pairs, index: int, before: Pairs, first_weights: Sequence[int]) -> Iterator[str]:
    """Causes that a pair shows which differs first, after a step that was equal to the bit.
    ``first_weights``: the numbers of the parameters of the first step.
    """
    name = now.name(index)
    if name.role == "param_grad":
        for place, side in enumerate(_SIDES):
            if _adds_up(now, before, place):
                yield (
                    f"the gradients of {side} are the sums of those of this step and of the step "
                    f"before: {side} does not clear them (optimizer.zero_grad())"
                )
    if now.phases[index] == Phase.FORWARD and name.role == "output":
        for label, side in _still_buffers(now, before, name.module):
            yield (
                f"{label} stays as it was in {side}, and moves on the other side: {name.module} "
                f"runs in eval mode in {side}, or its momentum is 0 there"
            )
        if label := _unread_weight(now, name.module, first_weights):
            yield (
                f"a log has {label} of the first step alone, since no optimizer updates it: look "
                "at what else writes to it (an average of other weights: its rate, its place in "
                "the loop). If nothing does, the operator is not deterministic, or the hardware "
                "at fault"
            )


def _unread_weight(now: Pairs, module: str, first_weights: Sequence[int]) -> str:
    """A weight of a module of which none is read any more; "" where there is none."""
    first, read = ([now.table[n] for n in names] for names in (first_weights, now.names.tolist()))
    if any(name.role == "param" and name.module == module for name in read):
        return ""
    own = (f"{name.module}.{name.label}" for name in first if name.module == module)
    return next(own, "")


def _adds_up(now: Pairs, before: Pairs, place: int) -> bool:
    """True if each gradient that differs is what the other side has, and the last one added."""
    last = {number: at for at, number in enumerate(before.names.tolist())}
    told = 0
    for index in np.flatnonzero(now.states == PairState.DIFFERENT).tolist():
        number = int(now.names[index])
        if now.name(index).role != "param_grad" or number not in last:
            continue
        mine, other = (
            side[index] for side in ((now.left, now.right), (now.right, now.left))[place]
        )
        old = (before.left, before.right)[place][last[number]]
        if min(side["depth"] for side in (mine, other, old)) < Depth.STATS:
            return False
        size = float(other["abs_sum"] + old["abs_sum"])
        if abs(float(old["sum"])) < _SIGNIFICANT * size:
            continue
        if abs(float(mine["sum"] - other["sum"] - old["sum"])) > _SUMMED * size:
            return False
        told += 1
    return told >= _FEW


def _still_buffers(now: Pairs, before: Pairs, module: str) -> Iterator[tuple[str, str]]:
    last = {number: at for at, number in enumerate(before.names.tolist())}
    for index, number in enumerate(now.names.tolist()):
        name = now.table[number]
        if name.role != "buffer" or name.module != module or number not in last:
            continue
        old = last[number]
        moved = [
            bool(after[index]["checksum"] != earlier[old]["checksum"])
            for after, earlier in ((now.left, before.left), (now.right, before.right))
        ]
        if moved[0] != moved[1]:
            yield f"{module}.{name.label}", _SIDES[moved.index(False)]
            return
