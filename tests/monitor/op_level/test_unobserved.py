"""Operators that level="op" cannot observe are listed: operator, reason, number of calls."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastcheck
from fastcheck.cli.main import main
from support.programs.op_level import model_with, train
from support.programs.training import Net

pytestmark = pytest.mark.usefixtures("op_observer")


class Silent(torch.Tensor):
    """Computes by itself, as if in another library."""

    @staticmethod
    def __new__(cls, values: list[float]) -> Silent:
        made = torch.Tensor._make_wrapper_subclass(cls, (len(values),))
        made.values_inside = values  # type: ignore[attr-defined]  # a subclass with an attribute of its own
        return made  # type: ignore[return-value]  # _make_wrapper_subclass() is typed as Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Silent([value * 2 for value in args[0].values_inside])


class Open(torch.Tensor):
    """Calls the operator again, for what it wraps."""

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> Open:
        made = torch.Tensor._make_wrapper_subclass(cls, inside.shape)
        made.inside = inside  # type: ignore[attr-defined]  # a subclass with an attribute of its own
        return made  # type: ignore[return-value]  # _make_wrapper_subclass() is typed as Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Open(func(*(arg.inside if isinstance(arg, Open) else arg for arg in args)))


def sparse() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "in beta state"
        return torch.eye(4).to_sparse_csr() * 2


def quantized() -> Any:
    return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


def other_dtype() -> Any:
    return torch.ones(4).to(torch.float8_e4m3fnuz)


CASES = [
    ("aten.mul.Tensor", "sparse", sparse),
    ("aten.quantize_per_tensor", "quantized", quantized),
    ("aten._to_copy", "dtype", other_dtype),
    ("aten.mul.Tensor", "meta or fake", lambda: torch.ones(4, device="meta") * 2),
    ("aten.mul.Tensor", "subclass", lambda: Silent([1.0]) * 2),
    ("aten.mul.Tensor", "nested", lambda: torch.nested.nested_tensor([torch.ones(2)]) * 2),
]


def unread(monitor: fastcheck.Monitor) -> dict[str, tuple[str, int]]:
    rows = monitor._session.level.unread_ops()  # type: ignore[attr-defined]  # of the op level's session
    return {row.op: (row.reason, row.calls) for row in rows}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor is deprecated")
@pytest.mark.filterwarnings("ignore:.*quantiz.*")
@pytest.mark.parametrize(("op", "reason", "use"), CASES, ids=[case[1] for case in CASES])
def test_the_reason_is_told(op: str, reason: str, use: Any, monkeypatch: Any) -> None:
    # As in a process that has compiled nothing.
    monkeypatch.setattr("fastcheck.monitor.op_level.level._has_traced", lambda: False)
    with fastcheck.install(Net(), level="op") as monitor:
        use()
        use()
        assert unread(monitor)[op][1] == 2
        assert reason in unread(monitor)[op][0]
        assert f"{op}" in monitor.summary() and "unread" in monitor.summary()


def test_a_subclass_that_calls_the_operator_again_is_seen() -> None:
    with fastcheck.install(Net(), level="op") as monitor:
        _ = Open(torch.ones(4)) * 2 + Open(torch.ones(4))
        assert not unread(monitor) and "unread" not in monitor.summary()


def test_a_healthy_run_says_nothing() -> None:
    model = nn.Sequential(Net(), model_with(lambda x: torch.softmax(x.long().float(), -1)[:, :8]))
    model[0].head = nn.Linear(8, 8)
    with fastcheck.install(model, level="op") as monitor:
        train(model, 2, optimizer=torch.optim.Adam(model.parameters()))
        torch.vmap(lambda x: x.sin() + 1)(torch.ones(2, 3))
        assert not unread(monitor)


def test_what_a_filter_leaves_out_is_no_matter() -> None:
    with fastcheck.install(Net(), level="op", filter=fastcheck.Filter(ops="mm")) as monitor:
        sparse()
        assert not unread(monitor)


def test_memory_that_is_gone() -> None:
    x = torch.ones(4)
    with fastcheck.install(Net(), level="op") as monitor:
        x.untyped_storage().resize_(0)
        x.view(4).detach()  # as sharding looks at parameters whose memory it has taken away
        assert not unread(monitor)


def test_the_log_and_show_tell_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    model = Net()
    with fastcheck.install(model, level="op", log_dir=log):
        sparse()
        train(model, 2)
        sparse()
    assert main(["show", str(log)]) == 0
    assert "aten.mul.Tensor" in (text := capsys.readouterr().out) and "sparse tensor" in text
    assert main(["show", str(log), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["meta"]["0"]["not_observed"]
    assert any(row["op"] == "aten.mul.Tensor" and row["calls"] == 2 for row in rows)


def test_the_log_of_a_stop_tells_it(tmp_path: Path) -> None:
    model = model_with(lambda x: torch.sqrt(-x.abs() - 1))
    fastcheck.install(model, level="op")
    sparse()
    with pytest.raises(fastcheck.OverflowDetected):
        train(model, 1)
    meta = next((tmp_path / "fastcheck_log").glob("**/meta-rank0.json"))
    assert any("sparse" in row["reason"] for row in json.loads(meta.read_text())["not_observed"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code() -> None:
    """Of kernels that the compiler makes: what the modules take and return, and their gradients."""
    model = nn.Sequential(
        nn.Linear(8, 8), model_with(lambda x: torch.sqrt(-x.abs() - 1)), nn.Linear(4, 4)
    )
    monitor = fastcheck.install(model, level="op", overflow_nums=-1)
    torch.compile(model)(torch.ones(2, 8)).sum().backward()
    monitor.remove()
    first = next(event for event in monitor.events if event.counted)
    assert (first.site.module, first.site.op, first.site.role) == ("1.1", None, "output")
    assert "compiled code" in first.reason
    assert unread(monitor)["1.1 (compiled)"][1] > 0
    ops = {site.op or "" for site in monitor.sites}
    assert not any(op.startswith("fastcheck.") for op in ops)
    assert any(site.role == "grad_output" and site.op is None for site in monitor.sites)


def test_an_outputs_numbers_call_no_operators() -> None:
    """Records are handed over without calling operators, which would be counted and seen."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    monitor = fastcheck.install(Net(), level="op")
    _ = torch.ones(2) + 1
    with Seen():
        monitor.records()
        monitor.flush()
    assert not names
    monitor.remove()
