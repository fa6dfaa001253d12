"""What op level did not observe, and why: counted by operator and reason, in C++ and only where an
operator meets something that can't be read.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable, NamedTuple

from ._layout import wrap

__all__ = ["UnreadOp", "from_meta", "to_meta", "unread_lines", "unread_ops"]

_SHOWN = 10
_KEY = "not_observed"
_IN_COMPILED = "compiled code calls no operators: what it takes and returns is read"


class UnreadOp(NamedTuple):
    """``calls`` of the operator had a tensor that was not observed."""

    op: str
    reason: str
    calls: int


def unread_ops(observer: Any, compiled: dict[str, int]) -> list[UnreadOp]:
    """Most calls first. ``compiled``: how often modules were called within compiled code."""
    rows = [
        UnreadOp(op, reason, calls)
        for op, reason, calls, has_no_values in observer.unread()
        # What is traced runs on fake tensors first, and then for good.
        if not (has_no_values and _has_traced())
    ]
    rows += [
        UnreadOp(f"{name} (compiled)", _IN_COMPILED, calls) for name, calls in compiled.items()
    ]
    return sorted(rows, key=lambda row: (-row.calls, row.op))


def unread_lines(rows: Sequence[UnreadOp], width: int) -> list[str]:
    """As lines for a person; none for no rows."""
    lines = []
    for row in rows[:_SHOWN]:
        times = "1 call" if row.calls == 1 else f"{row.calls:,} calls"
        lines += wrap(f"{row.op}, {times}: {row.reason}", width, rest="  ")
    hidden = len(rows) - _SHOWN
    return lines + ([f"and {hidden:,} more"] if hidden > 0 else [])


def to_meta(rows: Iterable[UnreadOp]) -> dict[str, Any]:
    """What the meta file of a log says of it."""
    return {_KEY: [row._asdict() for row in rows]}


def describing(
    describe: Callable[[], dict[str, Any]], rows: weakref.WeakMethod[Callable[[], list[UnreadOp]]]
) -> Callable[[], dict[str, Any]]:
    """``describe()``, and what ``rows`` tells at that time."""

    def both() -> dict[str, Any]:
        method = rows()
        return {**describe(), **to_meta([] if method is None else method())}

    return both


def from_meta(metas: Iterable[Mapping[str, Any]]) -> list[UnreadOp]:
    """Of the meta files of all ranks."""
    calls: Counter[tuple[str, str]] = Counter()
    for meta in metas:
        for row in meta.get(_KEY) or ():
            calls[str(row["op"]), str(row["reason"])] += int(row["calls"])
    return [UnreadOp(op, reason, count) for (op, reason), count in calls.most_common()]


def _has_traced() -> bool:
    utils = sys.modules.get("torch._dynamo.utils")
    counters: Any = getattr(utils, "counters", None)
    return bool(counters and counters.get("frames", {}).get("total"))
