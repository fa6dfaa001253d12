"""The tensors among a program's local variables, the lines that assigned them, and the variables
that these have read.
"""

from __future__ import annotations

import dis
import linecache
import re
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Callable, NamedTuple, Optional, Union

import numpy as np
import torch

from fastcheck.record.format import is_nonfinite
from fastcheck.statistics.functions import stats
from fastcheck.utils.torch.frames import program_frames
from fastcheck.utils.torch.held_frames import HeldFrame
from fastcheck.utils.torch.readable import can_hold_nonfinite, can_read, first_bad

_MOST_LOCALS = 4096
_MOST_ELEMENTS = 64
_MOST_SOURCE = 160
_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT")
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
#: A frame that runs, or as it was when backward() was called.
Frame = Union[FrameType, HeldFrame]


def holds_nonfinite(tensor: torch.Tensor) -> bool:
    """True if it is read and not finite. Makes the host wait for a device."""
    record = record_of(tensor)
    return record is not None and is_nonfinite(record)


def each(value: Any) -> tuple[Any, ...]:
    """The elements of a tuple or a list, or else the value alone."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


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
    ``line``: of its last assignment; 0: it has none.
    """

    name: str
    key: str
    value: torch.Tensor
    frame: Frame
    line: int = 0

    @property
    def shown(self) -> str:
        return self.name + self.key

    def assigned_in(self, assignments: Mapping[str, object]) -> str:
        """The name under which its assignments are: of an element that of the whole, where none
        to it by itself is known.
        """
        return self.shown if self.shown in assignments else self.name

    def __str__(self) -> str:
        if not self.line:
            return self._as_argument()
        known = _assignments(self.frame)
        assigned = [a for a in known[self.assigned_in(known)] if a.line <= self.line]
        # The branch that has run is not known.
        first = max((n for n, a in enumerate(assigned) if not a.may_be_skipped), default=0)
        # One that reads its own name goes on with what the one before has made.
        while first and self.name in assigned[first].read:
            first -= 1
        lines = list(dict.fromkeys(a.line for a in assigned[first:]))
        # The element may have been put there later.
        is_whole = self.assigned_in(known) == self.shown
        what = f"{self.shown}," if is_whole else f"{self.shown}; {self.name} is"
        return f"{what} assigned at {_place(self.frame, *lines)}"

    def _as_argument(self) -> str:
        code, caller = self.frame.f_code, self.frame.f_back
        if self.name not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            return f"{self.shown} in {code.co_name}"
        what = f"{self.shown}, {'in ' * bool(self.key)}an argument of {code.co_name}"
        if caller is None or not (isinstance(caller, HeldFrame) or caller in program_frames()):
            return what
        return f"{what}, which runs from {_place(caller, caller.f_lineno)}"

    def first_bad(self) -> str:
        return first_bad(self.shown, self.value)

    def first_cause(self) -> Optional[Variable]:
        """The variable it was assigned from that is not finite itself, or what that was assigned
        from, and so on.
        """
        cause, assigned = self, _assignments(self.frame)
        while cause.line:
            name = cause.assigned_in(assigned)
            read = next(a.read for a in assigned[name] if a.line == cause.line)
            earlier = [
                variable._replace(line=lines[-1].line)
                for variable in held_by(self.frame)
                if variable.name in read
                and (lines := assigned.get(variable.assigned_in(assigned)))
                and holds_nonfinite(variable.value)
            ]
            # A variable that was assigned since may have been finite by then.
            earlier = [variable for variable in earlier if variable.line < cause.line]
            if not earlier:
                break
            cause = min(earlier, key=lambda variable: variable.line)
        return None if cause is self else cause


def _place(frame: Frame, *lines: int) -> str:
    code = frame.f_code
    sources = (linecache.getline(code.co_filename, n, frame.f_globals).strip() for n in lines)
    source = "; ".join(filter(None, sources))[:_MOST_SOURCE]
    where = f"{code.co_filename}:{' or '.join(map(str, lines))} in {code.co_name}"
    return f"{where}: {source}" if source else where


def find_variable(
    is_it: Callable[[torch.Tensor], bool],
    rank: Callable[[torch.Tensor], int] = lambda tensor: 0,
    frames: Optional[Sequence[HeldFrame]] = None,
) -> Optional[Variable]:
    """The local variable of the program's running functions, or of these frames, that holds such a
    tensor, of several the variable of the least rank.
    """
    candidates = [(rank(one.value), one) for one in local_variables(frames) if is_it(one.value)]
    least = min((candidate[0] for candidate in candidates), default=0)
    variables = []
    for one in (variable for number, variable in candidates if number == least):
        assignments = _assignments(one.frame)
        lines = assignments.get(one.assigned_in(assignments))
        variables.append(one._replace(line=lines[-1].line) if lines else one)
    # An argument was not assigned there: by a caller perhaps, or else it is made in the call.
    assigned = [variable for variable in variables if variable.line]
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


class _Assignment(NamedTuple):
    """``read``: the variables that it has read. ``may_be_skipped``: it stands in a branch."""

    line: int
    read: tuple[str, ...]
    may_be_skipped: bool


def _assignments(frame: Frame) -> dict[str, list[_Assignment]]:
    """The assignments of a function to each variable that may have run until now, and to its
    elements with a constant key (``losses['box']``).
    """
    assignments: dict[str, list[_Assignment]] = {}
    code, is_over = frame.f_code, False
    read: list[str] = []
    starts, line = dict(dis.findlinestarts(code)), code.co_firstlineno
    instructions = list(dis.get_instructions(code))
    jumps = [
        (i.offset, i.argval)
        for i in instructions
        if i.opcode in _JUMPS and i.offset < i.argval <= frame.f_lasti
    ]
    for number, instruction in enumerate(instructions):
        line = starts.get(instruction.offset) or line
        name = instruction.opname
        known = re.fullmatch(r"(STORE|LOAD)_(?:FAST|NAME|GLOBAL|DEREF|SUBSCR)(?:_\w+)?", name)
        if known is None:
            is_over = is_over or name.startswith(("POP_", "RETURN_"))
            continue
        # One instruction may store two, or load two, from Python 3.13 on.
        names = [str(value) for value in each(instruction.argval)]
        if name == "STORE_SUBSCR":
            whole, key = instructions[number - 2 : number]
            if read[-1:] != [whole.argval] or key.opname not in _CONSTANTS:
                continue
            names = [f"{read.pop()}[{key.argval!r:.80}]"]
        if known[1] == "LOAD":
            if is_over:
                read, is_over = [], False
            read += names
            continue
        is_over = True
        if line <= frame.f_lineno:
            skipped = any(start < instruction.offset < end for start, end in jumps)
            for variable in names:
                assignments.setdefault(variable, []).append(_Assignment(line, tuple(read), skipped))
    return {name: sorted(found) for name, found in assignments.items()}
