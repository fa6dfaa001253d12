"""Writes a record log, which ``log/reader.py`` reads.

Records are appended as they are, so that a crash loses at most the record being written.

In the directory, for rank R:
    meta-rankR.json               options and environment, and the optimizers from their first step
    sites-rankR.jsonl             one site a line, each before the first record that names it
    records-rankR-000000.bin ...  segments of raw records: numpy.fromfile(segment, RECORD_DTYPE)
    events-rankR.bin              records of events that outlived their segment
    events-rankR.jsonl            verdict and reason of every event
    schedule-rankR.jsonl          learning rates and other numbers that the run changes by plan
    watch-rankR.jsonl             events of install(watch=)
    batches-rankR.jsonl           what each step was trained on, if monitor.batch() named it
    range-rankR.jsonl             exponents of install(record="range")
    stop-rankR.json               the report of a stop whose culprit is of the rank

Every write is one os.write of whole records or lines, so that the log of a killed process is whole.
A log that fails while the run goes on switches itself off and warns once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Callable

import numpy as np

from fastcheck.errors import LogError, warn
from fastcheck.record.event import Event
from fastcheck.record.format import RECORD_BYTES, RECORD_DTYPE, VERDICT_MASK, Flag
from fastcheck.record.site import SiteTable
from fastcheck.utils.private import (
    FILE_MODE,
    AppendFile,
    make_private_folders,
    write_all,
    write_private,
)
from fastcheck.utils.text.numbers import to_json

FORMAT = 1
_SEGMENT_BYTES = 64 * 1024 * 1024
_SEGMENTS_IN_LIMIT = 8


def default_directory() -> str:
    """The directory that a stop writes to when no log_dir was given: ``fastcheck_log/<time>-<pid>``
    under the working directory.
    """
    return os.path.join("fastcheck_log", f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


def working_directory() -> str:
    """The current working directory; an empty string where it was deleted."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def found_at(path: str, start: str) -> str:
    """A path that was given when ``start`` was the working directory, as it is found from that of
    now: as it was given, unless the working directory has changed.
    """
    if start in ("", working_directory()):
        return path
    return os.path.normpath(os.path.join(start, path))


def is_default(path: str | None) -> bool:
    """True if a default_directory() has this path, of whatever time and process."""
    return re.fullmatch(r"fastcheck_log.[0-9]{8}-[0-9]{6}-[0-9]+", path or "") is not None


def unwritable(directory: str, error: OSError) -> LogError:
    """The error for a directory that a log was to be written to."""
    return LogError(
        "the log can't be written",
        expected="a directory that can be created and written",
        got=f"{directory}: {error.strerror or error}",
        hint="give another log_dir=, or none at all",
    )


