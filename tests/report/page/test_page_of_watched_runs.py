"""The events of install(watch=) on the page, and from where a value that spread came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.report.page import write
from fastcheck.report.page.write import page_of_log
from support.page_data import PageData
from support.programs import synthetic_logs


def header_of(log: Path) -> dict[str, Any]:
    return PageData(page_of_log(log)).header


def test_events_have_their_rows_and_the_steps_of_a_forecast(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path, 40, 100, watch=True)
    header = header_of(tmp_path)
    found = {event["kind"]: event for event in header["watched"]}
    assert header["watch_count"] == 3
    assert [event["step"] for event in header["watched"]] == [45, 75, 87]
    forecast = found["headroom"]
    assert forecast["interval"] == [85.0, 93.0] and forecast["score"] == "nan"
    assert forecast["row"] == header["rows"]["site"].index(4)
    assert forecast["mover"]["row"] == forecast["row"] and forecast["mover"]["step"] == 60
    assert found["loss_spike"]["row"] == -1 and found["loss_spike"]["where"] == ""


def test_of_many_events_those_that_warn_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "_MOST_WATCHED", 2)
    synthetic_logs.write(tmp_path, 40, 100, watch=True)
    header = header_of(tmp_path)
    assert [event["kind"] for event in header["watched"]] == ["headroom", "loss_spike"]
    assert header["watch_count"] == 3


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"step": 1 << 60}, None),
        ({"rank": "0"}, None),
        ({"kind": None}, None),
        ({"site": {"module": 3}}, {"row": -1, "where": ""}),
        ({"site": 7}, {"row": -1, "where": ""}),
        ({"movers": [3], "value": True, "score": 10**400}, {"mover": None, "value": None}),
        ({"movers": [{"step": 3, "site": ["x"]}]}, {"mover": {"row": -1, "step": 3}}),
        ({"interval": [1, "inf"]}, {"interval": [6.0, float(1 << 53)]}),
        ({"interval": [1, "nan"]}, {"interval": None}),
        ({"interval": [1]}, {"interval": None}),
    ],
)
def test_lines_that_are_not_as_they_should_be(
    tmp_path: Path, changed: dict[str, Any], expected: Any
) -> None:
    synthetic_logs.write(tmp_path, 8, 10)
    line = {"step": 5, "rank": 0, "kind": "shift", "site": None, "text": "x", **changed}
    (tmp_path / "watch-rank0.jsonl").write_text(json.dumps(line) + "\n[]\n{}\n")
    found = header_of(tmp_path)["watched"]
    if expected is None:
        assert found == []
        return
    (event,) = found
    for name, value in expected.items():
        if isinstance(value, dict):
            assert {key: event[name][key] for key in value} == value
        else:
            assert event[name] == value


def test_a_page_opens_at_the_loss_where_that_moved_first(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path, 8, 10, event_step=-1)
    mover = {"step": 5, "site": None, "signal": "loss"}
    line = {"step": 6, "rank": 0, "kind": "loss_spike", "site": None, "text": "x"}
    line |= {"is_warning": True, "movers": [mover]}
    (tmp_path / "watch-rank0.jsonl").write_text(json.dumps(line) + "\n")
    header = header_of(tmp_path)
    opens = header["opens"]
    site = header["rows"]["site"][opens["row"]]
    assert (header["sites"]["role"][site], opens["step"]) == ("loss", 5)


def overflowing(log: Path, level: str) -> list[dict[str, Any]]:
    """The places of a step whose second layer overflows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    with torch.no_grad():
        model.get_parameter("1.weight").fill_(3e38)
    monitor = fastcheck.install(model, level=level, log_dir=log, overflow_nums=-1)
    model(torch.full((2, 4), 100.0)).square().mean().backward()
    monitor.remove()
    places: list[dict[str, Any]] = header_of(log)["spread"]["places"]
    return places


def test_op_level_has_edges_of_data(tmp_path: Path) -> None:
    places = overflowing(tmp_path, "op")
    read = {number: place["read"] for number, place in enumerate(places) if place["read"]}
    assert len(places) > 2 and read[1] == [0]
    assert all(source < number for number, sources in read.items() for source in sources)


def test_module_level_has_those_of_the_verdict(tmp_path: Path) -> None:
    places = overflowing(tmp_path, "module")
    assert len(places) > 2 and not any(place["read"] for place in places)
    assert places[0]["follows"] == [] and places[1]["follows"] == [0]
