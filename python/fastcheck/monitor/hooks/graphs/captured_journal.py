"""The journal of a captured graph, applied again for each replay with its new records.

Hooks do not run in a replay. Their entries would be those of the capture with other records: the
same journal, with new sequence numbers, in another step. It is judged entry by entry only if
something non-finite was read; a healthy replay needs only its notes.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any, Optional

from fastcheck.calls.module_calls import Call, new_call
from fastcheck.monitor.weight_updates.updates import UpdateInfo
from fastcheck.ring.device import DeviceRing
from fastcheck.ring.graph_slots import GraphSlots
from fastcheck.ring.reader import NO_TOKEN
from fastcheck.verdict.entries import Entry, Journal, Note, Records, Task, expanded
from fastcheck.verdict.step import Step

if TYPE_CHECKING:
    from fastcheck.monitor.session.session import Session

#: What is read at a capture is numbered from here on, so that no other number passes for one.
FIRST_SEQ = 2**40
# How far to look for a step that steps= has read.
_MAX_STEP = 2**20
_CALLS: Any = (Call, new_call)


class GraphSegment:
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
    def tasks(self) -> list[Task]:
        return [entry for entry in self.entries if isinstance(entry, Task)]

    @property
    def is_empty(self) -> bool:
        return not (self.entries or self.slots or self.closes)


class CapturedJournal:
    """Filled in while a graph is captured, under the session's lock."""

    def __init__(self, session: Session) -> None:
        self.stretches: list[GraphSegment] = []
        #: Why replays can't be followed; None: they can.
        self.problem: Optional[str] = None
        self._event_store = session.event_store
        self._session = session
        self._stretch = GraphSegment(FIRST_SEQ)
        # As it was before, to be put back.
        self._before = (session.step, session.is_closed, session.is_active, session.next_seq)
        # The steps of the capture have numbers of their own: every= is a matter of the replays.
        first = -session.config.every
        if session.config.filter.steps is not None:
            first = next(filter(session.config.observes, range(_MAX_STEP)), 0)
        session.recorder.close()
        session.step = self._first_step = session.event_store.new_step(first - 1)
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
        stretch, event_store = self._stretch, self._event_store
        has_ended = False
        for entry in itertools.chain.from_iterable(map(expanded, journal.entries)):
            # The boundaries of steps are found again at each replay.
            if isinstance(entry, Note) and entry.function in (event_store.close, event_store.end):
                has_ended = has_ended or entry.function == event_store.end
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
            slots.end_capture()
        self.stretches.append(stretch)
        self._stretch = GraphSegment(stop)

    def end_capture(self) -> None:
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


class Replayed(Task):
    """One replay of a stretch: its entries and notes with the records of the replay."""

    __slots__ = ("_shift", "_step", "_stretch")

    def __init__(self, stretch: GraphSegment, shift: int, step: Step) -> None:
        self._stretch = stretch
        self._shift = shift
        self._step = step

    def run(self, bad: Records) -> None:
        stretch, step, shift = self._stretch, self._step, self._shift
        first, stop = stretch.first_seq + shift, stretch.stop_seq + shift
        rebased = _Rebased(stretch, shift, step)
        if not step.findings.all and not any(first <= seq < stop for seq in bad):
            for task in stretch.tasks:
                step.apply(rebased.entry(task), bad)
            return
        assert stretch.step is not None
        for call in stretch.calls:
            step.calls.add(rebased.call(call))
        gradients = stretch.step.gradients.items()
        step.gradients.update((rebased.value(k), rebased.value(v)) for k, v in gradients)
        for entry in stretch.entries:
            step.apply(rebased.entry(entry), bad)


class _Rebased:
    """Copies of the objects of a capture (calls, entries) for one replay."""

    def __init__(self, stretch: GraphSegment, shift: int, step: Step) -> None:
        self._of = stretch.step
        self._shift = shift
        self._step = step
        self._calls: dict[int, Call] = {}

    def entry(self, entry: Any) -> Entry:
        if isinstance(entry, Note):
            return Note(entry.function, *map(self.value, entry.args))
        # A thread has a large number, too.
        fields = {name: getattr(entry, name) for name in entry._fields if name != "thread"}
        rebased: Entry = entry._replace(**{name: self.value(fields[name]) for name in fields})
        return rebased

    def value(self, value: Any) -> Any:
        """Sequence numbers, calls and steps, and what is made of them; anything else as it is."""
        if isinstance(value, int):
            return value + self._shift if FIRST_SEQ <= value < NO_TOKEN else value
        if isinstance(value, _CALLS):
            return self.call(value)
        if isinstance(value, Step):
            return self._step if value is self._of else value
        if isinstance(value, UpdateInfo):
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

    def _look(self, look: UpdateInfo) -> UpdateInfo:
        again = copy.copy(look)
        again.first, again.stop = self.value(look.first), self.value(look.stop)
        again.first_gradient = self.value(look.first_gradient)
        again.first_stray = self.value(look.first_stray)
        # Its modules were called again, whose count stands still.
        offset = self.value(FIRST_SEQ)
        again.calls = [count % FIRST_SEQ + offset for count in look.calls]
        return again
