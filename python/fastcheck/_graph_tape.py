"""The tape of a captured graph: what the hooks saw while it was captured, so that each replay can
be judged as if they had run again.

Hooks don't run in a replay. What they would have said is what they said at the capture, with other
records: the same journal, under new sequence numbers and in another step. It is said again entry by
entry only where something non-finite was read; of a healthy replay there is little to say.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any, Optional

from ._calls import Call, new_call
from ._device_ring import DeviceRing
from ._graph_slots import GraphSlots
from ._journal import (
    BadRecords,
    CallEnded,
    Entry,
    Journal,
    ListReading,
    Note,
    Reading,
    entries_of,
)
from ._reader import NO_TOKEN
from ._step import Step
from ._updates import Look
from ._verdict import Judge

if TYPE_CHECKING:
    from ._session import Session

__all__ = ["FIRST_SEQ", "Replayed", "Stretch", "Tape"]

#: What is read at a capture is numbered from here on, so that no other number passes for one.
FIRST_SEQ = 2**40
# How far to look for a step that steps= has read.
_MAX_STEP = 2**20
_CALLS: Any = (Call, new_call)


class Stretch:
    """A part of a graph that belongs to one step."""

    def __init__(self, first_seq: int) -> None:
        self.first_seq = self.stop_seq = first_seq
        #: The step of the capture, which nothing else knows.
        self.step: Optional[Step] = None
        #: A forward or a gradient of it opens a step, if none is open.
        self.begins = False
        #: An optimizer, or monitor.step() if ``is_explicit``, closes the step.
        self.closes = self.is_explicit = False
        #: Updates of weights that each replay applies.
        self.update_count = 0
        self.entries: list[Entry] = []
        self.calls: list[Call] = []
        self.slots: dict[DeviceRing, GraphSlots] = {}

    @property
    def notes(self) -> list[Note]:
        return [entry for entry in self.entries if isinstance(entry, Note)]

    @property
    def is_empty(self) -> bool:
        return not (self.entries or self.slots or self.closes)


class Tape:
    """Filled in while a graph is captured, under the session's lock."""

    def __init__(self, session: Session) -> None:
        self.stretches: list[Stretch] = []
        #: Why replays can't be followed; None: they can.
        self.problem: Optional[str] = None
        self._ledger = session.ledger
        self._session = session
        self._stretch = Stretch(FIRST_SEQ)
        # As it was before, to be put back.
        self._before = (session.step, session.is_closed, session.is_active, session.next_seq)
        # The steps of the capture have numbers of their own: every= is a matter of the replays.
        first = -session.config.every
        if session.config.steps is not None:
            first = next(filter(session.config.observes, range(_MAX_STEP)), 0)
        session.recorder.close()
        session.step = self._first_step = session.ledger.new_step(first - 1)
        session.is_closed = True
        session.is_active = True
        session.next_seq = FIRST_SEQ
        session.seen.clear()

    def slots(self, ring: DeviceRing) -> Optional[GraphSlots]:
        """Those of the stretch under way; None when what is read is no part of the graph."""
        if self.problem is None and not ring.is_capturing:
            self.problem = "something was read meanwhile on a stream that was not captured"
        if self.problem is not None:
            return None
        slots = self._stretch.slots.get(ring)
        if slots is None:
            slots = self._stretch.slots[ring] = ring.new_graph_slots()
        return slots

    def take(self, step: Step, journal: Journal, closes_step: bool) -> None:
        """A part of the journal, which would have been the drain's."""
        stretch, ledger = self._stretch, self._ledger
        has_ended = False
        for entry in itertools.chain.from_iterable(map(entries_of, journal.entries)):
            # The boundaries of steps are found again at each replay.
            if isinstance(entry, Note) and entry.function in (ledger.close, ledger.end):
                has_ended = has_ended or entry.function == ledger.end
            else:
                stretch.entries.append(entry)
        if closes_step:
            stretch.closes = True
            stretch.is_explicit = self._session.is_explicit
        if has_ended:
            self._cut(step)

    def _cut(self, step: Step) -> None:
        stretch, stop = self._stretch, self._session.next_seq
        if stretch.is_empty:
            return
        stretch.step, stretch.stop_seq = step, stop
        known = [self._first_step, *(each.step for each in self.stretches)]
        stretch.begins = not any(step is each for each in known)
        earlier = [each.update_count for each in self.stretches if each.step is step]
        stretch.update_count = step.update_count - sum(earlier)
        for slots in stretch.slots.values():
            slots.seal()
        self.stretches.append(stretch)
        self._stretch = Stretch(stop)

    def seal(self) -> None:
        """The capture is about to end."""
        session = self._session
        step = session.step
        journal, step.journal = step.journal, Journal()
        self.take(step, journal, False)
        self._cut(step)

    def close(self) -> None:
        """The capture is over, well or not: the session is what it was before."""
        session = self._session
        for step in {id(each.step): each.step for each in self.stretches if each.step}.values():
            for handle in step.leaf_handles:
                handle.remove()
            step.leaf_handles.clear()
        known: list[Optional[Step]] = []
        for stretch in self.stretches:
            if stretch.step is not None and not any(stretch.step is step for step in known):
                stretch.calls = list(stretch.step.calls)
            known.append(stretch.step)
        session.step, session.is_closed, session.is_active, session.next_seq = self._before
        session.seen.clear()
        session.host.take()  # what was read on the CPU, once

    def start(self) -> None:
        """The graph is there, and was not replayed yet."""
        for stretch in self.stretches:
            for slots in stretch.slots.values():
                slots.start()


