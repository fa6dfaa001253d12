"""Causes of a spike: the first tensors that moved, the batch, what the program changed before."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Callable, NamedTuple, Optional, Union

import numpy as np

from fastcheck.record.site import SiteTable

from .columns import Columns
from .event import Mover, WatchEvent
from .movers import GAP, NEVER, PAST, Movers
from .signals import (
    ACTIVATION,
    BUFFER,
    GRADIENT,
    INPUT,
    IS_FLOAT,
    WEIGHT,
    Signals,
)

#: Kinds of events that a bad batch makes again where it comes again.
_OF_BATCH = ("loss_spike", "gradient_spike")
#: Kinds whose text says what was changed before, and which a fault of the machine explains.
_SPIKES = (*_OF_BATCH, "explosion")
# A changed number matters from this ratio on, from one step to the next.
_FACTOR = 2.0
# A batch has one size if it had that in so many steps.
_STEADY = 16
# The number of doublings from the end of its dtype's range within which a tensor is near it.
_NEAR = 1.0

#: The cause, and the sentence for it, by phase of the first mover.
CAUSES = {
    INPUT: ("data", "the batch left its range first"),
    WEIGHT: ("optimizer", "a parameter left its range first: an update was too large"),
    ACTIVATION: ("layer", "an activation left its range first"),
    BUFFER: ("layer", "a buffer left its range first"),
    GRADIENT: ("gradient", "a gradient left its range first"),
}


class FirstMovers(NamedTuple):
    """The signals that left their range first, the cause that they point to, and the sentence that
    says so.
    """

    movers: tuple[Mover, ...] = ()
    cause: str = ""
    why: str = ""


class Change(NamedTuple):
    step: int
    name: str
    before: float
    after: float

    @property
    def size(self) -> float:
        """The ratio of the larger number to the other."""
        least, most = sorted((self.before, self.after))
        return most / least if least > 0 else math.inf

    def __str__(self) -> str:
        return (
            f"{self.name} was changed from {self.before:g} to {self.after:g} at step {self.step:,}"
        )


#: The name of the batch of a step; None: it has none.
BatchOf = Callable[[int], Union[int, str, None]]


class Causes:
    """Finds the causes of the events of one rank, whose sites are found in ``sites`` by number."""

    def __init__(self, sites: SiteTable, movers: Movers, batch_of: BatchOf) -> None:
        self._sites = sites
        self.movers = movers
        self._batch_of = batch_of
        #: Since when the loss is outside of its range.
        self.loss: Optional[Mover] = None
        # The batches that came with a spike when they came last: in which step, and which kind.
        self._spiked: dict[Union[int, str], tuple[int, str]] = {}
        self._batch_before: Union[int, str, None] = None
        # Changes, with the number of the observed step.
        self._changes: deque[tuple[int, Change]] = deque(maxlen=PAST)
        self._rate: Optional[float] = None
        #: The last step, and how many steps it came after the one before.
        self.last = 0, 1
        self._size, self._steady = 0.0, 0
        # The step in which the ranks had other weights than each other last.
        self._fault: Optional[int] = None
        # The time at which each tensor was near the end of its range last, when it came there, in
        # which step.
        self._of = Columns(
            near=np.full(1, NEVER),
            came=np.full(1, NEVER),
            step=np.zeros(1, np.int64),
            has_had_room=np.zeros(1, bool),
        )
        # Tensors of the steps that are taken together: what is near the end, and what is not. None:
        # nothing is near.
        self._room: Optional[tuple[np.ndarray, np.ndarray]] = None
        self._lost: deque[tuple[int, int, int]] = deque(maxlen=PAST)

    def begin(self, now: Signals) -> None:
        """Takes in the next steps."""
        self.movers.begin(now)
        self._of.grow(int(now.sites.max()) + 1)
        with np.errstate(invalid="ignore"):
            # A loss scale is raised until scaled gradients reach the end, where a scaler skips.
            is_near = (now.headroom < _NEAR) & IS_FLOAT[now.codes] & ~now.is_scaled
            has_room = (now.headroom >= _NEAR) | (now.abs_max == 0)
        self._room = (is_near, has_room) if is_near.any() else None
        if self._room is None:
            self._of["has_had_room"][now.sites] |= has_room.any(axis=0)

    def note_step(
        self,
        now: Signals,
        k: int,
        step: int,
        rate: Optional[float],
        rate_name: str,
        sizes: Sequence[float],
    ) -> Optional[Change]:
        """Step ``k``, of this number, begins. The change of its learning rate, if there is any;
        ``rate_name`` is empty where that would be none. ``sizes``: the numbers of elements of what
        it was given.
        """
        self.movers.now += 1
        self.last = step, step - self.last[0]
        before, self._rate = self._rate, rate or self._rate
        change = None
        if rate_name and rate and before and rate != before:
            change = Change(step, rate_name, before, rate)
            self.note_change(change)
        if sizes and sizes[0] == self._size:
            self._steady += 1
        elif sizes:
            if self._steady >= _STEADY:
                name = "the number of elements of the input"
                self.note_change(Change(step, name, self._size, sizes[0]))
            self._size, self._steady = sizes[0], 1
        if self._room is not None:
            self._note_near(now, k, *(of_steps[k] for of_steps in self._room))
        return change

    def note_change(self, change: Change) -> None:
        """Takes in a changed number. Small changes, as a schedule makes them, explain nothing and
        are left out.
        """
        if change.size >= _FACTOR:
            self._changes.append((self.movers.now, change))

    def note_fault(self, step: int) -> None:
        """Notes the step in which the ranks held different weights."""
        self._fault = step

    def note_lost(self, sites: Sequence[int], since: int) -> None:
        """Notes that these tensors have lost precision since a step."""
        self._lost.extend((self.movers.now, since, site) for site in sites)

    def origin(self, step: int, kind: str) -> FirstMovers:
        """The first movers and the cause of an event of this kind."""
        movers = self.movers.first(self.loss)
        cause, why = self._cause(movers)
        if kind not in _SPIKES:
            return FirstMovers(movers, cause, why)
        changes = self.changes_before(step)
        raised = [c for c in changes if c.after > c.before and c.name.startswith(_RAISES)]
        if raised and (not movers or raised[-1].step <= movers[0].step):
            cause, why = "optimizer", ""
        why = "; ".join([*([why] if why else []), *map(str, changes)])
        blamed = self._blamed_batch(step, kind)
        if blamed:
            cause, why = "data", blamed
        # It may have been found in a step whose records come later than the finding.
        if self._fault is not None and abs(step - self._fault) <= PAST:
            cause, why = "hardware", f"the ranks had different weights at step {self._fault:,}"
        return FirstMovers(movers, cause, why)

    def changes_before(self, step: int) -> list[Change]:
        """The last changes up to this step, of each number the largest: a schedule makes many."""
        changes: dict[str, Change] = {}
        for now, change in self._changes:
            if now >= self.movers.now - PAST and change.step <= step:
                known = changes.get(change.name)
                if known is None or change.size >= known.size:
                    changes[change.name] = change
        return sorted(changes.values(), key=lambda change: change.step)[-3:]

    def batch(self, step: int, origin: FirstMovers) -> Union[int, str, None]:
        """The name of the batch that the event is about."""
        is_of_mover = origin.movers and not origin.why.startswith("the batch also came")
        return self._batch_of(origin.movers[0].step if is_of_mover else step)

    def step_ended(self, step: int, events: Sequence[WatchEvent]) -> None:
        """Takes in all events of a step."""
        name = self._batch_before = self._batch_of(step)
        if name is None:
            return
        kinds = [event.kind for event in events if event.kind in _OF_BATCH]
        if kinds:
            self._spiked[name] = step, kinds[0]
        else:
            self._spiked.pop(name, None)

    def _cause(self, movers: Sequence[Mover]) -> tuple[str, str]:
        if not movers:
            return "", ""
        first = movers[0]
        lost = None if first.is_batch else self._lost_before(first)
        if lost is not None:  # no rounding changes what the model is given
            return "precision", lost
        if first.site is None:
            return (
                "loss",
                "no tensor that was read left its range before the loss: look at its targets, "
                "whether they belong to the inputs, and at weights and factors in its expression",
            )
        return CAUSES[self.movers.order_of(first)[0]]

    def _blamed_batch(self, step: int, kind: str) -> str:
        """The reason why the batch is blamed: it came with a spike when it came last. Or ""."""
        name = self._batch_of(step)
        earlier = None if name is None else self._spiked.get(name)
        if kind not in _OF_BATCH or earlier is None or name == self._batch_before:
            return ""
        return f"the batch also came with the {earlier[1]} of step {earlier[0]:,}"

    def _note_near(self, now: Signals, k: int, is_near: np.ndarray, has_room: np.ndarray) -> None:
        of, sites = self._of, now.sites
        if is_near.any():
            near = sites[is_near]
            # A tensor that was always near the end, such as a mask, shows nothing.
            is_new = of["has_had_room"][near] & (of["near"][near] < self.movers.now - PAST)
            of["came"][near[is_new]] = self.movers.now
            of["step"][near[is_new]] = now.steps[k]
            of["near"][near] = self.movers.now
        of["has_had_room"][sites] |= has_room

    def _lost_before(self, first: Mover) -> Optional[str]:
        """The sentence for a tensor that lost precision before the first mover, or is that."""
        notes = [
            (since, site, f"has lost precision since step {since:,}")
            for now, since, site in self._lost
            if now >= self.movers.now - PAST
        ]
        of = self._of
        near = (of["near"] >= self.movers.now - GAP) & (of["came"] >= self.movers.now - PAST)
        for site in np.flatnonzero(near).tolist():
            since = int(of["step"][site])
            notes.append((since, site, f"came near the end of its dtype's range at step {since:,}"))
        order = first.step, *self.movers.order_of(first)
        for since, site, text in sorted(notes):
            if (since, *self.movers.order_of_site(site)) <= order:
                return f"{self._sites[site]} {text}"
        return None


# Settings that make updates larger when they are raised.
_RAISES = ("the learning rate", "clipping.threshold", "clipping.value")
