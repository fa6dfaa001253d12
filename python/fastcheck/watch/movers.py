"""The order in which signals left their ranges: what moved first, and what that points to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import numpy as np

from fastcheck.record.site import SiteTable

from .event import Mover
from .signals import (
    ACTIVATION,
    BUFFER,
    GRADIENT,
    INPUT,
    NAMES,
    STATE,
    UPDATE,
    WEIGHT,
    StepSignals,
    phase_of,
    signal_name,
)

__all__ = ["GAP", "NEVER", "PAST", "Movers", "cause_of", "cause_of_phase"]

#: How far back a first mover is looked for. These are steps that were observed, of which
#: install(every=10) makes one in ten.
PAST = 64
#: A signal that is inside again for so many steps has come back.
GAP = 2
_MOST = 5
#: In the place of the number of a step.
NEVER = -(2**40)


class Movers:
    """Since when each signal is outside of its range. One row for each of NAMES."""

    def __init__(self, sites: SiteTable) -> None:
        self._sites = sites
        # How many steps were observed. What is compared is in these.
        self._now = 0
        # The step of the training at which each signal left.
        self._left_at = np.zeros((len(NAMES), 0), np.int64)
        self._since = np.zeros((len(NAMES), 0), np.int64)
        self._last = np.zeros((len(NAMES), 0), np.int64)
        self._score = np.zeros((len(NAMES), 0))
        # The place of each site in the order of its last step.
        self._place = np.zeros(0, np.int64)
        self._phase = np.zeros(0, np.int8)

    def grow(self, count: int) -> None:
        """Makes room for the sites with numbers below ``count``."""
        more = count - self._place.size
        if more <= 0:
            return
        more = max(more, self._place.size, 64)
        self._since = np.pad(self._since, ((0, 0), (0, more)), constant_values=NEVER)
        self._last = np.pad(self._last, ((0, 0), (0, more)), constant_values=NEVER)
        self._left_at = np.pad(self._left_at, ((0, 0), (0, more)))
        self._score = np.pad(self._score, ((0, 0), (0, more)))
        self._place = np.pad(self._place, (0, more))
        self._phase = np.pad(self._phase, (0, more))

    def add(self, step: int, signals: StepSignals, scores: np.ndarray, outside: np.ndarray) -> None:
        """One step of the training that was observed. ``scores`` and ``outside``: of each signal,
        as ``signals.values``.
        """
        sites = signals.sites
        self._now += 1
        self._place[sites] = np.arange(len(sites))
        self._phase[sites] = signals.phases
        for row in np.flatnonzero(outside.any(axis=1)).tolist():
            out = sites[outside[row]]
            has_come_back = self._last[row, out] < self._now - GAP
            began = out[has_come_back]
            self._since[row, began] = self._now
            self._left_at[row, began] = step
            self._score[row, began] = scores[row, outside[row]][has_come_back]
            self._last[row, out] = self._now

    def first(self, loss: Optional[Mover]) -> tuple[Mover, ...]:
        """What is outside of its range, or was a moment ago, and left it last within PAST steps:
        the first mover first, each module once. ``loss``: since when the loss is outside.
        """
        now = self._now
        rows, sites = np.nonzero((self._last >= now - GAP) & (self._since >= now - PAST))
        since = self._left_at[rows, sites]
        phases = self._phase[sites]
        order = np.lexsort((self._place[sites], phases, since))
        found: list[Mover] = []
        seen: set[tuple[str, int]] = set()
        is_loss_due = loss is not None
        for at in order.tolist():
            site = self._sites[int(sites[at])]
            signal = signal_name(int(rows[at]), int(phases[at]))
            score, is_batch = float(self._score[rows[at], sites[at]]), int(phases[at]) == INPUT
            mover = Mover(int(since[at]), site, signal, score, is_batch)
            if loss is not None and is_loss_due and _comes_before(loss, mover, int(phases[at])):
                found.append(loss)
                is_loss_due = False
            key = (site.module, int(phases[at]))
            if key not in seen:
                seen.add(key)
                found.append(mover)
            if len(found) >= _MOST:
                break
        if loss is not None and is_loss_due and len(found) < _MOST:
            found.append(loss)
        return tuple(found[:_MOST])

    def order_of(self, mover: Mover) -> tuple[int, int, int]:
        """Its step, and its place in the order of a step."""
        if mover.site is None:
            return mover.step, GRADIENT, -1  # the loss comes before all gradients
        number = self._sites.intern(mover.site)
        return mover.step, int(self._phase[number]), int(self._place[number])

    def still_outside(self, steps: int) -> Optional[tuple[int, int, int]]:
        """The first mover of those that left their range ``steps`` observed steps ago, and are
        still outside: the row of NAMES, the number of the site, and the step of the training at
        which it left. None: there is none.
        """
        rows, sites = np.nonzero(self._since == self._now - steps)
        # Updates have one reading in a round of all parameters.
        is_out = (self._last[rows, sites] == self._now) & (self._phase[sites] != UPDATE)
        rows, sites = rows[is_out], sites[is_out]
        if not len(sites):
            return None
        first = np.lexsort((rows, self._place[sites], self._phase[sites]))[0]
        row, site = int(rows[first]), int(sites[first])
        return row, site, int(self._left_at[row, site])


def _comes_before(loss: Mover, mover: Mover, phase: int) -> bool:
    return loss.step < mover.step or (loss.step == mover.step and phase >= GRADIENT)


def cause_of(
    movers: Sequence[Mover], lost_before: str, rate_changed_at: Optional[int]
) -> tuple[str, str]:
    """What the first mover points to, and the sentence for it. ``lost_before``: which tensor lost
    precision, not after it. ``rate_changed_at``: the step of the last large rise of the learning
    rate.
    """
    if not movers:
        return "", ""
    first = movers[0]
    if rate_changed_at is not None and rate_changed_at <= first.step:
        return "optimizer", f"the learning rate was raised at step {rate_changed_at:,}, before"
    if lost_before and not first.is_batch:  # no rounding changes what the model is given
        return "precision", lost_before
    if first.site is None:
        return "data", "no tensor of the model left its range before the loss: look at the targets"
    return _CAUSES[INPUT if first.is_batch else phase_of(first.site)]


def cause_of_phase(phase: int) -> str:
    """What it points to if a tensor of this phase is the first."""
    return _CAUSES[phase][0]


_OF_LAYER = ("layer", "the output of a layer left its range first")
_OF_UPDATE = ("optimizer", "a stored tensor left its range first: an update was too large")
_CAUSES = {
    INPUT: ("data", "the batch left its range first"),
    WEIGHT: _OF_UPDATE,
    STATE: _OF_UPDATE,
    UPDATE: ("optimizer", "an update left its range first"),
    ACTIVATION: _OF_LAYER,
    BUFFER: _OF_LAYER,
    GRADIENT: ("gradient", "a gradient left its range first"),
}
