"""Follows captured graphs (CUDA graphs): patches torch's capture and replay methods.

torch has no hooks for it. While a monitor is installed, the methods of its graph classes are
wrapped at class level, as those of GradScaler are.
"""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Callable, Optional

import torch

from fastcheck.calls.module_calls import Call, ModuleNode, new_call
from fastcheck.monitor.hooks.step_watcher import StepWatcher
from fastcheck.monitor.weights.updates import UpdateInfo
from fastcheck.ring.device import DeviceRing
from fastcheck.ring.graph_slots import GraphSlots
from fastcheck.ring.host import NO_SEQ
from fastcheck.utils.torch.patching import Listeners, wrap_method
from fastcheck.utils.torch.streams import DeviceStreams, streams_of
from fastcheck.verdict.entries import (
    Entry,
    GraphReplay,
    Journal,
    Moment,
    Note,
    Records,
    Written,
    expanded,
)
from fastcheck.verdict.step import Step

if TYPE_CHECKING:
    from fastcheck.monitor.session.session import Session

#: The first number of a tensor that is read at a capture, so that no other number passes for a
#: capture's.
FIRST_SEQ = 2**40
# The number of steps in which a step that steps= has read is looked for.
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
        #: True if the replay under way reads: one of a step that is not observed does not.
        self.is_read = True
        #: Updates of weights that each replay applies.
        self.update_count = 0
        self.entries: list[Entry] = []
        #: Entries of the part that matter even if no record is non-finite.
        self.due: list[Entry] = []
        self.calls: list[Call] = []
        self.slots: dict[DeviceRing, GraphSlots] = {}

    @property
    def is_empty(self) -> bool:
        return not (self.entries or self.slots or self.closes)


class CapturedJournal:
    """Filled in while a graph is captured, under the session's lock."""

    def __init__(self, session: Session, stream: Any) -> None:
        self.stretches: list[GraphSegment] = []
        self._stream = stream  # that of the capture
        #: The reason why replays can't be followed; None: they can.
        self.problem: Optional[str] = None
        self._session = session
        self._stretch = GraphSegment(FIRST_SEQ)
        # The state of the session before the capture, to be put back.
        self._before = (session.step, session.is_closed, session.is_active, session.next_seq)
        # The steps of the capture have numbers of their own: every= is a matter of the replays.
        first = -session.config.every
        if session.config.filter.steps is not None:
            first = next(filter(session.config.observes, range(_MAX_STEP)), 0)
        session.recorder.close()
        session.step = self._first_step = session.event_store.new_step(
            first - 1, 0, session.level.read_stored
        )
        session.is_closed = True
        session.is_active = True
        session.next_seq = FIRST_SEQ
        session.level.seen.clear()

    def slots(self, ring: DeviceRing) -> Optional[GraphSlots]:
        """The slots of the current stretch; None if the readings are not part of the graph."""
        if self.problem is None and not ring.is_capturing:
            self.problem = "something was read meanwhile on a stream that was not captured"
        if self.problem is not None:
            return None
        slots = self._stretch.slots.get(ring)
        if slots is None:
            slots = self._stretch.slots[ring] = ring.new_graph_slots(
                self._stream, self._session.recorder.has_passed
            )
        return slots

    def take(self, step: Step, journal: Journal, closes_step: bool) -> None:
        """A part of the journal, which would have been the drain's."""
        stretch = self._stretch
        stretch.entries += _without_ends(journal.entries)
        stretch.due += _without_ends(journal.due)
        if closes_step:
            stretch.closes = True
            stretch.is_explicit = self._session.is_explicit
        if Moment.ENDED in journal.due:
            self._cut(step)

    def read_waiting(self) -> None:
        for slots in self._stretch.slots.values():
            slots.read_waiting()

    def _cut(self, step: Step) -> None:
        stretch, stop = self._stretch, self._session.next_seq
        if stretch.is_empty:
            return
        stretch.step, stretch.stop_seq = step, stop
        known = [self._first_step, *(each.step for each in self.stretches)]
        stretch.begins = not any(step is each for each in known)
        earlier = [each.update_count for each in self.stretches if each.step is step]
        stretch.update_count = step.update.count - sum(earlier)
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
        """Restores the session after a capture, whether it succeeded or not."""
        session = self._session
        # The first stretch of each step has its calls.
        for stretch in {id(each.step): each for each in reversed(self.stretches)}.values():
            assert stretch.step is not None
            for handle in stretch.step.leaf_handles:
                handle.remove()
            stretch.step.leaf_handles.clear()
            stretch.calls = list(stretch.step.calls)
        session.step, session.is_closed, session.is_active, session.next_seq = self._before
        session.level.forget()  # what was read on the CPU, once
        session.rings.set_depth(session.rings.depth_at(session.step.index))

    def start(self) -> None:
        """The graph is there, and was not replayed yet."""
        for stretch in self.stretches:
            for slots in stretch.slots.values():
                slots.start()


