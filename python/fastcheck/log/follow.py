"""Reads a log while it grows: every byte once, by position, whatever is whole at the time.

A record or a line that is written in part is read when the rest has come. A segment that the log's
limit removed before it was read is counted as missed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np

from fastcheck.record.format import RECORD_BYTES
from fastcheck.record.site import Site
from fastcheck.utils.reading import open_regular, parse_json, reading

from .reader import find_logs, log_parts, read_meta, sites_of_lines
from .record_file import checked, read_spans

# The bytes of lines that are read at once.
_LINE_BYTES = 4 << 20
#: The bytes of each rank's new records that are read: the end of them.
TAIL_BYTES = 24 << 20


@dataclass
class Growth:
    """The growth of one rank's files since they were read before. ``records``: valid records, in
    order. ``sites``: new sites by number. ``events``, ``watch``: new lines. ``meta``: the meta
    file, if it changed. ``missed_bytes``: of segments that were removed unread, ``damaged``:
    records that no fastcheck can have written. ``total_bytes``: of all segments now; ``changed``:
    when the newest segment was written last, in seconds since the epoch.
    """

    rank: int
    records: list[np.ndarray] = field(default_factory=list)
    sites: dict[int, Site] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    watch: list[dict[str, Any]] = field(default_factory=list)
    meta: Optional[dict[str, Any]] = None
    missed_bytes: int = 0
    damaged: int = 0
    total_bytes: int = 0
    changed: float = 0.0


class LogFollower:
    """Follows the log at ``path`` (or the newest log right below it), which need not exist yet.

    ``tail_bytes``: of each rank, how much is read at once at most; of more than that the end.
    """

    def __init__(self, path: str, tail_bytes: int = TAIL_BYTES) -> None:
        self._path = path
        self._tail_bytes = tail_bytes
        #: The log's directory; None as long as there is none.
        self.directory: Optional[str] = None
        self._ranks: dict[int, _RankFollower] = {}

    def poll(self) -> list[Growth]:
        """Reads what is new, by rank; nothing as long as there is no log.

        Raises:
            LogError: the log can't be read, or a newer fastcheck writes it.
        """
        if self.directory is None:
            logs = find_logs(self._path)
            if not logs:
                return []
            self.directory = logs[-1]
        grown = []
        with reading():
            for rank, paths in log_parts(self.directory).items():
                if rank not in self._ranks:
                    self._ranks[rank] = _RankFollower(self.directory, rank, self._tail_bytes)
                grown.append(self._ranks[rank].poll(paths))
        return grown


class _RankFollower:
    """The files of one rank."""

    def __init__(self, directory: str, rank: int, tail_bytes: int) -> None:
        self._rank = rank
        self._sizes: dict[str, int] = {}
        self._tail_bytes = tail_bytes
        self._segment: Optional[str] = None
        self._offset = 0
        of_rank = f"-rank{rank}.jsonl"
        self._sites = _LineFollower(os.path.join(directory, "sites" + of_rank))
        self._events = _LineFollower(os.path.join(directory, "events" + of_rank))
        self._watch = _LineFollower(os.path.join(directory, "watch" + of_rank))
        self._meta_path = os.path.join(directory, f"meta-rank{rank}.json")
        self._meta_mark: Optional[tuple[int, int]] = None

    def poll(self, paths: list[str]) -> Growth:
        """``paths``: the segments that there are, oldest first; listed before anything is read, so
        that all but the last are complete.
        """
        growth = Growth(self._rank)
        self._read_segments(paths, growth)
        # After the records: a site is written before its first record.
        growth.sites = sites_of_lines(self._sites.poll())
        growth.events = list(self._events.poll())
        growth.watch = list(self._watch.poll())
        growth.meta = self._read_meta()
        return growth

    def _read_segments(self, paths: list[str], growth: Growth) -> None:
        if self._segment is not None and self._segment not in paths:
            # Removed; segments that came and went since then are not counted.
            growth.missed_bytes += max(self._sizes.get(self._segment, 0) - self._offset, 0)
        new = paths[_place(paths, self._segment) :]
        if new[:1] != [self._segment]:
            self._segment, self._offset = (new[0], 0) if new else (None, 0)
        unread = sum(map(_size_of, new)) - self._offset
        if unread > self._tail_bytes:
            # The end is what is of use now, and all of it may not fit into memory.
            self._segment, self._offset = _start(paths, self._tail_bytes)
            if self._sizes:
                growth.missed_bytes += unread - self._tail_bytes
        for path in paths[_place(paths, self._segment) :]:
            if path != self._segment:
                self._segment, self._offset = path, 0
            try:
                self._read(path, growth)
            except FileNotFoundError:
                continue  # removed since it was listed
        sizes = {path: self._sizes.get(path, 0) or _size_of(path) for path in paths[:-1]}
        self._sizes = {**sizes, **{path: _size_of(path) for path in paths[-1:]}}
        growth.total_bytes = sum(self._sizes.values())
        if paths:
            growth.changed = _size_and_time(paths[-1])[1]

    def _read(self, path: str, growth: Growth) -> None:
        for records in read_spans(path, self._offset // RECORD_BYTES):
            self._offset += len(records) * RECORD_BYTES
            piece = checked(records)
            growth.damaged += piece.damaged
            growth.records.append(piece.records)

    def _read_meta(self) -> Optional[dict[str, Any]]:
        try:
            status = os.stat(self._meta_path)
        except FileNotFoundError:
            return None
        mark = (status.st_mtime_ns, status.st_size)
        if mark == self._meta_mark:
            return None
        self._meta_mark = mark
        return read_meta(self._meta_path)


class _LineFollower:
    """A file of JSON lines that grows; it need not exist yet."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._offset = 0
        self._skips = False

    def poll(self) -> Iterator[dict[str, Any]]:
        """The objects of the lines that are whole; other lines are left out."""
        try:
            if os.path.getsize(self._path) <= self._offset:
                return
            with open_regular(self._path) as file:
                file.seek(self._offset)
                while data := file.read(_LINE_BYTES):
                    whole = data.rfind(b"\n") + 1
                    if not whole and len(data) < _LINE_BYTES:
                        return  # the rest is still to come
                    # A line longer than all that is read at once is passed over.
                    self._offset += whole or len(data)
                    file.seek(self._offset)
                    lines = data[:whole].split(b"\n")[int(self._skips) :]
                    self._skips = not whole
                    yield from _objects(lines)
        except FileNotFoundError:
            return


def _objects(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    for line in filter(None, lines):
        try:
            value = parse_json(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def _start(paths: list[str], tail_bytes: int) -> tuple[Optional[str], int]:
    """The place where the last ``tail_bytes`` of the segments begin."""
    left = tail_bytes
    for path in reversed(paths):
        size = _size_of(path) // RECORD_BYTES * RECORD_BYTES
        if size >= left:
            return path, (size - left) // RECORD_BYTES * RECORD_BYTES
        left -= size
    return (paths[0], 0) if paths else (None, 0)


def _place(paths: list[str], segment: Optional[str]) -> int:
    """The place of ``segment`` in ``paths`` or, if it was removed, of the segment after it."""
    if segment is None:
        return 0
    # Numbers are padded with zeros; a number that has more digits is larger.
    key = (len(segment), segment)
    return next((at for at, path in enumerate(paths) if (len(path), path) >= key), len(paths))


def _size_of(path: str) -> int:
    return _size_and_time(path)[0]


def _size_and_time(path: str) -> tuple[int, float]:
    """The size of a file, and when it was written last; 0 of a file that was removed."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return 0, 0.0
    return status.st_size, status.st_mtime
