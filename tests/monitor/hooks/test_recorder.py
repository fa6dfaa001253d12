"""The C++ recorder of hooks gives the same results as the Python hooks alone."""

from __future__ import annotations

import functools
import os
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.extension import status
from fastcheck.monitor.hooks import module_observer
from fastcheck.monitor.hooks.module_observer import ForwardHook, ForwardPreHook, ModuleObserver
from fastcheck.monitor.session import derivatives
from fastcheck.monitor.session.derivatives import _attributes
from fastcheck.ring.device import DeviceRing
from support.programs.recorder_models import MODELS, NAN, Block, Poison, outcome
from support.sampling import sample

pytestmark = [
    pytest.mark.fake_hooks,
    pytest.mark.skipif(status.module is None, reason="no extension"),
]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often Python did what a hook has to do."""
    counts = {"enter": 0, "leave": 0, "gradient": 0}
    for name in counts:
        method = getattr(ModuleObserver, name)

        def count(*args: Any, name: str = name, method: Any = method) -> Any:
            counts[name] += 1
            return method(*args)

        monkeypatch.setattr(ModuleObserver, name, count)
    return counts


def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_observer, "make_module_recorder", lambda recorder, node: None)


@pytest.fixture(params=["C++", "Python"])
def in_either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks are those of the recorder, then those of Python alone."""
    if request.param == "Python":
        in_python(monkeypatch)


#: The CPU's runs have all of them.
ON_FAKE = os.environ.get("FASTCHECK_FAKE_DEVICE") == "1"


