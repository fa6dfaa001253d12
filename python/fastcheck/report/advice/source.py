"""Advice on the lines of a program that have assigned a bad value, by what they do."""

from __future__ import annotations

import re

from .case import Advice

#: Strings and comments.
_NOT_CODE = re.compile(r"""(["']).*?(?:\1|$)|#[^;]*""")
#: Operations that the line of Python that assigned a bad value may do.
_IN_SOURCE = (
    (r"\.(?:std|var)\(", "a std or var of one element is 0/0, and that of equal numbers is 0"),
    (r"\blog(?:2|10|1p)?\(", "log(0) is -Inf, and log of a negative number is NaN: clamp before"),
    (
        r"sqrt\(|(?:\*\* ?|\bpow\((?:[^()]*, ?)?)-?\d*\.",
        "a root or power of a negative number is NaN, and a negative power of 0 Inf: clamp before",
    ),
    (r"\bexp2?\(", "exp of a large number is Inf: clamp before"),
    (
        r"\.half\(|\bfloat16",
        "a cast to float16 makes Inf of what is above 65,504: keep it in float32",
    ),
    (
        r"[^/]/[^/]",
        "it divides, and 0/0 is NaN (Inf/Inf, too), x/0 Inf: add an eps to the divisor or clamp it",
    ),
)


def on_source(source: str) -> Advice | None:
    """Advice on lines of Python that have assigned NaN or Inf, or have gone before that."""
    hints = _hints(source)
    return Advice(f"Look at the line that assigns it: {hints}.") if hints else None


def on_written(written: tuple[str, ...]) -> Advice | None:
    """Advice on the places that may have made NaN or Inf, each with its source."""
    hints = how_written(written)
    return Advice(f"Look at the lines that may have made it: {hints}.") if hints else None


def how_written(written: tuple[str, ...]) -> str:
    """Says how these places may have made it; empty if it is not known."""
    return _hints("; ".join(place.partition(": ")[2] for place in written))


def _hints(source: str) -> str:
    code = _NOT_CODE.sub("", source)
    return "; ".join([hint for pattern, hint in _IN_SOURCE if re.search(pattern, code)][:2])
