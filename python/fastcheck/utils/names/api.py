"""Names of torch API calls: one number for a call, and its text as in ``Functional.linear.145``."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from fastcheck.errors import ConfigError, did_you_mean

_CALL_BITS = 32

_lock = threading.Lock()
_numbers: dict[str, int] = {}
# The names of a process; there are no more of them than functions in torch's API.
_names: list[str] = []


def intern_call(name: str, call: int) -> int:
    """A number for the ``call``-th call of ``Functional.linear``."""
    number = _numbers.get(name)
    if number is None:
        with _lock:
            number = _numbers.setdefault(name, len(_names))
            if number == len(_names):
                _names.append(name)
    return number << _CALL_BITS | call


def format_call(number: int) -> str:
    """The opposite of intern_call(); empty for -1, which is no call."""
    if number < 0:
        return ""
    return f"{_names[number >> _CALL_BITS]}.{number & (1 << _CALL_BITS) - 1}"


_TENSOR_METHODS = torch.Tensor.__mro__[:2]  # the second is C++, its name is not the same everywhere


@functools.cache
def api_of(func: Any) -> str:
    """The name ``Functional.softmax``; empty if it is no function of torch's Python API."""
    name = getattr(func, "__name__", "")
    if not name or func in CALLS_WITHIN or (name.startswith("__") and not name.endswith("__")):
        return ""
    # A builtin may be a function of torch and of torch.nn.functional (linear): the latter is
    # what is called.
    if getattr(torch.nn.functional, name, None) is func:
        return f"Functional.{name}"
    if any(getattr(kind, name, None) is func for kind in _TENSOR_METHODS):
        return "" if name in _PASSED_BY else f"Tensor.{name}"
    if getattr(torch, name, None) is func:
        return f"Torch.{name}"
    if getattr(torch._VF, name, None) is func:
        return f"VF.{name}"
    if any(getattr(space, name.partition("_")[2], None) is func for space in _SPACES):
        return f"Torch.{name}"
    for kind, holder in (("Functional", torch.nn.functional), ("Tensor", torch.Tensor)):
        for attribute, value in vars(holder).items():
            if value is func:
                return f"{kind}.{attribute}"
    return ""


#: 2 / x, 2 // x and a.__rmatmul__(x): methods that are written in Python, whose calls are told in
#: their place, as msprobe does.
CALLS_WITHIN: dict[Any, Any] = {
    method: method.__wrapped__
    for name in ("__rdiv__", "__rfloordiv__", "__rmatmul__")
    if hasattr(method := getattr(torch.Tensor, name), "__wrapped__")
}
_PASSED_BY = ("__get__", "__set__", "backward")
#: Their functions are called linalg_norm.
_SPACES = (torch.linalg, torch.fft, torch.special)


_HOLDERS: tuple[tuple[str, Any], ...] = (
    ("Functional", torch.nn.functional),
    ("Torch", torch),
    ("Tensor", torch.Tensor),
)


def is_function(name: str) -> bool:
    """True if a name of a list is ``relu``, and no call or module."""
    return any(callable(getattr(holder, name, None)) for _, holder in _HOLDERS)


def api_names(function: str) -> list[str]:
    """``relu``: ``Functional.relu``, ``Torch.relu`` and ``Tensor.relu``, those that there are."""
    names = [
        f"{kind}.{function}"
        for kind, holder in _HOLDERS
        if callable(getattr(holder, function, None))
    ]
    if names:
        return names
    known = {name for _, holder in _HOLDERS for name in dir(holder) if not name.startswith("_")}
    text = f"api_list= names a function that torch does not have: {function!r}"
    raise ConfigError(f"{text}; {did_you_mean(function, known)}".rstrip("; "))
