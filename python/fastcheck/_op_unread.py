"""What op level did not observe, and why: counted by operator and reason, in C++ and only where an
operator meets something that can't be read.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ._layout import table

__all__ = ["UnreadOp", "from_meta", "to_meta", "unread_ops", "unread_table"]

_SHOWN = 10
_KEY = "not_observed"
_IN_COMPILED = "compiled code calls no operators"


class UnreadOp(NamedTuple):
    """``calls`` of the operator had a tensor that was not observed."""

    op: str
    reason: str
    calls: int


def unread_ops(observer: Any, compiled: dict[str, int]) -> list[UnreadOp]:
    """Most calls first. ``compiled``: how often modules were called within compiled code."""
    rows = [
        UnreadOp(op, reason, calls)
        for op, reason, calls, is_fake in observer.unread()
        # What is traced runs on fake tensors, and then for good.
        if not (is_fake and _has_traced())
    ]
    rows += [UnreadOp(f"in {name}", _IN_COMPILED, calls) for name, calls in compiled.items()]
    return sorted(rows, key=lambda row: (-row.calls, row.op))


def unread_table(rows: Sequence[UnreadOp], width: int) -> list[str]:
    """As lines for a person; none for no rows."""
    if not rows:
        return []
    shown = [[row.op, f"{row.calls:,}", row.reason] for row in rows[:_SHOWN]]
    lines = table(["operator", "calls", "not observed because"], shown, width=width)
    hidden = len(rows) - len(shown)
    return lines + ([f"and {hidden:,} more"] if hidden else [])


def to_meta(rows: Iterable[UnreadOp]) -> dict[str, Any]:
    """What the meta file of a log says of it."""
    return {_KEY: [row._asdict() for row in rows]}


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
