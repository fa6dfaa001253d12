"""The assignments of a running function to its variables, read from its instructions."""

from __future__ import annotations

import dis
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple, Optional, Union

from fastcheck.utils.torch.held_frames import HeldFrame

_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT")
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_CHANGES = re.compile(
    r"(?!requires_grad|detach|share)[a-z]\w*_|append|extend|insert|update|setdefault"
)
#: A frame that runs, or as it was when backward() was called.
Frame = Union[FrameType, HeldFrame]


class Assignment(NamedTuple):
    """``at``: when it last ran, among those of its function. ``line``, ``end``: its first and its
    last line. ``read``: the variables that it has read. ``may_be_skipped``: it stands in a branch,
    or later in a loop. ``is_change``: it calls a method that writes to the variable.
    """

    at: float
    line: int
    end: int
    read: tuple[str, ...]
    may_be_skipped: bool
    is_change: bool


def each(value: Any) -> tuple[Any, ...]:
    """The elements of a tuple or a list, or else the value alone."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def assignments_of(frame: Frame) -> Mapping[str, Sequence[Assignment]]:
    """The assignments of a function to each variable that may have run until now, and to its
    elements with a constant key (``losses['box']``), in the order in which they last ran.
    """
    return _assignments(frame.f_code, frame.f_lasti)


# A stop asks for each frame again and again.
@functools.lru_cache(maxsize=256)
def _assignments(code: CodeType, now: int) -> Mapping[str, Sequence[Assignment]]:
    """The assignments of this code, as it runs the instruction ``now``."""
    assignments: dict[str, list[Assignment]] = {}
    starts, line = dict(dis.findlinestarts(code)), code.co_firstlineno
    instructions = list(dis.get_instructions(code))
    jumps = [(i.offset, i.argval) for i in instructions if i.opcode in _JUMPS]
    branches = [(start, end) for start, end in jumps if start < end <= now]
    loops = [(start, end) for end, start in jumps if start <= now <= end]
    statement: list[tuple[int, dis.Instruction]] = []
    is_over = False
    for instruction in instructions:
        offset, name = instruction.offset, instruction.opname
        line = starts.get(offset) or line
        if is_over and not name.startswith("STORE_"):  # several may be stored together
            statement, is_over = [], False
        statement.append((line, instruction))
        names = _written(statement)
        # A loop's part behind the running call has run the last time round, if at all.
        around = [start for start, end in loops if now <= offset < end]
        if not around and offset >= now and set(names) <= set(code.co_freevars):
            around = [0]  # in an earlier call
        if names and (offset < now or around):
            at = max(around) - 1 + offset / (1 + len(code.co_code)) if around else offset
            may_be_skipped = bool(around) or any(start < offset < end for start, end in branches)
            # A condition may stand before it.
            parts = [(n, one) for n, one in statement if n >= line]
            read = [value for _, one in parts for value in _variables("LOAD", one)]
            end = max(n for n, _ in parts)
            for variable in names:
                # An element's store has read what holds it last.
                own = tuple(read[: -1 if variable.endswith("]") else None])
                one = Assignment(at, line, end, own, may_be_skipped, name == "POP_TOP")
                assignments.setdefault(variable, []).append(one)
        is_end = name.startswith(("STORE_", "POP_", "RETURN_", "RAISE_", "RERAISE"))
        # A condition may be part of an expression.
        is_over = is_over or (is_end and "JUMP" not in name)
    for variable, line in _written_within(code):
        inner = Assignment(math.inf, line, line, (variable,), True, False)
        assignments.setdefault(variable, []).append(inner)
    return {name: sorted(found) for name, found in assignments.items()}


def _written_within(code: CodeType) -> Iterator[tuple[str, int]]:
    """The variables of a function, or the global ones of a module, that functions within it assign,
    with the line. When these have run is not known.
    """
    owned = {"STORE_DEREF": code.co_cellvars, "STORE_GLOBAL": code.co_names}
    if code.co_name != "<module>":
        del owned["STORE_GLOBAL"]
    within = [code]
    for outer in within:
        within += [value for value in outer.co_consts if isinstance(value, CodeType)]
    for inner in within[1:]:
        line = inner.co_firstlineno
        starts = dict(dis.findlinestarts(inner))
        for instruction in dis.get_instructions(inner):
            line = starts.get(instruction.offset) or line
            if instruction.argval in owned.get(instruction.opname, ()):
                yield instruction.argval, line


def _variables(kind: str, instruction: dis.Instruction) -> list[str]:
    """Returns those that it loads or stores: several in one from Python 3.13 on."""
    is_it = re.fullmatch(kind + r"_(?:FAST|NAME|GLOBAL|DEREF)(?:_\w+)?", instruction.opname)
    return [str(value) for value in each(instruction.argval)] if is_it else []


def _written(statement: Sequence[tuple[int, dis.Instruction]]) -> list[str]:
    """The variables that the last of these instructions stores; or the one whose element it stores,
    or on which the statement that it ends calls a method that writes to it.
    """
    last = statement[-1][1]
    if last.opname not in ("STORE_SUBSCR", "STORE_SLICE", "POP_TOP"):
        return _variables("STORE", last)
    before = [one for _, one in statement[:-1]]
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
    if not first:
        # From Python 3.13 on one instruction may load a value and the variable that it is put into.
        pairs = [one for one in before if is_store and isinstance(one.argval, tuple)]
        return _variables("LOAD", pairs[-1])[-1:] if pairs else []
    return _variables("LOAD", first[0])[:1]


def _begin(instruction: dis.Instruction) -> Optional[tuple[Optional[int], Optional[int]]]:
    """Returns where its expression begins in the source; known from Python 3.11 on."""
    place = getattr(instruction, "positions", None)
    return None if place is None else (place.lineno, place.col_offset)
