"""A stop report as ranks send it to each other: JSON, of which nothing is executed."""

from __future__ import annotations

import base64
import functools
import json
from dataclasses import fields, is_dataclass, replace
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from fastcheck.errors import choice
from fastcheck.record.event import Event
from fastcheck.record.format import RECORD_DTYPE, Verdict
from fastcheck.record.site import Site, is_valid

from .render import WIDTH, render, report_sections
from .stop_report import StopReport

#: A message that is longer is not read.
MOST_BYTES = 16 << 20
_MOST_EVENTS = 2048


def packed(report: StopReport) -> bytes:
    """``report`` as a message. If it would be too long, it has the culprit only."""
    message = _encoded(replace(report, events=report.events[:_MOST_EVENTS]))
    if len(message) > MOST_BYTES:
        short = StopReport(report.culprit, report.step, rank=report.rank, log_path=report.log_path)
        message = _encoded(replace(short, world_size=report.world_size, style=report.style))
    return message


def unpacked(message: bytes) -> StopReport:
    """The report of packed().

    Raises:
        ValueError, TypeError, LookupError, RecursionError: it is no message, or has no text that
            can be printed.
    """
    if len(message) > MOST_BYTES:
        raise ValueError(f"a message of {len(message):,} bytes")
    report: StopReport = _made(StopReport, json.loads(message))
    if report.replay is not None and report.replay.report is not None:
        inner = replace(report.replay.report, replay=None)
        report = replace(report, replay=replace(report.replay, report=inner))
    choice("style", report.style, ("fastcheck", "msprobe"))
    render(report)  # here rather than where the run stops
    report_sections(report, WIDTH)
    return report


def _encoded(report: StopReport) -> bytes:
    return json.dumps(_plain(report)).encode()


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, (np.void, np.ndarray)):
        rows = np.atleast_1d(np.asarray(value)).astype(RECORD_DTYPE, copy=False)
        return base64.b64encode(rows.tobytes()).decode()
    return value.item() if isinstance(value, np.generic) else value


# A message that comes back is checked against the types of the fields: whoever reaches the store of
# the ranks can write to it.


@functools.cache
def _types_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, None, {"Event": Event, "Site": Site})


def _made(kind: Any, given: Any) -> Any:
    """The value of this type that _plain() has made ``given`` of."""
    parts = get_args(kind)
    if get_origin(kind) is Union:
        if given is None and type(None) in parts:
            return None
        return _made(type(given) if type(given) in parts else parts[0], given)
    if get_origin(kind) is tuple and isinstance(given, list):
        kinds = parts[:1] * len(given) if parts[-1] is Ellipsis else parts
        if len(kinds) != len(given):
            raise ValueError(f"expected {len(kinds)} items, got {given!r:.80}")
        return tuple(map(_made, kinds, given))
    if kind is np.ndarray:
        return _records(given)
    if kind is np.void:
        (record,) = _records(given)
        return record
    if kind is Site:
        return Site.from_dict(given)
    if kind is Verdict:
        return Verdict(_made(int, given))
    if is_dataclass(kind) and isinstance(given, dict):
        make: Any = kind  # a stop that an earlier version has written may lack fields
        known = {name: of for name, of in _types_of(make).items() if name in given}
        return make(**{name: _made(of, given[name]) for name, of in known.items()})
    if type(given) is not kind and not (kind is float and type(given) is int):
        raise TypeError(f"expected {kind}, got {given!r:.80}")
    return given


def _records(given: str) -> np.ndarray:
    records = np.frombuffer(base64.b64decode(given, validate=True), RECORD_DTYPE)
    if not is_valid(records).all():
        raise ValueError("a record that no kernel has made")
    return records
