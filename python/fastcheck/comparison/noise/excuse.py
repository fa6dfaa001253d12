"""Sets the differing pairs of a step to CLOSE where rounding noise explains the difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fastcheck.comparison.block import Phase
from fastcheck.comparison.measure import CANCELLED, DRIFTED, MEASURED, PART, State
from fastcheck.comparison.names import Name, NameTable

from .cancellation import Cancellation
from .drift import Drift

__all__ = ["Measures", "excuse", "excuse_parts"]


@dataclass(frozen=True)
class Measures:
    """By pair, of one step of one rank; ``states``, ``errors`` and ``reasons`` are written to.
    ``distances``: ``||a - b||`` of pairs whose values are there. ``formats``: the codes of the
    dtypes whose rounding the pairs carry.
    """

    table: NameTable
    numbers: np.ndarray
    left: np.ndarray
    right: np.ndarray
    formats: np.ndarray
    phases: np.ndarray
    states: np.ndarray
    errors: np.ndarray
    reasons: np.ndarray
    distances: Mapping[int, float]

    def name(self, index: int) -> Name:
        return self.table[int(self.numbers[index])]


def excuse_parts(pairs: Measures) -> int:
    """Sets differing gradients of modules' inputs to CLOSE; how many. fastcheck reads the gradient
    of the tensor that a module is given, msprobe what the module adds to it: of a residual stream
    these are two things.
    """
    count = 0
    differing = (pairs.states == State.DIFFERENT) & np.isin(pairs.reasons, MEASURED)
    for index in np.flatnonzero(differing).tolist():
        name = pairs.name(index)
        if name.role == "grad_input" and not name.op:
            pairs.states[index], pairs.errors[index] = State.CLOSE, 0.0
            pairs.reasons[index] = PART
            count += 1
    return count


def excuse(step: int, pairs: Measures, drift: Drift, computed: Sequence[Phase]) -> list[str]:
    """Sets pairs that noise explains to CLOSE; the names of gradients whose terms cancel."""
    suspects = (pairs.states == State.DIFFERENT) & np.isin(pairs.reasons, MEASURED)
    suspects &= np.isin(pairs.phases, [int(phase) for phase in computed])
    followed = suspects | _gradients_to_follow(pairs, drift)
    inexact = np.flatnonzero(followed)
    if not len(inexact):
        return []
    names = [pairs.table[number] for number in pairs.numbers.tolist()] if suspects.any() else []
    settled = np.where(pairs.states == State.DIFFERENT, 0.0, pairs.errors)
    cancelled = Cancellation(names, pairs.left, pairs.right, pairs.formats, settled)
    found = []
    # Parameters first: they are read at the end of a step, and are what its forward used.
    is_late = pairs.phases[inexact] != Phase.UPDATE
    for index in inexact[np.argsort(is_late, kind="stable")].tolist():
        name, is_noise = pairs.name(index), False
        if suspects[index]:
            apart = pairs.distances.get(index)
            apart = cancelled.distance(index) if apart is None else apart
            error = cancelled.explains(index, apart)
            is_noise = error is not None
            numel, raw = int(pairs.right["numel"][index]), float(pairs.errors[index])
            if error is None and drift.explains(step, name, numel, apart, raw):
                error = 0.0
            if error is not None:
                pairs.states[index], pairs.errors[index] = State.CLOSE, error
                pairs.reasons[index] = CANCELLED if is_noise else DRIFTED
            if is_noise:
                found.append(str(name))
        if name.role == "param_grad" and pairs.states[index] != State.DIFFERENT:
            drift.follow(step, name, is_noise)
    return found


def _gradients_to_follow(pairs: Measures, drift: Drift) -> np.ndarray:
    """Those with other last bits of which the optimizer may make more."""
    found: np.ndarray = pairs.states != State.SAME
    if not drift.normalises:
        return np.zeros(len(found), bool)
    numbers = np.unique(pairs.numbers[found]).tolist()
    wanted = [number for number in numbers if drift.is_followed(pairs.table[number])]
    found &= np.isin(pairs.numbers, wanted)
    return found
