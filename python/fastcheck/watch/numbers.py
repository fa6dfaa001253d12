"""Numbers of a whole step beside their own past: the loss, the norm of the gradients, the size of
the update, the loss scale.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Optional

import numpy as np

from fastcheck.log.step_table import StepRow

from .bands import Bands
from .columns import Columns, before_each, readings
from .signals import NOTHING, PART, RMS, WEIGHT, Signals

_FIRST, _RECENT = 16, 32
# Over how many steps the growth of weights is.
_GROWTH_STEPS = 10
# The growth of weights since the first step is looked at every 16 steps, over four looks, where the
# loss had come down by a tenth of the first losses before, and is half of them or more.
_LOOK_STEPS, _LOOKS, _FIRST_LOSSES, _LEAST_FALL, _HIGH = 16, 4, 4, 0.1, 0.5
# A run diverges at this ratio of the loss to the first losses, which may have been near 0, at this
# ratio of the losses at each look to those at the look before, and at this growth of its weights.
_DIVERGED, _GOES_ON, _BLOWN_UP = 1000.0, 1.65, 4.0
# The ratio of a loss below 0 to the first losses at which it has no lower bound.
_ENDLESS = 1e6
# The steps of which a share of skipped steps is taken.
_SCALE_PAST = 100
# The rounding of a sum, as a share of the sum of magnitudes.
_ROUNDING = 1e-6
# The share of the steps in which a weight has to move, and the share of the weights.
_TOGETHER = 0.9
# Limits of a loss that jumps in the first steps: how many steps it takes, what share of the first
# loss it has come down to, how many times its usual change it jumps by, and the highest loss to.
_LEAST_BEFORE, _FALLEN, _SUDDEN, _ABOVE_ALL = 8, 0.95, 10.0, 1.5
#: The numbers that have a range, and their least spread: as they are, and as log2.
RANGES = {"loss": (1e-12, 0.01), "gradient_norm": (1e-12, 0.05), "update_size": (1e-12, 0.1)}
_PLACES = {name: place for place, name in enumerate(RANGES)}
_NUMBERS = np.arange(2 * len(RANGES))
#: The score of the loss at the beginning of a rise that lasts, and of an unusual update.
RISE_SCORE, UPDATE_SCORE = 4.0, 3.0


class Number(NamedTuple):
    """A number of a step. ``usual``: the median of its range, or what else it is compared with;
    ``score``: by how many spreads it is above that, as a logarithm (of the loss: as it is too,
    whichever says less). Of the loss, ``most``: the largest of half a window, ``recent`` of 32
    steps (inf: too few), ``first`` the median of the first 16, ``is_jump``: as
    _jumps_while_falling() has it. ``share``: of steps that were skipped; ``run``: of halvings in a
    row; ``steps``: how many there were; ``full_name``: of a setting.
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
    is_jump: bool = False
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


