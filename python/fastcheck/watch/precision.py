"""Since when a tensor loses precision: it came near the end of its dtype's range, or underflows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Optional

import numpy as np

from fastcheck.record.site import SiteTable

from .movers import GAP, NEVER, PAST
from .signals import StepSignals
from .stuck import IS_FLOAT, LOSS_STEPS, Stuck

__all__ = ["Narrowed", "Precision"]

# How many doublings from the end of its dtype's range a tensor is near it.
_NEAR = 1.0


class Narrowed(NamedTuple):
    """The tensor that lost precision first. ``order``: the step, and its place within that as
    Movers.order_of() has it.
    """

    order: tuple[int, int, int]
    text: str


class Precision:
    """Of one rank, whose sites are found in ``sites`` by number. A tensor that was always near the
    end of its range, such as a mask, shows nothing.
    """

    def __init__(self, sites: SiteTable) -> None:
        self._sites = sites
        # How many steps were observed, and the last steps of the training that were.
        self._now = 0
        self._steps: deque[int] = deque(maxlen=LOSS_STEPS)
        # When each tensor was near the end last, when it came there, and what its order was then.
        self._near = np.zeros(0, np.int64)
        self._came = np.zeros(0, np.int64)
        self._order = np.zeros((3, 0), np.int64)
        self._has_had_room = np.zeros(0, bool)
        # Of events: until when they count.
        self._lost: deque[tuple[int, Narrowed]] = deque(maxlen=PAST)

    def grow(self, count: int) -> None:
        """Makes room for the sites with numbers below ``count``."""
        held = len(self._near)
        if count <= held:
            return
        more = max(count - held, held, 64)
        self._near = np.pad(self._near, (0, more), constant_values=NEVER)
        self._came = np.pad(self._came, (0, more), constant_values=NEVER)
        self._order = np.pad(self._order, ((0, 0), (0, more)))
        self._has_had_room = np.pad(self._has_had_room, (0, more))

    def add(self, step: int, signals: StepSignals, stuck: Sequence[Stuck]) -> None:
        """One observed step, and the tensors that are newly stuck in it."""
        self._now += 1
        self._steps.append(step)
        sites, now = signals.sites, self._now
        with np.errstate(invalid="ignore"):
            # A loss scale is raised until scaled gradients reach the end, where a scaler skips.
            is_near = (signals.headroom < _NEAR) & IS_FLOAT[signals.dtypes] & ~signals.is_scaled
            has_room = (signals.headroom >= _NEAR) | (signals.abs_max == 0)
        places = np.flatnonzero(is_near)
        near = sites[places]
        is_new = self._has_had_room[near] & (self._near[near] < now - PAST)
        came = near[is_new]
        self._came[came] = now
        self._order[0, came] = step
        self._order[1, came] = signals.phases[places[is_new]]
        self._order[2, came] = places[is_new]
        self._near[near] = now
        self._has_had_room[sites] |= has_room
        lost = [one.site for one in stuck if one.cause == "precision"]
        if lost:
            began, at = self._steps[0], int(np.flatnonzero(np.isin(sites, lost))[0])
            text = f"{self._sites[int(sites[at])]} has lost precision since step {began:,}"
            order = began, int(signals.phases[at]), at
            self._lost.append((now + PAST, Narrowed(order, text)))

    def first(self) -> Optional[Narrowed]:
        """What lost precision first within the last steps, and still does. None: nothing."""
        now = self._now
        found = [one for until, one in self._lost if until >= now]
        for number in np.flatnonzero((self._near >= now - GAP) & (self._came >= now - PAST)):
            step, phase, place = self._order[:, number].tolist()
            text = f"{self._sites[int(number)]} came near the end of its dtype's range at step "
            found.append(Narrowed((step, phase, place), f"{text}{step:,}"))
        return min(found, default=None)
