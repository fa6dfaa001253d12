"""Causes: what left its range before an event, what was changed, and what that points to."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Callable, NamedTuple, Optional, Union

import numpy as np

from fastcheck.log.step_table import StepRow
from fastcheck.record.site import SiteTable

from .columns import Columns
from .event import Mover, WatchEvent
from .movers import GAP, NEVER, PAST, Movers
from .signals import ACTIVATION, BUFFER, GRADIENT, INPUT, IS_FLOAT, WEIGHT, Signals

__all__ = ["CAUSES", "Causes", "Origin"]

#: Kinds of events that a bad batch makes again where it comes again.
_OF_BATCH = ("loss_spike", "gradient_spike")
#: Kinds whose text says what was changed before, and which a fault of the machine explains.
_SPIKES = (*_OF_BATCH, "explosion")
# Of a number that was changed, from one step to the next.
_FACTOR = 2.0
# A batch has one size if it had that in so many steps.
_STEADY = 16
# How many doublings from the end of its dtype's range a tensor is near it.
_NEAR = 1.0

_OF_LAYER = ("layer", "the output of a layer left its range first")
#: By phase of the first mover: the cause, and the sentence for it.
CAUSES = {
    INPUT: ("data", "what the step trains on left its range first"),
    WEIGHT: ("optimizer", "a parameter left its range first: an update was too large"),
    ACTIVATION: _OF_LAYER,
    BUFFER: _OF_LAYER,
    GRADIENT: ("gradient", "a gradient left its range first"),
}


class Origin(NamedTuple):
    """What left its range first, the cause that it points to, and the sentence for that."""

    movers: tuple[Mover, ...] = ()
    cause: str = ""
    why: str = ""


class _Change(NamedTuple):
    step: int
    name: str
    before: float
    after: float

    def __str__(self) -> str:
        return (
            f"{self.name} was changed from {self.before:g} to {self.after:g} at step {self.step:,}"
        )


class Causes:
    """Of one rank, whose sites are found in ``sites`` by number."""

    def __init__(self, sites: SiteTable, movers: Movers) -> None:
        self._sites = sites
        self._movers = movers
        #: Since when the loss is outside of its range.
        self.loss: Optional[Mover] = None
        #: The name of what a step was trained on; set where the training loop gives names.
        self.batch_of: Callable[[int], Union[int, str, None]] = lambda step: None
        # The batches that came with a spike when they came last: in which step, and which kind.
        self._spiked: dict[Union[int, str], tuple[int, str]] = {}
        self._batch_before: Union[int, str, None] = None
        # What was changed, with the number of the observed step.
        self._changes: deque[tuple[int, _Change]] = deque(maxlen=PAST)
        self._rate: Optional[float] = None
        self._size, self._steady = 0.0, 0
        # The step in which the ranks had other weights than each other last.
        self._fault: Optional[int] = None
        # How many steps were observed.
        self._now = 0
        # When each tensor was near the end of its range last, when it came there, in which step.
        self._of = Columns(
            near=np.full(1, NEVER),
            came=np.full(1, NEVER),
            step=np.zeros(1, np.int64),
            has_had_room=np.zeros(1, bool),
        )
        self._lost: deque[tuple[int, int, int]] = deque(maxlen=PAST)

    def note_step(self, now: Signals, k: int, row: Optional[StepRow]) -> Optional[_Change]:
        """Step ``k`` begins. The change of its learning rate, if there is one."""
        self._now += 1
        step, rate = int(now.steps[k]), None if row is None else row.learning_rate
        before, self._rate = self._rate, rate or self._rate
        change = None
        if rate and before and rate != before:
            change = _Change(step, "the learning rate", before, rate)
            self.note_change(change)
        inputs = np.flatnonzero((now.phases == INPUT) & now.is_read[k])
        if len(inputs):
            size = float(now.numel[k, inputs[0]])
            if size == self._size:
                self._steady += 1
            elif self._steady >= _STEADY:
                name = "the number of elements of the input"
                self.note_change(_Change(step, name, self._size, size))
            self._steady = self._steady if size == self._size else 1
            self._size = size
        self._note_near(now, k)
        return change

    def note_change(self, change: _Change) -> None:
        """A number was changed; by a schedule's small step nothing is explained."""
        least, most = sorted((change.before, change.after))
        if not least > 0 or most / least >= _FACTOR:
            self._changes.append((self._now, change))

    def setting_changed(self, step: int, name: str, before: float, after: float) -> None:
        """One of the optimizer or of clipping is another one from this step on."""
        self.note_change(_Change(step, name, before, after))

    def note_fault(self, step: int) -> None:
        """The ranks hold other weights than each other."""
        self._fault = step

    def note_lost(self, step: int, sites: Sequence[int], since: int) -> None:
        """These tensors have lost precision since a step."""
        self._lost.extend((self._now, since, site) for site in sites)

    def origin(self, step: int, kind: str) -> Origin:
        """What an event of this kind comes from."""
        movers = self._movers.first(self.loss)
        cause, why = self._cause(movers)
        if kind not in _SPIKES:
            return Origin(movers, cause, why)
        changes = [c for now, c in self._changes if now >= self._now - PAST and c.step <= step]
        raised = [c for c in changes if c.after > c.before and c.name in _RAISES]
        if raised and (not movers or raised[-1].step <= movers[0].step):
            cause, why = "optimizer", ""
        why = "; ".join([*([why] if why else []), *map(str, changes[-3:])])
        blamed = self._blamed_batch(step, kind)
        if blamed:
            cause, why = "data", blamed
        # It may have been found in a step whose records come later than the finding.
        if self._fault is not None and abs(step - self._fault) <= PAST:
            cause, why = "hardware", f"the ranks had different weights at step {self._fault:,}"
        return Origin(movers, cause, why)

    def batch(self, step: int, origin: Origin) -> Union[int, str, None]:
        """The name of the batch that the event is about."""
        is_of_mover = origin.movers and not origin.why.startswith("the batch came")
        return self.batch_of(origin.movers[0].step if is_of_mover else step)

    def step_ended(self, step: int, found: Sequence[WatchEvent]) -> None:
        """All events of a step are known."""
        name = self._batch_before = self.batch_of(step)
        if name is None:
            return
        kinds = [event.kind for event in found if event.kind in _OF_BATCH]
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
                "data",
                "no tensor of the model left its range before the loss: look at the targets",
            )
        return CAUSES[self._movers.order_of(first)[0]]

    def _blamed_batch(self, step: int, kind: str) -> str:
        """Why it is the batch: it came with a spike when it came last. Or ""."""
        name = self.batch_of(step)
        earlier = None if name is None else self._spiked.get(name)
        if kind not in _OF_BATCH or earlier is None or name == self._batch_before:
            return ""
        return f"the batch came with the {earlier[1]} of step {earlier[0]:,} too"

    def _note_near(self, now: Signals, k: int) -> None:
        of, sites = self._of, now.sites
        of.grow(int(sites.max()) + 1)
        with np.errstate(invalid="ignore"):
            # A loss scale is raised until scaled gradients reach the end, where a scaler skips.
            is_near = (now.headroom[k] < _NEAR) & IS_FLOAT[now.codes] & ~now.is_scaled[k]
            has_room = (now.headroom[k] >= _NEAR) | (now.abs_max[k] == 0)
        if is_near.any():
            near = sites[is_near]
            # One that was always near the end, such as a mask, shows nothing.
            is_new = of["has_had_room"][near] & (of["near"][near] < self._now - PAST)
            of["came"][near[is_new]] = self._now
            of["step"][near[is_new]] = now.steps[k]
            of["near"][near] = self._now
        of["has_had_room"][sites] |= has_room

    def _lost_before(self, first: Mover) -> Optional[str]:
        """The sentence for a tensor that lost precision before the first mover, or is that."""
        found = [
            (since, site, f"has lost precision since step {since:,}")
            for now, since, site in self._lost
            if now >= self._now - PAST
        ]
        of = self._of
        near = (of["near"] >= self._now - GAP) & (of["came"] >= self._now - PAST)
        for site in np.flatnonzero(near).tolist():
            since = int(of["step"][site])
            found.append((since, site, f"came near the end of its dtype's range at step {since:,}"))
        order = first.step, *self._movers.order_of(first)
        for since, site, text in sorted(found):
            if (since, *self._movers.order_of_site(site)) <= order:
                return f"{self._sites[site]} {text}"
        return None


# What makes updates larger when it is raised.
_RAISES = ("the learning rate", "clipping.threshold")
