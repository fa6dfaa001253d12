"""monitor.report(path): the page of a run, from its log or from memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fastcheck
from fastcheck.errors import LogError
from fastcheck.log.reader import read_log
from fastcheck.log.view import first_event
from fastcheck.report.build import report_from_log
from fastcheck.report.message import packed
from fastcheck.report.page import write as writing
from support.page_data import PageData
from support.programs.training import Net, batches

pytestmark = pytest.mark.usefixtures("fresh_start")


def train(monitor: fastcheck.Monitor, model: Net, steps: int = 4) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in batches(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("log_dir", [None, "log"])
@pytest.mark.parametrize("removed", [False, True])
def test_the_page_holds_what_the_monitor_holds(
    tmp_path: Path, log_dir: str | None, removed: bool
) -> None:
    model = Net()
    monitor = fastcheck.install(model, log_dir=log_dir)
    train(monitor, model)
    if removed:
        monitor.remove()
    monitor.report(tmp_path / "run.html")
    page = PageData((tmp_path / "run.html").read_text())
    records, rows = monitor.records(), page.header["rows"]
    assert page.header["records"] == len(records)
    assert page.header["axis"]["starts"] == [0, 1, 2, 3]
    for row, site in enumerate(rows["site"]):
        names = page.header["sites"]
        number = next(
            n
            for n, one in enumerate(monitor.sites)
            if (one.module, one.role, one.tensor_name)
            == (names["module"][site], names["role"][site], names["name"][site])
        )
        mine = records[records["site"] == number]
        high = [
            float(np.fmax(np.abs(mine["min"]), mine["max"])[mine["step"] == step].max())
            for step in range(4)
            if (mine["step"] == step).any()
        ]
        shown = page.arrays["abs_max.high"][row]
        if mine["dtype"][0] <= 7:  # min and max of integers are not float64
            assert shown[~np.isnan(shown)].tolist() == high
    assert page.header["steps"]["0"]["loss"] == [row.loss for row in monitor.step_table()]
    assert (tmp_path / "log").exists() == (log_dir is not None)


@pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
@pytest.mark.parametrize("is_stopped", [False, True])
def test_warnings_of_a_run_in_memory_are_on_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    """Also on the page that a stop writes."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    monitor = fastcheck.install(model, watch=fastcheck.Watch(window=32, warm_up=16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(scale: float) -> None:
        optimizer.zero_grad()
        x = torch.randn(32, 8)
        (model(x) - scale * x[:, :4]).square().mean().backward()
        optimizer.step()

    for step in range(45):
        train(1000.0 if step == 35 else 1.0)
    path = tmp_path / "run.html"
    if is_stopped:
        with pytest.raises(fastcheck.OverflowDetected) as stop:
            train(np.nan)
        assert stop.value.report.page is not None
        path = Path(stop.value.report.page)
    else:
        monitor.report(path)
    watched = PageData(path.read_text()).header["watched"]
    assert (35, "loss_spike") in [(event["step"], event["kind"]) for event in watched]


