"""Operators that op level did not observe, as rows in the meta file of a log."""

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
    """The rows of the meta files of all ranks, added up; what is no row is left out."""
    calls: Counter[tuple[str, str]] = Counter()
    for meta in metas:
        rows = meta.get(_KEY)
        for row in rows if isinstance(rows, list) else ():
            count = row.get("calls") if isinstance(row, dict) else None
            if isinstance(count, int):
                calls[str(row.get("op")), str(row.get("reason"))] += count
    return [UnreadOp(op, reason, count) for (op, reason), count in calls.most_common()]
