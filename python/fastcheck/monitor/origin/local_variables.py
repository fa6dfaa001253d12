"""The tensors among a program's local variables, the lines that assigned or changed them, and the
variables that these have read.
"""

from __future__ import annotations

import dis
import linecache
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import torch

from fastcheck.record.format import is_nonfinite
from fastcheck.statistics.functions import stats
from fastcheck.utils.torch.flatten import flatten_arguments
from fastcheck.utils.torch.frames import call_frames, frames, program_frames
from fastcheck.utils.torch.held_frames import HeldFrame
from fastcheck.utils.torch.readable import can_hold_nonfinite, can_read, first_bad

from .assignments import Assignment, Frame, assignments_of

_MOST_LOCALS = 4096
_MOST_ELEMENTS = 64
_MOST_SOURCE = 160
_MOST_LINES = 5


def holds_nonfinite(tensor: torch.Tensor) -> bool:
    """True if it is read and not finite. Makes the host wait for a device."""
    record = record_of(tensor)
    return record is not None and is_nonfinite(record)


def record_of(tensor: torch.Tensor) -> Optional[np.void]:
    """The record of a tensor; None for what is not read: integers hold nothing that is not
    finite.
    """
    if not can_hold_nonfinite(tensor) or not can_read(tensor):
        return None
    return stats(tensor.detach()).record


def is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """True if both are the same elements in memory, of one dtype."""
    if tensor is other:
        return True
    if tensor.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return is_at(tensor, other, other.data_ptr())


def is_at(tensor: torch.Tensor, other: torch.Tensor, address: int) -> bool:
    """True if it is like ``other``, which was at this address."""
    # A view of the whole may have another shape.
    is_alike = (tensor.numel(), tensor.dtype) == (other.numel(), other.dtype)
    return is_alike and tensor.numel() > 0 and tensor.data_ptr() == address


class Variable(NamedTuple):
    """A local variable of a running function, or the element of one that has this ``key``.
    ``last``: its last assignment, as far as there is one.
    """

    name: str
    key: str
    value: torch.Tensor
    frame: Frame
    last: Optional[Assignment] = None

    @property
    def shown(self) -> str:
        return self.name + self.key

    def assigned_in(self, assignments: Mapping[str, Sequence[Assignment]]) -> Sequence[Assignment]:
        """Returns its assignments: of an element those of the whole, where none to it by itself is
        known.
        """
        if self.key:
            return assignments.get(self.shown) or assignments.get(self.name, [])
        # A store to an element goes on with the rest.
        of_elements = (
            one._replace(read=(*one.read, self.name))
            for name, found in assignments.items()
            for one in found
            if name.startswith(f"{self.name}[")
        )
        return sorted([*assignments.get(self.name, ()), *of_elements])

    def last_in(self, assignments: Mapping[str, Sequence[Assignment]]) -> Optional[Assignment]:
        return next(iter(self.assigned_in(assignments)[-1:]), None)

    def origin(self) -> tuple[Frame, list[tuple[int, int]]]:
        """The statements that gave it its value, each by its first and last line, and the function
        that they are in: its assignments, or the call of the program that it is an argument of.
        """
        if self.last is not None:
            lines = dict.fromkeys((one.line, one.end) for one in self._assigned())
            return self.frame, list(lines)[-_MOST_LINES:]
        caller = self.frame.f_back
        if caller is None or not self._is_argument:
            return self.frame, []
        if not isinstance(caller, HeldFrame) and caller not in program_frames():
            return self.frame, []
        return caller, [running_lines(caller)]

    def _assigned(self) -> list[Assignment]:
        """The assignments that may have given it its value."""
        known, last = assignments_of(self.frame), self.last
        assigned = [one for one in self.assigned_in(known) if last and one.at <= last.at]
        # The branch that has run is not known.
        first = max((n for n, one in enumerate(assigned) if not one.may_be_skipped), default=0)
        # One that reads its own name goes on with what the one before has made.
        while first and self.name in assigned[first].read:
            first -= 1
        assigned = assigned[first:]
        if len(assigned) > _MOST_LINES:
            assigned = [one for one in assigned if not one.is_change] or assigned
        return assigned

    @property
    def _is_argument(self) -> bool:
        code = self.frame.f_code
        return self.name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    def __str__(self) -> str:
        frame, statements = self.origin()
        if self.last is None:
            if not self._is_argument:
                return f"{self.shown} in {self.frame.f_code.co_name}"
            what = f"{self.shown}, {'in ' * bool(self.key)}an argument of "
            what += self.frame.f_code.co_name
            return f"{what}, which runs from {running_place(frame)}" if statements else what
        # The element may have been put there later.
        is_whole = not self.key or self.shown in assignments_of(self.frame)
        what = f"{self.shown}," if is_whole else f"{self.shown}; {self.name} is"
        how = "assigned or changed" if any(o.is_change for o in self._assigned()) else "assigned"
        return f"{what} {how} at {_place(frame, *statements)}"

    def first_bad(self) -> str:
        return first_bad(self.shown, self.value)

    @property
    def has_own_line(self) -> bool:
        """True if a line assigns it: one that assigns a list may have read what is in another
        element.
        """
        return not self.key or self.shown in assignments_of(self.frame)

    def first_cause(self) -> Optional[Variable]:
        """The variable it was assigned from that is not finite itself, or what that was assigned
        from, and so on.
        """
        cause, known = self, assignments_of(self.frame)
        while cause.last is not None:
            # One that reads its own name goes on with what those before have read.
            read = {name for one in cause._assigned() for name in one.read}
            at = cause.last.at
            earlier = [
                (last.at if last is not None else -1, variable._replace(last=last))
                for variable in held_by(self.frame)
                if variable.name in read
                and (not cause.key or variable.name != cause.name)
                # A variable that was assigned since may have been finite by then. An argument, or
                # one of the function around this one, has no assignment here.
                and (not (last := variable.last_in(known)) or last.at < at)
                and holds_nonfinite(variable.value)
            ]
            if not earlier:
                break
            cause = min(earlier, key=operator.itemgetter(0))[1]
        return None if cause is self else cause