@pytest.mark.parametrize("name", sample(MODELS, 3) if ON_FAKE else MODELS)
def test_it_records_what_python_would(
    name: str, device: str, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = outcome(MODELS[name], device)
    few = dict(counted)
    counted.update(enter=0, leave=0, gradient=0)
    in_python(monkeypatch)
    assert outcome(MODELS[name], device) == short
    assert short[0] and len(short[1])
    # Otherwise the two were the same.
    assert few["enter"] < 0.8 * counted["enter"]
    assert few["leave"] < 0.8 * counted["leave"]
    assert few["gradient"] < 0.8 * counted["gradient"]


OPTIONS: dict[str, dict[str, Any]] = {
    "every": {"every": 2},
    "step": {"sync": "step"},
    "call": {"sync": "call"},
    "health": {"record": "health"},
    "scaled": {"training": fastcheck.Training(scaler=lambda: 2.0)},
}


@pytest.mark.parametrize("name", sample(OPTIONS, 2) if ON_FAKE else OPTIONS)
def test_whatever_was_asked_for(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for model in ("blocks", "backward"):
        short = outcome(MODELS[model], device, **OPTIONS[name])
        with monkeypatch.context() as patch:
            in_python(patch)
            assert outcome(MODELS[model], device, **OPTIONS[name]) == short


def test_rings_of_a_few_slots(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full ones are taken out, sent away and exchanged in the middle of a call."""
    whole = outcome(MODELS["blocks"], device)
    elsewhere = functools.partial(DeviceRing, segment_slots=3)
    monkeypatch.setattr("fastcheck.ring.host.CAPACITY", 3)
    monkeypatch.setattr("fastcheck.monitor.session.session.DeviceRing", elsewhere)
    monkeypatch.setattr("fastcheck.monitor.session.session._MAX_SEEN", 40)
    assert outcome(MODELS["blocks"], device) == whole


def test_a_model_that_is_served(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve() -> tuple[Any, ...]:
        torch.manual_seed(5)
        model = nn.Sequential(Block(), Block(Poison(NAN)), Block()).to(device).eval()
        monitor = fastcheck.install(model, overflow_nums=-1)
        with torch.no_grad():
            for index in range(6):
                model[1].poison.is_on = index == 4
                model(torch.randn(8, 8).to(device))
        monitor.flush()
        verdicts = [(str(event.site), event.verdict) for event in monitor.events]
        records = monitor.records().tobytes()
        monitor.remove()
        return verdicts, records

    short = serve()
    in_python(monkeypatch)
    assert serve() == short


def test_what_was_kept_from_a_step_that_passed_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(8, 8)
            self.kept = torch.zeros(8, 8)
            self.is_bad = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            given, self.kept = self.kept, x * (NAN if self.is_bad else 1.0)
            out: torch.Tensor = self.part(given)
            return out

    def reasons() -> list[tuple[Any, str]]:
        torch.manual_seed(2)
        model = nn.Sequential(Keeps())
        monitor = fastcheck.install(model, every=2, overflow_nums=-1)
        for step in range(5):
            model[0].is_bad = step == 3  # which passes unread
            model(torch.randn(8, 8))
            monitor.step()
        monitor.remove()
        return [(event.verdict, event.reason) for event in monitor.events]

    short = reasons()
    assert any("every= skipped" in reason for _, reason in short)
    in_python(monkeypatch)
    assert reasons() == short


def test_a_backward_after_the_step_was_closed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps() -> list[tuple[int, str]]:
        torch.manual_seed(2)
        model = nn.Sequential(Block(), Block()).to(device)
        monitor = fastcheck.install(model, overflow_nums=-1)
        model(torch.randn(8, 8).to(device))  # whose sites are new: Python's
        monitor.step()
        loss = model(torch.randn(8, 8).to(device)).sum()
        loss.backward(retain_graph=True)
        monitor.step()
        loss.backward()
        monitor.flush()
        sites, records = monitor._session.sites, monitor.records()
        monitor.remove()
        return [(int(record["step"]), str(sites[int(record["site"])])) for record in records]

    short = steps()
    assert {step for step, _ in short} == {0, 1, 2}
    in_python(monkeypatch)
    assert steps() == short


def test_threads_have_passes_of_their_own(
    device: str, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [nn.Sequential(Block(), Block()).to(device) for _ in range(2)]
    monitor = fastcheck.install(*models, overflow_nums=-1)
    for model in models:
        model(torch.randn(8, 8).to(device))
    barrier = threading.Barrier(4)
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            barrier.wait()
            for _ in range(20):
                models[index % 2](torch.randn(8, 8).to(device)).sum().backward()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monitor.flush()
    assert not failures
    records = monitor.records()
    numbers = records["seq"]
    assert len(np.unique(numbers)) == len(numbers) == monitor._session.next_seq
    # Of each site as many as calls: 20 in each of two threads, and the first.
    sites = monitor._session.sites
    outputs = [n for n in np.unique(records["site"]) if sites[int(n)].role == "output"]
    assert {int((records["site"] == n).sum()) for n in outputs} == {41}
    assert counted["enter"] < 82 * 4  # the outermost ones, and few others
    monitor.remove()


def test_an_ordinary_call_runs_no_line_of_python(device: str) -> None:
    """Of the hooks of inner modules; those of the outermost one begin and end a pass."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(device)
    called = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == module_observer.__file__:
            called.append(frame.f_code)

    with fastcheck.install(model):
        model(torch.ones(2, 4, device=device)).sum().backward()
        sys.setprofile(note)
        try:
            model(torch.ones(2, 4, device=device))
        finally:
            sys.setprofile(None)
    begin_and_end = (ForwardPreHook.__call__, ModuleObserver.enter, ModuleObserver.pass_left)
    assert [called.count(method.__code__) for method in begin_and_end] == [0, 1, 1]
    for method in (ForwardHook.__call__, ModuleObserver.leave):
        assert method.__code__ not in called


def test_inner_modules_do_nothing_in_a_step_that_is_left_out(
    device: str, counted: dict[str, int]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(device)
    x = torch.ones(2, 4, device=device)
    with fastcheck.install(model, every=2) as monitor:
        for index in range(4):
            counted.update(enter=0, leave=0, gradient=0)
            if index == 2:  # it begins with a part of the model
                model[0](x).sum().backward()
            model(x).sum().backward()
            if index % 2:
                assert counted == {"enter": 1, "leave": 1, "gradient": 0}
            monitor.step()
        monitor.flush()
        seen = {
            (site.module, int(record["step"]))
            for record in monitor.records()
            for site in [monitor.sites[int(record["site"])]]
            if site.role == "output"
        }
    assert seen == {(path, step) for path in "012" for step in (0, 2)}


class Hooked(nn.Module):
    """Hooks of its own on what an inner module returns, before fastcheck's and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Doubled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        handle: Any = y.register_hook(lambda gradient: gradient * 3)
        removed: Any = y.register_hook(lambda gradient: gradient * 100)
        removed.remove()
        assert handle.id in y._backward_hooks
        return y.sum()


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        y.register_hook(lambda gradient: gradient * 2)
        return y


@pytest.mark.usefixtures("in_either_way")
def test_hooks_of_others_on_a_tensor_run_in_their_order(device: str) -> None:
    model = Hooked().to(device)
    x = torch.ones(4, device=device)
    with fastcheck.install(model) as monitor:
        for _ in range(2):  # the first time Python gives the sites their numbers
            model(x).backward()
            monitor.step()
        monitor.flush()
    records = monitor.records()
    [number] = [
        number
        for number, site in enumerate(monitor.sites)
        if site.module == "inner" and site.role == "grad_output"
    ]
    assert records["max"][records["site"] == number].tolist() == [2.0, 2.0]
    assert model.inner.weight.grad.tolist() == [12.0] * 4


class Parted(nn.Module):
    """Uses one of the two outputs of its inner module, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.parts = nn.Linear(4, 4), Parts()

    def forward(self, x: torch.Tensor, place: int) -> torch.Tensor:
        loss: torch.Tensor = self.parts(self.linear(x))[place].sum()
        return loss


class Parts(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.unbind(0)


@pytest.mark.usefixtures("in_either_way")
def test_an_output_that_nothing_uses_has_no_gradient(device: str) -> None:
    model = Parted().to(device)
    with fastcheck.install(model) as monitor:
        for step in range(4):
            model(torch.ones(2, 4, device=device), step % 2).backward()
            monitor.step()
        monitor.flush()
    came = [
        (site.label, int(record["step"]))
        for record in monitor.records()
        for site in [monitor.sites[int(record["site"])]]
        if (site.module, site.role) == ("parts", "grad_output")
    ]
    assert came == [(f"output[{step % 2}]", step) for step in range(4)]
    assert "no longer observes" not in str(monitor.summary())


def saved_near(near: Any, roots: tuple[torch.Tensor, ...], room: int) -> tuple[Any, int]:
    found, size = near(roots, _attributes, 36, room)
    return [
        (*fields, {k: v.tolist() if torch.is_tensor(v) else v for k, v in values.items()}, versions)
        for *fields, values, versions in found
    ], size


def test_what_the_last_nodes_of_a_graph_have_saved() -> None:
    """The walk in C++ finds what the one in Python does, in the same order."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0]

    x = torch.rand(4, requires_grad=True)
    deep = x
    for _ in range(40):
        deep = (deep.exp() + 1).log()
    wide = torch.stack([x.sqrt() / (x + k) for k in range(30)]).sum()
    graphs = [
        (x.exp().sum(),),
        (Own.apply(x.log()).sum(), (x / x).sum()),
        (deep.sum(),),
        (wide,),
        (wide, wide.exp()),
        (x,),
        (torch.ones(1),),
        (),
    ]
    for room in (1 << 20, 100, 0):
        compiled = [saved_near(derivatives._near, roots, room) for roots in graphs]
        assert compiled == [saved_near(derivatives._saved_near, roots, room) for roots in graphs]
        if room > 100:
            assert [len(found) for found, _ in compiled[:4]] == [1, 3, 23, 32]
