"""Chooses the calls of a dump that its page shows, and collects what each read and returned."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np

from fastcheck.dump.storage.files import REFERENCE
from fastcheck.dump.storage.reading import StoredValues, read_calls, read_index, value_of
from fastcheck.errors import CompareError, LogError, explain, printable
from fastcheck.log.reader import log_parts
from fastcheck.log.record_file import read_pieces
from fastcheck.record.format import NONFINITE_COUNTS, nonfinite
from fastcheck.record.statistics import statistics_of
from fastcheck.utils.reading import read_json_lines
from fastcheck.utils.text.numbers import to_json

from .histogram import value_histogram

__all__ = ["DumpedCalls", "collect_calls"]

# Calls on the page, and how many of them before the culprit.
_MOST, _BEFORE = 80, 20
_MOST_TENSORS, _MOST_TEXT = 24, 400
# Of stored values that are read for histograms.
_MOST_BYTES = 512 << 20
_STATISTICS = ("min", "max", "mean", "rms")
_MEASURES = ("error", "allowed", "max_abs", "max_ulp", "cosine", "differing", "nonfinite")


@dataclass
class DumpedCalls:
    """``calls``: those of the page, in order; ``first``, ``last``: their numbers, of ``count``.
    ``culprit``: the number of the first call that made something non-finite of finite inputs, or
    whose result differs from the reference; None without one. ``reason``: which of the two.
    """

    place: str
    index: dict[str, Any]
    count: int = 0
    first: int = 0
    last: int = -1
    culprit: Optional[int] = None
    reason: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    different: int = 0
    compared: int = 0
    without_histogram: int = 0


def collect_calls(place: str) -> DumpedCalls:
    """Reads the dump in ``place``, a directory of one step of one rank.

    Raises:
        LogError: it can't be read.
    """
    found = DumpedCalls(place, read_index(place))
    try:
        references = _references(place, found)
        bad = _bad_records(place)
        _find_culprit(found, bad, references)
        start = max((found.culprit or 0) - _BEFORE, 0)
        chosen = [line for at, line in enumerate(read_calls(place)) if start <= at < start + _MOST]
    except OSError as error:
        raise LogError(
            explain(
                "this dump can't be read",
                expected="the files that Dumper has written",
                got=f"{error.filename or place}: {error.strerror or error}",
            )
        ) from error
    found.first, found.last = start, start + len(chosen) - 1
    seqs = {entry.get("seq") for line in chosen for entry in _tensors(line)}
    records = _records(place, seqs)
    values = _Values(place)
    for number, line in enumerate(chosen, start):
        mine = references.get(line.get("n", number), {})
        found.calls.append(_call(number, line, records, mine, values))
    found.without_histogram = values.left_out
    return found


def _find_culprit(
    found: DumpedCalls, bad: set[int], references: dict[int, dict[int, dict[str, Any]]]
) -> None:
    passed: Optional[int] = None
    differing: Optional[int] = None
    for number, line in enumerate(read_calls(found.place)):
        found.count = number + 1
        reads, makes = (
            any(entry.get("seq") in bad for entry in _entries(line, name)) for name in ("in", "out")
        )
        if makes and not reads and found.culprit is None:
            found.culprit, found.reason = number, "made"
        if (makes or reads) and passed is None:
            passed = number
        mine = references.get(line.get("n", number), {})
        if differing is None and any(one.get("is_different") is True for one in mine.values()):
            differing = number
    if found.culprit is None and passed is not None:
        found.culprit, found.reason = passed, "read"
    if found.culprit is None and differing is not None:
        found.culprit, found.reason = differing, "different"


def _entries(line: dict[str, Any], name: str) -> list[dict[str, Any]]:
    some = line.get(name)
    return [one for one in some if isinstance(one, dict)] if isinstance(some, list) else []


def _tensors(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from _entries(line, "in")
    yield from _entries(line, "out")


def _references(place: str, found: DumpedCalls) -> dict[int, dict[int, dict[str, Any]]]:
    """By number of the call and of its output."""
    path = os.path.join(place, REFERENCE)
    made: dict[int, dict[int, dict[str, Any]]] = {}
    if not os.path.exists(path):
        return made
    for line, _ in read_json_lines(path):
        if isinstance(line, dict) and type(line.get("n")) is type(line.get("output")) is int:
            made.setdefault(line["n"], {})[line["output"]] = line
            found.compared += 1
            found.different += line.get("is_different") is True
    return made


def _pieces(place: str) -> Iterator[np.ndarray]:
    for paths in log_parts(place).values():
        for path in paths:
            for piece in read_pieces(path):
                yield piece.records


def _bad_records(place: str) -> set[int]:
    """Sequence numbers of what is not finite."""
    found: set[int] = set()
    for records in _pieces(place):
        found.update(records["seq"][nonfinite(records)].tolist())
    return found


def _records(place: str, seqs: Iterable[Any]) -> dict[int, np.void]:
    wanted = np.array(sorted(seq for seq in seqs if type(seq) is int), np.int64)
    return {
        int(record["seq"]): record
        for records in _pieces(place)
        for record in records[np.isin(records["seq"], wanted)]
    }


def _call(
    number: int,
    line: dict[str, Any],
    records: dict[int, np.void],
    references: dict[int, dict[str, Any]],
    values: _Values,
) -> dict[str, Any]:
    made: dict[str, Any] = {
        name: _short(line.get(name))
        for name in ("kind", "op", "ran", "direction", "module", "type", "call")
    }
    made["number"] = number
    made["args"] = "" if not line.get("args") else _short(json.dumps(line["args"]))
    tensors = []
    for name in ("in", "out"):
        entries = _entries(line, name)
        for position, entry in enumerate(entries[:_MOST_TENSORS]):
            reference = references.get(position) if name == "out" else None
            tensors.append(
                {
                    "side": name,
                    **_tensor(entry, records.get(entry.get("seq", -1)), values),
                    "reference": None if reference is None else _measures(reference),
                }
            )
        made[f"{name}_count"] = len(entries)
    made["tensors"] = tensors
    return made


def _tensor(entry: dict[str, Any], record: Optional[np.void], values: _Values) -> dict[str, Any]:
    shape = entry.get("shape")
    made: dict[str, Any] = {
        "label": _short(entry.get("label")),
        "role": _short(entry.get("role")),
        "dtype": _short(entry.get("dtype")),
        "shape": shape if isinstance(shape, list) else None,
        "counts": None,
        "histogram": values.histogram(entry),
    }
    if record is not None:
        reading = statistics_of(record)
        made["counts"] = [int(record[name]) for name in NONFINITE_COUNTS]
        made["zeros"] = int(record["zero_count"]) / max(int(record["numel"]), 1)
        made |= {name: to_json(getattr(reading, name)) for name in _STATISTICS}
    return made


def _measures(line: dict[str, Any]) -> dict[str, Any]:
    made = {name: to_json(line.get(name)) for name in _MEASURES}
    return {**made, "is_different": line.get("is_different") is True}


def _short(value: Any) -> str:
    text = "" if value is None else printable(str(value))
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 1] + "…"


class _Values:
    """Reads stored values for histograms, up to a limit in bytes; each tensor once."""

    def __init__(self, place: str) -> None:
        self._stored = StoredValues(place)
        self._room = _MOST_BYTES
        self._known: dict[tuple[str, str], Optional[dict[str, Any]]] = {}
        self.left_out = 0

    def histogram(self, entry: dict[str, Any]) -> Optional[dict[str, Any]]:
        """None where no values were stored, or where they can't be read."""
        place = value_of(entry)
        if place is None:
            return None
        if place not in self._known:
            self._known[place] = self._count(place, str(entry.get("dtype")), entry.get("shape"))
        return self._known[place]

    def _count(self, place: tuple[str, str], dtype: str, shape: Any) -> Optional[dict[str, Any]]:
        try:
            size = 8 * int(np.prod([int(one) for one in shape], dtype=np.float64))
        except (TypeError, ValueError):
            size = 0
        if size > self._room:
            self.left_out += 1
            return None
        self._room -= size
        try:
            return value_histogram(self._stored.load(*place, dtype))
        except (CompareError, RuntimeError):
            self.left_out += 1
            return None
