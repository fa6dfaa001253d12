"""Stop reports as ranks send them: what was sent comes back, and nothing else does."""

from __future__ import annotations

import json
import pickle
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, Callable, get_args

import numpy as np
import pytest

from fastcheck.record.format import Verdict
from fastcheck.record.site import Site
from fastcheck.report import message as messages
from fastcheck.report.error import OverflowDetected
from fastcheck.report.message import MOST_BYTES, packed, unpacked
from fastcheck.report.stop_report import Dumped, Outlier, ReplayOutcome, StopReport
from support.records import record_builder as build
from support.reports import all_reports, full_report


def same(one: StopReport, other: StopReport) -> bool:
    return packed(one) == packed(other) and str(OverflowDetected(one)) == str(
        OverflowDetected(other)
    )


def test_every_report_comes_back() -> None:
    reports = all_reports()
    assert len(reports) > 50
    for report in reports:
        assert same(unpacked(packed(report)), report)


def test_what_is_rare_comes_back() -> None:
    dump = Dumped("dump/step=3", "a call", "replay.py", ("a note",))
    report = full_report(
        replay=ReplayOutcome(build.report(), ("a note",), dump),
        dump=dump,
        learning_rates=(("AdamW", 0.1), ("AdamW", float("nan"))),
        fault="AdamW has stepped with a learning rate of nan",
        left_out_by=("every=2",),
        silent_norms=("norm (LayerNorm)",),
        batch="shard 7",
        scale=float("inf"),
        outlier=Outlier("input[0]", 52832.0, 2.375, 5, False, 3),
    )
    known = unpacked(packed(report))
    assert same(known, report) and known.dump == dump and known.batch == "shard 7"
    assert known.replay is not None and known.replay.notes == ("a note",)
    assert known.culprit.record.tobytes() == report.culprit.record.tobytes()


def test_every_type_in_a_report_is_one_that_comes_back() -> None:
    kinds, known = [StopReport], set()
    while kinds:
        kind: Any = kinds.pop()
        if kind in known:
            continue
        known.add(kind)
        kinds += get_args(kind)
        if is_dataclass(kind) and kind is not Site:
            kinds += messages._types_of(kind).values()
    plain = {k for k in known if not get_args(k) and not is_dataclass(k)}
    assert plain == {str, int, float, bool, type(None), Verdict, np.ndarray, np.void, ...}


def test_a_report_with_very_many_events_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    report = full_report()
    many = replace(report, events=(report.culprit,) * 5000, event_count=5000)
    assert len(unpacked(packed(many)).events) == 2048
    monkeypatch.setattr(messages, "MOST_BYTES", 4000)
    short = unpacked(packed(many))
    assert short.events == () and str(short.culprit.site) == str(report.culprit.site)


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        unpacked(pickle.dumps(Evil(str(tmp_path / "made"))))
    assert list(tmp_path.iterdir()) == []


def changed(change: Callable[[Any], object]) -> bytes:
    fields = json.loads(packed(full_report()))
    change(fields)
    return json.dumps(fields).encode()


def record_with(**fields: Any) -> str:
    record = full_report().culprit.record.copy()
    for name, value in fields.items():
        record[name] = value
    fake = replace(build.report().culprit, record=record)
    return str(json.loads(packed(replace(build.report(), culprit=fake)))["culprit"]["record"])


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x80\x04.",
        b"null",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"culprit":' * 100_000,
        b" " * (MOST_BYTES + 1),
        changed(lambda report: report.pop("culprit")),
        changed(lambda report: report.update(step="3")),
        changed(lambda report: report.update(step=True)),
        changed(lambda report: report.update(events={})),
        changed(lambda report: report.update(style="\x1b[2J")),
        changed(lambda report: report["culprit"].update(record="AAAA")),
        changed(lambda report: report["culprit"].update(verdict=77)),
        changed(lambda report: report["culprit"].update(site={"module": 3})),
        changed(lambda report: report["culprit"].update(record=record_with(dtype=200))),
        changed(lambda report: report["culprit"].update(record=record_with(site=-5))),
        changed(lambda report: report.update(trend=record_with(depth=9))),
        changed(lambda report: report.update(replay={"report": 1})),
        changed(lambda report: report.update(inputs=[["a"]])),
        changed(lambda report: report.update(log_path=["a"])),
    ],
    ids=range(22),
)
def test_what_is_no_report_is_refused(message: bytes) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, IndexError, RecursionError)):
        unpacked(message)


def test_a_report_of_an_earlier_version_lacks_fields() -> None:
    known = unpacked(changed(lambda report: [report.pop(name) for name in ("fault", "batch")]))
    assert same(known, full_report(fault="", batch=None))


def test_replays_do_not_nest() -> None:
    def nest(report: Any) -> None:
        inner = json.loads(packed(full_report(replay=ReplayOutcome(build.report()))))
        report["replay"] = {"report": inner, "notes": [], "dump": None}

    known = unpacked(changed(nest))
    assert known.replay is not None and known.replay.report is not None
    assert known.replay.report.replay is None


def test_records_keep_their_bits() -> None:
    report = full_report()
    assert np.array_equal(
        unpacked(packed(report)).trend.view(np.uint8), report.trend.view(np.uint8)
    )