class RecordLog:
    """Appends one rank's records to a directory. Not thread-safe: the caller holds the monitor's
    lock.

    Raises LogError when the directory can't be made or written at the start; later failures never
    raise: they are passed to ``on_failure`` with the path, or else warned of. ``directory`` is
    where it writes: the directory given or, when this rank has a log there already, ``run-2``,
    ``run-3``, ... under it, so that nothing of an earlier run is overwritten.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        rank: int = 0,
        limit_bytes: int | None = None,
        sites: SiteTable | None = None,
        meta: Mapping[str, Any] | None = None,
        on_failure: Callable[[Exception, str], None] | None = None,
    ) -> None:
        self.rank = rank
        self._on_failure = on_failure
        self.limit_bytes = limit_bytes
        self.failed = False
        self.dropped_records = 0
        self.dropped_events = 0
        self._sites = sites
        self._sites_written = 0
        self._files: dict[str, AppendFile] = {}
        self._bytes = 0
        # Events outlive their segment: they may take half of the limit.
        self._event_bytes = 0
        self._event_limit = None if limit_bytes is None else limit_bytes // 2
        # Closed segments: path, bytes, has events.
        self._segments: deque[tuple[str, int, bool]] = deque()
        self._segment_index = 0
        self._segment_bytes = 0
        self._segment_has_events = False
        share = _SEGMENT_BYTES
        if limit_bytes is not None:
            share = min(share, limit_bytes // _SEGMENTS_IN_LIMIT)
        self._segment_limit = max(share // RECORD_BYTES, 1) * RECORD_BYTES
        try:
            self._place = self._claim(os.fspath(directory), dict(meta or {}))
        except OSError as error:
            raise unwritable(os.fspath(directory), error) from error

    @property
    def directory(self) -> str:
        return found_at(self._place, self._start)

    def append(self, records: np.ndarray, step: int) -> bool:
        """Writes whole records (RECORD_DTYPE). False once the log is switched off. ``step`` only
        names the step in the message of a failure.
        """

        def write() -> None:
            self._write_sites()
            for part in self._parts(records):
                self._append_to_segment(part)
            self._evict()

        return self._attempt(write, step) if len(records) else not self.failed

    def append_event(self, *events: Event) -> bool:
        """Writes verdict and reason of each as one line. Their records go through append()."""

        def write() -> None:
            self._write_sites()
            for event in events:
                data = _line(_fields_of(event))
                if self._has_room(len(data)):
                    self._write_event(self._path("events", "jsonl"), data)
                else:
                    self._drop_event()

        return self._attempt(write, events[0].step if events else None)

    def append_line(self, kind: str, line: Mapping[str, Any]) -> None:
        """Writes a line to ``<kind>-rankR.jsonl``. Never raises."""
        self._attempt(lambda: self._write(self._path(kind, "jsonl"), _line(line)))

    def add_meta(self, **fields: Any) -> None:
        """Adds to the meta file what wasn't known when the log was begun. Replaces the file as a
        whole, so that a crash leaves one of the two; never raises.
        """
        if not self.failed:
            self._meta.update(fields)
            self._attempt(self._write_meta)

    def _write_meta(self) -> None:
        path = os.path.join(self._root, f"meta-rank{self.rank}.json")
        write_private(path, _meta_text(self._meta))

    def sync(self) -> None:
        """Waits until everything written is on the disk, so that it survives a power cut."""

        def sync() -> None:
            for file in self._files.values():
                file.sync()

        self._attempt(sync)

    def close(self) -> None:
        """Closes the files, and notes the time in the meta file. Idempotent; the log takes nothing
        more afterwards.
        """
        # Not in a forked child, whose parent goes on writing.
        if not self.failed and os.getpid() == self._meta["pid"]:
            self._meta["ended"] = _now()
            if self.dropped_events:
                self._meta["dropped_events"] = self.dropped_events
            with contextlib.suppress(Exception):
                self._write_meta()
        self.failed = True
        self._close_files()

    def _claim(self, directory: str, meta: dict[str, Any]) -> str:
        """Creates the meta file, which marks the directory as this rank's; O_EXCL settles a race of
        two processes.
        """
        meta.update(
            format=FORMAT,
            record_bytes=RECORD_BYTES,
            rank=self.rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            created=_now(),
        )
        self._meta = meta
        text = _meta_text(meta)
        run = 1
        while True:
            place = directory if run == 1 else os.path.join(directory, f"run-{run}")
            make_private_folders(place)
            path = os.path.join(place, f"meta-rank{self.rank}.json")
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
            except FileExistsError:
                run += 1
                continue
            # A change of the working directory must not move the log.
            self._start, self._root = working_directory(), os.path.abspath(place)
            try:
                write_all(descriptor, text)
            except OSError as error:
                error.filename = path
                os.unlink(path)
                raise
            finally:
                os.close(descriptor)
            return place

    def _path(self, kind: str, ending: str, number: int | None = None) -> str:
        tail = "" if number is None else f"-{number:06d}"
        return os.path.join(self._root, f"{kind}-rank{self.rank}{tail}.{ending}")

    def _write(self, path: str, data: bytes | memoryview) -> None:
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = AppendFile(path)
        file.append(data)
        self._bytes += len(data)

    def _has_room(self, size: int) -> bool:
        """True if there is room for an event's line or record. The first events are kept: later
        events follow from them.
        """
        return self._event_limit is None or self._event_bytes + size <= self._event_limit

    def _write_event(self, path: str, data: bytes | memoryview) -> None:
        self._write(path, data)
        self._event_bytes += len(data)

    def _drop_event(self) -> None:
        self.dropped_events += 1
        if self.dropped_events & (self.dropped_events - 1) == 0:
            # Not every time: a process that is killed leaves at least half of the number.
            self.add_meta(dropped_events=self.dropped_events)

    def _write_sites(self) -> None:
        new = [] if self._sites is None else self._sites.to_dicts(self._sites_written)
        if new:
            self._write(self._path("sites", "jsonl"), b"".join(map(_line, new)))
            self._sites_written += len(new)

    def _parts(self, records: np.ndarray) -> list[np.ndarray]:
        """Whole, unless the records are more than a segment: then in pieces, so that the limit can
        hold.
        """
        size = self._segment_limit // RECORD_BYTES
        return [records[start : start + size] for start in range(0, len(records), size)]

    def _append_to_segment(self, records: np.ndarray) -> None:
        data = record_bytes(records)
        if self._segment_bytes and self._segment_bytes + len(data) > self._segment_limit:
            path = self._path("records", "bin", self._segment_index)
            self._files.pop(path).close()
            self._segments.append((path, self._segment_bytes, self._segment_has_events))
            self._segment_index += 1
            self._segment_bytes = 0
            self._segment_has_events = False
        self._write(self._path("records", "bin", self._segment_index), data)
        self._segment_bytes += len(data)
        self._segment_has_events |= bool(is_kept(records).any())

    def _evict(self) -> None:
        while self.limit_bytes is not None and self._bytes > self.limit_bytes and self._segments:
            path, size, has_events = self._segments[0]
            records = np.fromfile(path, RECORD_DTYPE)
            kept = is_kept(records)
            if has_events:
                data = record_bytes(records[kept])
                if not self._has_room(len(data)):
                    kept[:] = False
                else:
                    # Before the segment goes: a crash in between leaves them twice, and the reader
                    # drops the double.
                    self._write_event(self._path("events", "bin"), data)
            os.unlink(path)
            self._segments.popleft()
            self._bytes -= size
            self.dropped_records += int((~kept).sum())

    def _attempt(self, write: Callable[[], object], step: int | None = None) -> bool:
        """Writes; a failure switches the log off: it must never break the run that it describes.
        False once it is off.
        """
        if not self.failed:
            try:
                write()
            except Exception as error:
                self._switch_off(error, step)
        return not self.failed

    def _switch_off(self, error: Exception, step: int | None) -> None:
        self.failed = True
        self._close_files()
        if self._on_failure is not None:
            self._on_failure(error, getattr(error, "filename", None) or self.directory)
            return
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        when = "" if step is None else f" at step {step}"
        warn(
            f"fastcheck: the log in {self.directory} stopped{when}: {reason}. Training goes on "
            "and is still checked; what was written until then can be read."
        )

    def _close_files(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        self._files.clear()


def save_log(
    directory: str | os.PathLike[str],
    rank: int,
    records: np.ndarray,
    events: Iterable[Event],
    sites: SiteTable,
    meta: Mapping[str, Any],
    watched: Iterable[dict[str, Any]],
) -> str | None:
    """Writes a whole log at once, for a stop without log_dir. Never raises: warns and returns None
    when it can't.
    """
    try:
        log = RecordLog(directory, rank, None, sites, meta)
    except Exception as error:
        first = str(error).replace("\n", ";")
        warn(f"fastcheck: the last steps' records could not be saved: {first}")
        return None
    step = int(records["step"][-1]) if len(records) else 0
    if not (log.append(records, step) and log.append_event(*events)):
        return None
    for line in watched:
        log.append_line("watch", line)
    log.close()
    return log.directory


def _fields_of(event: Event) -> dict[str, Any]:
    return {
        "step": event.step,
        "seq": int(event.record["seq"]),
        "call": int(event.record["call"]),
        "site": int(event.record["site"]),
        "verdict": int(event.verdict),
        "verdict_name": event.verdict.name.lower(),
        "counted": bool(event.counted),
        "rank": event.rank,
        **({"line": event.line} if event.line else {}),
        **({"api": event.api} if event.api else {}),
        **({"inputs": event.inputs} if event.inputs else {}),
        "reason": event.reason,
        # Not always the record's own: a gradient is blamed on the module that read it.
        "blamed": vars(event.site),
    }


def is_kept(records: np.ndarray) -> np.ndarray:
    """A boolean array of the records that outlive their segment: events, and whatever was given a
    verdict.
    """
    flags = records["flags"]
    return ((flags & int(Flag.EVENT)) != 0) | ((flags & VERDICT_MASK) != 0)


def record_bytes(records: np.ndarray) -> memoryview:
    """The records as format 1 has them, 192 bytes each. Shares their memory where it can."""
    return np.ascontiguousarray(records.astype(RECORD_DTYPE, copy=False)).view(np.uint8).data


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _meta_text(meta: Mapping[str, Any]) -> bytes:
    return json.dumps(to_json(meta), allow_nan=False, indent=1, default=str).encode() + b"\n"


def _line(value: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):  # a NaN, or a number of NumPy
        text = json.dumps(to_json(dict(value)), allow_nan=False)
    return text.encode() + b"\n"
