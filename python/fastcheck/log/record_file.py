"""Reads a file of records in pieces, and leaves out records that fastcheck cannot have written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fastcheck.errors import LogError
from fastcheck.record.format import RECORD_BYTES, RECORD_DTYPE, RECORD_VERSION
from fastcheck.record.site import is_valid
from fastcheck.utils.reading import check_regular, open_regular

# 3 MiB: two are in memory at a time.
_RECORDS = 1 << 14


class Piece(NamedTuple):
    """A part of a file: its valid records, how many others were ``damaged``, and the bytes that are
    no record: of a record that is cut short, or zeros, which a machine that lost power can leave (a
    record's version is not 0).
    """

    records: np.ndarray
    damaged: int
    dropped_bytes: int


def count_records(path: str) -> int:
    """The number of whole records that a file has room for.

    Raises:
        OSError: there is no regular file at ``path``.
    """
    check_regular(path)
    return os.path.getsize(path) // RECORD_BYTES


def read_span(path: str, start: int, end: int) -> np.ndarray:
    """The records from ``start`` to ``end`` as they are; fewer where the file ends before.

    Reads instead of mapping, which would keep every visited page in memory.

    Raises:
        OSError: the file can't be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        count = min(end, size // RECORD_BYTES) - start
        if count <= 0:
            return np.zeros(0, RECORD_DTYPE)
        file.seek(start * RECORD_BYTES)
        return np.fromfile(file, RECORD_DTYPE, count=count)


def check_version(records: np.ndarray, path: str, first: int) -> None:
    """``records``: of the file at ``path``, from its record ``first`` on.

    Raises:
        LogError: a record is of another version.
    """
    versions = records["version"]
    strange = np.flatnonzero((versions != RECORD_VERSION) & (versions != 0))
    if len(strange):
        number = int(strange[0])
        raise LogError(
            "this is not a log that this fastcheck reads",
            expected=f"records of version {RECORD_VERSION}, {RECORD_BYTES} bytes each",
            got=f"{path}, whose record {first + number} has version {int(versions[number])}",
            hint="if a newer fastcheck wrote it, read it with that one",
        )


def read_spans(path: str, start: int = 0, end: int = 1 << 62) -> Iterator[np.ndarray]:
    """The records from ``start`` to ``end`` as they are, at most 16,384 at a time.

    Raises:
        OSError: the file can't be read.
        LogError: a newer fastcheck has written it.
    """
    while len(records := read_span(path, start, min(start + _RECORDS, end))):
        check_version(records, path, start)
        yield records
        start += len(records)


def checked(records: np.ndarray) -> Piece:
    """The valid records among these, and what the others are."""
    is_written, valid = records["version"] != 0, is_valid(records)
    damaged = int((is_written & ~valid).sum())
    unwritten = len(records) - int(is_written.sum())
    return Piece(records if valid.all() else records[valid], damaged, unwritten * RECORD_BYTES)


def read_pieces(path: str) -> Iterator[Piece]:
    """The records of a file in order, at most 16,384 at a time.

    Raises:
        FileNotFoundError: there is none.
        LogError: it can't be read, or a newer fastcheck has written it.
    """
    try:
        yield from map(checked, read_spans(path, 0, count_records(path)))
        if cut := os.path.getsize(path) % RECORD_BYTES:
            yield Piece(np.zeros(0, RECORD_DTYPE), 0, cut)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LogError(f"{path} can't be read: {error.strerror}") from error


def read_rank(directory: str, rank: int, segments: Sequence[str]) -> Iterator[Piece]:
    """The records of one rank in pieces: those of events that outlived their segment, then those of
    its segments. Raises what read_pieces() raises.
    """
    events = os.path.join(directory, f"events-rank{rank}.bin")
    for piece in read_pieces(events) if os.path.exists(events) else ():
        kept = piece.records
        # A crash may have left them in their segment too.
        for other in _pieces_if_there(segments[0]) if segments else ():
            kept = kept[~np.isin(kept["seq"], other.records["seq"])]
        yield piece._replace(records=kept)
    for path in segments:
        yield from _pieces_if_there(path)


def _pieces_if_there(path: str) -> Iterator[Piece]:
    """read_pieces() of a file that the log's limit may have removed since it was listed."""
    with contextlib.suppress(FileNotFoundError):
        yield from read_pieces(path)
