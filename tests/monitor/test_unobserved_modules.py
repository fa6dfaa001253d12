"""A warning names what is not observed: new modules, copies in other processes, forks."""

from __future__ import annotations

import os
import pathlib
import pickle
import warnings
from multiprocessing import context
from typing import Any, Callable
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.monitor.hooks import hook_support
from fastcheck.utils.torch.patching import Listeners
from support.processes import run_code
from support.programs.training import Net, train

pytestmark = pytest.mark.usefixtures("fresh_start")


class Adapter(nn.Module):
    """As LoRA's: takes the place of a layer, and has it as its own."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))


def warned(function: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in caught]


def adapt(model: Net) -> None:
    model.blocks[1].a = Adapter(model.blocks[1].a)


def replace_head(model: Net) -> None:
    model.head = nn.Linear(8, 6)


def bypass(model: Net) -> None:
    model._modules["head"] = nn.Linear(8, 6)


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize(
    ("change", "names"),
    [
        (adapt, "blocks.1.a (Adapter), blocks.1.a.down (Linear), blocks.1.a.up (Linear)."),
        (replace_head, "head (Linear)."),
        (bypass, "head (Linear)."),
    ],
)
def test_modules_that_come_after_install(level: str, change: Any, names: str) -> None:
    model = Net()
    with fastcheck.install(model, level=level) as monitor:
        change(model)
        (text,) = warned(lambda: train(model, 2))
        assert f"and not observed: {names}" in text
        assert text in " ".join(monitor.summary().split())
        assert warned(lambda: train(model, 2)) == []


def test_modules_that_come_later_and_those_that_are_left_out() -> None:
    model = Net()
    with fastcheck.install(model, exclude="blocks.1"):
        adapt(model)
        assert warned(lambda: train(model, 2)) == []
        replace_head(model)
        (text,) = warned(lambda: train(model, 1))
        assert "head (Linear)" in text and "blocks" not in text


def test_healthy_changes_of_a_tree() -> None:
    model = Net()
    with fastcheck.install(model):
        model.head = model.head
        model.dropout = model.blocks[0].act  # observed, under its first name
        wrapper = nn.Sequential(model)
        assert warned(lambda: train(wrapper, 2)) == []


def test_nothing_is_left_of_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the monitors that other tests may have left.
    own = Listeners[hook_support.ModuleTree](hook_support._begin)
    monkeypatch.setattr(hook_support, "_trees", own)
    hooks = torch.nn.modules.module._global_module_registration_hooks
    before = len(hooks)
    monitor = fastcheck.install(Net())
    assert len(hooks) == before + 1
    monitor.remove()
    assert len(hooks) == before


def sent(model: torch.nn.Module) -> bytes:
    """Pickled as multiprocessing does while it starts a process."""
    context.set_spawning_popen(object())
    try:
        return pickle.dumps(model)
    finally:
        context.set_spawning_popen(None)


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has neither called install() nor warned."""
    monkeypatch.setattr(hook_support, "_has_warned", False)
    monkeypatch.setattr(hook_support, "_followed", WeakKeyDictionary())


@pytest.mark.usefixtures("nothing_installed")
def test_a_copy_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    monitor = fastcheck.install(model)
    data = sent(model)
    monitor.remove()
    here = os.getpid()
    assert warned(lambda: train(pickle.loads(data), 1)) == []  # of this process
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    copy = pickle.loads(data)
    with torch.no_grad():
        assert warned(lambda: copy(torch.ones(2, 8))) == []
    (text,) = warned(lambda: train(copy, 2))
    assert f"called in another process ({here})" in text and "mp.spawn" in text
    assert warned(lambda: train(pickle.loads(data), 2)) == []


@pytest.mark.usefixtures("nothing_installed")
def test_a_model_that_was_saved_may_be_loaded_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    with fastcheck.install(model):
        data = pickle.dumps(model)
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    assert warned(lambda: train(pickle.loads(data), 2)) == []


@pytest.mark.usefixtures("nothing_installed")
def test_a_copy_that_is_observed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    monitor = fastcheck.install(model)
    data = sent(model)
    monitor.remove()
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    copy = pickle.loads(data)
    with fastcheck.install(copy):
        assert warned(lambda: train(copy, 2)) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("level", ["module", "op"])
def test_a_forked_child_leaves_its_parents_log_alone(tmp_path: pathlib.Path, level: str) -> None:
    # In a process of its own: no child may call backward() where autograd has started a thread.
    call = f"fork({level!r}, {str(tmp_path / 'log')!r})"
    done = run_code(f"from monitor.test_unobserved_modules import fork; {call}")
    assert done.returncode == 0, done.stderr


def fork(level: str, log_dir: str) -> None:
    model = Net()
    monitor = fastcheck.install(model, level=level, log_dir=log_dir)
    train(model, 2)
    monitor.flush()
    sizes = {path: path.stat().st_size for path in pathlib.Path(log_dir).iterdir()}
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = warned(lambda: train(model, 3))
            monitor.flush()
            monitor.remove()
        except BaseException as error:
            found = [repr(error)]
        os.write(writer, "\n".join(found).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        found = file.read().splitlines()
    os.waitpid(child, 0)
    (text,) = found
    assert "was forked from the process that called fastcheck.install(), and trains" in text
    assert {path: path.stat().st_size for path in pathlib.Path(log_dir).iterdir()} == sizes
    train(model, 1)
    assert {r["step"] for r in monitor.records()} == {0, 1, 2}
    monitor.remove()
