"""Numbers of a whole step beside their own past: the loss, the norm of the gradients, the size of
the update, the loss scale.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import numpy as np

from fastcheck.log.step_table import StepRow

from .bands import Bands
from .columns import Columns
from .signals import NOTHING, RMS, WEIGHT, Signals

_FIRST, _RECENT = 16, 32
# Over how many steps the growth of weights is.
_GROWTH_STEPS = 10
# How many steps of a loss scale a share of skipped ones is of.
_SCALE_PAST = 100
# The rounding of a sum, as a share of the sum of magnitudes.
_ROUNDING = 1e-6
# Of a loss that jumps in the first steps: how many steps it takes, what share of the first loss it
# has come down to, how many times its usual change it jumps by, and the highest loss to.
_LEAST_BEFORE, _FALLEN, _SUDDEN, _ABOVE_ALL = 8, 0.95, 10.0, 1.5
#: The numbers that have a range, and their least spread: as they are, and as log2.
_RANGES = {"loss": (1e-12, 0.01), "gradient_norm": (1e-12, 0.05), "update_size": (1e-12, 0.1)}
_NUMBERS = np.arange(2 * len(_RANGES))


@dataclass(frozen=True)
class Number:
    """One number of a step. ``usual``: the median of its range, or what else it is compared with;
    ``score``: by how many spreads it is above that, as a logarithm (of the loss: as it is too,
    whichever says less). ``most``: the largest of half a window, ``recent`` of 32 steps (inf: too
    few), ``first`` the median of the first 16. ``share``: of steps that were skipped; ``run``: of
    halvings in a row; ``steps``: how many there were; ``full_name``: of a setting.
    ``is_early_jump``: as _jumps_early() has it.
    """

    name: str
    value: float
    usual: float = math.nan
    score: float = math.nan
    most: float = -math.inf
    recent: float = math.inf
    first: float = math.nan
    threshold: float = 6.0
    share: float = 0.0
    run: int = 0
    steps: int = 0
    is_skipped: bool = False
    is_early_jump: bool = False
    full_name: str = ""


class LossScale:
    """The scale of the loss over the steps, and the share of steps that it had skipped."""

    def __init__(self) -> None:
        self._scale: Optional[float] = None
        self._halvings = self._steps = 0
        self._skipped: deque[bool] = deque(maxlen=_SCALE_PAST)

    def of_step(self, scale: float, is_skipped: bool) -> Number:
        before, self._scale = self._scale, scale
        self._skipped.append(is_skipped)
        if before is not None and scale < before:
            self._halvings += 1
        elif before is not None and (scale > before or not is_skipped):
            self._halvings = 0
        self._steps += 1
        share = sum(self._skipped) / len(self._skipped)
        return Number(
            "loss_scale", scale, usual=share, share=share, run=self._halvings,
            steps=self._steps, is_skipped=is_skipped,
        )  # fmt: skip


class Numbers:
    """The ranges of the numbers of a step of one rank."""

    def __init__(self, threshold: float, window: int, warm_up: int) -> None:
        self._threshold = threshold
        # Two signals of each of _RANGES: as it is, and as log2.
        self._bands = Bands(window, warm_up, np.array(list(_RANGES.values())).ravel())
        self._bands.grow(len(_NUMBERS))
        self._new: dict[int, float] = {}
        self._ended: list[tuple[list[float], list[bool]]] = []
        self._is_outside: set[int] = set()
        # The last values that were inside, and the first.
        self._inside: tuple[deque[float], ...] = tuple(deque(maxlen=window // 2) for _ in _RANGES)
        self._first: tuple[list[float], ...] = tuple([] for _ in _RANGES)
        self._recent = min(_RECENT, window // 2)
        # Of each parameter the sum before the last update, the number of elements, and the rms in
        # the last steps, in log2; of one that was zero NOTHING: it may grow as it likes.
        self._of = Columns(
            sum=np.zeros(1), numel=np.zeros(1), rms=np.full((_GROWTH_STEPS, 1), np.nan)
        )
        self._was_skipped = False
        self._rate: Optional[float] = None
        self._loss_scale = LossScale()
        # Some step had a learning rate: one without has made no update.
        self._has_rates = False

    @property
    def usual_norm(self) -> Optional[float]:
        """The median norm of all gradients; None: there are too few yet."""
        median = float(self._bands.median[2 * list(_RANGES).index("gradient_norm")])
        return None if math.isnan(median) else median

    def is_outside(self, name: str) -> None:
        """The number of this step does not enter its range."""
        self._is_outside.add(list(_RANGES).index(name))

    def step_ended(self) -> None:
        """The others do."""
        values, outside = [math.nan] * len(_NUMBERS), [False] * len(_NUMBERS)
        for at, value in self._new.items():
            values[2 * at] = value
            values[2 * at + 1] = math.log2(value) if value > 0 else math.nan
            if at in self._is_outside:
                outside[2 * at : 2 * at + 2] = True, True
            else:
                self._inside[at].append(value)
        self._ended.append((values, outside))
        self._new.clear()
        self._is_outside.clear()

    def add_ended(self) -> None:
        """Adds the steps that have ended to the ranges."""
        if not self._ended:
            return
        values, outside = zip(*self._ended)
        self._bands.add(_NUMBERS, np.array(values), np.array(outside))
        self._ended.clear()

    def of_step(self, row: StepRow, now: Signals, k: int, has_scaled: bool) -> list[Number]:
        """The numbers of step ``k``. ``has_scaled``: the gradients of parameters were read with the
        loss scale on them. What was back-propagated without an update adds up, in a step that is
        like no other.
        """
        found = []
        self._has_rates |= row.learning_rate is not None
        is_whole = row.overflow or row.learning_rate is not None or not self._has_rates
        if is_whole and row.loss is not None and math.isfinite(row.loss):
            found.append(self._look("loss", row.loss))
        norm = row.gradient_norm
        if is_whole and norm is not None and 0 < norm < math.inf:
            norm /= row.scale if row.scale and has_scaled else 1.0
            found.append(self._look("gradient_norm", norm))
        at = np.flatnonzero((now.phases == WEIGHT) & now.is_read[k])
        found += [*self._update(row, now, k, at), *self._growth(now, k, at)]
        if row.scale is not None:
            found.append(self._loss_scale.of_step(row.scale, row.overflow))
        return found

    def _look(self, name: str, value: float) -> Number:
        at = list(_RANGES).index(name)
        self._new[at] = value
        inside, first = self._inside[at], self._first[at]
        if len(first) < _FIRST:
            first.append(value)
        raw, median = self._bands.score(2 * at, value), float(self._bands.median[2 * at])
        logarithm = self._bands.score(2 * at + 1, math.log2(value)) if value > 0 else raw
        recent = list(inside)[-self._recent :]
        return Number(
            name=name,
            value=value,
            usual=median,
            # Noise of a loss near 0 is lopsided: it has to be outside as it is and as a logarithm.
            score=min(raw, logarithm, key=abs) if name == "loss" else logarithm,
            most=max(inside, default=-math.inf),
            recent=max(recent) if len(recent) == self._recent else math.inf,
            first=statistics.median(first),
            threshold=self._threshold,
            is_early_jump=name == "loss" and math.isnan(median) and _jumps_early(inside, value),
        )

    def _update(self, row: StepRow, now: Signals, k: int, at: np.ndarray) -> list[Number]:
        """The size of the update of the step before, from the sums of the parameters around it,
        which are ``at`` these places.

        An update changes the sum of a parameter by the sum of its elements' changes. If these have
        no common sign, its square is on average the square of the norm of the update; that of all
        parameters, divided by the norm of these, follows how far an update moves the weights,
        without reading anything a second time.
        """
        sites, sums, numel = now.sites[at], now.sums[k, at], now.numel[k, at]
        self._of.grow(int(sites.max(initial=-1)) + 1)
        before, count = self._of["sum"][sites], self._of["numel"][sites]
        is_known = (count == numel) & np.isfinite(sums)
        floor = _ROUNDING * now.abs_sums[k, at]
        changes = np.where(is_known, np.maximum(np.abs(sums - before), floor), 0.0)
        self._of["sum"][sites], self._of["numel"][sites] = sums, numel
        squares = float(now.squares[k, at][is_known].sum())
        moved, rate, was_skipped = float(np.dot(changes, changes)), self._rate, self._was_skipped
        self._rate, self._was_skipped = row.learning_rate, bool(now.is_skipped[k])
        if was_skipped or not rate or not moved > 0 or not squares > 0:
            return []
        # A schedule changes nothing of what is divided by the learning rate.
        return [self._look("update_size", math.sqrt(moved / squares) / rate)]

    def _growth(self, now: Signals, k: int, at: np.ndarray) -> list[Number]:
        """The ratio of the size of the weights to that some steps before: of the median parameter,
        each with the weight of its elements.
        """
        sites, level, numel = now.sites[at], now.levels[RMS, k, at], now.numel[k, at]
        past = self._of["rms"][:, sites]
        level = np.where((level == NOTHING) | (past[-1] == NOTHING), NOTHING, level)
        self._of["rms"][:-1, sites], self._of["rms"][-1, sites] = past[1:], level
        is_known = (level > NOTHING) & np.isfinite(past[0])
        order = np.argsort((level - past[0])[is_known])
        elements = np.cumsum(numel[is_known][order])
        if not len(elements):
            return []
        middle = order[np.searchsorted(elements, elements[-1] / 2)]
        return [Number("weight_growth", 2.0 ** float((level - past[0])[is_known][middle]))]


def _jumps_early(before: Sequence[float], value: float) -> bool:
    """Whether a loss that was falling, and steadily, is suddenly far above all that it ever was: of
    the first steps, where there is no range yet.
    """
    if len(before) < _LEAST_BEFORE or not min(before) > 0:
        return False
    values = list(before)
    changes = [abs(after - earlier) for earlier, after in zip(values, values[1:])]
    has_fallen = values[-1] <= _FALLEN * values[0]
    is_sudden = value - values[-1] >= _SUDDEN * sum(changes) / len(changes)
    return has_fallen and is_sudden and value >= _ABOVE_ALL * max(values)


def gradient_rms(now: Signals, k: int) -> float:
    """The rms of what is not 0 of the gradients of all parameters, in step ``k``; 0: there is
    nothing.
    """
    at = np.flatnonzero(now.is_of_parameter & now.is_read[k])
    elements = float((now.numel[k, at] * (1 - now.zero_share[k, at])).sum())
    return math.sqrt(float(now.squares[k, at].sum()) / elements) if elements else 0.0