class Standstill:
    """Weights that go on growing while the loss comes down no more, or grows with them."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._losses: deque[float] = deque(maxlen=_LOOK_STEPS)
        # The step, the growth of the weights since the first step, and the median loss.
        self._looks: deque[tuple[int, float, float]] = deque(maxlen=_LOOKS)

    def add(self, loss: float) -> None:
        """The loss of the next step."""
        self._losses.append(loss)
        if len(self._first) < _FIRST_LOSSES:
            self._first.append(loss)

    def look(self, step: int, grown: float) -> list[Number]:
        """The number of this step, up to which the weights have ``grown``. ``share``: what the loss
        has come down by since the step ``steps`` ago, of what it had come down by until then.
        """
        is_due = not self._looks or step - self._looks[-1][0] >= _LOOK_STEPS
        if not is_due or len(self._losses) < _LOOK_STEPS:
            return []
        self._looks.append((step, grown, statistics.median(self._losses)))
        (begun, before, high), (_, _, low) = self._looks[0], self._looks[-1]
        first = statistics.median(self._first)
        sizes = [abs(loss) for _, _, loss in self._looks]
        # A sum of logarithms of densities may be large at once, but hardly so many times larger.
        if sizes[-1] >= _ENDLESS * max(abs(first), 1.0) and low < 0:
            return [Number("descent", low, first)]
        goes_on = all(size > _GOES_ON * last for last, size in zip(sizes, sizes[1:]))
        is_far = sizes[-1] >= _DIVERGED * abs(first) and grown >= _BLOWN_UP
        if goes_on and len(sizes) == _LOOKS:
            # Whatever the weights do: a loss has a bound below.
            if -low >= _DIVERGED * max(abs(first), 1.0):
                return [Number("descent", low, first)]
            if is_far:
                return [Number("divergence", low, first, full_name=f"{grown:.3g}")]
        fall = first - high
        # A loss that is low stands still since there is little left to learn.
        if len(self._looks) < _LOOKS or not fall >= _LEAST_FALL * first > 0 or low < _HIGH * first:
            return []
        share = (high - low) / fall
        return [Number("standstill", grown, before, share=share, steps=step - begun)]


class Weights:
    """The parameters of some steps: how far updates have moved them, and their growth."""

    def __init__(self) -> None:
        # The sum of each parameter before the last update, the number of elements, the rms in the
        # last steps, in log2 (of a tensor that was zero NOTHING: it may grow as it likes), and at
        # first, and the number of steps that have moved it.
        self._of = Columns(
            sum=np.zeros(1),
            numel=np.zeros(1),
            rms=np.full((_GROWTH_STEPS, 1), np.nan),
            first=np.full(1, np.nan),
            moves=np.zeros(1),
        )
        self._steps = 0
        #: The distance by which the update before has moved the weights, and their norm, as
        #: squares, by step.
        self.moved: list[tuple[float, float]] = []
        #: The ratio of the size of the weights to that some steps before: of the median parameter,
        #: each with the weight of its elements. None: it is not known.
        self.grown: list[Optional[float]] = []
        # The ratio to their size at first, by the last step of each part: of weights that move
        # together. Nearly all that move at all do so in each step, and one loss stands for them.
        self._grown_since_first: dict[int, Optional[float]] = {}
        self.standstill = Standstill()

    def begin(self, now: Signals, steps: Sequence[int]) -> None:
        """Takes in the steps that come next, of which ``steps`` have a row."""
        at = np.flatnonzero(now.phases == WEIGHT)
        self._of.grow(int(now.sites[at].max(initial=-1)) + 1)
        self.moved, self.grown = [(0.0, 0.0)] * len(now.steps), [None] * len(now.steps)
        self._grown_since_first = {}
        if len(steps) and len(at):
            numbers = np.array(steps)
            chosen = np.ix_(numbers, at)
            ends = np.flatnonzero(np.diff(numbers // PART, append=-1))
            moved, together = self._moved(now, chosen, ends)
            grown, since_first = self._grown(now, chosen, ends)
            for k, of_step, growth in zip(steps, moved, grown):
                self.moved[k], self.grown[k] = of_step, growth
            for k, growth, is_together in zip(numbers[ends].tolist(), since_first, together):
                self._grown_since_first[k] = growth if is_together else None

    def look(self, step: int, k: int) -> list[Number]:
        """The number of step ``k``, if a part ends with it, of weights that grow for nothing."""
        grown = self._grown_since_first.get(k)
        return [] if grown is None else self.standstill.look(step, grown)

    def _moved(
        self, now: Signals, chosen: tuple[np.ndarray, ...], ends: np.ndarray
    ) -> tuple[Iterable[tuple[float, float]], Sequence[bool]]:
        """``moved``, and whether weights move together, as of each of ``ends``."""
        of, sites, is_read = self._of, now.sites[chosen[1][0]], now.is_read[chosen]
        sums, numel = now.sums[chosen], now.numel[chosen]
        sum_before, sum_after = before_each(of["sum"][sites], sums, is_read)
        numel_before, numel_after = before_each(of["numel"][sites], numel, is_read)
        is_known = (numel_before == numel) & is_read & np.isfinite(sums)
        distance = np.abs(sums - sum_before)
        floor = _ROUNDING * now.abs_sums[chosen]
        changes = np.where(is_known, np.maximum(distance, floor), 0.0)
        of["sum"][sites], of["numel"][sites] = sum_after[-1], numel_after[-1]
        moves = of["moves"][sites] + np.cumsum(is_known & (distance > 0), axis=0)[ends]
        of["moves"][sites] = moves[-1]
        elements = np.where(moves > 0, numel_after[ends], 0.0)
        is_often = moves >= _TOGETHER * (self._steps + ends[:, None] + 1)
        self._steps += len(sums)
        together = np.where(is_often, elements, 0.0).sum(axis=1)
        elements = elements.sum(axis=1)
        are_together = (together >= _TOGETHER * elements) & (elements > 0)
        squares = sums_of_rows(now.squares[chosen], is_known)
        # np.dot() of each row with itself, of which the rounding depends on the number of elements.
        moved: list[float] = (changes[:, None] @ changes[:, :, None]).ravel().tolist()
        for k in np.flatnonzero(~is_read.all(axis=1)).tolist():
            change = changes[k, is_read[k]]
            moved[k] = float(np.dot(change, change))
        return zip(moved, squares), are_together.tolist()

    def _grown(
        self, now: Signals, chosen: tuple[np.ndarray, ...], ends: np.ndarray
    ) -> tuple[Iterable[Optional[float]], Iterable[Optional[float]]]:
        """``grown``, and the growth since the first step, as of each of ``ends``."""
        of, sites, is_read = self._of, now.sites[chosen[1][0]], now.is_read[chosen]
        held, new = of["rms"][:, sites], now.levels[RMS][chosen]
        if np.count_nonzero(held[-1] == NOTHING) or np.count_nonzero(new == NOTHING):
            # A tensor that was zero may grow as it likes from then on.
            was_nothing = (new == NOTHING) & is_read
            was_nothing[0] |= held[-1] == NOTHING
            new = np.where(np.logical_or.accumulate(was_nothing), NOTHING, new)
        known, place, of["rms"][:, sites] = readings(held, new, is_read)
        level = np.take_along_axis(known, place, 0)
        before = np.take_along_axis(known, place - _GROWTH_STEPS, 0)
        first = of["first"][sites]
        first = of["first"][sites] = np.where(np.isnan(first), known[_GROWTH_STEPS], first)
        numel = now.numel[chosen]
        since_first = _medians(level[ends], first[None], is_read[ends], numel[ends])
        return _medians(level, before, is_read, numel), since_first


def _medians(
    level: np.ndarray, before: np.ndarray, is_read: np.ndarray, numel: np.ndarray
) -> list[Optional[float]]:
    """The median ratio of the size of a parameter to that before, each with the weight of its
    elements, by step. None: it is not known.
    """
    is_known = is_read & (level > NOTHING) & (before > NOTHING) & np.isfinite(before)
    growth = np.where(is_known, level - np.where(is_known, before, 0.0), np.inf)
    # A weight that began small may grow to the size at which weights usually begin: 1 /
    # sqrt(inputs), of a square matrix.
    growth[is_known & (level < -np.log2(np.maximum(numel, 1)) / 4)] = 0.0
    order = np.argsort(growth, axis=1)
    elements = np.cumsum(np.take_along_axis(np.where(is_known, numel, 0.0), order, 1), axis=1)
    middle = (elements < elements[:, -1:] / 2).sum(axis=1)
    medians = growth[np.arange(len(growth)), order[np.arange(len(growth)), middle]]
    return [2.0**median if median < np.inf else None for median in medians.tolist()]


class Numbers:
    """The ranges of the numbers of a step of one rank."""

    def __init__(self, threshold: float, window: int, warm_up: int) -> None:
        self._threshold = threshold
        # Two signals of each of RANGES: as it is, and as log2.
        self._bands = Bands(window, warm_up, np.array(list(RANGES.values())).ravel())
        self._bands.grow(len(_NUMBERS))
        # No rule holds of a signal whose score is below this.
        rise = min(RISE_SCORE, threshold)
        self._near = np.array([rise, rise, math.inf, threshold, math.inf, UPDATE_SCORE])
        # The numbers of RANGES by step (NaN: there is none), the values of the signals, and whether
        # they are outside. The scores of a part by step, and whether none of them is far.
        self._values: list[tuple[float, ...]] = []
        self._signals = np.zeros((0, len(_NUMBERS)))
        self._are_outside = np.zeros((0, len(_NUMBERS)), bool)
        self._scores: dict[int, tuple[list[float], bool]] = {}
        # The last losses that were inside, and the first losses.
        self._inside: deque[float] = deque(maxlen=window // 2)
        self._first: list[float] = []
        self._recent = min(_RECENT, window // 2)
        # The loss has had a range.
        self._has_range = False
        self._weights = Weights()
        # The learning rate of the update before; None: there was none.
        self._rate: Optional[float] = None
        self._loss_scale = LossScale()
        # Some step had a learning rate: a step without has made no update.
        self._has_rates = False

    @property
    def usual_norm(self) -> Optional[float]:
        """The median norm of all gradients; None: there are too few yet."""
        median = float(self._bands.of["median"][2 * _PLACES["gradient_norm"]])
        return None if math.isnan(median) else median

    @property
    def grown(self) -> list[Optional[float]]:
        """The growth of the weights, by step."""
        return self._weights.grown

    @property
    def norms(self) -> list[float]:
        """The norm of all gradients without the loss scale, by step; NaN: there is none."""
        return [of_step[_PLACES["gradient_norm"]] for of_step in self._values]

    def begin(
        self, now: Signals, steps: Sequence[int], have_scaled: Sequence[bool]
    ) -> list[tuple[list[Number], Optional[Number]]]:
        """Takes in the steps that come next, of which ``steps`` have a row. ``have_scaled``: the
        gradients of parameters were read with the loss scale on them. By step: the numbers of
        weights that grow for nothing, and of the loss scale.
        """
        self._weights.begin(now, steps)
        self._values = [(math.nan,) * len(RANGES)] * len(now.steps)
        others: list[tuple[list[Number], Optional[Number]]] = [([], None)] * len(now.steps)
        for k in steps:
            row = now.rows[k]
            assert row is not None
            self._values[k] = loss, *_ = self._of_row(row, k, have_scaled[k])
            if now.is_skipped[k]:
                self._rate = None
            if loss == loss:
                self._weights.standstill.add(loss)
            scale = None
            if row.scale is not None:
                scale = self._loss_scale.of_step(row.scale, row.overflow)
            others[k] = self._weights.look(row.step, k), scale
        values = [value for of_step in self._values for value in of_step]
        logs = [math.log2(value) if value > 0 else math.nan for value in values]
        self._signals = np.array([values, logs]).T.reshape(-1, len(_NUMBERS))
        self._are_outside = np.zeros(self._signals.shape, bool)
        return others

    def _of_row(self, row: StepRow, k: int, has_scaled: bool) -> tuple[float, float, float]:
        """The numbers that have a range. What was back-propagated without an update adds up, in a
        step that is like no other.

        The size of the update of the step before is made of the sums of the parameters around it.
        An update changes the sum of a parameter by the sum of its elements' changes. If these have
        no common sign, its square is on average the square of the norm of the update; that of all
        parameters, divided by the norm of these, follows how far an update moves the weights,
        without reading anything a second time.
        """
        rate, before, given = row.learning_rate, self._rate, row.gradient_norm
        self._has_rates |= rate is not None
        loss = norm = update = math.nan
        if row.overflow or rate is not None or not self._has_rates:
            if row.loss is not None and math.isfinite(row.loss):
                loss = row.loss
            if given is not None and 0 < given < math.inf:
                norm = given / ((has_scaled and row.scale) or 1.0)
        moved, squares = self._weights.moved[k]
        self._rate = rate
        if before and moved > 0 and squares > 0:
            # A schedule changes nothing of what is divided by the learning rate.
            update = math.sqrt(moved / squares) / before
        return loss, norm, update

    def part_began(self, steps: Sequence[int]) -> None:
        """Compares the next steps with the same ranges."""
        with np.errstate(over="ignore"):
            scores = self._bands.scores(_NUMBERS, self._signals[steps])
        are_near = ~(np.abs(scores) >= self._near).any(axis=1)
        self._scores = dict(zip(steps, zip(scores.tolist(), are_near.tolist())))

    def part_ended(self) -> None:
        steps = list(self._scores)
        self._bands.add(_NUMBERS, self._signals[steps], self._are_outside[steps])

    def are_usual(self, k: int) -> bool:
        """True if no rule holds of the numbers of step ``k``."""
        loss, (_, is_near) = self._values[k][0], self._scores[k]
        if loss == loss and is_near:
            is_above = bool(self._inside) and loss >= _ABOVE_ALL * self._inside[-1]
            return len(self._first) == _FIRST and not is_above
        return is_near

    def of_step(self, k: int) -> list[Number]:
        """The numbers of step ``k`` that have a range."""
        values = zip(RANGES, self._values[k])
        return [self._look(name, value, k) for name, value in values if value == value]

    def is_outside(self, name: str, k: int) -> None:
        """The number of step ``k`` does not enter its range."""
        at = 2 * _PLACES[name]
        self._are_outside[k, at : at + 2] = True

    def step_ended(self, k: int) -> None:
        """The others do."""
        loss = self._values[k][0]
        if loss == loss and not self._are_outside[k, 0]:
            self._inside.append(loss)

    def _look(self, name: str, value: float, k: int) -> Number:
        at = 2 * _PLACES[name]
        median = float(self._bands.of["median"][at])
        raw, logarithm = self._scores[k][0][at : at + 2]
        if name != "loss":
            return Number(name, value, median, logarithm, threshold=self._threshold)
        if len(self._first) < _FIRST:
            self._first.append(value)
        self._has_range |= median == median
        inside = list(self._inside)
        recent = inside[-self._recent :]
        return Number(
            name=name,
            value=value,
            usual=median,
            # Noise of a loss near 0 is lopsided: it has to be outside as it is and as a logarithm.
            score=min(raw, logarithm, key=abs) if value > 0 else raw,
            most=max(inside, default=-math.inf),
            recent=max(recent) if len(recent) == self._recent else math.inf,
            first=statistics.median(self._first),
            threshold=self._threshold,
            # Losses that were inside are of the level before, where a new level is learned.
            is_jump=(median == median or not self._has_range)
            and _jumps_while_falling(inside, value),
        )


def _jumps_while_falling(before: Sequence[float], value: float) -> bool:
    """True if a loss that was falling, and steadily, is suddenly far above all of these, without a
    range or with a range that the fall has made wide.
    """
    if len(before) < _LEAST_BEFORE or not min(before) > 0:
        return False
    if before[-1] > _FALLEN * before[0] or value < _ABOVE_ALL * max(before):
        return False
    levels = np.log2([*before, value])
    *changes, last = np.abs(np.diff(levels)).tolist()
    return bool(last >= _SUDDEN * statistics.fmean(changes))


def gradient_rms(now: Signals) -> list[float]:
    """The rms of what is not 0 of the gradients of all parameters, by step; 0: there is nothing."""
    at = np.flatnonzero(now.is_of_parameter)
    is_read = now.is_read[:, at]
    elements = now.numel[:, at] * (1 - now.zero_share[:, at])
    sums = zip(sums_of_rows(now.squares[:, at], is_read), sums_of_rows(elements, is_read))
    return [math.sqrt(square / count) if count else 0.0 for square, count in sums]


def sums_of_rows(values: np.ndarray, mask: np.ndarray) -> list[float]:
    """The sum of each row where the mask is True, rounded as that of these elements alone."""
    sums: list[float] = np.add.reduce(np.ascontiguousarray(values), axis=1).tolist()
    for k in np.flatnonzero(~mask.all(axis=1)).tolist():
        sums[k] = float(np.add.reduce(values[k, mask[k]]))
    return sums
