"""install(record="range"): what is counted and when, the advice, the log; nothing changes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck import ConfigError
from fastcheck.backends import table
from fastcheck.backends.table import backend_for
from fastcheck.cli.main import main
from fastcheck.monitor import precision
from fastcheck.monitor.precision import ExponentReadings
from fastcheck.monitor.session.session import ModuleLevel
from fastcheck.types import PrecisionAdvice, Site


class Net(nn.Module):
    """Two linear layers, between them outputs over more binades than float16 has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.spread = Spread()
        self.head = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.spread(self.first(x)).float())
        return y


class Spread(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.exp2(-torch.arange(64.0))


def train(steps: int = 3, record: str = "range", **options: Any) -> tuple[Any, list[Any]]:
    """The monitor, and the losses and weights."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [torch.randn(16, 64) for _ in range(steps)]
    monitor = fastcheck.install(model, record=record, **options)
    seen: list[Any] = []
    for x in batches:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    seen += [p.detach().clone() for p in model.parameters()]
    return monitor, seen


def by_name(monitor: Any) -> dict[str, PrecisionAdvice]:
    return {f"{one.site.module} {one.site.tensor_name}": one for one in monitor.advice()}


def test_the_counts_are_those_of_the_tensors() -> None:
    kept: dict[str, fastcheck.types.Exponents] = {}

    def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        found = fastcheck.exponents(output)
        kept["sum"] = kept["sum"] + found if kept else found

    torch.manual_seed(0)
    model = Net()
    model.spread.register_forward_hook(keep)
    with fastcheck.install(model, record="range") as monitor:
        for _ in range(3):
            model(torch.randn(16, 64)).sum().backward()
            monitor.step()
    advice = by_name(monitor)["spread output"]
    assert advice.readings == 3
    assert advice.exponents == kept["sum"]


def test_advice() -> None:
    monitor, _ = train()
    advice = by_name(monitor)
    down = advice["first output"]
    assert (down.goes_down, down.format, down.dtype) == (True, "float8_e4m3fn", "float32")
    assert down.exponents.share_above(down.format, down.scale).most == 0
    assert down.exponents.abs_max * down.scale > 448 / 4
    assert down.lost.most <= 0.001
    assert str(down).startswith("first (Linear) · forward · output: float32 to float8_e4m3fn at ")
    stays = advice["spread output"]
    # 64 binades are more than float16's 40, and fewer than bfloat16's.
    assert stays.format == "bfloat16" and stays.scale == 1
    assert "float16: " in stays.because and "mxfp8_e4m3: " in stays.because
    weight = advice["first parameter first.weight"]
    assert weight.readings >= 3  # in the first step twice
    assert advice["first gradient of first.weight"].readings >= 3
    monitor.remove()


def test_formats_of_ones_own() -> None:
    monitor, _ = train(1)
    found = {
        f"{one.site.module} {one.site.label}": one
        for one in monitor.advice(formats=("nvfp4", "mxfp4", "bf16"))
    }
    assert {one.format for one in found.values()} <= {"nvfp4", "mxfp4", "bfloat16"}
    first = found["first output"]
    assert first.lost == first.exponents.share_below(first.format, first.scale)
    assert monitor.advice(tolerance=0.9, formats=["nvfp4"])[0].format == "nvfp4"
    for wrong in ("nvfp4", (), ["float4"], [3]):
        with pytest.raises(ConfigError, match="format"):
            monitor.advice(formats=wrong)
    monitor.remove()


def test_a_tolerance_of_zero_and_errors() -> None:
    monitor, _ = train(1)
    strict = {f"{one.site.module} {one.site.label}": one for one in monitor.advice(tolerance=0)}
    assert strict["first output"].format != "float8_e4m3fn"
    for wrong in (1, -0.1, None, True):
        with pytest.raises(ConfigError, match="tolerance"):
            monitor.advice(tolerance=wrong)
    monitor.remove()
    other, _ = train(1, record="full")
    with pytest.raises(ConfigError, match='record="range"'):
        other.advice()
    other.remove()
    with pytest.raises(ConfigError, match="module level"):
        fastcheck.install(Net(), record="range", level="op")


def test_nothing_changes() -> None:
    monitors, runs = zip(*[train(3, record) for record in ("range", "full")])
    for with_counts, without in zip(*runs):
        assert bool(torch.as_tensor(with_counts == without).all())
    records = [monitor.records() for monitor in monitors]
    for monitor in monitors:
        monitor.remove()
    assert (records[0] == records[1]).all()


def test_the_steps_that_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    before = ExponentReadings.read

    def read(self: Any, *args: Any) -> bool:
        counted.append(args[4])  # the step
        return before(self, *args)

    monkeypatch.setattr(ExponentReadings, "read", read)
    monitor, _ = train(67)
    monitor.remove()
    assert sorted(set(counted)) == [0, 1, 2, 4, 8, 16, 32, 64]
    counted.clear()
    # Of the steps that are observed.
    monitor, _ = train(10, every=3)
    monitor.remove()
    assert sorted(set(counted)) == [0, 3, 6]


def test_between_them_the_hooks_go_their_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    before = ModuleLevel.open_recorder

    def open_recorder(level: ModuleLevel) -> None:
        opened.append(level.session.step.index)
        before(level)

    monkeypatch.setattr(ModuleLevel, "open_recorder", open_recorder)
    monitor, _ = train(8)
    monitor.remove()
    assert set(opened) == {3, 5, 6, 7}


def test_log_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    monitor, _ = train(3, log_dir=log)
    monitor.flush()
    expected = {str(one) for one in monitor.advice()}
    monitor.remove()
    lines = (log / "range-rank0.jsonl").read_text().splitlines()
    assert len(lines) == len(expected)  # flush() wrote all; remove() had nothing to add
    assert all(json.loads(line)["readings"] >= 3 for line in lines)
    assert main(["show", str(log), "--json", "--limit", "0"]) == 0
    shown = json.loads(capsys.readouterr().out)["precision"]
    assert {f"{Site.from_dict(one['site'])}: {one['text']}" for one in shown} == expected
    assert main(["show", str(log)]) == 0
    assert "float32 to float8_e4m3fn at scale 2^" in capsys.readouterr().out
    # Damaged lines are left out.
    with open(log / "range-rank0.jsonl", "a") as file:
        file.write('{"site": 0, "dtype": "float3", "readings": 1, "is_scaled": 0, "words": {}}\n')
        file.write('{"site": 1, "dtype": "float32", "words": 3}\n{"site": [0]}\n')
    assert main(["show", str(log), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["precision"]) >= len(expected) - 2


def test_an_error_inside_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(ExponentReadings, "read", fail)
    with pytest.warns(fastcheck.FastcheckWarning, match="exponents: RuntimeError: broken"):
        monitor, seen = train(3)
    assert monitor.advice() == []
    assert len(monitor.records()) > 0
    monitor.remove()
    plain = train(3, record="full")
    assert seen[:3] == plain[1][:3]
    plain[0].remove()


def test_a_tensor_that_cannot_be_read_is_left_out_and_the_others_are_counted() -> None:
    class Frees(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gone = x + 1
            gone.untyped_storage().resize_(0)
            return gone

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frees, self.linear = Frees(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.frees(x)
            out: torch.Tensor = self.linear(x)
            return out

    model = Both()
    with pytest.warns(fastcheck.FastcheckWarning, match="frees"):
        monitor = fastcheck.install(model, record="range")
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            monitor.step()
    counted = {(one.site.module, one.site.role) for one in monitor.advice()}
    monitor.remove()
    assert ("linear", "output") in counted and ("frees", "output") not in counted


def test_what_is_counted_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record and its exponents come from one call of the backend."""

    def fail(*args: object) -> None:
        raise AssertionError("the tensor was read a second time")

    cpu = backend_for(torch.device("cpu"))
    once = dataclasses.replace(cpu, observe=fail, observe_list=fail, exponents=fail)
    for module in (table, precision):
        monkeypatch.setattr(module, "backend_for", lambda device: once)
    monitor, _ = train(1)
    assert len(monitor.advice()) > 6
    monitor.remove()


def test_what_has_to_stay() -> None:
    advise = fastcheck.record.precision.advise
    only_zeros = advise(fastcheck.exponents(torch.zeros(3)), "float32", 0.001)
    assert only_zeros.text == "stays float32: only zeros were read"
    bad = advise(fastcheck.exponents(torch.tensor([1.0, float("inf")])), "float32", 0.001)
    assert bad.text == "stays float32: 1 element was NaN or infinite"
    narrow = advise(fastcheck.exponents(torch.ones(3).half()), "float8_e5m2", 0.001)
    assert narrow.text == "stays float8_e5m2: it is the narrowest already"
    wide = torch.exp2(torch.arange(-64.0, 64.0))
    stays = advise(fastcheck.exponents(wide.bfloat16()), "bfloat16", 0.001)
    assert stays.text.startswith("stays bfloat16: at their best scale become zero in float8_e4m3fn")
    small = advise(fastcheck.exponents(torch.full((32,), 2.0**-140)), "float64", 0.001)
    assert (small.format, small.scale) == ("float8_e4m3fn", 2.0**147)
    loss_scaled = advise(fastcheck.exponents(torch.ones(3)), "float32", 0.001, is_scaled=True)
    assert "at scale 2^7 of the scaled gradient" in loss_scaled.text