def _without_ends(written: Iterable[Written]) -> list[Entry]:
    """The entries but for the boundaries of steps, which are found again at each replay."""
    entries = itertools.chain.from_iterable(map(expanded, written))
    return [entry for entry in entries if entry not in (Moment.CLOSED, Moment.ENDED)]


class Replayed(GraphReplay):
    """A replay of a stretch."""

    __slots__ = ("_shift", "_step", "_stretch")

    def __init__(self, stretch: GraphSegment, shift: int, step: Step) -> None:
        self._stretch = stretch
        self._shift = shift
        self._step = step

    def entries(self, bad: Records) -> Iterator[Entry]:
        stretch, step, shift = self._stretch, self._step, self._shift
        first, stop = stretch.first_seq + shift, stretch.stop_seq + shift
        rebased = _Rebased(stretch, shift, step)
        if not step.findings.all and not any(first <= seq < stop for seq in bad):
            yield from map(rebased.entry, stretch.due)
            return
        assert stretch.step is not None
        for call in stretch.calls:
            step.calls.append(rebased.call(call))
        gradients = stretch.step.gradients.items()
        step.gradients.update((rebased.value(k), rebased.value(v)) for k, v in gradients)
        yield from map(rebased.entry, stretch.entries)


class _Rebased:
    """Copies of the objects of a capture (calls, entries) for one replay."""

    def __init__(self, stretch: GraphSegment, shift: int, step: Step) -> None:
        self._of = stretch.step
        self._shift = shift
        self._step = step
        self._calls: dict[int, Call] = {}

    def entry(self, entry: Any) -> Entry:
        if isinstance(entry, Moment):
            return entry
        if isinstance(entry, Note):
            return Note(entry.function, *map(self.value, entry.args))
        # A thread has a large number, too.
        fields = {name: getattr(entry, name) for name in entry._fields if name != "thread"}
        rebased: Entry = entry._replace(**{name: self.value(fields[name]) for name in fields})
        return rebased

    def value(self, value: Any) -> Any:
        """Sequence numbers, calls and steps, and what is made of them; anything else as it is."""
        if isinstance(value, int):
            return value + self._shift if FIRST_SEQ <= value < NO_SEQ else value
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
            for tensor_seq, site in zip(call.inputs, call.input_sites):
                again.add_input(self.value(tensor_seq), site)
            for tensor_seq in call.outputs:
                again.add_output(self.value(tensor_seq))
        return again

    def _look(self, look: UpdateInfo) -> UpdateInfo:
        again = copy.copy(look)
        again.first, again.stop = self.value(look.first), self.value(look.stop)
        again.first_gradient = self.value(look.first_gradient)
        again.first_stray = self.value(look.first_stray)
        # The graph's modules were called again, whose count stands still.
        offset = self.value(FIRST_SEQ)
        again.calls = [count % FIRST_SEQ + offset for count in look.calls]
        return again


# The places where torch keeps them: module, class, type of device (None: the accelerator, whatever
# it is).
_CLASSES = (
    ("cuda", "CUDAGraph", "cuda"),
    ("xpu", "XPUGraph", "xpu"),
    ("accelerator", "Graph", None),
)


class _Followed:
    """A tape, and where the graph was replayed last."""

    def __init__(self, tape: CapturedJournal, streams: DeviceStreams) -> None:
        self.tape = tape
        self.streams = streams
        self.is_captured = False
        self._stream: Any = None
        self._done = streams.new_event()

    def wait(self) -> None:
        """The next replay overwrites what the copies of the last replay read."""
        stream = self.streams.current()
        if self._stream is not None and stream != self._stream:
            stream.wait_event(self._done)

    def mark(self) -> None:
        self._stream = self.streams.current()
        self._done.record(self._stream)


