"""The position up to which a rank's log has been converted, and the records that follow.

A log with a limit deletes its oldest segments, and keeps their events in a file of its own
(``log/writer.py``). Where a segment was deleted before it was read, its events are taken from that
file, and no other record of it, which would be there twice.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field, replace
from typing import Any, Optional

import numpy as np

from fastcheck.log.history import joined
from fastcheck.log.reader import log_parts
from fastcheck.log.record_file import count_records, read_span, read_spans
from fastcheck.log.writer import is_kept
from fastcheck.record.format import RECORD_DTYPE
from fastcheck.record.site import is_valid

_NUMBER = re.compile(r"-([0-9]{6,18})\.bin$")
_ALL = 1 << 62
_MOST_STEPS = 1 << 53
Key = list[int]


def whole_number(value: Any) -> int:
    """``value``, if it is an int from 0 to 2 ** 62.

    Raises:
        ValueError: it is not.
    """
    if type(value) is int and 0 <= value <= _ALL:
        return value
    raise ValueError(f"no whole number: {str(value)[:60]}")


@dataclass(frozen=True)
class Position:
    """Everything before record ``record`` of segment ``segment`` has been converted, and the
    ``events`` first records of the file of kept events were considered.

    ``kept``: by segment, how many of its records that are kept were converted, and the first of
    them. ``lost_segments``: those that were deleted before they were seen to be read to their end.
    """

    identity: str = ""
    segment: int = 0
    record: int = 0
    events: int = 0
    lost_segments: int = 0
    damaged: int = 0
    kept: dict[int, tuple[int, Key]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return {**vars(self), "kept": {str(segment): list(at) for segment, at in self.kept.items()}}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Position:
        """The inverse of to_dict().

        Raises:
            LookupError, TypeError, ValueError or AttributeError: ``fields`` is not what it returns.
        """
        numbers = ("segment", "record", "events", "lost_segments", "damaged")
        kept = {
            int(segment): (whole_number(at[0]), [whole_number(key) for key in at[1]])
            for segment, at in fields["kept"].items()
        }
        return cls(
            identity=str(fields["identity"]),
            **{name: whole_number(fields[name]) for name in numbers},
            kept=kept,
        )


@dataclass(frozen=True)
class NewRecords:
    """Records as they were written, and the position behind them."""

    records: np.ndarray
    position: Position


def last_step(directory: str, rank: int) -> Optional[int]:
    """The step of the last record that the rank has written; None where there is none."""
    segments = _segments(directory, rank)
    for path in reversed(list(segments.values())):
        try:
            count = count_records(path)
            if count:
                return int(read_span(path, count - 1, count)["step"][0])
        except FileNotFoundError:
            continue
    return None


def next_step(directory: str, rank: int, position: Position) -> Optional[int]:
    """The step of the first record behind ``position``; None where there is none yet."""
    for index, path in _segments(directory, rank).items():
        if index < position.segment:
            continue
        start = position.record if index == position.segment else 0
        try:
            records = read_span(path, start, start + 1)
        except FileNotFoundError:
            continue
        if len(records):
            return int(records["step"][0]) if _valid(records).size else 0
    return None


def take_until(directory: str, rank: int, position: Position, end: int, most: int) -> NewRecords:
    """The records behind ``position`` up to the first record of step ``end`` or later, and not many
    more than ``most``.

    Raises:
        LogError: a segment can't be read, or a newer fastcheck has written it.
    """
    pieces: list[np.ndarray] = []
    segments = _segments(directory, rank)
    later = [index for index in segments if index >= position.segment]
    if later and later[0] > position.segment:
        events, position = _kept_of_lost(directory, rank, position)
        pieces.append(events)
    # A segment that is deleted while this reads ends it: the next call finds the gap.
    with contextlib.suppress(FileNotFoundError):
        for index, path in segments.items():
            if index < position.segment:
                continue
            if index > position.segment:
                position = replace(position, segment=index, record=0)
            for piece in read_spans(path, position.record):
                later_steps = np.flatnonzero((piece["step"] >= end) & _is_sound(piece))
                is_last = len(later_steps) > 0
                taken = piece[: int(later_steps[0])] if is_last else piece
                pieces.append(_valid(taken))
                position = _behind(position, taken)
                most -= len(taken)
                if is_last or most <= 0:
                    return NewRecords(joined(pieces), position)
    return NewRecords(joined(pieces), position)


def _segments(directory: str, rank: int) -> dict[int, str]:
    """The paths of the rank's segments by number, oldest first."""
    paths = {}
    for path in log_parts(directory).get(rank, ()):
        match = _NUMBER.search(path)
        paths[int(match.group(1)) if match else 0] = path
    return paths


def _is_sound(records: np.ndarray) -> np.ndarray:
    return is_valid(records) & (records["step"] >= 0) & (records["step"] < _MOST_STEPS)


def _valid(records: np.ndarray) -> np.ndarray:
    valid = _is_sound(records)
    return records if valid.all() else records[valid]


def _key(record: np.void) -> Key:
    return [int(record["step"]), int(record["seq"]), int(record["site"])]


def _behind(position: Position, taken: np.ndarray) -> Position:
    """The position behind ``taken``, which begins at ``position``."""
    kept = taken[is_kept(taken)]
    before = position.kept.get(position.segment)
    counted = position.kept
    if len(kept):
        count, first = before or (0, _key(kept[0]))
        counted = {**position.kept, position.segment: (count + len(kept), first)}
    damaged = int(((taken["version"] != 0) & ~_is_sound(taken)).sum())
    return replace(
        position,
        record=position.record + len(taken),
        kept=counted,
        damaged=position.damaged + damaged,
    )


def _kept_of_lost(directory: str, rank: int, position: Position) -> tuple[np.ndarray, Position]:
    """The events of deleted segments that were not converted, and the position behind the deleted
    segments.
    """
    path = os.path.join(directory, f"events-rank{rank}.bin")
    oldest, live, events = _undisturbed(directory, rank, path, position)
    doubles = {tuple(first): count for count, first in position.kept.values()}
    is_new = np.ones(len(events), bool)
    at = 0
    while at < len(events):
        key = tuple(_key(events[at]))
        if key in live:  # written before its segment is deleted, which has not happened yet
            events, is_new = events[:at], is_new[:at]
            break
        count = doubles.get(key, 0)
        is_new[at : at + count] = False
        at += max(count, 1)
    return _valid(events[is_new]), replace(
        position,
        segment=oldest,
        record=0,
        events=position.events + len(events),
        lost_segments=position.lost_segments + oldest - position.segment,
        kept={index: at for index, at in position.kept.items() if index >= oldest},
    )


def _undisturbed(
    directory: str, rank: int, path: str, position: Position
) -> tuple[int, set[tuple[int, ...]], np.ndarray]:
    """The oldest segment, the keys of its kept records, and the file of kept events, read while
    nothing was deleted.
    """
    while True:
        segments = _segments(directory, rank)
        oldest = min(segments, default=position.segment)
        try:
            events = read_span(path, position.events, _ALL)
        except FileNotFoundError:
            events = np.zeros(0, RECORD_DTYPE)
        try:
            records = read_span(segments[oldest], 0, _ALL) if segments else events[:0]
        except FileNotFoundError:
            continue
        if min(_segments(directory, rank), default=oldest) == oldest:
            keys = {tuple(_key(record)) for record in records[is_kept(records)]}
            return oldest, keys, events
