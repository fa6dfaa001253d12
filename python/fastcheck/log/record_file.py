"""Reads a file of records in pieces, and leaves out records that fastcheck cannot have written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fastcheck.errors import LogError
from fastcheck.record.format import RECORD_BYTES, RECORD_DTYPE, RECORD_VERSION
from fastcheck.record.site import is_valid
from fastcheck.utils.reading import check_regular, open_regular

# 12 MiB.
_RECORDS = 1 << 16


class Piece(NamedTuple):
    """A part of a file: its valid records, how many others were ``damaged``, and how many were zero
    bytes, which a machine that lost power can leave: no record, since its version would be 0.
    """

    records: np.ndarray
    damaged: int
    unwritten: int


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


def check_version(records: np.ndarray, path: str, first: int = 0) -> None:
    """``records``: of the file at ``path``, from its record ``first`` on.

    Raises:
        LogError: one of them is of another version.
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


def read_pieces(path: str) -> Iterator[Piece]:
    """The records of a file in order, at most 65,536 at a time.

    Raises:
        FileNotFoundError: there is none.
        LogError: it can't be read, or a newer fastcheck has written it.
    """
    try:
        count = count_records(path)
        for start in range(0, count, _RECORDS):
            piece = read_span(path, start, min(start + _RECORDS, count))
            check_version(piece, path, start)
            written = piece["version"] != 0
            valid = is_valid(piece)
            records = piece if valid.all() else piece[valid]
            damaged = int((written & ~valid).sum())
            yield Piece(records, damaged, len(piece) - int(written.sum()))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LogError(f"{path} can't be read: {error.strerror}") from error


def read_all(path: str) -> Piece:
    """The records of a file as one piece. Raises what read_pieces() raises."""
    pieces = list(read_pieces(path))
    if len(pieces) == 1:
        return pieces[0]
    chunks = [piece.records for piece in pieces]
    return Piece(
        np.concatenate(chunks) if chunks else np.zeros(0, RECORD_DTYPE),
        sum(piece.damaged for piece in pieces),
        sum(piece.unwritten for piece in pieces),
    )
