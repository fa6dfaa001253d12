"""The frames of this thread's stack, innermost first: a program's, and those of modules' calls."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Optional

import torch

from fastcheck.extension import status

CALL = torch.nn.Module._call_impl.__code__
#: Parts of the file names of the code that torch.compile makes, as in csrc/torch/python/line.cpp.
_OF_GRAPHS = ("<eval_with_key", "_aot_autograd")
#: The beginnings of names that such code has which stands in the place of a function, with its file
#: and name.
_CALLS_OF_GRAPHS = ("__compiled_fn", "__resume_at")
#: The code of functions that run a call again which is over: the program is elsewhere by then.
PAST: set[CodeType] = set()


_MOST_FRAMES = 32
# In a dictionary that is looked into.
_MOST_HELD = 100_000


class _Left(threading.local):
    """The frames that an exception has left, innermost first, where this thread looks at them."""

    frames: Sequence[FrameType] = ()


_left = _Left()


@contextlib.contextmanager
def past_frames(left: Sequence[FrameType]) -> Iterator[None]:
    """Puts frames that an exception has left before those of the stack, for this ``with``
    statement.
    """
    _left.frames = left
    try:
        yield
    finally:
        _left.frames = ()


def frames() -> Iterator[FrameType]:
    """All of them."""
    yield from _left.frames
    frame: Optional[FrameType] = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def program_frames() -> Iterator[FrameType]:
    """The frames of a program's functions; of a call that runs again and is over its own alone."""
    for frame in frames():
        if frame.f_code in PAST:
            return
        if is_of_program(frame.f_code, frame.f_globals):
            yield frame


def values_at_hand() -> Iterator[tuple[str, Any]]:
    """The values of the program's local variables, then what these hold as attributes or, modules,
    as children, then what those hold: of objects that lead to a module, an optimizer or a
    dictionary of tensors. None without the compiled extension.
    """
    # Not by f_locals: that is a dictionary which Python keeps, with all that is in it, until the
    # call is over, and which locals() has given the program.
    module = status.module
    level = [] if module is None else module.local_variables(_MOST_FRAMES)
    for steps in (2, 1):
        yield from level
        level = [
            (f"{name}.{attribute}", held)
            for name, value in level
            if _leads(value, steps)
            for attribute, held in _held_by(value).items()
        ]
    yield from level


def _leads(value: Any, steps: int) -> bool:
    """True for a module, and for an object of the program that leads to what is looked for in so
    many steps. Its ``__dict__`` is not asked for: in Python 3.11 an object that was asked once is
    slower at each of its attributes, for good.
    """
    kind = type(value)
    if issubclass(kind, torch.nn.Module):
        return True
    is_object = kind.__dictoffset__ and not issubclass(kind, (type, ModuleType, FunctionType))
    if not (steps and is_object):
        return False
    held = gc.get_referents(value)
    # One of them may be the object's own __dict__.
    held += [inner for one in held for inner in _values(one)]
    return any(_is_wanted(one) or _leads(one, steps - 1) for one in held)


def _is_wanted(value: Any) -> bool:
    if issubclass(type(value), (torch.nn.Module, torch.optim.Optimizer)):
        return True
    return any(issubclass(type(one), torch.Tensor) for one in _values(value))


def _values(value: Any) -> list[Any]:
    """The values of a dictionary, to which another thread may write; of others none."""
    return list(value.values()) if type(value) is dict and len(value) <= _MOST_HELD else []


def _held_by(value: Any) -> dict[str, Any]:
    try:
        held = dict(object.__getattribute__(value, "__dict__"))
    except (AttributeError, TypeError):
        return {}
    return (
        {**held, **held.pop("_modules", {})} if issubclass(type(value), torch.nn.Module) else held
    )


def is_of_program(code: CodeType, names: Mapping[str, Any]) -> bool:
    """True for a function that is neither torch's, nor fastcheck's, nor of pytest or its pluggy,
    nor that of a graph that torch.compile has made. ``names``: its global variables.
    """
    package = str(names.get("__name__", "")).partition(".")[0]
    is_of_graph = any(name in code.co_filename for name in _OF_GRAPHS)
    is_of_graph |= any(name.startswith(_CALLS_OF_GRAPHS) for name in code.co_names)
    is_internal = package in ("torch", "fastcheck", "pluggy") or package.startswith("_pytest")
    return not (is_internal or is_of_graph)


def call_frames() -> Iterator[FrameType]:
    """The frames of modules that are called, whose ``self``, ``args`` and ``kwargs`` are locals."""
    return (frame for frame in frames() if frame.f_code is CALL)
