"""A log as a table: named columns, in pieces of bounded size, for whoever writes tables to disk."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from ._logread import log_parts, read_sites_and_meta
from ._record import (
    DTYPES,
    RECORD_BYTES,
    RECORD_DTYPE,
    VERDICT_MASK,
    VERDICT_SHIFT,
    Depth,
    Flag,
    Order,
    Verdict,
)
from ._site import Site

__all__ = ["COLUMNS", "log_table"]

_ROWS = 1 << 16
_COUNTS = (
    "nan_count",
    "posinf_count",
    "neginf_count",
    "zero_count",
    "subnormal_count",
    "negative_count",
    "saturated_count",
)
_PLACE = ("module", "module_type", "op", "direction", "role", "label")
_STATISTICS = ("min", "max", "sum", "abs_sum", "sum_sq", "mean", "rms", "l2_norm")
_VERDICTS = np.array([verdict.name.lower() for verdict in Verdict])
_DTYPES = np.array([info.name for info in DTYPES])
_PER_ELEMENT = np.array([info.components for info in DTYPES])
_KINDS = np.array([info.kind for info in DTYPES])

#: Text, int64, float64 (NaN where a record's depth doesn't cover the column), uint64 and bool.
COLUMNS = (
    "rank",
    "step",
    "seq",
    "call",
    *_PLACE,
    "dtype",
    "numel",
    *_COUNTS,
    *_STATISTICS,
    "checksum",
    "order",
    "depth",
    "recomputed",
    "scaled",
    "event",
    "verdict",
)


def log_table(directory: str) -> Iterator[dict[str, np.ndarray]]:
    """The records of all ranks, rank by rank in the order of the log, at most 65536 at a time.

    ``min`` and ``max`` of integer tensors are float64 here: beyond 2**53 they are rounded.
    """
    for rank, segments in log_parts(directory).items():
        sites, _ = read_sites_and_meta(directory, rank)
        places = _Places(sites)
        events = os.path.join(directory, f"events-rank{rank}.bin")
        if os.path.exists(events):
            for kept in _pieces(events):
                # A crash may have left them in their segment too.
                for piece in _pieces(segments[0]) if segments else ():
                    kept = kept[~np.isin(kept["seq"], piece["seq"])]
                if len(kept):
                    yield _columns(rank, kept, places)
        for path in segments:
            for piece in _pieces(path):
                yield _columns(rank, piece, places)


def _pieces(path: str) -> Iterator[np.ndarray]:
    count = os.path.getsize(path) // RECORD_BYTES
    for start in range(0, count, _ROWS):
        wanted = min(_ROWS, count - start)
        piece = np.fromfile(path, RECORD_DTYPE, count=wanted, offset=start * RECORD_BYTES)
        piece = piece[piece["version"] != 0]  # the zero bytes that a power cut leaves
        if len(piece):
            yield piece


class _Places:
    """Each column of the sites as an array that ``records["site"]`` indexes."""

    def __init__(self, sites: dict[int, Site]) -> None:
        size = max(sites, default=-1) + 2  # the last: a site whose line was lost
        self._last = size - 1
        self._columns = {name: np.full(size, "", object) for name in _PLACE}
        for number, site in sites.items():
            for name in _PLACE:
                self._columns[name][number] = getattr(site, name) or ""

    def columns(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        within = np.where((numbers < 0) | (numbers > self._last), self._last, numbers)
        return {name: column[within] for name, column in self._columns.items()}


def _columns(rank: int, records: np.ndarray, places: _Places) -> dict[str, np.ndarray]:
    made: dict[str, np.ndarray] = {"rank": np.full(len(records), rank, np.int64)}
    for name in ("step", "seq", "call", "numel", *_COUNTS):
        made[name] = records[name].astype(np.int64)
    made.update(places.columns(records["site"]))
    made["dtype"] = _DTYPES[records["dtype"]].astype(object)
    made.update(_statistics(records))
    made["checksum"] = records["checksum"].astype(np.uint64)
    made["order"] = _names(Order, records["order"])
    made["depth"] = _names(Depth, records["depth"])
    flags = records["flags"]
    for name, flag in (
        ("recomputed", Flag.RECOMPUTE),
        ("scaled", Flag.SCALED),
        ("event", Flag.EVENT),
    ):
        made[name] = (flags & int(flag)) != 0
    made["verdict"] = _VERDICTS[(flags & VERDICT_MASK) >> VERDICT_SHIFT].astype(object)
    return {name: made[name] for name in COLUMNS}


def _names(kind: type[Order] | type[Depth], codes: np.ndarray) -> np.ndarray:
    spelt = np.full(256, "", object)
    for member in kind:
        spelt[int(member)] = member.name.lower()
    named: np.ndarray = spelt[codes]
    return named


def _statistics(records: np.ndarray) -> dict[str, np.ndarray]:
    finite = records["numel"] * _PER_ELEMENT[records["dtype"]]
    for name in ("nan_count", "posinf_count", "neginf_count"):
        finite = finite - records[name]
    known = records["depth"] >= Depth.STATS
    made: dict[str, np.ndarray] = {}
    for name in ("min", "max"):
        raw = np.ascontiguousarray(records[name])
        kinds = _KINDS[records["dtype"]]
        values = np.where(kinds == "i8", raw.view("<i8").astype(np.float64), raw)
        values = np.where(kinds == "u8", raw.view("<u8").astype(np.float64), values)
        made[name] = np.where(known & (finite > 0), values, np.nan)
    with np.errstate(all="ignore"):
        for name in ("sum", "abs_sum", "sum_sq"):
            made[name] = np.where(known, records[name], np.nan)
        made["mean"] = made["sum"] / finite
        made["rms"] = np.sqrt(made["sum_sq"] / finite)
        made["l2_norm"] = np.sqrt(made["sum_sq"])
    return made
