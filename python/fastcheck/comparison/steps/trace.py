"""Traces the first computed tensor that is not equal to the bit, what follows from it, and its
cause in the step before: gradients that are not cleared, buffers that do not move any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Optional

import numpy as np

from fastcheck.comparison.block import SIDES, Phase
from fastcheck.comparison.measure import PairState
from fastcheck.comparison.origin import Origin, is_permuted, rounding_limit
from fastcheck.comparison.steps.pairs import Pairs
from fastcheck.comparison.tally import COMPUTED, Key
from fastcheck.record.format import Depth

from .step import StepPairs

#: The most that a few elements whose update rounding has turned round make of what rounding makes
#: of a parameter.
_TURNED_LIMITS = 10


def trace(pairs: StepPairs, inexact: np.ndarray) -> None:
    """Notes the first computed tensor that is not equal to the bit, and what follows it."""
    origins, handed = pairs.course.tally.origins, pairs.handed
    computed = np.isin(pairs.phases, COMPUTED)
    is_update = pairs.phases == Phase.UPDATE
    # Rounding noise moves some parameters as far as an update does.
    for index in np.flatnonzero(is_update & (pairs.states == PairState.CLOSE)).tolist():
        computed[index] &= not handed.drift.may_move(pairs.name(index))
    is_update &= computed
    origin = origins.get(pairs.rank)
    if origin is not None:
        if origin.is_open:
            _follow_update(pairs, origin, is_update)
        return
    firsts = {phase: np.flatnonzero(inexact & (pairs.phases == phase)) for phase in COMPUTED}
    keys = {
        pairs.key(int(phase), int(where[0])): int(where[0])
        for phase, where in firsts.items()
        if len(where)
    }
    if not keys:
        handed.equal_names, handed.equal_step = pairs.names[computed], pairs
        return
    key = min(keys)
    index = keys[key]
    origin = origins[pairs.rank] = _origin_at(pairs, key, index)
    after = computed & (np.arange(len(computed)) != index)
    if origin.is_open:
        after &= ~is_update & (np.arange(len(computed)) > index)
    _follow(pairs, origin, after, 0 if origin.is_parameters_gradient else int(after.sum()))


def _origin_at(pairs: StepPairs, key: Key, index: int) -> Origin:
    code, before = int(pairs.formats[index]), pairs.handed.equal_step
    left, right, state = pairs.left[index], pairs.right[index], PairState(pairs.states[index])
    is_late = before is not None and pairs.names[index] in pairs.handed.equal_names
    alike, others = _alike(pairs, index)
    return Origin(
        key,
        pairs.row(index),
        rounding_limit(code, index in pairs.elements),
        pairs.name(index).role == "param_grad",
        is_permuted(left, right, state, code),
        bool(pairs.beyond[index]),
        is_late=is_late,
        causes=[*causes_of(pairs, index, before if is_late else None), *_put_back(pairs, key)],
        alike=alike,
        is_alone=others == 1,
        is_open=key[1] != Phase.UPDATE,
    )


def _follow_update(pairs: StepPairs, origin: Origin, is_update: np.ndarray) -> None:
    """Adds the updates that the step after it shows."""
    reads = is_update
    if origin.is_parameters_gradient:
        reads = is_update & (pairs.states != PairState.SAME)
    else:
        # Adam's first updates have a sign by rounding where a gradient is nearly 0.
        turned = is_update & pairs.turned & (pairs.errors > origin.limit)
        turned &= pairs.errors <= _TURNED_LIMITS * origin.limit
        origin.turned = int(turned.sum())
        is_update = is_update & ~turned
    _follow(pairs, origin, is_update, int(reads.sum()))
    origin.is_updated |= bool(is_update.any())
    # The first update of Adam is the same for gradients with other last bits.
    origin.is_open = origin.is_parameters_gradient and not reads.any()


def _alike(pairs: StepPairs, index: int) -> tuple[int, int]:
    """The number of tensors of its role that are equal to the bit, and of all others."""
    role, here = pairs.name(index).role, pairs.phases == pairs.phases[index]
    same = [
        state == PairState.SAME
        for n, state in zip(pairs.names[here].tolist(), pairs.states[here].tolist())
        if pairs.table[n].role == role
    ]
    return sum(same), len(same) - sum(same)


def _follow(pairs: StepPairs, origin: Origin, which: np.ndarray, readers: int) -> None:
    where = np.flatnonzero(which)
    worst = None
    if len(where):
        ranked = np.lexsort((pairs.errors[where], pairs.states[where] == PairState.DIFFERENT))
        worst = pairs.row(int(where[ranked[-1]]))
    origin.follow(readers, worst)


#: The relative difference of two sums that are equal but for rounding, and the smallest part of the
#: magnitudes that a sum has to be to say anything.
_SUMMED, _SIGNIFICANT = 1e-5, 1e-3
_FEW = 3


def causes_of(now: StepPairs, index: int, before: Optional[Pairs]) -> Iterator[str]:
    """Causes that a pair shows which differs first. ``before``: a step that was equal to the bit,
    in which it was read too.
    """
    name = now.name(index)
    if name.role == "param_grad" and before is not None:
        for place, side in enumerate(SIDES):
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
        if before is not None and (
            label := _unread_weight(now, name.module, now.handed.first_weights)
        ):
            yield (
                f"a log has {label} of the first step alone, since no optimizer updates it: look "
                "at what else writes to it (an average of other weights: its rate, its place in "
                "the loop). If nothing does, the operator is not deterministic, or the hardware "
                "at fault"
            )


def _put_back(pairs: StepPairs, key: Key) -> Iterator[str]:
    """The side whose parameters are those of an earlier step again, where their update differs."""
    if key[1] != Phase.UPDATE or not pairs.handed.states:
        return
    steps, *sides = zip(*pairs.handed.states)
    for side, had in zip(SIDES, sides):
        # Updates of one size that turn round each time come back to what was two steps before.
        if steps[-1] == pairs.step and had[-1] in had[:-3] and had[-1] not in had[-3:-1]:
            yield (
                f"all parameters of {side} in step {pairs.step:,} are what they were in step "
                f"{steps[had.index(had[-1])]:,}, to the bit, and were not in the step before: they "
                "were put back, as by a checkpoint that is loaded within the run"
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


def _still_buffers(now: Pairs, before: Optional[Pairs], module: str) -> Iterator[tuple[str, str]]:
    """``before``: None where the step begins with its buffers, as the first does."""
    before = now if before is None else before
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
            yield f"{module}.{name.label}", SIDES[moved.index(False)]
            return