class Replayed(Note):
    """One replay of a stretch: all that its entries and notes say."""

    __slots__ = ("_shift", "_step", "_stretch")

    def __init__(self, stretch: Stretch, shift: int, step: Step) -> None:
        self._stretch = stretch
        self._shift = shift
        self._step = step

    def apply(self, judge: Judge, bad: BadRecords) -> None:
        stretch, shift = self._stretch, self._shift
        first, stop = stretch.first_seq + shift, stretch.stop_seq + shift
        said = _Again(stretch, shift, self._step, judge)
        if not judge.findings and not any(first <= seq < stop for seq in bad):
            for note in stretch.notes:
                said.entry(note).apply(judge, bad)
            return
        assert stretch.step is not None
        for call in stretch.calls:
            self._step.calls.add(said.call(call))
        gradients = stretch.step.gradients.items()
        self._step.gradients.update((said.value(k), said.value(v)) for k, v in gradients)
        for entry in stretch.entries:
            said.entry(entry).apply(judge, bad)


class _Again:
    """Says what was said at the capture, of a replay."""

    def __init__(self, stretch: Stretch, shift: int, step: Step, judge: Judge) -> None:
        self._of = stretch.step
        self._shift = shift
        self._step = step
        self._judge = judge
        self._calls: dict[int, Call] = {}

    def entry(self, entry: Entry) -> Entry:
        again = copy.copy(entry)
        if isinstance(again, Reading):
            again.seq += self._shift
            again.call = self.value(again.call)
            again.args = self.value(again.args)
        elif isinstance(again, ListReading):
            again.first_seq += self._shift
            again.args = self.value(again.args)
        elif isinstance(again, Note):
            again.args = self.value(again.args)
            if self._of is not None and getattr(again.function, "__self__", None) is self._of.judge:
                again.function = getattr(self._judge, again.function.__name__)
        elif isinstance(again, CallEnded):
            again.call = self.call(again.call)
        return again

    def value(self, value: Any) -> Any:
        """Sequence numbers, calls and steps, and what is made of them; anything else as it is."""
        if isinstance(value, int):
            return value + self._shift if FIRST_SEQ <= value < NO_TOKEN else value
        if isinstance(value, _CALLS):
            return self.call(value)
        if isinstance(value, Step):
            return self._step if value is self._of else value
        if isinstance(value, Look):
            return self._look(value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.value, value))
        return value

    def call(self, call: Call) -> Call:
        again = self._calls.get(id(call))
        if again is None:
            again = self._calls[id(call)] = new_call(
                call.node,
                call.index,
                self.value(call.parent),
                call.thread,
                self.value(call.first_seq),
                call.is_recompute,
            )
            for token, site in zip(call.inputs, call.input_sites):
                again.add_input(self.value(token), site)
            for token in call.outputs:
                again.add_output(self.value(token))
        return again

    def _look(self, look: Look) -> Look:
        again = copy.copy(look)
        again.first, again.stop = self.value(look.first), self.value(look.stop)
        again.first_gradient = self.value(look.first_gradient)
        again.first_stray = self.value(look.first_stray)
        # Its modules were called again, whose count stands still.
        offset = self.value(FIRST_SEQ)
        again.calls = [count % FIRST_SEQ + offset for count in look.calls]
        return again
