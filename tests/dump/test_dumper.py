"""Dumper: the dumped step is not changed, whatever other modes and hooks run in it; its options."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from support.programs.dumping import LEVELS, calls, dumped_run, index, log, ops, place
from support.programs.training import Net

safetensors = pytest.importorskip("safetensors")


@pytest.mark.parametrize(
    "options",
    [
        {"level": "op"},
        {"level": "module"},
        {"level": "op", "tensors": True, "reference": "cpu"},
        {"level": "op", "order": "logical", "record": "stats"},
        {"level": "module", "tensors": True},
    ],
)
def test_training_is_bit_identical_and_draws_the_same_numbers(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    plain, model = dumped_run(None)
    state = torch.get_rng_state()
    losses, dumped = dumped_run(tmp_path / "dump", **options)
    assert losses == plain
    assert torch.equal(torch.get_rng_state(), state)
    for one, other in zip(model.parameters(), dumped.parameters()):
        assert torch.equal(one, other)


def test_the_filters_of_warnings_are_as_before(tmp_path: Path) -> None:
    """In a process of its own: a module imported by the first dump could add filters too."""
    code = """
import sys, warnings, torch, fastcheck
def run(step, is_compiled=False, **options):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    called = torch.compile(model, backend="eager") if is_compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = list(warnings.filters)
    with fastcheck.Dumper(sys.argv[1], step=step, **options):
        called(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        warnings.filterwarnings("ignore", "the user's")
    assert warnings.filters.pop(0)[1].pattern == "the user's"
    assert warnings.filters == before, set(warnings.filters) ^ set(before)
import torch._dynamo  # as torch does for the first optimizer, with filters of its own
run(1)
run(2, level="module", tensors=True)
run(3, reference="cpu")
run(4, is_compiled=True)
run(5, is_compiled=True, level="module")
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


def test_disabled_it_does_nothing_at_all(tmp_path: Path) -> None:
    before = torch.nn.modules.module._global_forward_hooks.copy()
    with fastcheck.Dumper(tmp_path / "dump", enable=False, level="nonsense") as dumper:
        assert torch._C._len_torch_dispatch_stack() == 0
        assert torch.nn.modules.module._global_forward_hooks == before
    assert dumper.path is None and not dumper.problem
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("level", LEVELS)
def test_an_exception_ends_the_dump_and_goes_on(tmp_path: Path, level: str) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.fails = nn.Linear(8, 8), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            if self.fails:
                raise RuntimeError("in the middle")
            return y + 1

    model = Broken()
    dumper = fastcheck.Dumper(tmp_path, level=level)
    with pytest.raises(RuntimeError, match="in the middle"), dumper:
        model(torch.ones(2, 8))
    assert index(tmp_path)["ended_by"] == "RuntimeError"
    assert len(log(tmp_path).records) > 2
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.nn.modules.module._global_forward_pre_hooks
    # One that the block itself catches is no end: what runs then is not inside the model.
    with fastcheck.Dumper(tmp_path, step=1, level=level):
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 8))
        torch.ones(2).exp()
        model.fails = False
        model(torch.ones(2, 8))
    modules = {line.get("module") for line in calls(tmp_path, 1)}
    assert modules == {"", "a", None} and not index(tmp_path, 1)["ended_by"]
    outside = [line["type"] for line in calls(tmp_path, 1) if line.get("op") == "aten.exp"]
    assert outside == (["outside the model"] if level == "op" else [])


def test_several_models_and_calls_go_by_their_own_names(tmp_path: Path) -> None:
    generator, judge = Net(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with fastcheck.Dumper(tmp_path, level="module"):
        judge(generator(torch.ones(2, 8)))
        judge(torch.ones(3, 4))
    found = [(x["module"], x["call"]) for x in calls(tmp_path) if x["kind"] == "module"]
    assert ("", 0) in found and ("head", 0) in found
    assert [call for module, call in found if module == "Sequential.0"] == [0, 0, 1, 1]
    with fastcheck.Dumper(tmp_path, step=1, level="module", model=[judge, generator]):
        judge(generator(torch.ones(2, 8)))
    modules = {x["module"] for x in calls(tmp_path, 1) if x["kind"] == "module"}
    assert {"", "0", "1", "Net", "Net.head"} <= modules


def test_dumps_can_be_nested(tmp_path: Path) -> None:
    x = torch.randn(4, 4)
    with fastcheck.Dumper(tmp_path / "outer", tensors=True):
        y = x + 1
        with fastcheck.Dumper(tmp_path / "inner", tensors=True, reference="cpu"):
            z = y.exp()
        z.sin()
    assert ops(tmp_path / "outer") == ["aten.add.Tensor", "aten.exp", "aten.sin"]
    assert ops(tmp_path / "inner") == ["aten.exp"]


def test_it_goes_together_with_a_monitor_of_either_level(tmp_path: Path) -> None:
    def sites(level: str, is_dumped: bool) -> list[str]:
        model = Net()
        dumper = fastcheck.Dumper(tmp_path / level, enable=is_dumped, tensors=True, reference="cpu")
        with fastcheck.install(model, level=level, overflow_nums=-1) as monitor:
            with dumper:
                model(torch.ones(2, 8)).sum().backward()
            found = [str(monitor.sites[r["site"]]) for r in monitor.records()]
        # Autograd adds gradients up in place unless Python holds one of them.
        return [name for name in found if "add" not in name or "forward" in name]

    for level in LEVELS:
        assert sites(level, True) == sites(level, False)


def test_other_threads_are_left_alone(tmp_path: Path) -> None:
    def other() -> None:
        torch.ones(3) @ torch.ones(3)

    with fastcheck.Dumper(tmp_path):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        torch.ones(2) + 1
    assert ops(tmp_path) == ["aten.ones", "aten.add.Tensor"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_compiled_model_is_seen_as_it_is_written(tmp_path: Path, level: str) -> None:
    model = Net()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.ones(2, 8)
    compiled(x).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with fastcheck.Dumper(tmp_path, level=level):
        compiled(x).sum().backward()
    found = {line["module"] for line in calls(tmp_path) if "module" in line}
    assert {"head", "blocks.1.a"} <= found
    assert all(
        torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients) if p.grad is not None
    )
    count = len(calls(tmp_path))
    compiled(x).sum().backward()  # compiled again, and not observed
    assert len(calls(tmp_path)) == count


def test_a_dumper_is_for_one_step(tmp_path: Path) -> None:
    dumper = fastcheck.Dumper(tmp_path)
    with dumper:
        pass
    with pytest.raises(fastcheck.ConfigError, match="already used"), dumper:
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": -1}, "an int from 0"),
        ({"step": True}, "an int from 0"),
        ({"level": "modul"}, "did you mean 'module'"),
        ({"record": "all"}, '"health" or "stats" or "full"'),
        ({"order": "row"}, '"storage" or "logical"'),
        ({"reference": "gpu"}, "'cpu'"),
        ({"reference": "cpu", "level": "module"}, 'level="op"'),
        ({"tensors": True, "record": "stats"}, 'record="full"'),
        ({"memory": "lots"}, "65536 bytes or more"),
        ({"model": 3}, "model must be a torch.nn.Module"),
    ],
)
def test_options_that_cannot_be_used_say_so(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(fastcheck.ConfigError, match=message):
        fastcheck.Dumper(tmp_path, **options)
    assert not place(tmp_path).exists()
