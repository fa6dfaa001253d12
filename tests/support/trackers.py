"""Stand-ins for experiment trackers: the part of their public interface that fastcheck calls, as
wandb 0.31, mlflow 3.17, trackio 0.43, aim 3.29 and torch 2.13 have it. What is written is kept.
"""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any, Callable, Optional

import pytest
from torch import nn

import fastcheck
from support.programs.training import Apply, chain, poison, stopped, train


class Kept:
    """A sink of a user's: ``rows`` are (step, scalars)."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.texts: list[tuple[str, str, int]] = []
        self.alerts: list[tuple[str, str, int]] = []
        self.warnings: list[tuple[str, str, int]] = []
        self.threads: set[str] = set()

    def log(self, scalars: dict[str, float], step: int) -> None:
        self.threads.add(threading.current_thread().name)
        self.rows.append((step, dict(scalars)))

    def text(self, name: str, text: str, step: int) -> None:
        self.texts.append((name, text, step))

    def alert(self, title: str, text: str, step: int) -> None:
        self.alerts.append((title, text, step))

    def warning(self, title: str, text: str, step: int) -> None:
        self.warnings.append((title, text, step))

    def column(self, name: str) -> list[Optional[float]]:
        return [scalars.get(f"fastcheck/{name}") for _, scalars in self.rows]


class _WandbRun:
    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls
        self.summary: dict[str, Any] = {}

    def define_metric(self, name: str, step_metric: Any = None, hidden: Any = None) -> None:
        self._calls.append(("define_metric", name, step_metric))

    def log(self, data: dict[str, Any], step: Any = None, commit: Any = None) -> None:
        assert step is None and commit is False, "this would move the user's rows"
        self._calls.append(("log", data))

    def alert(self, title: str, text: str, level: Any = None, wait_duration: Any = None) -> None:
        assert len(title) < 64 and level == "ERROR"
        self._calls.append(("alert", title, text))


def _wandb(calls: list[Any]) -> ModuleType:
    module = ModuleType("wandb")
    module.run = _WandbRun(calls)  # type: ignore[attr-defined]  # a module made here
    return module


def _mlflow(calls: list[Any]) -> ModuleType:
    def log_batch(run_id: str, metrics: Any = (), synchronous: Optional[bool] = None) -> None:
        assert run_id == "7" and synchronous is True
        calls.append(("log", {m.key: m.value for m in metrics} | {"step": metrics[0].step}))

    def log_text(run_id: str, text: str, artifact_file: str) -> None:
        calls.append(("alert", artifact_file, text))

    def set_tag(run_id: str, key: str, value: Any) -> None:
        calls.append(("set_tag", key, value))

    def metric(key: str, value: float, timestamp: int, step: int) -> SimpleNamespace:
        assert timestamp > 1e12, "milliseconds"
        return SimpleNamespace(key=key, value=value, step=step)

    client = SimpleNamespace(log_batch=log_batch, log_text=log_text, set_tag=set_tag)
    own = threading.current_thread()

    def active_run() -> Any:
        on_this_thread = threading.current_thread() is own
        return SimpleNamespace(info=SimpleNamespace(run_id="7")) if on_this_thread else None

    return _module(
        "mlflow",
        active_run=active_run,
        MlflowClient=lambda: client,
        entities=SimpleNamespace(Metric=metric),
    )


def _trackio(calls: list[Any]) -> ModuleType:
    def log(metrics: dict[str, Any], step: Optional[int] = None) -> None:
        calls.append(("log", {**metrics, "step": step}))

    def alert(title: str, text: str, level: Any, step: int) -> None:
        assert level == "error"
        calls.append(("alert", title, text))

    run = SimpleNamespace(log=log, alert=alert)
    current = SimpleNamespace(get=lambda: run)
    return _module(
        "trackio",
        context_vars=SimpleNamespace(current_run=current),
        AlertLevel=SimpleNamespace(ERROR="error"),
    )


def _aim(calls: list[Any]) -> ModuleType:
    class Run:
        def __init__(self, experiment: str, log_system_params: bool) -> None:
            calls.append(("run", experiment))

        def track(self, value: Any, name: Any = None, step: Any = None) -> None:
            if isinstance(value, dict):
                calls.append(("log", {**value, "step": step}))
            else:
                calls.append(("alert", name, value))

        def close(self) -> None:
            calls.append(("close",))

    return _module("aim", Run=Run, Text=str)


def _tensorboard(calls: list[Any]) -> ModuleType:
    class SummaryWriter:
        def __init__(self, log_dir: Optional[str] = None, comment: str = "") -> None:
            calls.append(("run", comment))

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            calls.append(("log", {tag: value, "step": step}))

        def add_text(self, tag: str, text: str, step: int) -> None:
            calls.append(("alert", tag, text))

        def flush(self) -> None: ...

        def close(self) -> None:
            calls.append(("close",))

    return _module("torch.utils.tensorboard", SummaryWriter=SummaryWriter)


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module


MAKE: dict[str, Callable[[list[Any]], ModuleType]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
    "aim": _aim,
}


def pretend(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """From now on ``import name`` gives the stand-in; what it is called with."""
    calls: list[Any] = []
    module = MAKE[name](calls)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    if "." in module.__name__:
        import torch.utils

        monkeypatch.setattr(torch.utils, "tensorboard", module, raising=False)
    return calls


def stopped_run(*sinks: Any) -> fastcheck.OverflowDetected:
    """Three steps, of which the last is stopped."""
    model = chain(fc=nn.Linear(8, 8), hole=Apply(), out=nn.Linear(8, 8))

    def before(step: int) -> None:
        model.hole.function = poison if step == 2 else Apply().function

    with fastcheck.install(model, sinks=sinks):
        return stopped(train, model, 3, before_step=before)
