"""A stop report as ranks send it to each other: JSON, of which nothing is executed."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np

from fastcheck.errors import choice
from fastcheck.record.event import Event
from fastcheck.record.format import RECORD_DTYPE, Verdict
from fastcheck.record.site import Site, is_valid

from .render import render
from .stop_report import Dumped, MadeBy, ReplayOutcome, StopReport

#: A message that is longer is not read.
MOST_BYTES = 16 << 20
_MOST_EVENTS = 2048

_T = TypeVar("_T")


def packed(report: StopReport) -> bytes:
    """``report`` as a message. Of one with very much in it the culprit alone."""
    message = _encoded(replace(report, events=report.events[:_MOST_EVENTS]))
    if len(message) > MOST_BYTES:
        short = StopReport(report.culprit, report.step, rank=report.rank, log_path=report.log_path)
        message = _encoded(replace(short, world_size=report.world_size, style=report.style))
    return message


def unpacked(message: bytes) -> StopReport:
    """The report of packed().

    Raises:
        ValueError, TypeError, LookupError, RecursionError: it is not one, or has no text that can
            be printed.
    """
    if len(message) > MOST_BYTES:
        raise ValueError(f"a message of {len(message):,} bytes")
    report = _report(json.loads(message))
    choice("style", report.style, ("fastcheck", "msprobe"))
    render(report, whole=True)  # here rather than where the run stops
    return report


def _encoded(report: StopReport) -> bytes:
    return json.dumps(_plain(report)).encode()


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    if isinstance(value, (np.void, np.ndarray)):
        rows = np.atleast_1d(np.asarray(value)).astype(RECORD_DTYPE, copy=False)
        return base64.b64encode(rows.tobytes()).decode()
    return value.item() if isinstance(value, np.generic) else value


# What comes back is checked field by field: whoever reaches the store of the ranks can write to it.


def _report(given: Any, is_replay: bool = False) -> StopReport:
    known = _Fields(given)
    return StopReport(
        culprit=_event(known["culprit"]),
        step=known.of("step", int),
        events=known.all("events", _event),
        event_count=known.of("event_count", int),
        overflow_nums=known.of("overflow_nums", int),
        inputs=known.all("inputs", lambda pair: (Site.from_dict(pair[0]), _record(pair[1]))),
        inputs_before=known.all("inputs_before", lambda one: None if one is None else _record(one)),
        trend=_records(known["trend"]),
        log_path=known.of("log_path", str, None),
        scale=known.of("scale", float, int, None),
        rank=known.of("rank", int),
        world_size=known.of("world_size", int),
        weights_intact=known.of("weights_intact", bool, None),
        why_updated=known.of("why_updated", str),
        updated_since=known.all("updated_since", int),
        broken_weights=known.maybe("broken_weights", lambda names: tuple(map(str, names))),
        is_lost=known.of("is_lost", bool),
        style=known.of("style", str),
        replay=None if is_replay else known.maybe("replay", _replay),
        dump=known.maybe("dump", _dumped),
        learning_rates=known.all("learning_rates", lambda pair: (str(pair[0]), float(pair[1]))),
        left_out_by=known.all("left_out_by", str),
        page=known.of("page", str, None),
        batch=known.of("batch", int, str, None),
        made_by=known.maybe("made_by", _made_by),
        silent_norms=known.all("silent_norms", str),
    )


def _event(given: Any) -> Event:
    known = _Fields(given)
    return Event(
        site=Site.from_dict(known["site"]),
        record=_record(known["record"]),
        step=known.of("step", int),
        verdict=Verdict(known.of("verdict", int)),
        reason=known.of("reason", str),
        counted=known.of("counted", bool),
        rank=known.of("rank", int),
        line=known.of("line", str),
        api=known.of("api", str),
        inputs=known.all("inputs", lambda pair: (str(pair[0]), int(pair[1]))),
    )


def _replay(given: Any) -> ReplayOutcome:
    known = _Fields(given)
    report = known.maybe("report", lambda one: _report(one, is_replay=True))
    return ReplayOutcome(report, known.all("notes", str), known.maybe("dump", _dumped))


def _made_by(given: Any) -> MadeBy:
    known = _Fields(given)
    return MadeBy(
        known.of("operator", str),
        known.of("how", str),
        known.of("line", str),
        known.all("inputs", lambda pair: (str(pair[0]), _record(pair[1]))),
        known.maybe("result", _record),
        known.of("variable", str),
        known.of("is_backward", bool),
        known.maybe("site", Site.from_dict),
    )


def _dumped(given: Any) -> Dumped:
    known = _Fields(given)
    return Dumped(
        known.of("path", str, None),
        known.of("what", str),
        known.of("script", str, None),
        known.all("notes", str),
    )


def _record(given: str) -> np.void:
    (record,) = _records(given)
    assert isinstance(record, np.void)
    return record


def _records(given: str) -> np.ndarray:
    records = np.frombuffer(base64.b64decode(given, validate=True), RECORD_DTYPE)
    if not is_valid(records).all():
        raise ValueError("a record that no kernel has made")
    return records


class _Fields:
    """An object of JSON. Its methods raise TypeError or KeyError where a field is another one."""

    def __init__(self, given: Any) -> None:
        if not isinstance(given, Mapping):
            raise TypeError(f"expected an object, got {given!r:.80}")
        self._given = given

    def __getitem__(self, name: str) -> Any:
        return self._given[name]

    def of(self, name: str, *kinds: type | None) -> Any:
        value = self._given[name]
        if (None if value is None else type(value)) not in kinds:
            raise TypeError(f"{name} is {value!r:.80}")
        return value

    def all(self, name: str, make: Callable[[Any], _T]) -> tuple[_T, ...]:
        return tuple(make(one) for one in self.of(name, list))

    def maybe(self, name: str, make: Callable[[Any], _T]) -> _T | None:
        value = self._given[name]
        return None if value is None else make(value)