class GraphFollower:
    """Follows graphs for one monitor. Called within StepWatcher.guarded()."""

    def __init__(self, watcher: StepWatcher, nodes: Sequence[ModuleNode]) -> None:
        self.watcher = watcher
        self._session = watcher.session
        self._nodes = nodes
        self._graphs: weakref.WeakKeyDictionary[Any, _Followed] = weakref.WeakKeyDictionary()
        self._was_paused = False

    # Captures

    def capture_begins(self, graph: Any, device: torch.device) -> bool:
        """The current stream of the device is about to be captured."""
        session = self._session
        if not session.level.reads_captured_graphs:
            # The readings of the session wait.
            self._was_paused = session.passes.are_paused
            session.pause(True)
            self._note('with level="op" nothing that is captured in a graph is read')
            return False
        if session.tape is not None:
            session.tape.problem = "another graph was captured at the same time"
            return False
        if session.rings.of:
            # The drain of any monitor would ask the device about its copies, which ends a capture
            # in failure. The host has waited for the device a moment ago.
            session.flush()
        streams = streams_of(device)
        if streams is None or not self._observes(device):
            return False
        ring = session.rings.ring_of(device)
        session.tape = tape = CapturedJournal(session, streams.current())
        self._graphs[graph] = _Followed(tape, streams)
        if ring.backend.capture_list is None:
            # It copies from the host what depends on shapes, or waits for what it keeps.
            tape.problem = (
                f"only the CUDA kernels can be captured, not the {ring.backend.name} kernels"
            )
        for ring in session.rings.of.values():
            ring.captured = tape.slots
        # The model of this capture is not known yet: its hooks raise a stop that is due.
        return False

    def capture_seals(self, graph: Any) -> bool:
        """Called before the capture ends: work that is put on the stream is still part of it."""
        if self._is_capturing(graph):
            self._graphs[graph].tape.end_capture()
        return False

    def capture_ended(self, graph: Any, is_whole: bool) -> None:
        """``is_whole``: the graph can be replayed. In any case the session is what it was."""
        session = self._session
        if not session.level.reads_captured_graphs:
            session.pause(self._was_paused)
            return
        if not self._is_capturing(graph):
            return
        followed = self._graphs[graph]
        tape, session.tape = followed.tape, None
        for ring in session.rings.of.values():
            ring.captured = None
        tape.close()
        if tape.problem is not None:
            self._note(f"a captured graph is not read: {tape.problem}")
        if not is_whole or tape.problem is not None or not tape.stretches:
            del self._graphs[graph]
            return
        tape.start()
        followed.mark()
        followed.is_captured = True

    def leave(self) -> None:
        """Ends the capture for a monitor that is removed, possibly during it; earlier records are
        kept.
        """
        for graph in list(self._graphs):
            if self._is_capturing(graph):
                self.capture_ended(graph, is_whole=False)

    def _is_capturing(self, graph: Any) -> bool:
        followed = self._graphs.get(graph)
        return followed is not None and followed.tape is self._session.tape

    def _observes(self, device: torch.device) -> bool:
        """True if the model is on this device, or something there was read already."""
        if device in self._session.rings.of:
            return True
        for node in self._nodes:
            module = node.module()
            if module is not None and any(
                tensor is not None and tensor.device == device
                for tensor in (*module._parameters.values(), *module._buffers.values())
            ):
                return True
        return False

    # Replays

    def follows(self, graph: Any) -> bool:
        followed = self._graphs.get(graph)
        return followed is not None and followed.is_captured

    def replay_begins(self, graph: Any) -> bool:
        followed, session = self._graphs[graph], self._session
        followed.wait()
        step, is_closed, is_read = session.step.index, session.is_closed, session.is_active
        depth = session.rings.depths.now
        for stretch in followed.tape.stretches:
            if stretch.begins:
                step += is_closed
                is_closed, is_read = False, session.config.observes(step) and session.reads_passes
                depth = session.rings.depth_at(step)
            stretch.is_read = is_read
            for slots in stretch.slots.values():
                slots.let_read(depth if is_read else 0)
            is_closed = is_closed or self._closes_step(stretch)
        return False

    def replayed(self, graph: Any) -> bool:
        """A replay was put on the current stream."""
        session, followed = self._session, self._graphs[graph]
        # A replay writes to memory whose version stays the same.
        session.level.seen.clear()
        for stretch in followed.tape.stretches:
            for slots in stretch.slots.values():
                slots.replays += 1
            if stretch.begins:
                session.begin_step_if_closed()
                session.apply_pause()
            session.step.update.count += stretch.update_count
            if session.is_active and stretch.is_read:
                self._follow(stretch)
            if self._closes_step(stretch):
                self.watcher.close_step()
        followed.mark()
        if session.rings.settles_calls:
            session.settle_call()
        else:
            session.end_pass()
        return True

    def _closes_step(self, stretch: GraphSegment) -> bool:
        return stretch.closes and (stretch.is_explicit or not self._session.is_explicit)

    def _follow(self, stretch: GraphSegment) -> None:
        session, step, template = self._session, self._session.step, stretch.step
        assert template is not None
        shift = session.next_seq - stretch.first_seq
        for ring, slots in stretch.slots.items():
            if slots.identities:
                ring.follow(slots, shift, step.index)
            session.leave_unread([seq + shift for seq in slots.unread])
        session.next_seq = stretch.stop_seq + shift
        update, captured = step.update, template.update
        update.state_read = update.state_read or captured.state_read
        update.guarded_count += captured.guarded_count
        update.why_applied = update.why_applied or captured.why_applied
        update.scaler = captured.scaler or update.scaler
        for path, seq in template.pass_ends.items():
            step.pass_ends[path] = seq + shift
        for first in template.gradients if not step.gradients else ():
            # One stands for all; the others are added where something is not finite.
            step.gradients[first + shift] = template.gradients[first] + shift
            break
        step.journal.add_due(Replayed(stretch, shift, step))

    # Texts of summary()

    def remarks(self) -> list[str]:
        unseen = sum(
            slots.unseen_replays
            for followed in list(self._graphs.values())
            for stretch in followed.tape.stretches
            for slots in stretch.slots.values()
        )
        if not unseen:
            return []
        return [
            f"{unseen:,} replays of a graph left no record: they did not go through its replay()"
        ]

    def _note(self, text: str) -> None:
        self._session.faults.notes[text] = None


