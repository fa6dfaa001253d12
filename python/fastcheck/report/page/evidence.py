"""The records that the verdict of a page is built from: those up to the first counted event."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

import numpy as np

from fastcheck.log.history import joined
from fastcheck.log.view import LogView, RankLog, merge_ranks
from fastcheck.record.format import overflowed
from fastcheck.record.site import Site

EventLines = list[dict[str, Any]]

# Records before the event, and around it; events of a rank whose records are looked for.
_MOST_BEFORE, _MOST_AROUND, _MOST_EVENTS = 1 << 15, 1 << 18, 4096
#: Steps before and after the first event that the page shows in full.
STEPS_BEFORE, STEPS_AFTER = 24, 8


class FirstEvent(NamedTuple):
    """The first event of a log by its line, with the rank and the site's number there."""

    rank: int
    step: int
    seq: int
    site: int


class Evidence:
    """The parts of a log's pieces that the page needs, collected as the pieces are read."""

    def __init__(self, lines: Mapping[int, EventLines]) -> None:
        self._lines = {rank: _important(events) for rank, events in lines.items()}
        self.first = _first(self._lines)
        #: True if any event is counted; the first is a counted event then.
        self.is_counted = any(
            bool(line.get("counted")) for events in self._lines.values() for line in events
        )
        self._seqs = {
            rank: np.array(sorted({line["seq"] for line in events}), np.int64)
            for rank, events in self._lines.items()
        }
        self._kept: dict[int, list[np.ndarray]] = {rank: [] for rank in lines}
        self._before: deque[np.ndarray] = deque()
        self._around: list[np.ndarray] = []

    def add(self, rank: int, records: np.ndarray) -> None:
        """The next records of this rank."""
        seqs = self._seqs.get(rank)
        if seqs is not None and len(seqs):
            self._keep(rank, records[np.isin(records["seq"], seqs)])
        first = self.first
        if first is None or first.rank != rank:
            return
        distance = records["step"] - first.step
        is_near = (distance >= -STEPS_BEFORE) & (distance <= STEPS_AFTER)
        if is_near.any() and sum(map(len, self._around)) < _MOST_AROUND:
            self._around.append(records[is_near])
        is_before = distance <= 0
        if not is_before.any():
            return
        self._before.append(records if is_before.all() else records[is_before])
        while sum(map(len, self._before)) - len(self._before[0]) > _MOST_BEFORE:
            old = self._before.popleft()
            self._keep(rank, old[old["site"] == first.site])

    def around(self) -> np.ndarray:
        """The records of the steps around the first event on its rank; ``site`` as written."""
        return joined(self._around)

    def view(
        self, directory: str, sites: Mapping[int, dict[int, Site]], meta: Mapping[int, Any]
    ) -> LogView:
        """The evidence as a log of its own: events with their records, and what came before the
        first event on its rank. ``sites``, ``meta``: by rank.
        """
        parts = []
        for rank, lines in sorted(self._lines.items()):
            held = list(self._kept[rank])
            if self.first is not None and self.first.rank == rank:
                held += self._before
            parts.append(RankLog(rank, _in_order(joined(held)), sites[rank], lines, meta[rank], 0))
        return merge_ranks(directory, parts)

    def spread(self) -> np.ndarray:
        """The records of the first event's step on its rank that overflowed, in device order."""
        records = joined(self._before)
        if self.first is not None:
            records = records[records["step"] == self.first.step]
        return _in_order(records[overflowed(records)])

    def _keep(self, rank: int, records: np.ndarray) -> None:
        if len(records):
            self._kept[rank].append(records)


def _important(lines: EventLines) -> EventLines:
    """The events with a place, counted events first where there are too many."""
    whole = [
        line
        for line in lines
        if all(type(line.get(name)) is int for name in ("step", "seq", "site"))
        and all(abs(line[name]) < 1 << 63 for name in ("step", "seq", "site"))
    ]
    if len(whole) > _MOST_EVENTS:
        whole = sorted(whole, key=lambda line: not line.get("counted"))[:_MOST_EVENTS]
    return whole


def _first(lines: Mapping[int, EventLines]) -> Optional[FirstEvent]:
    events = [
        (not line.get("counted"), line["step"], line["seq"], rank, line["site"])
        for rank, some in lines.items()
        for line in some
    ]
    if not events:
        return None
    _, step, seq, rank, site = min(events)
    return FirstEvent(rank, step, seq, site)


def _in_order(records: np.ndarray) -> np.ndarray:
    """The records in the order of step and sequence number, each once."""
    ordered = records[np.lexsort((records["seq"], records["step"]))]
    if len(ordered) < 2:
        return ordered
    same = np.ones(len(ordered) - 1, bool)
    for name in ("step", "seq", "site"):
        same &= ordered[name][1:] == ordered[name][:-1]
    return ordered[np.concatenate([[True], ~same])]