def test_a_stopped_run_in_memory(tmp_path: Path) -> None:
    model = Net()
    monitor = fastcheck.install(model, overflow_nums=-1)
    train(monitor, model, 2)
    model(torch.full((4, 8), float("nan")))
    monitor.report(tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text()
    assert "32 NaN in input" in text and "held in memory" in text
    assert str(tmp_path) not in text.replace(str(tmp_path / "log"), "")
    assert PageData(text).header["first"]["step"] == monitor.events[0].step


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    model = Net()
    monitor = fastcheck.install(model)
    train(monitor, model, 1)
    with pytest.raises(LogError, match="the page can't be written"):
        monitor.report(tmp_path / "missing" / "run.html")


def test_the_page_of_a_log_names_the_log(tmp_path: Path) -> None:
    model = Net()
    monitor = fastcheck.install(model, log_dir=tmp_path / "log")
    train(monitor, model, 1)
    monitor.report(tmp_path / "run.html")
    assert read_log(tmp_path / "log").directory == str(tmp_path / "log")
    assert PageData((tmp_path / "run.html").read_text()).header["directory"] == str(
        tmp_path / "log"
    )


def stop_of(model: Net, **options: object) -> fastcheck.OverflowDetected:
    """The stop of a run whose third batch holds a NaN."""
    monitor = fastcheck.install(model, **options)
    train(monitor, model, 2)
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        model(torch.full((4, 8), float("nan")))
    monitor.remove()
    return caught.value


@pytest.mark.parametrize("log_dir", [None, "log"])
def test_a_stop_leaves_a_page_beside_its_log(log_dir: str | None) -> None:
    stop = stop_of(Net(), log_dir=log_dir)
    log = stop.report.log_path
    assert log is not None and stop.report.page == str(Path(log, "report.html"))
    assert f"In a browser: {stop.report.page}" in " ".join(str(stop).split())
    text = Path(stop.report.page).read_text()
    header = PageData(text).header
    assert header["records"] == len(read_log(log).records)
    assert header["first"]["step"] == stop.step
    # Of the stop itself: no record holds this.
    assert "No optimizer has updated a weight in this step." in text


def test_only_the_rank_of_the_culprit_writes() -> None:
    report = stop_of(Net()).report
    assert report.page is not None
    page = Path(report.page)
    page.unlink()
    writing.write_stop_page(report, report.rank + 1, tuple)
    assert not page.exists()
    writing.write_stop_page(report, report.rank, tuple)
    assert page.exists()


def test_a_stop_without_a_page() -> None:
    stop = stop_of(Net(), stop=fastcheck.Stop(report=False))
    assert stop.report.page is None and "browser" not in str(stop)
    assert stop.report.log_path is not None
    assert not Path(stop.report.log_path, "report.html").exists()


def test_a_page_that_fails_does_not_replace_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: object, **kwargs: object) -> None:
        raise ValueError("no such luck\nat all")

    monkeypatch.setattr(writing, "write_page", failing)
    with pytest.warns(
        fastcheck.FastcheckWarning, match="report of the stop could not be written: no such luck;"
    ):
        stop = stop_of(Net())
    assert stop.report.page is None and "NaN in input" in str(stop)


def test_a_large_log_gets_no_page_at_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_MOST_BYTES", 100)
    assert stop_of(Net()).report.page is None


def test_a_log_of_two_stops_has_the_report_of_the_first_for_its_event_alone() -> None:
    model = Net()
    monitor = fastcheck.install(model, log_dir="log")
    train(monitor, model, 2)
    stops = []
    for _ in range(2):
        with pytest.raises(fastcheck.OverflowDetected) as caught:
            model(torch.full((4, 8), float("nan")))
        stops.append(caught.value.report)
    monitor.remove()
    first, second = stops
    assert first.log_path is not None
    view = read_log(first.log_path)
    counted = {int(event.record["seq"]): event for event in view.events if event.counted}
    for report, is_known in ((first, True), (second, False)):
        seq = int(report.culprit.record["seq"])
        shown = report_from_log(view, counted[seq], "fastcheck")
        assert shown is not None and shown.culprit.record["seq"] == seq
        assert (shown.weights_intact is not None) is is_known


@pytest.mark.parametrize("has_page", [True, False])
def test_a_log_has_what_its_stop_knew(has_page: bool) -> None:
    report = stop_of(Net(), stop=fastcheck.Stop(report=has_page)).report
    assert report.log_path is not None and report.weights_intact is not None
    view = read_log(report.log_path)
    shown = report_from_log(view, first_event(view.events), "msprobe")
    assert shown is not None
    place = {"log_path": report.log_path, "page": report.page, "style": report.style}
    assert packed(replace(shown, **place)) == packed(report)
    # What is damaged is left out.
    Path(report.log_path, "stop-rank0.json").write_text('{"culprit": 1}')
    poor = report_from_log(view, first_event(view.events), "fastcheck")
    assert poor is not None and poor.weights_intact is None


def test_what_goes_on_writes_no_page(tmp_path: Path) -> None:
    model = Net()
    monitor = fastcheck.install(model, log_dir="log", stop=fastcheck.Stop(action="warn"))
    with pytest.warns(fastcheck.FastcheckWarning, match="NaN in input"):
        model(torch.full((4, 8), float("nan")))
    monitor.remove()
    assert not Path("log", "report.html").exists()


def test_the_option_is_checked() -> None:
    with pytest.raises(fastcheck.ConfigError, match="report"):
        fastcheck.Stop(report="yes")  # type: ignore[arg-type]  # the error is what is tested
