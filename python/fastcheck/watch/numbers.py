"""Rules for the numbers of a whole step: the loss, the norm of the gradients, the loss scale."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, Optional

import numpy as np

from fastcheck.utils.text.numbers import format_number

from .bands import Band

__all__ = [
    "Found",
    "LossBand",
    "NormBand",
    "Reading",
    "ScaleRule",
    "SettingRule",
    "UpdateBand",
    "text_of",
]

# A loss is out of its range only if it is also this much above its median, as a share of it.
_LOSS_RISE = 0.2
_RISE_IN_A_ROW = 5
# What stays below this share of the first losses is no spike: a loss near 0 has wild ratios.
_LEAST_OF_FIRST, _FIRST = 0.2, 16
# It rises so many times as far above the median as the largest of half a window does.
_BEYOND = 1.5
# A spike warns if it takes back at least so much of what the loss has come down until then.
_LEAST_OF_PROGRESS = 0.1
# After a warning the next one within a window is of a spike that is so many times as high.
_AGAIN = 2.0
# A loss that is so many times the largest of the last steps is a spike, whatever its noise.
_JUMP, _JUMP_PAST = 8.0, 32
# Of its range at the beginning of a rise that lasts.
_RISE_SCORE = 4.0
# The norm of all gradients: by this factor.
_NORM_FACTOR = 2.0
# The size of the updates, a noisy estimate: by this factor, so many times in a row.
_UPDATE_SCORE, _UPDATE_FACTOR, _UPDATE_IN_A_ROW = 3.0, 8.0, 3
_AVERAGE_FACTOR, _EPS_FACTOR = 2.0, 10.0
_SCALE_PAST = 100
_HALVINGS, _MOST_SKIPPED = 4, 0.2


@dataclass(frozen=True)
class Reading:
    """What a rule found: ``value`` where ``reference`` is usual, so many spreads away."""

    kind: str
    value: float
    reference: float
    score: float
    is_warning: bool


class Found(NamedTuple):
    """What a rule found at the site of this number, and the sentence for it."""

    site: int
    reading: Reading
    text: str


def text_of(reading: Reading) -> str:
    """What a reading of a whole step is reported as."""
    value, usual = format_number(reading.value), format_number(reading.reference)
    if reading.kind == "loss_scale":
        return f"the loss scale is {value}; {reading.reference:.0%} of the steps were skipped"
    start = {
        "gradient_spike": "the norm of all gradients is",
        "update": "an update changes a weight by",
        "loss_rise": "the loss stays high:",
    }.get(reading.kind, "the loss is")
    return f"{start} {value}, usual is {usual}"


class LossBand:
    """The loss. It has to be outside as it is and, if it is positive, as a logarithm as well: noise
    of a loss near 0 is lopsided.
    """

    def __init__(self, threshold: float, window: int, warm_up: int) -> None:
        self._threshold = threshold
        self._raw = Band(window, warm_up, 1e-12)
        self._log = Band(window, warm_up, 0.01)
        self._past: deque[float] = deque([-math.inf], maxlen=window // 2)
        self._jump_past = min(_JUMP_PAST, window // 2)
        self._first: list[float] = []
        self._in_a_row = 0
        #: Since when the loss is outside, and how far it was then.
        self.since: Optional[int] = None
        self.score = math.nan
        self._has_spiked = self._was_warned = False
        self._window = window
        self._warned: tuple[int, float] = (-window, 0.0)

    def add(self, step: int, loss: float) -> Optional[Reading]:
        """The loss of a step, finite."""
        logarithm = math.log2(loss) if loss > 0 else math.nan
        scores = self._raw.score(loss), self._log.score(logarithm)
        score = scores[0] if math.isnan(scores[1]) else min(scores)
        median = self._raw.median
        if len(self._first) < _FIRST:
            self._first.append(loss)
        first = statistics.median(self._first)
        is_small = loss < _LEAST_OF_FIRST * abs(first)
        rise = loss - median
        is_large = rise >= _LOSS_RISE * abs(median) and not is_small
        # Lopsided noise: as far as this it goes by itself.
        is_large = is_large and rise >= _BEYOND * (max(self._past) - median)
        is_outside = is_large and score >= _RISE_SCORE
        last = list(self._past)[-self._jump_past :]
        is_jump = not is_small and len(last) >= self._jump_past and loss >= _JUMP * max(last) > 0
        is_outside = is_outside or is_jump
        is_spike = is_jump or (is_large and score >= self._threshold)
        self._raw.add(loss, is_outside)
        self._log.add(logarithm, is_outside)
        if not is_outside:
            self._past.append(loss)
        self._in_a_row = self._in_a_row + 1 if is_outside else 0
        if not is_outside:
            self.since, self._has_spiked, self._was_warned = None, False, False
            return None
        if self.since is None:
            self.since, self.score = step, score
        if is_spike and not self._has_spiked:
            self._has_spiked = True
            # One batch that a converged model gets wrong calls for no look.
            is_warning = rise >= _LEAST_OF_PROGRESS * (first - median)
            return Reading("loss_spike", loss, median, score, is_warning and self._warn(step, rise))
        if self._in_a_row == _RISE_IN_A_ROW:
            # Of a spike that lasts there was a warning already.
            is_warning = not self._was_warned and self._warn(step, rise)
            return Reading("loss_rise", loss, median, score, is_warning)
        return None

    def _warn(self, step: int, rise: float) -> bool:
        """Whether a rise is news: the last warning is a window old, or was of less."""
        warned_at, before = self._warned
        if step - warned_at < self._window and rise < _AGAIN * before:
            return False
        self._warned, self._was_warned = (step, rise), True
        return True


class NormBand:
    """The norm of all gradients."""

    def __init__(self, threshold: float, window: int, warm_up: int) -> None:
        self._threshold = threshold
        self._log = Band(window, warm_up, 0.05)

    @property
    def usual(self) -> Optional[float]:
        """The median of the norms; None: there are too few yet."""
        median = 2.0**self._log.median
        return None if math.isnan(median) else median

    def add(self, norm: float) -> Optional[Reading]:
        """The norm of a step, finite."""
        if norm <= 0:
            return None
        value = math.log2(norm)
        score = self._log.score(value)
        median = 2.0**self._log.median
        is_outside = score >= self._threshold and norm >= _NORM_FACTOR * median
        self._log.add(value, is_outside)
        if not is_outside:
            return None
        return Reading("gradient_spike", norm, median, score, False)


class UpdateBand:
    """The size of the updates, from the sums of the parameters before each of them.

    An update changes the sum of a parameter's ``n`` elements. If the changes of single elements
    have no common sign, its square is ``n`` times their mean square on average; the mean over all
    parameters follows the size of the updates, without reading anything a second time. Divided by
    the learning rate, so that a schedule changes nothing.
    """

    def __init__(self, window: int, warm_up: int) -> None:
        self._log = Band(window, warm_up, 0.1)
        # By site: the sum of the step before, and of how many elements.
        self._sums = np.zeros(0)
        self._counts = np.zeros(0, np.int64)
        self._outside = 0

    def add(
        self, sites: np.ndarray, sums: np.ndarray, floor: np.ndarray, counts: np.ndarray,
        rate: Optional[float],
    ) -> Optional[Reading]:  # fmt: skip
        """The parameters of a step: their sums, the rounding of these, and their elements."""
        more = int(sites.max(initial=-1)) + 1 - len(self._sums)
        if more > 0:
            more = max(more, len(self._sums), 64)
            self._sums = np.concatenate([self._sums, np.zeros(more)])
            self._counts = np.concatenate([self._counts, np.zeros(more, np.int64)])
        is_known = (self._counts[sites] == counts) & (counts > 0)
        changes = np.where(is_known, np.maximum(np.abs(sums - self._sums[sites]), floor), 0.0)
        self._sums[sites], self._counts[sites] = sums, counts
        squares, elements = float(np.dot(changes, changes)), int(counts[is_known].sum())
        if squares <= 0 or not rate:
            return None
        size = math.sqrt(squares / elements) / rate
        value = math.log2(size)
        score = self._log.score(value)
        median = 2.0**self._log.median
        factor = max(size / median, median / size)
        is_outside = abs(score) >= _UPDATE_SCORE and factor >= _UPDATE_FACTOR
        self._log.add(value, is_outside)
        self._outside = self._outside + 1 if is_outside else 0
        if self._outside != _UPDATE_IN_A_ROW:
            return None
        return Reading("update", size * rate, median * rate, score, False)


class SettingRule:
    """Numbers of the optimizer that were changed a lot from one step to the next. The learning rate
    is not one of them: schedules change it.
    """

    @staticmethod
    def at_first(beta1: float, beta2: float) -> Optional[Reading]:
        """The betas of Adam. The bound of its regret is finite while beta1^2 / sqrt(beta2) < 1
        (Kingma and Ba, 2015, theorem 4.1): beyond, updates follow single large gradients.
        """
        least = beta1**4
        if beta2 > least or not 0 <= beta1 < 1:
            return None
        return Reading("settings", beta2, least, math.nan, True)

    @staticmethod
    def changed(name: str, before: float, after: float) -> Optional[Reading]:
        """``name``: as in the log, such as ``optimizers[0].groups[0].betas[1]``."""
        option = name.rpartition(".")[2].partition("[")[0]
        if option in ("betas", "momentum"):
            # How far back the average goes.
            old, new = 1 - before, 1 - after
        elif option == "eps":
            old, new = before, after
        else:
            return None
        factor = _AVERAGE_FACTOR if option != "eps" else _EPS_FACTOR
        if min(old, new) > 0 and max(old / new, new / old) < factor:
            return None
        return Reading("settings", after, before, math.nan, False)


class ScaleRule:
    """The loss scale: halved several times in a row, or many steps skipped, or at 1 and below. What
    a scaler does in its first hundred steps is a search, and no event.
    """

    def __init__(self) -> None:
        self._last: Optional[float] = None
        self._halvings = 0
        self._skipped: deque[bool] = deque(maxlen=_SCALE_PAST)
        self._steps = 0
        self._is_warned = False

    def add(self, scale: float, is_skipped: bool) -> Optional[Reading]:
        """The scale of a step, and whether its update was skipped."""
        before, self._last = self._last, scale
        self._skipped.append(is_skipped)
        self._steps += 1
        if before is not None and scale < before:
            self._halvings += 1
        elif before is not None and (scale > before or not is_skipped):
            self._halvings = 0
        share = sum(self._skipped) / len(self._skipped)
        is_stuck = scale <= 1 and is_skipped
        if self._halvings < _HALVINGS and share < _MOST_SKIPPED and not is_stuck:
            self._is_warned = self._is_warned and share > _MOST_SKIPPED / 2
            return None
        if self._is_warned or (self._steps <= _SCALE_PAST and scale > 1):
            return None
        self._is_warned = True
        return Reading("loss_scale", scale, share, math.nan, True)
