"""Names of torch's Python API as the observer carries them: one number for a call, and its spelling
in msprobe's style, ``Functional.linear.145``.
"""

from __future__ import annotations

import threading

__all__ = ["intern_call", "spell_call"]

_CALL_BITS = 32

_lock = threading.Lock()
_numbers: dict[str, int] = {}
# Of a process; there are no more of them than functions in torch's API.
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


def spell_call(number: int) -> str:
    """The opposite of intern_call(); empty for -1, which is no call."""
    if number < 0:
        return ""
    return f"{_names[number >> _CALL_BITS]}.{number & (1 << _CALL_BITS) - 1}"
