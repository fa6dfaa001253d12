"""A log as a table of named columns, in chunks of bounded size, for export."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Callable, Optional

import numpy as np

from fastcheck.errors import printable
from fastcheck.record.format import (
    COUNTS,
    DTYPES,
    VERDICT_MASK,
    VERDICT_SHIFT,
    Depth,
    Flag,
    Order,
    Verdict,
)
from fastcheck.record.site import Site
from fastcheck.record.statistics import statistics_columns

from .reader import log_parts, read_sites_and_meta
from .record_file import read_rank

_PLACE = ("module", "module_type", "op", "direction", "role", "label")
_STATISTICS = ("min", "max", "sum", "abs_sum", "sum_sq", "mean", "rms", "l2_norm")
_VERDICTS = np.array([verdict.name.lower() for verdict in Verdict])
_DTYPES = np.array([info.name for info in DTYPES])

#: Text, int64, float64 (NaN where ``record=`` left the column out), uint64 and bool.
COLUMNS = (
    "rank",
    "step",
    "seq",
    "call",
    *_PLACE,
    "dtype",
    *COUNTS,
    *_STATISTICS,
    "checksum",
    "order",
    "record",
    "recomputed",
    "scaled",
    "event",
    "verdict",
)


def log_table(
    directory: str, on_damage: Optional[Callable[[int], None]] = None
) -> Iterator[dict[str, np.ndarray]]:
    """The records of all ranks, rank by rank in the order of the log, at most 16,384 at a time.

    ``min`` and ``max`` of integer tensors are float64 here: beyond 2**53 they are rounded.
    Damaged records are left out; ``on_damage`` is called with the number of those in each piece.

    Raises:
        LogError: a file of the log can't be read.
    """
    for rank, segments in log_parts(directory).items():
        places = _Places(read_sites_and_meta(directory, rank)[0])
        for piece in read_rank(directory, rank, segments):
            if piece.damaged and on_damage is not None:
                on_damage(piece.damaged)
            if len(piece.records):
                yield _columns(rank, piece.records, places)


def named_table(rank: int, records: np.ndarray, sites: Iterable[Site]) -> dict[str, np.ndarray]:
    """``records`` as columns: ``name`` (the site in one text), those of COLUMNS, and ``abs_max``,
    which is NaN for integers: nothing overflows in labels and indices.
    """
    by_number = dict(enumerate(sites))
    names = np.array([*(printable(str(site)) for site in by_number.values()), ""], object)
    made = {"name": names[records["site"]], **_columns(rank, records, _Places(by_number))}
    is_float = np.array([info.kind == "f8" for info in DTYPES])[records["dtype"]]
    made["abs_max"] = np.where(is_float, statistics_columns(records)["abs_max"], np.nan)
    return made


class _Places:
    """Each column of the sites as an array that ``records["site"]`` indexes."""

    def __init__(self, sites: dict[int, Site]) -> None:
        size = max(sites, default=-1) + 2  # the last entry: a site whose line was lost
        self._last = size - 1
        self._columns = {name: np.full(size, "", object) for name in _PLACE}
        for number, site in sites.items():
            for name in _PLACE:
                self._columns[name][number] = printable(getattr(site, name) or "")

    def columns(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        within = np.where((numbers < 0) | (numbers > self._last), self._last, numbers)
        return {name: column[within] for name, column in self._columns.items()}


def _columns(rank: int, records: np.ndarray, places: _Places) -> dict[str, np.ndarray]:
    made: dict[str, np.ndarray] = {"rank": np.full(len(records), rank, np.int64)}
    for name in ("step", "seq", "call", *COUNTS):
        made[name] = records[name].astype(np.int64)
    made.update(places.columns(records["site"]))
    made["dtype"] = _DTYPES[records["dtype"]].astype(object)
    made.update(statistics_columns(records))
    made["checksum"] = records["checksum"].astype(np.uint64)
    made["order"] = _names(Order, records["order"])
    made["record"] = _names(Depth, records["depth"])
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
    by_code = np.full(256, "", object)
    for member in kind:
        by_code[int(member)] = member.name.lower()
    return by_code[codes]
