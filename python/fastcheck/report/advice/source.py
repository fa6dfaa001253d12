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
        r"sqrt\(|\*\* ?-?\d*\.",
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
    source = _NOT_CODE.sub("", source)
    hints = [hint for pattern, hint in _IN_SOURCE if re.search(pattern, source)]
    if not hints:
        return None
    return Advice(f"Look at the line that assigns it: {'; '.join(hints[:2])}.")
