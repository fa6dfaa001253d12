"""The events of one rank of a log that grows: verdicts on records, and what the watch found."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Optional

import numpy as np

from fastcheck.log.view import RankLog, merge_ranks
from fastcheck.record.event import Event
from fastcheck.record.format import RECORD_DTYPE, overflowed
from fastcheck.record.site import Site
from fastcheck.report.render import headline
from fastcheck.report.stop_report import StopReport

__all__ = ["LiveEvent", "RankEvents"]

_MOST_LINES, _MOST_WATCH, _MOST_RECORDS = 4096, 256, 4096

Key = tuple[int, int, int]


class LiveEvent(NamedTuple):
    """One line of the picture. ``kind``: ``counted``, ``other``, ``warning`` or ``watch``."""

    step: int
    rank: int
    kind: str
    text: str


class RankEvents:
    """Holds the first counted event, and the youngest of all."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lines: dict[Key, dict[str, Any]] = {}
        self._first: Optional[Key] = None
        self._records: deque[np.ndarray] = deque()
        self._watch: deque[LiveEvent] = deque(maxlen=_MOST_WATCH)
        #: How many there were: counted ones, others, warnings of the watch, and the rest of it.
        self.counts = {"counted": 0, "other": 0, "warning": 0, "watch": 0}

    def add(
        self, records: list[np.ndarray], lines: list[dict[str, Any]], watch: list[dict[str, Any]]
    ) -> None:
        """What is new of the rank's records, of its events and of the watch's events."""
        for some in records:
            bad = some[overflowed(some)]
            if len(bad):
                self._records.append(bad)
        while len(self._records) > 1 and sum(map(len, self._records)) > _MOST_RECORDS:
            self._records.popleft()
        for line in lines:
            self._add_line(line)
        for line in watch:
            step, text = line.get("step"), line.get("text")
            if isinstance(step, int) and isinstance(text, str):
                kind = "warning" if line.get("is_warning") else "watch"
                self.counts[kind] += 1
                self._watch.append(LiveEvent(step, self._rank, kind, text))

    def first(self, sites: dict[int, Site], world_size: int) -> Optional[LiveEvent]:
        """The first counted event, as the first line of a stop report; None without one."""
        return None if self._first is None else self._shown([self._first], sites, world_size)[0]

    def latest(self, sites: dict[int, Site], world_size: int, most: int) -> list[LiveEvent]:
        """The youngest events, oldest first; the watch's at the end of their step."""
        keys = [key for key in self._lines if key != self._first][-most:] if most else []
        found = [*self._shown(keys, sites, world_size), *list(self._watch)[-most:]]
        return sorted(found, key=lambda event: event.step)[-most:]

    def _add_line(self, line: dict[str, Any]) -> None:
        key = (line.get("step"), line.get("seq"), line.get("site"))
        if not all(type(one) is int for one in key):
            return
        place: Key = key  # type: ignore[assignment]  # checked one line above
        before = self._lines.pop(place, None)
        if before is not None:  # its verdict has changed
            self.counts[_kind(before)] -= 1
        self._lines[place] = line
        self.counts[_kind(line)] += 1
        is_counted = _kind(line) == "counted"
        if self._first == place and not is_counted:
            counted = [one for one, other in self._lines.items() if _kind(other) == "counted"]
            self._first = min(counted, default=None)
        elif is_counted and (self._first is None or place < self._first):
            self._first = place
        if len(self._lines) > _MOST_LINES:
            del self._lines[next(one for one in self._lines if one != self._first)]

    def _shown(self, keys: list[Key], sites: dict[int, Site], world_size: int) -> list[LiveEvent]:
        if not keys:
            return []
        held = [some[np.isin(some["seq"], [seq for _, seq, _ in keys])] for some in self._records]
        records = np.concatenate([np.zeros(0, RECORD_DTYPE), *held])
        lines = [self._lines[key] for key in keys]
        view = merge_ranks("", [RankLog(self._rank, records, dict(sites), lines, {}, 0)])
        return [
            LiveEvent(
                event.step,
                self._rank,
                "counted" if event.counted else "other",
                _text(event, world_size),
            )
            for event in view.events
        ]


def _text(event: Event, world_size: int) -> str:
    text = headline(StopReport(event, event.step, rank=event.rank, world_size=world_size))
    # Its record was read before, or is gone: only the verdict is known.
    return text.replace("no NaN or Inf", "NaN or Inf", 1) if not event.record["numel"] else text


def _kind(line: dict[str, Any]) -> str:
    return "counted" if line.get("counted") else "other"
