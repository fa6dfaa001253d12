"""Converts the log of a node to Parquet, each record exactly once, while it grows or afterwards.

For each span of steps the files of records are written first, then the manifest that makes them
count together with how far the log was read. So a collector that is killed at any point, and
started again, neither loses a record nor writes one twice.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Callable, Optional

import numpy as np

from fastcheck.errors import ConfigError, LogError
from fastcheck.log.reader import log_parts, read_event_lines, read_sites_and_meta
from fastcheck.record.site import Site

from . import schema
from .manifest import Manifest, plain_name
from .positions import NewRecords, Position, last_step, next_step, take_until
from .store import Folder


def small_tables(
    directory: str, ranks: Iterable[int], node: str
) -> dict[str, list[dict[str, Any]]]:
    """The rows of each of the small tables."""
    sites: dict[int, dict[str, Any]] = {}
    made: dict[str, list[dict[str, Any]]] = {"ranks": [], "events": [], "meta": []}
    for rank in ranks:
        known, meta = read_sites_and_meta(directory, rank)
        for position, site in sorted(known.items()):
            sites.setdefault(schema.site_id(site), site_row(position, site))
        made["ranks"].append(rank_row(rank, node, meta))
        text = json.dumps(meta)
        made["meta"].append({"rank": rank, "format": schema.RECORD_FORMAT, "text": text})
        made["events"] += _events(directory, rank, known)
    return {"sites": list(sites.values()), **made}


def site_row(position: int, site: Site) -> dict[str, Any]:
    """A row of the table of sites. ``position``: the order in which the site was first seen."""
    return {"site": schema.site_id(site), "position": position, "name": str(site), **site.to_dict()}


def rank_row(rank: int, node: str, meta: dict[str, Any]) -> dict[str, Any]:
    """A row of the table of ranks, from what the meta file holds; None where it is unknown."""
    place = meta.get("placement")
    place = place if isinstance(place, dict) else {}
    at = place.get("coordinates")
    at = at if isinstance(at, dict) else {}
    return {
        "rank": rank,
        "node": node,
        "host": _text(place.get("host") or meta.get("host")),
        "device": _text(place.get("device")),
        "serial": _text(place.get("serial")),
        "world_size": _number(place.get("world_size")),
        **{name: _number(at.get(name)) for name in schema.COORDINATES},
        "replica_group": _text(place.get("replica_group")),
        "pid": _number(meta.get("pid")),
        "created": _text(meta.get("created")),
    }


def _events(directory: str, rank: int, sites: dict[int, Site]) -> list[dict[str, Any]]:
    # An event written again (its verdict changed) stands for the earlier line.
    latest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in read_event_lines(directory, rank)[0]:
        step, seq, number = (_number(line.get(name)) for name in ("step", "seq", "site"))
        if step is None or number is None:
            continue
        site = sites.get(number)
        latest[step, seq, number] = {
            "rank": rank,
            "step": step,
            "site": number if site is None else schema.site_id(site),
            "seq": seq,
            "verdict": _text(line.get("verdict_name")),
            "counted": bool(line.get("counted")),
            "name": f"site {number}" if site is None else str(site),
            "reason": _text(line.get("reason")),
        }
    return list(latest.values())


def _text(value: Any) -> Optional[str]:
    return None if value is None else str(value)


def _number(value: Any) -> Optional[int]:
    is_one = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62
    return value if is_one else None


_SOURCES = ("meta", "sites", "events")
# The rows of a batch: about 1.5 GB while it is converted.
_MOST_ROWS = 1 << 22
_FLUSH_SECONDS = 600.0


@dataclass(frozen=True)
class Written:
    """The rows and files that a call of Collector.take() has written. ``lost_segments`` and
    ``damaged`` are those of all calls since the run began.
    """

    rows: int = 0
    files: int = 0
    bytes: int = 0
    lost_segments: int = 0
    damaged: int = 0


def attempts(log: str) -> list[str]:
    """The log directories at ``log`` and those of later runs of the same program, ``run-2``, ...

    Raises:
        LogError: ``log`` can't be read.
    """
    logs = [log] if log_parts(log) else []
    number = 2
    while os.path.isdir(path := os.path.join(log, f"run-{number}")):
        if log_parts(path):
            logs.append(path)
        number += 1
    return logs


class Collector:
    """Converts one log directory into files of ``run`` and ``node`` in ``folder``.

    Reads files and nothing else of the program that writes them. Only one collector may write the
    files of a node at a time.
    """

    def __init__(
        self, log: str, folder: Folder, run: str, node: str, *, steps_per_file: int = 100
    ) -> None:
        self.log = log
        self.run = plain_name(run)
        self.node = plain_name(node)
        self._folder = folder
        self._manifest = Manifest.read(folder, self.run, self.node, steps_per_file)
        self._sources: dict[str, tuple[int, int]] = {}
        self._drop_uncounted()

    def take(self, is_final: bool = True) -> Written:
        """Converts what is new: the spans of steps that every rank has left behind, and with
        ``is_final`` the others too, as far as they were written.

        Raises:
            LogError: the log can't be read, or the folder not be written.
            ConfigError: the node's files are those of another log.
        """
        try:
            return self._take(is_final)
        except OSError as error:
            raise LogError(f"{error.filename or self.log} can't be read: {error}") from error

    def _take(self, is_final: bool) -> Written:
        ranks = sorted(log_parts(self.log))
        self._follow_sources(ranks)
        most = max(_MOST_ROWS // max(len(ranks), 1), 1)
        rows = files = size = 0
        while True:
            end = self._end_of_span(ranks)
            if end is None or not (is_final or self._have_all_reached(ranks, end)):
                break
            batch = {
                rank: take_until(self.log, rank, self._manifest.ranks[rank], end, most)
                for rank in ranks
            }
            for made, count in self._write_batch(batch):
                rows, files, size = rows + count, files + 1, size + made
        at = self._manifest.ranks.values()
        lost, damaged = sum(place.lost_segments for place in at), sum(place.damaged for place in at)
        return Written(rows, files, size, lost, damaged)

    def _drop_uncounted(self) -> None:
        """Deletes files whose manifest was never written; their records are written again."""
        start = f"run={self.run}/"
        for path in self._folder.files(start[:-1]):
            below = path[len(start) :]
            name = below.rpartition("/")[2]
            is_own = name.startswith(f"node={self.node}.")
            if below.startswith("step=") and is_own and below not in self._manifest.files:
                self._folder.delete(path)

    def _check_identity(self, ranks: list[int]) -> None:
        for rank in ranks:
            _, meta = read_sites_and_meta(self.log, rank)
            identity = " ".join(str(meta.get(name, "")) for name in ("host", "pid", "created"))
            known = self._manifest.ranks.get(rank)
            if known is None:
                self._manifest.ranks[rank] = Position(identity)
            elif known.identity.strip() == "":
                # The meta file had not been written, or was lost.
                self._manifest.ranks[rank] = replace(known, identity=identity)
            elif known.identity != identity and identity.strip():
                raise ConfigError(
                    f"node {self.node} of run {self.run} has the files of another log, begun by "
                    f"{known.identity}, not of {self.log}, begun by {identity}: give another --run "
                    "or --node"
                )

    def _follow_sources(self, ranks: list[int]) -> None:
        """Rewrites the small tables whose sources have changed."""
        sources = dict(self._sizes_and_times(ranks))
        if sources == self._sources and all(rank in self._manifest.ranks for rank in ranks):
            return
        self._check_identity(ranks)
        for kind, rows in small_tables(self.log, ranks, self.node).items():
            data = schema.table_bytes(schema.small_table(kind, rows))
            self._folder.write(f"run={self.run}/{kind}/node={self.node}.parquet", data)
        self._sources = sources

    def _sizes_and_times(self, ranks: list[int]) -> Iterator[tuple[str, tuple[int, int]]]:
        for rank in ranks:
            for kind in _SOURCES:
                name = f"{kind}-rank{rank}.{'json' if kind == 'meta' else 'jsonl'}"
                try:
                    status = os.stat(os.path.join(self.log, name))
                except OSError:
                    continue
                yield name, (status.st_size, status.st_mtime_ns)

    def _end_of_span(self, ranks: list[int]) -> Optional[int]:
        """The step behind the span that the earliest new record belongs to; None: nothing is
        new.
        """
        at = self._manifest.ranks
        steps = [next_step(self.log, rank, at[rank]) for rank in ranks]
        known = [step for step in steps if step is not None]
        each = self._manifest.steps_per_file
        return (min(known) // each + 1) * each if known else None

    def _have_all_reached(self, ranks: list[int], end: int) -> bool:
        """True if every rank has written a record of step ``end`` or later."""
        steps = [last_step(self.log, rank) for rank in ranks]
        return all(step is not None and step >= end for step in steps)

    def _write_batch(self, batch: dict[int, NewRecords]) -> list[tuple[int, int]]:
        """Writes the rows of each span of steps as a file, then the manifest; returns the size and
        rows of each file.
        """
        pieces = []
        for rank, new in batch.items():
            sites, _ = read_sites_and_meta(self.log, rank)
            if len(new.records):
                pieces.append(schema.record_rows(rank, new.records, sites))
        known = self._manifest
        batch_number = known.batch + 1
        written = []
        if pieces:
            rows = schema.sorted_rows(pieces)
            spans = rows["step"] // known.steps_per_file
            for span in np.unique(spans).tolist():
                part = {name: column[spans == span] for name, column in rows.items()}
                name = self._file_name(span, batch_number)
                data = schema.table_bytes(schema.record_table(part))
                self._folder.write(f"run={self.run}/{name}", data)
                written.append((name, len(data), len(part["step"])))
        manifest = replace(
            known,
            batch=batch_number,
            rows=known.rows + sum(count for _, _, count in written),
            files={**known.files, **{name: count for name, _, count in written}},
            ranks={**known.ranks, **{rank: new.position for rank, new in batch.items()}},
        )
        # After a failure the same names are written again.
        manifest.write(self._folder, self.run)
        self._manifest = manifest
        return [(size, count) for _, size, count in written]

    def _file_name(self, span: int, batch_number: int) -> str:
        each = self._manifest.steps_per_file
        place = f"step={span * each:06d}-{(span + 1) * each - 1:06d}"
        name = f"{place}/node={self.node}.parquet"
        if name in self._manifest.files:
            name = f"{place}/node={self.node}.{batch_number:06d}.parquet"
        return name


def follow(
    collectors: Callable[[], list[Collector]],
    *,
    interval_seconds: float,
    is_over: Callable[[], bool],
    on_written: Callable[[Written], None],
    sleep: Callable[[float], Any] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Converts spans of steps as the ranks leave them behind, until ``is_over``; what waits for a
    rank longer than ten minutes is converted too, and all that is left at the end.

    ``collectors``: those of the logs that are there now.
    """
    flushed = clock()
    while True:
        is_last = is_over()
        is_final = is_last or clock() - flushed >= _FLUSH_SECONDS
        for collector in collectors():
            done = collector.take(is_final)
            if done.rows:
                on_written(done)
                flushed = clock()
        if is_last:
            return
        if is_final:
            flushed = clock()
        sleep(interval_seconds)
