"""Writes the page of a dump: the operators around the culprit, and the script to run it again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Optional, Union

import numpy as np
import torch

from fastcheck._version import __version__
from fastcheck.dump.storage.files import REFERENCE, places_in
from fastcheck.dump.storage.reading import StoredValues, read_calls, read_index, value_of
from fastcheck.errors import CompareError, LogError, explain, printable
from fastcheck.log.reader import log_parts
from fastcheck.log.record_file import read_pieces
from fastcheck.record.format import NONFINITE_COUNTS, nonfinite
from fastcheck.record.statistics import statistics_of
from fastcheck.report.page.container import Container, page_html, text_html, write_html
from fastcheck.utils.reading import read_json_lines
from fastcheck.utils.text.numbers import to_json

BINS = 40


def value_histogram(values: torch.Tensor) -> Optional[dict[str, Any]]:
    """``low`` and ``high``: the smallest and the largest finite value; ``counts``: of BINS
    intervals of equal width between them, one where all are equal. None without a finite value.

    ``values`` on the host, of any dtype; of complex numbers both parts are counted.
    """
    if values.is_complex():
        values = torch.view_as_real(values)
    flat = values.detach().reshape(-1).to(torch.float64)
    finite = flat[torch.isfinite(flat)]
    if not finite.numel():
        return None
    low, high = float(finite.min()), float(finite.max())
    if low == high:
        return {"low": low, "high": high, "counts": [finite.numel()]}
    # Halved: the distance of the two ends of float64 is no float64.
    share = (finite / 2 - low / 2) / (high / 2 - low / 2)
    bins = (share * BINS).to(torch.int64).clamp_(0, BINS - 1)
    counts = torch.bincount(bins, minlength=BINS)
    return {"low": low, "high": high, "counts": counts.tolist()}


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


_SCRIPT = "replay.py"
_MOST_SCRIPT = 1 << 18
_MOST_PLACES = 20


def dump_page(path: Union[str, os.PathLike[str]]) -> str:
    """The page of a dump, of a step of one, or of a rank of a step, as HTML. Of several steps and
    ranks it shows the first that has a culprit, and names the others.

    Raises:
        LogError: there is no dump, or it can't be read.
    """
    places = [place for _, _, place in sorted(places_in(os.fspath(path)))]
    if not places:
        raise LogError(
            explain(
                "there is no dump here",
                expected="a directory that Dumper or Stop(dump=) has written",
                got=os.fspath(path),
            )
        )
    found = collect_calls(places[0])
    for place in places[1:]:
        if found.culprit is not None:
            break
        other = collect_calls(place)
        found = other if other.culprit is not None else found
    header: dict[str, Any] = {
        "format": 1,
        "kind": "dump",
        "fastcheck": __version__,
        "culprit": found.culprit,
        "reason": found.reason,
        "calls": found.calls,
    }
    name = os.path.relpath(found.place, os.path.dirname(os.path.abspath(os.fspath(path))))
    verdict = _verdict(found, [place for place in places if place != found.place])
    return page_html(f"fastcheck: {name}", name, verdict, Container().to_text(header))


def write_dump_page(
    path: Union[str, os.PathLike[str]], target: Union[str, os.PathLike[str]]
) -> int:
    """Writes the page to ``target``, which it replaces; returns its size in bytes. Raises as
    dump_page() does, and LogError where the file can't be written.
    """
    return write_html(target, dump_page(path))


def _verdict(found: DumpedCalls, others: list[str]) -> str:
    style = "good" if found.culprit is None else "bad"
    parts = [f'<p class="headline {style}">{text_html(_headline(found))}</p>']
    parts += [f"<p>{text_html(line)}</p>" for line in _notes(found)]
    if others:
        names = "\n".join(others[:_MOST_PLACES])
        more = len(others) - _MOST_PLACES
        names += f"\nand {more:,} more" if more > 0 else ""
        parts.append(_details("Other steps and ranks of this dump", names))
    parts.append(_replay(found.place))
    return "\n".join(parts)


def _headline(found: DumpedCalls) -> str:
    if found.culprit is None:
        if found.compared:
            return f"All is finite, and all {found.compared:,} outputs agree with the reference."
        return "Everything that this dump holds is finite."
    call = next(one for one in found.calls if one["number"] == found.culprit)
    name = " · ".join(filter(None, (call["module"], call["op"] or call["kind"], call["direction"])))
    what = {
        "made": "made the first value that is not finite, of finite inputs",
        "read": "is the first that read or returned a value that is not finite",
        "different": "is the first whose result differs from the reference",
    }[found.reason]
    return f"Call {found.culprit:,}, {name}, {what}."


def _notes(found: DumpedCalls) -> list[str]:
    lines = [printable(found.place)]
    shown = found.last - found.first + 1
    if shown < found.count:
        lines.append(
            f"Calls {found.first:,} to {found.last:,} of {found.count:,} are on this page; "
            f"{found.count - shown:,} are left out. `fastcheck show` has the records of all."
        )
    else:
        calls = "1 call" if found.count == 1 else f"{found.count:,} calls, all of them"
        lines.append(f"{calls} on this page.")
    if found.compared:
        lines.append(
            f"{found.different:,} of {found.compared:,} compared outputs differ from the "
            "reference. The dump holds the distances, beside each output, not the other values."
        )
    if found.without_histogram:
        lines.append(
            f"{found.without_histogram:,} stored tensors have no histogram: they are damaged, or "
            "beyond the 512 MiB of values that are read for a page."
        )
    if not found.index.get("is_complete"):
        lines.append("The dump has no end: it was interrupted.")
    return lines


def _replay(place: str) -> str:
    path = os.path.join(place, _SCRIPT)
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(_MOST_SCRIPT)
    except OSError:
        why = "A script that runs a call again is written where a run is stopped (Stop(dump=))."
        return f"<p>{why}</p>"
    command = f"python {printable(path)}"
    return (
        "<h3>Run the call again</h3>"
        f"<pre><code>{text_html(command)}</code></pre>"
        f"{_details(_SCRIPT, text)}"
    )


def _details(title: str, text: str) -> str:
    label = text_html(title)
    return (
        f"<details><summary>{label}</summary>"
        f'<div class="scrolling" tabindex="0" role="region" aria-label="{label}">'
        f"<pre>{text_html(text)}</pre></div></details>"
    )
