"""The journal: the entries of the hooks in a step, in order, judged when their records are there.

On the CPU a record is there when the hook asks for it, and an entry is judged at once. On any other
device the entries wait for their records. Entries are judged in the same order on every device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, Optional, Union

import numpy as np

from fastcheck.calls.module_calls import Call

from .finding import Finding, is_event
from .module_level import Judge

__all__ = [
    "CallEnded",
    "Entry",
    "Journal",
    "JournalReading",
    "ListReading",
    "Note",
    "Recorded",
    "entries_of",
]

BadRecords = Mapping[int, np.void]
#: What csrc/torch/hooks/recorder.h writes into a journal.
Recorded = Union[Call, tuple[Any, ...]]


class Entry:
    """One line of the journal."""

    __slots__ = ()

    def apply(self, judge: Judge, bad: BadRecords) -> None:
        """Passes the entry to the judge. ``bad``: the records that show an overflow, by sequence
        number.
        """
        raise NotImplementedError


class JournalReading(Entry):
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
        # A parameter may have been read for another finding, before its own entry.
        if record is None or not is_event(record, self.role):
            return
        if not judge.is_finding(self.seq):
            finding = Finding(record, self.role, self.call, self.thread)
            judge.take(finding, self.method, *self.args)


class ListReading(Entry):
    """Tensors were read in one call, under the sequence numbers from ``first_seq`` on.

    ``method`` as in JournalReading, the same for all of them.
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
                finding = Finding(bad[seq], role, None, self.thread)
                judge.take(finding, self.method, *self.args)


class CallEnded(Entry):
    """A module returned. ``is_complete``: all that it returned was read, and there was any.
    ``ended_by``: the exception that left it, of an outermost call.
    """

    __slots__ = ("call", "ended_by", "is_complete")

    def __init__(self, call: Call, is_complete: bool, ended_by: str = "") -> None:
        self.call = call
        self.is_complete = is_complete
        self.ended_by = ended_by

    def apply(self, judge: Judge, bad: BadRecords) -> None:
        if judge.findings:
            is_finite = self.is_complete and not any(map(judge.is_finding, self.call.outputs))
            judge.call_ended(self.call, is_finite)
            if self.call.parent is None and not self.call.is_recompute:
                judge.pass_ended(self.call, self.is_complete, self.ended_by)


class Note(Entry):
    """Another event: ``function(*args)`` is called when the entry is applied."""

    __slots__ = ("args", "function")

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function = function
        self.args = args

    def apply(self, judge: Judge, bad: BadRecords) -> None:
        self.function(*self.args)


def entries_of(recorded: Union[Entry, Recorded]) -> Iterator[Entry]:
    """The entries of what the C++ recorder wrote, equal to those of ModuleObserver."""
    if isinstance(recorded, Entry):
        yield recorded
    elif not isinstance(recorded, tuple):
        call = recorded
        for seq in call.outputs:
            if seq >= call.outputs_seq:  # no module had read it before
                yield JournalReading(seq, "output", call, Judge.output, (call,), call.thread)
        yield CallEnded(call, call.is_complete)
    elif recorded[0] == "input":
        _, seq, call, after_gap = recorded
        args = (call.parent, after_gap)
        yield JournalReading(seq, "input", call, Judge.inner_input, args, call.thread)
    elif recorded[0] == "output":
        _, seq, call = recorded
        yield JournalReading(seq, "output", call, Judge.output, (call,), call.thread)
    else:
        _, seq, hook, is_scaled, thread = recorded
        args = (hook.token, is_scaled)
        yield JournalReading(seq, hook.role, hook.call, Judge.gradient, args, thread)


class Journal:
    """A part of one step's journal."""

    __slots__ = ("entries", "notes")

    def __init__(self) -> None:
        self.entries: list[Union[Entry, Recorded]] = []
        # The entries that are applied even where no record is non-finite.
        self.notes: list[Note] = []

    def note(self, note: Note) -> None:
        self.entries.append(note)
        self.notes.append(note)
