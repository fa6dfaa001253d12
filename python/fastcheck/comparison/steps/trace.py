"""Traces the first computed tensor that is not equal to the bit, and what follows from it."""

from __future__ import annotations

import numpy as np

from fastcheck.comparison.block import Phase
from fastcheck.comparison.measure import PairState
from fastcheck.comparison.origin import Origin, is_permuted, rounding_limit
from fastcheck.comparison.tally import COMPUTED, Key

from .earlier import causes_of
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
        causes=list(causes_of(pairs, index, before, pairs.handed.first_weights))
        if is_late and before is not None
        else [],
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
