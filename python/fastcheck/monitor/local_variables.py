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
_MOST_LINES = 5
_CHANGES = re.compile(
    r"(?!requires_grad|detach|share)[a-z]\w*_|append|extend|insert|update|setdefault"
)
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


class _Assignment(NamedTuple):
    """``at``: when it last ran, among those of its function. ``read``: the variables that it has
    read. ``may_be_skipped``: it stands in a branch, or later in a loop. ``is_change``: it calls a
    method that writes to the variable.
    """

    at: float
    line: int
    read: tuple[str, ...]
    may_be_skipped: bool
    is_change: bool


class Variable(NamedTuple):
    """A local variable of a running function, or the element of one that has this ``key``.
    ``last``: its last assignment, as far as there is one.
    """

    name: str
    key: str
    value: torch.Tensor
    frame: Frame
    last: Optional[_Assignment] = None

    @property
    def shown(self) -> str:
        return self.name + self.key

    def assigned_in(self, assignments: Mapping[str, list[_Assignment]]) -> list[_Assignment]:
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

    def __str__(self) -> str:
        if self.last is None:
            return self._as_argument()
        known, last = _assignments(self.frame), self.last
        assigned = [one for one in self.assigned_in(known) if one.at <= last.at]
        # The branch that has run is not known.
        first = max((n for n, one in enumerate(assigned) if not one.may_be_skipped), default=0)
        # One that reads its own name goes on with what the one before has made.
        while first and self.name in assigned[first].read:
            first -= 1
        assigned = assigned[first:]
        if len(assigned) > _MOST_LINES:
            assigned = [one for one in assigned if not one.is_change] or assigned
        lines = list(dict.fromkeys(one.line for one in assigned))[-_MOST_LINES:]
        # The element may have been put there later.
        is_whole = not self.key or self.shown in known
        what = f"{self.shown}," if is_whole else f"{self.shown}; {self.name} is"
        how = "assigned or changed" if any(one.is_change for one in assigned) else "assigned"
        return f"{what} {how} at {_place(self.frame, *lines)}"

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
        cause, known = self, _assignments(self.frame)
        while cause.last is not None:
            read, at = cause.last.read, cause.last.at
            earlier = [
                (assigned[-1].at, variable._replace(last=assigned[-1]))
                for variable in held_by(self.frame)
                if variable.name in read
                # A variable that was assigned since may have been finite by then.
                and (assigned := variable.assigned_in(known))
                and assigned[-1].at < at
                and holds_nonfinite(variable.value)
            ]
            if not earlier:
                break
            cause = min(earlier, key=operator.itemgetter(0))[1]
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
        known = one.assigned_in(_assignments(one.frame))
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


def _assignments(frame: Frame) -> dict[str, list[_Assignment]]:
    """The assignments of a function to each variable that may have run until now, and to its
    elements with a constant key (``losses['box']``), in the order in which they last ran.
    """
    assignments: dict[str, list[_Assignment]] = {}
    code, now = frame.f_code, frame.f_lasti
    starts, line = dict(dis.findlinestarts(code)), code.co_firstlineno
    instructions = list(dis.get_instructions(code))
    jumps = [(i.offset, i.argval) for i in instructions if i.opcode in _JUMPS]
    branches = [(start, end) for start, end in jumps if start < end <= now]
    loops = [(start, end) for end, start in jumps if start <= now <= end]
    statement: list[dis.Instruction] = []
    is_over = False
    for instruction in instructions:
        offset, name = instruction.offset, instruction.opname
        line = starts.get(offset) or line
        if is_over and not name.startswith("STORE_"):  # several may be stored together
            statement, is_over = [], False
        statement.append(instruction)
        names = _written(statement)
        # A loop's part behind the running call has run the last time round, if at all.
        around = [start for start, end in loops if now <= offset < end]
        if names and (offset < now or around):
            at = max(around) - 1 + offset / (1 + len(code.co_code)) if around else offset
            may_be_skipped = bool(around) or any(start < offset < end for start, end in branches)
            read = [value for one in statement for value in _variables("LOAD", one)]
            for variable in names:
                # An element's store has read what holds it last.
                own = tuple(read[: -1 if variable.endswith("]") else None])
                one = _Assignment(at, line, own, may_be_skipped, name == "POP_TOP")
                assignments.setdefault(variable, []).append(one)
        is_over = is_over or name.startswith(("STORE_", "POP_", "RETURN_"))
    return {name: sorted(found) for name, found in assignments.items()}


def _variables(kind: str, instruction: dis.Instruction) -> list[str]:
    """Returns those that it loads or stores: several in one from Python 3.13 on."""
    is_it = re.fullmatch(kind + r"_(?:FAST|NAME|GLOBAL|DEREF)(?:_\w+)?", instruction.opname)
    return [str(value) for value in each(instruction.argval)] if is_it else []


def _written(statement: Sequence[dis.Instruction]) -> list[str]:
    """The variables that the last of these instructions stores; or the one whose element it stores,
    or on which the statement that it ends calls a method that writes to it.
    """
    *before, last = statement
    if last.opname not in ("STORE_SUBSCR", "STORE_SLICE", "POP_TOP"):
        return _variables("STORE", last)
    if last.opname == "STORE_SUBSCR" and len(before) > 1 and before[-1].opname in _CONSTANTS:
        held = _variables("LOAD", before[-2])[-1:]
        if held:
            return [f"{held[0]}[{before[-1].argval!r:.80}]"]
    begin = _begin(last)
    first = [one for one in before if begin is not None and _begin(one) == begin]
    methods = [one.argval for one in first if one.opname in ("LOAD_ATTR", "LOAD_METHOD")]
    methods = [name for name in methods if name != "data"]
    is_store = last.opname != "POP_TOP"
    if len(methods) != (0 if is_store else 1) or not all(map(_CHANGES.fullmatch, methods)):
        return []
    return _variables("LOAD", first[0])[:1] if first else []


def _begin(instruction: dis.Instruction) -> Optional[tuple[Optional[int], Optional[int]]]:
    """Returns where its expression begins in the source; known from Python 3.11 on."""
    place = getattr(instruction, "positions", None)
    return None if place is None else (place.lineno, place.col_offset)
