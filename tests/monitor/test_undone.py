"""An install() that fails leaves nothing behind, and raises an error of fastcheck."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.monitor.hooks import graphs, optimizers
from fastcheck.monitor.monitor import Monitor

pytestmark = pytest.mark.usefixtures("fresh_start")
LEVELS = ("module", "op")


def traced(module: nn.Module) -> nn.Module:
    return torch.jit.trace(module, torch.ones(2, 3))


class Mixed(nn.Module):
    """With a compiled part between two others."""

    def __init__(self, compiled: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = compiled(nn.Sequential(nn.Linear(3, 3)))
        self.c = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x)))


class NotBuilt(nn.Module):
    def __init__(self) -> None:
        pass


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def listeners() -> tuple[int, int]:
    return len(list(optimizers.watchers)), len(list(graphs.followers))


@pytest.mark.parametrize("compiled", [torch.jit.script, traced])
@pytest.mark.parametrize("exclude", [None, "b"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_part_that_jit_compiled_is_left_out_with_a_note(
    level: str, exclude: str | None, compiled: Callable[[nn.Module], nn.Module]
) -> None:
    model, criterion = Mixed(compiled), torch.jit.script(nn.MSELoss())
    more = () if exclude else (criterion,)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fastcheck.install(model, *more, level=level, exclude=exclude) as monitor:
        for _ in range(2):
            criterion(model(torch.randn(2, 3)), torch.zeros(2, 3)).backward()
            optimizer.step()
        assert monitor.step_index == 1
        modules = {site.module for site in monitor.sites}
        assert "a" in modules and not any(name.startswith("b") for name in modules)
        text = " ".join(monitor.summary().split())
    note = (
        "not observed, compiled by torch.jit: b (compiled from Sequential), "
        "RecursiveScriptModule (compiled from MSELoss)"
    )
    assert (note in text) == (exclude is None)
    assert hooks(model) == 0


@pytest.mark.parametrize("compiled", [torch.jit.script, traced])
def test_a_model_that_jit_compiled_is_refused(
    compiled: Callable[[nn.Module], nn.Module],
) -> None:
    with pytest.raises(fastcheck.ConfigError, match="the model, compiled from Linear"):
        fastcheck.install(compiled(nn.Linear(3, 3)))


@pytest.mark.parametrize("level", LEVELS)
def test_whatever_is_raised_while_hooks_are_put_on_takes_them_off(
    level: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, before = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), listeners()

    class Refusing(nn.Module):
        def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

    model.append(Refusing())
    with pytest.raises(KeyboardInterrupt):
        fastcheck.install(model, level=level, log_dir=tmp_path / "log")
    assert hooks(model) == 0 and listeners() == before
    monkeypatch.setattr(graphs.followers, "connect", lambda one: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fastcheck.install(model[:2], level=level)
    monkeypatch.undo()
    assert hooks(model) == 0 and listeners() == before
    with fastcheck.install(model[:2], level=level) as monitor:
        model[:2](torch.randn(2, 3)).sum().backward()
        assert len(monitor.records())


def test_a_second_monitor_at_op_level_leaves_no_hook() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    with fastcheck.install(first, level="op"):
        with pytest.raises(fastcheck.ConfigError, match="installed already"):
            fastcheck.install(second, level="op")
        assert hooks(second) == 0
        first(torch.randn(2, 3))
    assert hooks(first) == 0


def built() -> nn.Module:
    return nn.Linear(3, 3)


def with_part() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3))
    model._modules["bad"] = NotBuilt()
    return model


WRONG: dict[str, Callable[[], object]] = {
    "model": lambda: fastcheck.install(NotBuilt()),
    "more": lambda: fastcheck.install(built(), NotBuilt()),
    "part": lambda: fastcheck.install(with_part()),
    "scripted": lambda: fastcheck.install(torch.jit.script(built())),
    "include": lambda: fastcheck.install(built(), include=3.5),  # type: ignore[arg-type]  # wrong on purpose
    "exclude": lambda: fastcheck.install(built(), exclude=3.5),  # type: ignore[arg-type]  # wrong on purpose
    "items": lambda: fastcheck.install(built(), exclude=[3]),  # type: ignore[list-item]  # wrong on purpose
    "log_dir": lambda: fastcheck.install(built(), log_dir="a\0b"),
    "bytes": lambda: fastcheck.install(built(), log_dir=b"a"),  # type: ignore[arg-type]  # wrong on purpose
    "empty": lambda: fastcheck.install(built(), log_dir=""),
    "Log": lambda: fastcheck.Log("a\0b"),
    "Stop": lambda: fastcheck.Stop(dump="a\0b"),
    "Dumper": lambda: fastcheck.Dumper("a\0b"),
    "Dumper-int": lambda: fastcheck.Dumper(3),  # type: ignore[arg-type]  # wrong on purpose
    "from_log": lambda: fastcheck.Dumper("dump", from_log="a\0b"),
    "seal": lambda: fastcheck.seal("a\0b", built()),
    "verify": lambda: fastcheck.verify("a\0b"),
    "verify-int": lambda: fastcheck.verify(3),  # type: ignore[arg-type]  # wrong on purpose
    "bisect": lambda: fastcheck.bisect(
        3,  # type: ignore[arg-type]  # wrong on purpose
        lambda x: 0.0,
        dtype=torch.float32,
    ),
    "metric": lambda: fastcheck.bisect(
        lambda x: 0,
        "x",  # type: ignore[arg-type]  # wrong on purpose
        dtype=torch.float32,
    ),
    "inventory": lambda: fastcheck.inventory(3),  # type: ignore[arg-type]  # wrong on purpose
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_a_config_error(name: str) -> None:
    before = set(os.listdir())
    with pytest.raises(fastcheck.ConfigError, match=r"expected(.|\n)*got|must be .* got"):
        WRONG[name]()
    assert set(os.listdir()) == before


def test_monitor_is_what_install_returns() -> None:
    with fastcheck.install(built()) as monitor:
        assert isinstance(monitor, Monitor)
