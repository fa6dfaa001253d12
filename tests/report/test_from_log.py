"""Reports from a log (summary(), the stop report, `fastcheck show`): the culprit and its inputs,
the last healthy numbers, how it spread, harmless values, and loss scaling.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.cli.main import main
from support.programs.op_level import Attention, model_with, train
from support.programs.training import stopped

pytestmark = pytest.mark.usefixtures("op_observer")

INF = float("inf")


def roots(x: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(-x.abs() - 1)


def healthy_then_bad(model: nn.Sequential, bad: int = 2) -> Any:
    def before(step: int) -> None:
        model[1].function = roots if step == bad else lambda x: torch.sqrt(x.abs() + 1)

    return before


def section(text: str, label: str) -> str:
    """The lines of one section, with their line breaks."""
    found = re.search(rf"^{label} .*?(?=^\S|\Z)", text, re.M | re.S)
    assert found is not None, f"no section {label} in\n{text}"
    return found.group()


@pytest.mark.parametrize("level", ["op", "module"])
def test_summary_tells_the_story(level: str) -> None:
    model = model_with(lambda x: x)
    monitor = fastcheck.install(model, level=level, record="stats", overflow_nums=-1)
    train(model, 4, healthy_then_bad(model))
    text = monitor.summary()
    culprit = section(text, "culprit")
    assert "32 NaN" in culprit and "at step 2" in culprit and "everything that" in culprit
    # 1 is the smallest that sqrt(|x| + 1) can be.
    assert re.search(r"step 1, the last healthy step:\s+min 1\.\d", culprit)
    assert re.search(r"Linear", section(text, "spread"))
    assert ("rms before" in section(text, "inputs")) is (level == "module")
    if level == "op":
        assert "aten.sqrt #0" in culprit and "test_from_log.py" in culprit


def test_the_inputs_have_their_healthy_numbers_beside_them() -> None:
    model = model_with(lambda x: x)
    fastcheck.install(model, level="op", record="stats")
    state = {"shift": 1.0}
    model[1].function = lambda x: torch.sqrt(x.abs() * 0 + state["shift"])

    def before(step: int) -> None:
        state["shift"] = 4.0 if step < 2 else -4.0

    rows = section(str(stopped(train, model, 3, before)), "inputs").splitlines()
    assert rows[0].split()[-3:] == ["rms", "rms", "before"]
    assert rows[1].split()[-4:] == ["-4", "-4", "4", "4"]


def test_the_first_ten_places_and_a_count() -> None:
    model = model_with(roots)
    monitor = fastcheck.install(model, level="op", record="stats", overflow_nums=-1)
    train(model, 1)
    spread = section(monitor.summary(), "spread")
    assert "1. output of aten.addmm #1 in 2 (Linear), forward: 16 NaN" in spread
    assert "10. " in spread and "11. " not in spread
    places = {
        (e.site, int(e.record["call"])) for e in monitor.events if e.verdict.name == "PROPAGATED"
    }
    assert f"and {len(places) - 10} more places" in spread


def test_what_was_no_harm_is_not_taken_for_a_place() -> None:
    model = nn.Sequential(model_with(roots), Attention(4))
    monitor = fastcheck.install(model, level="op", record="stats", overflow_nums=-1)
    with torch.no_grad():
        model(torch.randn(2, 6, 8))
    spread = section(monitor.summary(), "spread")
    places = re.findall(r"\d+\. .*", spread)
    assert places and not any("full_like" in place for place in places)
    model[0][1].function = lambda x: torch.full_like(x, INF) * 1 + roots(x)
    with torch.no_grad():
        model(torch.randn(2, 6, 8))
    monitor.remove()
    spread = section(monitor.summary(), "spread")
    assert "full_like" not in " ".join(re.findall(r"\d+\. .*", spread))
    assert "intended: 2 tensors, first output of aten.full_like" in " ".join(spread.split())


def test_nothing_spread_and_nothing_is_said_of_it() -> None:
    model = model_with(lambda x: torch.nan_to_num(roots(x)))
    options = {"overflow_nums": -1, "stop": fastcheck.Stop(count="all")}  # it is cleaned
    monitor = fastcheck.install(model, level="op", record="stats", **options)
    with torch.no_grad():
        model(torch.ones(2, 8))
    assert "culprit" in monitor.summary() and "spread" not in monitor.summary()


def test_what_did_no_harm_is_one_line_for_each_kind() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        scores = x.half() * 60000 * 60000  # absorbed by the sigmoid
        return x + torch.sigmoid(scores).float()

    model = nn.Sequential(Attention(), nn.Linear(8, 8), model_with(function))
    monitor = fastcheck.install(model, level="op", record="stats", overflow_nums=-1)
    with torch.no_grad():
        model(torch.randn(2, 6, 8))
        model(torch.randn(2, 6, 8))
    monitor.remove()
    assert monitor.event_count == 0
    text = monitor.summary()
    lines = re.findall(r"(?:intended|absorbed|benign|scaled): .*", section(text, "harmless"))
    assert re.search(r"intended: 2 tensors, first output of aten.masked_fill", lines[0])
    assert re.search(r"absorbed: \d tensors", lines[1]) and len(lines) == 2
    assert "culprit" not in text


def test_a_healthy_run_has_no_story() -> None:
    model = model_with(lambda x: x)
    monitor = fastcheck.install(model, level="op", record="stats")
    train(model, 2)
    text = monitor.summary()
    assert not {"culprit", "spread", "harmless"} & set(text.split())


def test_show_tells_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_with(lambda x: x)
    monitor = fastcheck.install(
        model, level="op", record="stats", overflow_nums=-1, log_dir=tmp_path / "log"
    )
    train(model, 3, healthy_then_bad(model))
    monitor.remove()
    assert main(["show", str(tmp_path / "log")]) == 0
    shown = capsys.readouterr().out

    def words(text: str) -> list[str]:
        return text.split()

    for label in ("culprit", "inputs", "spread"):
        assert words(section(shown, label)) == words(section(monitor.summary(), label))
    assert main(["show", str(tmp_path / "log"), "--events"]) == 0
    assert "culprit" not in capsys.readouterr().out


def test_show_of_what_a_stop_has_written(capsys: pytest.CaptureFixture[str]) -> None:
    model = model_with(lambda x: x)
    fastcheck.install(model, level="op", record="stats", stop=fastcheck.Stop(style="msprobe"))
    stop = stopped(train, model, 3, healthy_then_bad(model))
    assert main(["show", str(stop.log_path), "--style", "msprobe"]) == 0
    shown = capsys.readouterr().out
    assert "Torch.sqrt.0.forward.output.0 at step 2" in section(shown, "culprit")
    assert "self (aten.sub.Tensor)" in section(shown, "inputs")
    assert "the last healthy step" in section(shown, "culprit")
    assert "NaN" in section(shown, "numbers") and "trend" in shown


# Loss scaling


def scaled(log_dir: Path, level: str) -> tuple[fastcheck.Monitor, list[list[str]]]:
    """A run with two overflows, and torch's own numbers of each step."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    monitor = fastcheck.install(
        model, level=level, record="stats", overflow_nums=-1, log_dir=log_dir
    )
    expected = []
    for step in range(6):
        optimizer.zero_grad()
        factor = INF if step in (1, 4) else 1.0
        loss = model(torch.ones(2, 8)).square().mean() * factor
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        is_skipped = scaler.get_scale() < scale
        skipped = ["overflow,", "skipped"] if is_skipped else []
        expected.append([str(step), _spelt(loss.item()), *skipped, _spelt(scale)])
    monitor.remove()
    return monitor, expected


def _spelt(number: float) -> str:
    from fastcheck.utils.text.numbers import format_number

    return format_number(number)


@pytest.mark.parametrize("level", ["op", "module"])
def test_the_scalers_own_numbers(
    tmp_path: Path, level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor, expected = scaled(tmp_path / "log", level)
    assert [len(row) for row in expected] == [3, 5, 3, 3, 5, 3]
    lines = [line.split() for line in section(monitor.summary(), "steps").splitlines()]
    assert [line[: len(row)] for line, row in zip(lines[1:7], expected)] == expected
    assert "2 of the last 6 updates skipped" in monitor.summary()
    assert main(["show", str(tmp_path / "log")]) == 0
    shown = [line.split() for line in section(capsys.readouterr().out, "steps").splitlines()]
    assert [line[: len(row)] for line, row in zip(shown[1:7], expected)] == expected


def test_the_numbers_of_a_scaler_are_read_by_no_operator() -> None:
    model = nn.Linear(8, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with fastcheck.install(model, level="op", record="stats") as monitor:
        scaler.scale(model(torch.ones(2, 8)).sum()).backward()
        ops = [monitor.sites[int(r["site"])].op for r in monitor.records()]
    assert "aten.clone" not in ops
