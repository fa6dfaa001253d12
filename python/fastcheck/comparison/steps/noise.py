"""Differences that rounding noise explains: sets the pairs of a step that have them to CLOSE.

Drift is that of parameters that two healthy runs update differently, since their gradients are
rounding noise. Adam divides a gradient by its own size, so that noise moves a parameter by the
learning rate in either direction. The loss does not depend on such a parameter, but its module's
output does (the bias of a convolution before BatchNorm), and a running mean of that.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from fastcheck.comparison.block import Phase, Source
from fastcheck.comparison.measure import CANCELLED, DRIFTED, MEASURED, PART, SMALL, PairState
from fastcheck.comparison.names import Name
from fastcheck.record.format import Depth
from fastcheck.record.statistics import extreme_values
from fastcheck.statistics.thresholds import rounding_unit

from .pairs import Pairs

#: The factor by which the noise of another gradient may be larger where it arrives.
_SPREAD = 4.0
#: The norm of a layer's input over that of its output per weight, at least.
_INPUT = 2.0
#: The number of earlier gradients that are searched for what a gradient was computed from.
_WINDOW = 8
#: The norm of a gradient over the largest of its step, at most, for noise of a coarse dtype.
_SMALL = 1e-4
_GRADIENTS = ("grad_input", "grad_output", "param_grad")
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "attention", "linear", "matmul")


class Drift:
    """Follows the parameters that rounding noise moves, over the steps of one rank."""

    def __init__(self, actual: Source, reference: Source) -> None:
        groups = [
            group
            for side in (actual, reference)
            for group in _groups(side.settings.get(Phase.HYPERPARAMETERS))
        ]
        #: The largest learning rate; 0 where no side records a rate.
        self._rate = max((rate for rate, _ in groups), default=0.0)
        #: True if an optimizer moves a parameter by the learning rate whatever its gradient's size.
        self.normalises = any(kind not in ("", "SGD") for _, kind in groups)
        self._noisy: set[tuple[str, str]] = set()
        self._modules: set[str] = set()
        # A layer whose weight is moved by noise lies before something that takes it away again, and
        # all in between moves with it.
        self._spreads = False
        self._largest = 0.0
        self._first_step: Optional[int] = None

    def is_followed(self, name: Name) -> bool:
        """True if a part of this gradient may be noise, and be followed by a drift."""
        return self.normalises and name.role == "param_grad" and name.label.endswith("bias")

    def follow(self, step: int, name: Name, is_noise: bool) -> None:
        """A parameter's gradient: noise as a whole, or with other last bits, in which case a part
        of a bias may be noise (that of fused keys).
        """
        if is_noise or self.is_followed(name):
            self._noisy.add((name.module, name.label))
            self._spreads |= is_noise and not name.label.endswith("bias")
            if self._first_step is None:
                self._first_step = step

    def may_move(self, name: Name) -> bool:
        """True if this is a parameter that noise moves."""
        return name.role == "param" and (name.module, name.label) in self._noisy

    def explains(self, step: int, name: Name, numel: int, apart: float, error: float) -> bool:
        """True if updates by noise are the cause. ``apart``: ``||a - b||``; ``error``: relative."""
        if self._first_step is None or not np.isfinite(error):
            return False
        steps = step - self._first_step + 1
        is_near = apart <= 2 * self._rate * steps * np.sqrt(max(numel, 1))
        if self.may_move(name) and is_near:
            self._modules.add(name.module)
            self._largest = max(self._largest, error)
            return True
        is_made = name.direction == "forward" and name.module in self._modules
        if is_near and self._modules and (is_made or name.role == "buffer"):
            return True
        return self._spreads and error <= _SPREAD * self._largest


def _groups(value: Any, kind: str = "") -> Iterator[tuple[float, str]]:
    """(learning rate, the optimizer's type) of each group in the description of optimizers."""
    if isinstance(value, Mapping):
        kind = value.get("type", kind) if isinstance(value.get("type"), str) else kind
        rate = value.get("lr")
        if isinstance(rate, (int, float)):
            yield float(rate), kind
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _groups(item, kind)


def _distances(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    root = np.sqrt(np.maximum(right["numel"], 1))
    with np.errstate(all="ignore"):  # of a damaged record anything may be infinite
        parts = [np.sqrt(left["sum_sq"]) - np.sqrt(right["sum_sq"])]
        parts += [(left[field] - right[field]) / root for field in ("sum", "abs_sum")]
        for end in ("min", "max"):
            parts.append(extreme_values(left, end) - extreme_values(right, end))
    distances: np.ndarray = np.fmax.reduce(np.abs(parts))  # nanmax() warns where all are NaN
    is_known = (left["depth"] >= Depth.STATS) & (right["depth"] >= Depth.STATS)
    return np.where(is_known, distances, np.nan)


@dataclass(eq=False)
class Cancellation:
    """Explains the differences of gradients whose terms cancel, in one step of one rank. ``names``:
    by pair; ``formats``: the codes of the dtypes whose rounding the pairs carry; ``errors``: of
    those that are close.
    """

    _names: Sequence[Name]
    _left: np.ndarray
    _right: np.ndarray
    _formats: np.ndarray
    _errors: np.ndarray

    def __post_init__(self) -> None:
        # The norms of the larger side: either side may have cancelled further than the other.
        ours, theirs = (np.nan_to_num(side["sum_sq"]) for side in (self._left, self._right))
        self._norms = np.sqrt(np.maximum(ours, theirs))
        # The most that the norm allows, for statistics without a sum of magnitudes.
        most = self._norms * np.sqrt(np.maximum(self._right["numel"], 1))
        magnitudes = np.maximum(self._left["abs_sum"], self._right["abs_sum"])
        self._magnitudes = np.where(np.isnan(magnitudes), most, magnitudes)
        self._places: dict[tuple[str, str, str, str], list[int]] = {}
        for index, name in enumerate(self._names):
            key = (name.module, name.op, name.role, name.label)
            self._places.setdefault(key, []).append(index)
        self._gradients = [
            index
            for index, name in enumerate(self._names)
            if name.role in _GRADIENTS or name.direction == "backward"
        ]
        self._outputs: dict[str, list[int]] = {}
        for index in self._gradients:
            if self._names[index].role == "grad_output":
                self._outputs.setdefault(self._names[index].module, []).append(index)
        #: The least ``||a - b||`` that the statistics allow; NaN where they have no number.
        self.distances = _distances(self._left, self._right)
        #: The relative error of each gradient that was found to be noise.
        self._noise: dict[int, float] = {}

    def explains(self, index: int, apart: float) -> Optional[float]:
        """The error of a pair relative to what was summed where that explains it; None where not.

        ``apart``: ``||a - b||``. Called in the order of the pairs.
        """
        unit = rounding_unit(int(self._formats[index]))
        name = self._names[index]
        is_gradient = name.role in _GRADIENTS or name.direction == "backward"
        if not unit or not is_gradient or not np.isfinite(apart):
            return None
        allowed = 0.0
        for source, summed in self._summed(index):
            noise = self._noise.get(source)
            # A result computed from noise is noise; a result of rounded numbers has their error.
            inherited = float(self._errors[source]) if noise is None else _SPREAD * min(noise, 1.0)
            allowed = max(allowed, (unit + inherited) * summed)
        if not apart <= allowed:
            return None
        own = max(float(self._norms[index]), np.finfo(np.float64).tiny)
        self._noise[index] = apart / own
        return unit * apart / allowed if allowed else 0.0

    def _summed(self, index: int) -> list[tuple[int, float]]:
        """(a gradient before it, the norm of the sums of magnitudes if it was made of that)."""
        name = self._names[index]
        if name.op:
            return self._summed_by_op(index, name)
        if name.role == "param_grad":
            return self._summed_for_parameter(index, name)
        terms = []
        own = self._forward_norm(name)
        position = bisect.bisect_left(self._gradients, index)
        for source in self._gradients[max(position - _WINDOW, 0) : position]:
            of = self._names[source]
            if of.op or of.role == "param_grad":
                continue
            through = self._forward_norm(of)
            gain = through / own if own and through else 1.0
            terms.append((source, float(self._norms[source]) * gain))
        return terms

    def _summed_for_parameter(self, index: int, name: Name) -> list[tuple[int, float]]:
        sources = self._gradients_of_outputs(name.module)
        label = name.label.partition(".")[0]
        count = np.sqrt(max(int(self._right["numel"][index]), 1))
        terms = []
        for source in sources:
            if label.endswith("bias"):
                terms.append((source, float(self._magnitudes[source]) / count))
                continue
            weights = self._places.get((name.module, "", "param", label), [])
            weight = max((float(self._norms[place]) for place in weights), default=0.0)
            made = self._forward_norm(self._names[source])
            # A part of the input's norm shows in the output's.
            gain = _INPUT * made / weight if made and weight else 1.0
            terms.append((source, float(self._norms[source]) * gain))
        return terms

    def _gradients_of_outputs(self, module: str) -> list[int]:
        """The gradients of the outputs of the module, or of the nearest around it that has some."""
        while module and module not in self._outputs:
            module = module.rpartition(".")[0]
        return self._outputs.get(module, [])

    def _forward_norm(self, name: Name) -> float:
        """The norm of the tensor that the gradient is of."""
        role = {"grad_output": "output", "grad_input": "input"}.get(name.role, "")
        places = self._places.get((name.module, name.op, role, name.label), [])
        if not places and role == "output":
            places = self._places.get((name.module, name.op, role, "output[0]"), [])
        return max((float(self._norms[place]) for place in places), default=0.0)

    def _summed_by_op(self, index: int, name: Name) -> list[tuple[int, float]]:
        """An operator's inputs stand right before its outputs."""
        inputs = []
        for place in range(index - 1, -1, -1):
            other = self._names[place]
            if (other.module, other.op) != (name.module, name.op):
                break
            if other.role in ("input", "grad_output"):
                inputs.append(place)
            elif inputs:
                break
        if not inputs:
            return []
        numel = max(int(self._right["numel"][index]), 1)
        largest = max(inputs, key=lambda place: float(self._norms[place]))
        extents = [_extent(self._right[place]) for place in inputs if place != largest]
        summed = float(self._norms[largest]) * max([1.0, *extents])
        for place in inputs:
            if int(self._right["numel"][place]) > numel:
                summed = max(summed, float(self._magnitudes[place]) / np.sqrt(numel))
        if any(word in name.op or word in name.label for word in _PRODUCTS):
            norms = sorted(float(self._norms[place]) for place in inputs)
            summed = max(summed, norms[-1] * (norms[-2] if len(norms) > 1 else 1.0))
        return [(place, summed) for place in inputs]


def _extent(record: np.void) -> float:
    ends = [float(extreme_values(np.array([record]), end)[0]) for end in ("min", "max")]
    return max((abs(end) for end in ends if np.isfinite(end)), default=0.0)


def excuse_parts(pairs: Pairs) -> int:
    """Sets differing gradients of modules' inputs to CLOSE; how many. fastcheck reads the gradient
    of the tensor that a module is given, msprobe what the module adds to it: of a residual stream
    these are two things.
    """
    count = 0
    differing = (pairs.states == PairState.DIFFERENT) & np.isin(pairs.reasons, MEASURED)
    for index in np.flatnonzero(differing).tolist():
        name = pairs.name(index)
        if name.role == "grad_input" and not name.op:
            pairs.set(index, PairState.CLOSE, 0.0, PART)
            count += 1
    return count


def sizes_in_step(
    left: np.ndarray, right: np.ndarray, formats: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The norm of each gradient over the largest of the step, of the larger side; and whether it is
    rounding noise beside that on both sides: never where a norm is not known.
    """
    squares = np.maximum(left["sum_sq"], right["sum_sq"])
    norms = np.sqrt(squares)
    largest = float(np.nanmax(norms, initial=0.0))
    if not 0 < largest < np.inf:
        return np.ones(len(norms)), np.zeros(len(norms), bool)
    sizes = norms / largest
    units = np.array([rounding_unit(int(code)) for code in formats])
    is_small = sizes <= np.minimum(units, _SMALL)
    is_small &= (left["depth"] >= Depth.STATS) & (right["depth"] >= Depth.STATS)
    return sizes, is_small


def excuse_small(pairs: Pairs, drift: Drift) -> list[str]:
    """Sets gradients of parameters to CLOSE that are no larger than rounding beside the largest of
    the step on both sides, where the gradients that they were made of are not there; their names.
    """
    gradients = [i for i in range(len(pairs.states)) if pairs.name(i).role == "param_grad"]
    sides = pairs.left[gradients], pairs.right[gradients]
    sizes, is_small = sizes_in_step(*sides, pairs.formats[gradients])
    names = []
    for index, size in zip(np.array(gradients)[is_small].tolist(), sizes[is_small].tolist()):
        if pairs.states[index] == PairState.DIFFERENT and pairs.reasons[index] in MEASURED:
            pairs.set(index, PairState.CLOSE, size, SMALL)
            drift.follow(pairs.step, pairs.name(index), True)
            names.append(str(pairs.name(index)))
    return names


def excuse(pairs: Pairs, drift: Drift, computed: Sequence[Phase]) -> list[str]:
    """Sets pairs that noise explains to CLOSE; the names of gradients whose terms cancel."""
    suspects = (pairs.states == PairState.DIFFERENT) & np.isin(pairs.reasons, MEASURED)
    suspects &= np.isin(pairs.phases, computed)
    followed = suspects | _gradients_to_follow(pairs, drift)
    inexact = np.flatnonzero(followed)
    if not len(inexact):
        return []
    names = [pairs.table[number] for number in pairs.names.tolist()] if suspects.any() else []
    settled = np.where(pairs.states == PairState.DIFFERENT, 0.0, pairs.errors)
    cancelled = Cancellation(names, pairs.left, pairs.right, pairs.formats, settled)
    gradients = []
    # Parameters first: they are read at the end of a step, and are what its forward used.
    is_late = pairs.phases[inexact] != Phase.UPDATE
    for index in inexact[np.argsort(is_late, kind="stable")].tolist():
        name, is_noise = pairs.name(index), False
        if suspects[index]:
            elements = pairs.elements.get(index)
            apart = float(cancelled.distances[index]) if elements is None else elements.euclidean
            error = cancelled.explains(index, apart)
            is_noise = error is not None
            numel, raw = int(pairs.right["numel"][index]), float(pairs.errors[index])
            if error is None and drift.explains(pairs.step, name, numel, apart, raw):
                error = 0.0
            if error is not None:
                reason = CANCELLED if is_noise else DRIFTED
                pairs.set(index, PairState.CLOSE, error, reason)
            if is_noise:
                gradients.append(str(name))
        if name.role == "param_grad" and pairs.states[index] != PairState.DIFFERENT:
            drift.follow(pairs.step, name, is_noise)
    return gradients


def _gradients_to_follow(pairs: Pairs, drift: Drift) -> np.ndarray:
    """A boolean array: the gradients with other last bits of which the optimizer may make more."""
    followed: np.ndarray = pairs.states != PairState.SAME
    if not drift.normalises:
        return np.zeros(len(followed), bool)
    numbers = np.unique(pairs.names[followed]).tolist()
    wanted = [number for number in numbers if drift.is_followed(pairs.table[number])]
    followed &= np.isin(pairs.names, wanted)
    return followed
