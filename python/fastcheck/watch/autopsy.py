"""Autopsy: what left its range before an event, and what that points to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, NamedTuple, Optional, Union

from fastcheck.log.step_table import StepRow
from fastcheck.record.site import Site, SiteTable

from .event import Mover, WatchEvent
from .movers import PAST, Movers, cause_of
from .numbers import LossBand, Reading
from .precision import Precision

__all__ = ["NO_ORIGIN", "Autopsy", "Origin"]

# After an event of a kind there is none of the same kind for so many steps, but that a warning may
# come after what did not warn.
_PAUSE = 32
# When these warn again their own rule says: of a loss that is twice as high, at once.
_OWN_PAUSE = ("loss_spike", "loss_rise")
_RATE_FACTOR = 2.0
# Of what left its range, so many are in the text.
_NAMED = 3
# Events that a bad batch makes again where it comes again.
_SPIKES = ("loss_spike", "gradient_spike")
# Events that a machine's fault explains that was found so many steps before.
_OF_MACHINE = (*_SPIKES, "loss_rise", "gradient", "explosion")


class Origin(NamedTuple):
    """What left its range first, the cause that it points to, and the sentence for that."""

    movers: tuple[Mover, ...]
    cause: str
    why: str


NO_ORIGIN = Origin((), "", "")


class Autopsy:
    """Makes the events of one rank. ``movers``, ``loss`` and ``precision``: the Watcher's own."""

    def __init__(
        self, sites: SiteTable, rank: int, movers: Movers, loss: LossBand, precision: Precision
    ) -> None:
        self._sites = sites
        self._rank = rank
        self._movers = movers
        self._loss = loss
        self._precision = precision
        self._rate: Optional[float] = None
        self._rate_rose_at: Optional[int] = None
        self._steps_since = 0
        # By kind, and whether it warned.
        self._last_of: dict[tuple[str, bool], int] = {}
        # The step in which a fault of the machine was found last, and how.
        self._fault: Optional[tuple[int, str]] = None
        #: The name of what a step was trained on; set where the training loop gives names.
        self.batch_of: Callable[[int], Union[int, str, None]] = lambda step: None
        # The batches that came with a spike when they came last: in which step, and which kind.
        self._spiked: dict[Union[int, str], tuple[int, str]] = {}
        self._batch_before: Union[int, str, None] = None

    def note_rate(self, step: int, row: Optional[StepRow]) -> None:
        """The learning rate of an observed step: a large rise of it explains what comes after."""
        self._steps_since += 1
        rate = None if row is None else row.learning_rate
        if rate is None:
            return
        if self._rate and rate >= _RATE_FACTOR * self._rate:
            self._rate_rose_at, self._steps_since = step, 0
        if self._steps_since > PAST:
            self._rate_rose_at = None
        self._rate = rate

    def note_fault(self, step: int, how: str) -> None:
        """A fault of the machine was found in this step. ``how``: a sentence."""
        self._fault = step, how

    def event(
        self,
        step: int,
        kind: str,
        text: str,
        reading: Reading,
        origin: Origin,
        site: Optional[Site] = None,
        interval: Optional[tuple[float, float]] = None,
    ) -> WatchEvent:
        """An event whose text ends with what ``origin`` found. ``site``: the tensor, if it is of
        one.
        """
        blamed = self._blamed_batch(step, kind)
        if blamed:
            origin = Origin(origin.movers, "data", blamed)
        fault = self._fault if kind in _OF_MACHINE else None
        # It may have been found in a step whose records come later than the finding.
        if fault is not None and abs(step - fault[0]) <= PAST:
            origin = Origin(origin.movers, "hardware", f"{fault[1]} at step {fault[0]:,}")
        lines = f"step {step:,}: " + (text if site is None else f"{site}: {text}")
        if origin.movers:
            lines += f". First out of its range: {origin.movers[0]}"
            if len(origin.movers) > 1:
                lines += f", then {', '.join(map(str, origin.movers[1:_NAMED]))}"
        if origin.why:
            lines += f"; {origin.why}"
        batch = self.batch_of(origin.movers[0].step if origin.movers and not blamed else step)
        if batch is not None:
            lines += f"; batch {batch}"
        return WatchEvent(
            step=step,
            kind=kind,
            site=site,
            value=reading.value,
            reference=reading.reference,
            score=reading.score,
            text=lines,
            is_warning=reading.is_warning,
            rank=self._rank,
            movers=origin.movers,
            cause=origin.cause,
            interval=interval,
            batch=batch,
        )

    def _blamed_batch(self, step: int, kind: str) -> str:
        """Why it is the batch: it came with a spike when it came last. Or ""."""
        name = self.batch_of(step)
        earlier = None if name is None else self._spiked.get(name)
        if kind not in _SPIKES or earlier is None or name == self._batch_before:
            return ""
        return f"the batch came with the {earlier[1]} of step {earlier[0]:,} too"

    def step_ended(self, step: int, found: Sequence[WatchEvent]) -> None:
        """All events of a step are known."""
        name = self._batch_before = self.batch_of(step)
        if name is None:
            return
        kinds = [event.kind for event in found if event.kind in _SPIKES]
        if kinds:
            self._spiked[name] = step, kinds[0]
        else:
            self._spiked.pop(name, None)

    def origin(self) -> Origin:
        """What left its range within the last steps."""
        since = self._loss.since
        loss = None if since is None else Mover(since, None, "loss", self._loss.score)
        movers = self._movers.first(loss)
        narrowed = self._precision.first() if movers else None
        is_before = narrowed is not None and narrowed.order <= self._movers.order_of(movers[0])
        lost_before = narrowed.text if narrowed is not None and is_before else ""
        return Origin(movers, *cause_of(movers, lost_before, self._rate_rose_at))

    def is_recent(self, step: int, kind: str, is_warning: bool = False) -> bool:
        """Whether this event comes too soon after one of its kind; if it warns: after one that did
        so too. Notes it if not: what nobody sees makes no pause.
        """
        past = [self._last_of.get((kind, warned)) for warned in (True, False)[: 2 - is_warning]]
        is_recent = any(last is not None and step - last < _PAUSE for last in past)
        if is_recent and not (is_warning and kind in _OWN_PAUSE):
            return True
        self._last_of[kind, is_warning] = step
        return False
