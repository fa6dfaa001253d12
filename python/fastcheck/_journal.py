"""The journal: what the hooks saw in a step, in order, so that it can be judged once the records
are on the host.

On the CPU a record is there when the hook asks for it, and an entry is judged at once. On any other
device the entries wait for their records. Either way the judge hears the same, in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, Optional, Union

import numpy as np

from ._calls import Call
from ._finding import Finding, is_event
from ._verdict import Judge

__all__ = [
    "CallEnded",
    "Entry",
    "Journal",
    "ListReading",
    "Note",
    "Reading",
    "Recorded",
    "entries_of",
]

BadRecords = Mapping[int, np.void]
#: What csrc/torch/hook_recorder.h writes into a journal.
Recorded = Union[Call, tuple[Any, ...]]


class Entry:
    """One line of the journal."""

    __slots__ = ()

    def apply(self, judge: Judge, bad: BadRecords) -> None:
        """Tells the judge; ``bad`` holds the records that show an overflow, by their sequence
        number.
        """
        raise NotImplementedError


class Reading(Entry):
    """One tensor was read. ``method(judge, finding, *args)`` judges it if it was non-finite."""

    __slots__ = ("args", "call", "method", "role", "seq", "thread")

    def __init__(
        self,
        seq: int,
        role: str,
        call: Optional[Call],
        method: Callable[..., None],
        args: tuple[Any, ...],
        thread: Optional[int] = None,
    ) -> None:
        self.seq = seq
        self.role = role
        self.call = call
        self.thread = threading.get_ident() if thread is None else thread
        self.method = method
        self.args = args

    def apply(self, judge: Judge, bad: BadRecords) -> None:
        record = bad.get(self.seq)
        # A parameter may have been looked up earlier than its turn.
        if record is None or not is_event(record, self.role):
            return
        if not judge.is_finding(self.seq):
            finding = Finding(record, self.role, self.call, self.thread)
            self.method(judge, finding, *self.args)


class ListReading(Entry):
    """Tensors were read in one call, under the sequence numbers from ``first_seq`` on.

    ``method`` as in Reading, the same for all of them.
    """

    __slots__ = ("args", "first_seq", "method", "roles", "thread")

    def __init__(
        self,
        first_seq: int,
        roles: Sequence[str],
        method: Callable[..., None],
        args: tuple[Any, ...],
    ) -> None:
        self.first_seq = first_seq
        self.roles = roles
        self.thread = threading.get_ident()
        self.method = method
        self.args = args

    def apply(self, judge: Judge, bad: BadRecords) -> None:
        stop = self.first_seq + len(self.roles)
        for seq in sorted(seq for seq in bad if self.first_seq <= seq < stop):
            role = self.roles[seq - self.first_seq]
            if is_event(bad[seq], role) and not judge.is_finding(seq):
                self.method(judge, Finding(bad[seq], role, None, self.thread), *self.args)


class CallEnded(Entry):
    """A module returned. ``is_complete``: all that it returned was read, and there was any."""

    __slots__ = ("call", "is_complete")

    def __init__(self, call: Call, is_complete: bool) -> None:
        self.call = call
        self.is_complete = is_complete

    def apply(self, judge: Judge, bad: BadRecords) -> None:
        if judge.findings:
            is_finite = self.is_complete and not any(map(judge.is_finding, self.call.outputs))
            judge.call_ended(self.call, is_finite)


class Note(Entry):
    """Something else that happened: ``function(*args)`` is called when its turn comes."""

    __slots__ = ("args", "function")

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function = function
        self.args = args

    def apply(self, judge: Judge, bad: BadRecords) -> None:
        self.function(*self.args)


def entries_of(recorded: Union[Entry, Recorded]) -> Iterator[Entry]:
    """What the recorder has written, as ModuleObserver would have."""
    if isinstance(recorded, Entry):
        yield recorded
    elif not isinstance(recorded, tuple):
        call = recorded
        for seq in call.outputs:
            if seq >= call.outputs_seq:  # no module had read it before
                yield Reading(seq, "output", call, Judge.output, (call,), call.thread)
        yield CallEnded(call, call.is_complete)
    elif recorded[0] == "input":
        _, seq, call, after_gap = recorded
        args = (call.parent, after_gap)
        yield Reading(seq, "input", call, Judge.inner_input, args, call.thread)
    elif recorded[0] == "output":
        _, seq, call = recorded
        yield Reading(seq, "output", call, Judge.output, (call,), call.thread)
    else:
        _, seq, hook, is_scaled, thread = recorded
        args = (hook.token, is_scaled)
        yield Reading(seq, hook.role, hook.call, Judge.gradient, args, thread)


class Journal:
    """A stretch of one step's journal."""

    __slots__ = ("entries", "notes")

    def __init__(self) -> None:
        self.entries: list[Union[Entry, Recorded]] = []
        # Those of the entries that are due where nothing non-finite was read, too.
        self.notes: list[Note] = []

    def note(self, note: Note) -> None:
        self.entries.append(note)
        self.notes.append(note)