# ---- The classes of torch ------------------------------------------------------------------------


def _wrap(at_end: ExitStack) -> None:
    for kind, device_type in _kinds():
        begin = functools.partial(_capture_begin, device_type=device_type)
        for name, wrap in (
            ("capture_begin", begin),
            ("capture_end", _capture_end),
            ("replay", _replay),
        ):
            wrap_method(at_end, kind, name, wrap)


def _kinds() -> Iterator[tuple[Any, Optional[str]]]:
    for module_name, class_name, device_type in _CLASSES:
        kind = getattr(getattr(torch, module_name, None), class_name, None)
        if isinstance(kind, type):
            yield kind, device_type


def _current_device(device_type: Optional[str]) -> torch.device:
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        device_type = accelerator.type
    module: Any = getattr(torch, device_type)
    return torch.device(device_type, module.current_device())


def _tell(what: Callable[..., bool], told: Sequence[GraphFollower], *args: Any) -> None:
    for follower in told:
        follower.watcher.guarded("captured graphs", lambda _, f: what(f, *args), follower)


def _end(graph: Any, is_whole: bool) -> None:
    """Ends the capture of all followers, also of those that are off since it began."""
    for follower in followers:
        session = follower.watcher.session
        with session.lock:
            try:
                follower.capture_ended(graph, is_whole)
            except Exception as error:
                session.report_internal_error("captured graphs", error)


def _all() -> list[GraphFollower]:
    return [follower for follower in followers if not follower.watcher.session.removed]


def _capture_begin(original: Callable[..., Any], device_type: Optional[str]) -> Callable[..., Any]:
    @functools.wraps(original)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            _tell(GraphFollower.capture_begins, _all(), self, _current_device(device_type))
            return original(self, *args, **kwargs)
        except BaseException:
            _end(self, is_whole=False)
            raise

    return capture_begin


def _capture_end(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_whole = False
        try:
            _tell(GraphFollower.capture_seals, _all(), self)
            result = original(self, *args, **kwargs)
            is_whole = True
            return result
        finally:
            _end(self, is_whole)

    return capture_end


def _replay(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replay(self: Any, *args: Any, **kwargs: Any) -> Any:
        told = [follower for follower in _all() if follower.follows(self)]
        _tell(GraphFollower.replay_begins, told, self)
        result = original(self, *args, **kwargs)
        _tell(GraphFollower.replayed, told, self)
        return result

    return replay


#: Told from connect() on. Graphs may still be replayed after disconnect().
followers: Listeners[GraphFollower] = Listeners(_wrap)