def _place(frame: Frame, *statements: tuple[int, int], is_whole: bool = True) -> str:
    """The place of statements, each from one line to another, and their source."""
    code, text = frame.f_code, linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    sources = "; ".join(filter(None, (source_of(text, *one, is_whole) for one in statements)))
    lines = " or ".join(str(first) for first, _ in statements)
    where = f"{code.co_filename}:{lines} in {code.co_name}"
    return f"{where}: {sources[:_MOST_SOURCE]}" if sources else where


def source_of(text: Sequence[str], first: int, last: int, is_whole: bool = True) -> str:
    """Joins these lines of a file, and those that close their brackets."""
    closing = (")", "]", "}") if is_whole else ()
    while text[last : last + 1] and text[last].lstrip().startswith(closing):
        last += 1
    # The comment of the last line stays.
    lines = [re.sub(r"\s#\s.*", "", line) for line in text[first - 1 : last - 1]]
    return " ".join("".join([*lines, *text[last - 1 : last]]).split())


def running_place(frame: Frame) -> str:
    return _place(frame, running_lines(frame), is_whole=False)


def running_lines(frame: Frame) -> tuple[int, int]:
    """The first and the last line of what runs in a frame, which is known from Python 3.11 on."""
    first = frame.f_lineno
    begun = [one for one in dis.get_instructions(frame.f_code) if one.offset <= frame.f_lasti]
    place = getattr(begun[-1], "positions", None) if begun else None
    last = None if place is None else place.end_lineno
    return first, max(first, last or first)


def caller_with(argument: torch.Tensor) -> Optional[FrameType]:
    """The function of the program that has called a module, which still runs, with this tensor."""

    def is_given(frame: FrameType) -> bool:
        given = flatten_arguments(frame.f_locals["args"], frame.f_locals["kwargs"])
        return any(tensor is argument for _, tensor in given)

    calls = [frame for frame in call_frames() if is_given(frame)]
    around, callers = list(frames()), list(program_frames())
    outside = around[around.index(calls[-1]) :] if calls else []
    return next((frame for frame in outside if frame in callers), None)


def find_variable(
    is_it: Callable[[torch.Tensor], bool],
    rank: Callable[[torch.Tensor], int] = lambda tensor: 0,
    frames: Optional[Sequence[HeldFrame]] = None,
) -> Optional[Variable]:
    """The local variable of the program's running functions, or of these frames, that holds such a
    tensor, of several the variable of the least rank.
    """
    candidates = [(rank(one.value), one) for one in local_variables(frames) if is_it(one.value)]
    # The function that owns a variable has the lines of those within it, too.
    owned = {one.name for _, one in candidates if one.name in one.frame.f_code.co_cellvars}
    candidates = [
        (number, one)
        for number, one in candidates
        if one.name not in owned or one.name not in one.frame.f_code.co_freevars
    ]
    least = min((candidate[0] for candidate in candidates), default=0)
    variables = []
    for one in (variable for number, variable in candidates if number == least):
        known = one.assigned_in(assignments_of(one.frame))
        variables.append(one._replace(last=known[-1]) if known else one)
    # An argument was not assigned there: by a caller perhaps, or else it is made in the call.
    assigned = [variable for variable in variables if variable.last]
    return next(iter([*assigned, *variables[::-1]]), None)


def local_variables(frames: Optional[Sequence[HeldFrame]] = None) -> Iterator[Variable]:
    """The local variables that hold a tensor; after those of a function the elements of its lists,
    tuples and dictionaries.
    """
    for frame in program_frames() if frames is None else frames:
        yield from held_by(frame)


def held_by(frame: Frame) -> Iterator[Variable]:
    held = [(name, "", value) for name, value in list(frame.f_locals.items())[:_MOST_LOCALS]]
    for name, _, value in tuple(held):
        # Neither a method of a subclass is called nor the repr() of a key: a parameter may be one.
        kind: Any = next((k for k in (list, tuple, dict) if issubclass(type(value), k)), None)
        if kind is not None and kind.__len__(value) <= _MOST_ELEMENTS:
            pairs = tuple(dict.items(value)) if kind is dict else enumerate(kind.__iter__(value))
            named = [(key, element) for key, element in pairs if type(key) in (int, str)]
            held += [(name, f"[{key!r:.80}]", element) for key, element in named]
    for name, key, value in held:
        if issubclass(type(value), torch.Tensor):  # a proxy's class may be the program's code
            yield Variable(name, key, value, frame)
