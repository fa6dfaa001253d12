"""Fields of the meta file of a log that say what it lacks: operators that op level did not observe,
a device that was lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_KEY = "not_observed"


class UnreadOp(NamedTuple):
    """``calls`` of the operator had a tensor that was not observed."""

    op: str
    reason: str
    calls: int


def to_meta(rows: Iterable[UnreadOp]) -> dict[str, Any]:
    """The rows as a field of the meta file."""
    return {_KEY: [row._asdict() for row in rows]}


def from_meta(metas: Iterable[Mapping[str, Any]]) -> list[UnreadOp]:
    """The rows of the meta files of all ranks, added up; invalid entries are left out."""
    calls: Counter[tuple[str, str]] = Counter()
    for meta in metas:
        rows = meta.get(_KEY)
        for row in rows if isinstance(rows, list) else ():
            count = row.get("calls") if isinstance(row, dict) else None
            if isinstance(count, int):
                calls[str(row.get("op")), str(row.get("reason"))] += count
    return [UnreadOp(op, reason, count) for (op, reason), count in calls.most_common()]


_LOST = "lost_device"


def lost_to_meta(message: str, step: int) -> dict[str, Any]:
    """The field: what the device reported, in which step."""
    return {_LOST: {"message": message, "step": step}}


def lost_lines(metas: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """A line for each rank whose device was lost, by the meta files of the ranks."""
    lines = []
    for rank, meta in sorted(metas.items()):
        lost = meta.get(_LOST)
        if isinstance(lost, dict) and isinstance(lost.get("step"), int):
            of_rank = f" of rank {rank}" if len(metas) > 1 else ""
            lines.append(
                f"the device{of_rank} was lost in step {lost['step']:,}: {lost.get('message')}"
            )
    return lines
