"""The hooks' short way in C++: what it leaves undone comes to Python, and nobody can tell which of
the two it was.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import pickle
import threading
import warnings
import weakref
from typing import Any, Callable, Optional

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fastcheck import _hooks
from fastcheck._device_ring import DeviceRing
from fastcheck._extension import status
from fastcheck._hooks import ModuleObserver
from fastcheck._ring import HostRing
from fastcheck._session import Session

pytestmark = pytest.mark.skipif(status.module is None, reason="no extension")

FAKE = bool(os.environ.get("FASTCHECK_FAKE_DEVICE"))
NAN, INF = float("nan"), float("inf")


if FAKE:
    import fake_device

    # Before the first backward: autograd counts the devices there.
    DEVICE = fake_device.load().name()
else:
    DEVICE = "cpu"


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "device", marks=pytest.mark.skipif(not FAKE, reason="make test-fake-device runs it")
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return "cpu" if request.param == "cpu" else DEVICE


class Apply(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Poison(nn.Module):
    """Multiplies by ``value``, in forward or in backward alone, in one call of its step."""

    def __init__(self, value: float, *, backward: bool = False) -> None:
        super().__init__()
        self.value = value
        self.backward = backward
        self.is_on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_on:
            return x * 1
        if self.backward:
            y = x * 1
            y.register_hook(lambda gradient: gradient * self.value)
            return y
        return x * self.value


class Block(nn.Module):
    """Residual sums between its parts: inputs that no module has made."""

    def __init__(self, poison: Optional[Poison] = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.first = nn.Linear(8, 8)
        self.poison = poison or Poison(1.0)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: Optional[torch.Tensor] = None) -> torch.Tensor:
        y = self.second(self.poison(torch.relu(self.first(self.norm(x)))))
        return x + (y if scale is None else y * scale)


class Containers(nn.Module):
    """Hands tensors to its parts, and gets them back, in all shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Apply(lambda x, n, flag: (x * 2, None, x.long(), n))
        self.nested = Apply(lambda pair, *, mask: [pair[0] + mask, (pair[1], [pair[0]])])
        self.mapping = Apply(lambda x: {"value": x + 1, "none": None})
        self.same = Apply(lambda x: x)
        self.nothing = Apply(lambda x: None)
        self.weight = nn.Parameter(torch.ones(8))
        self.own = Apply(lambda x: self.weight)
        self.strings = Apply(lambda x, name=None, more=None: x.t())
        self.detached = Apply(lambda x: x.detach().requires_grad_())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _, whole, _ = self.pair(x, 3, True)
        total, (again, [last]) = self.nested((first, whole), mask=x)
        value = self.mapping(total)["value"]
        self.nothing(value)
        leaf = self.detached(value)
        out: torch.Tensor = self.same(value) + last + again + self.own(leaf)
        return self.strings(out, "name", more=[leaf, None, "text"]).t() + leaf


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y if depth == 0 else self(y, depth - 1)


class Raising(nn.Module):
    """A part of it raises, and it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.bad = Apply(lambda x: x / [])
        self.after = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        with contextlib.suppress(TypeError):
            self.bad(y)
        out: torch.Tensor = self.after(y)
        return out


class Checkpointed(nn.Module):
    def __init__(self, poison: Optional[Poison] = None) -> None:
        super().__init__()
        self.block = Block(poison)
        self.end = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        out: torch.Tensor = self.end(checkpoint(self.block, x, use_reentrant=False))
        return out


def shared() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Sequential(layer))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": lambda: nn.Sequential(Block(), Block(Poison(NAN)), Block()),
    "infinite": lambda: nn.Sequential(Block(), Block(Poison(-INF)), nn.Softmax(-1), Block()),
    "backward": lambda: nn.Sequential(Block(), Block(Poison(NAN, backward=True)), Block()),
    "containers": Containers,
    "recursive": lambda: nn.Sequential(nn.Linear(8, 8), Recursive()),
    "raising": lambda: nn.Sequential(nn.Linear(8, 8), Raising()),
    "checkpointed": lambda: nn.Sequential(nn.Linear(8, 8), Checkpointed()),
    "checkpointed, bad": lambda: nn.Sequential(nn.Linear(8, 8), Checkpointed(Poison(NAN))),
    "shared": shared,
}


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


def outcome(
    build: Callable[[], nn.Module], device: str, *, steps: int = 4, bad: int = 2, **options: Any
) -> tuple[Any, ...]:
    """All that a monitor knows of some steps of training, of which one is bad."""
    torch.manual_seed(11)
    model = build().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    monitor = fastcheck.install(model, overflow_nums=-1, **options)
    losses = []
    for step in range(steps):
        for module in model.modules():
            if isinstance(module, Poison):
                module.is_on = step == bad
        x = torch.randn(8, 8).to(device)
        for _ in range(2):  # two backward passes in a step
            loss = model(x).square().mean()
            loss.backward()
        losses.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    monitor.flush()
    records = monitor.records()
    events = [
        (str(event.site), event.step, event.verdict, event.reason, int(event.record["seq"]))
        for event in monitor.events
    ]
    sites = [str(monitor._session.sites[int(number)]) for number in records["site"]]
    monitor.remove()
    return sites, records.tobytes(), events, torch.stack(losses).numpy().tobytes()


def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hooks, "make_module_recorder", lambda recorder, node: None)


@pytest.mark.parametrize("name", MODELS)
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
    "scaled": {"scaler": lambda: 2.0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_whatever_was_asked_for(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for model in ("blocks", "backward"):
        short = outcome(MODELS[model], device, **OPTIONS[name])
        with monkeypatch.context() as patch:
            in_python(patch)
            assert outcome(MODELS[model], device, **OPTIONS[name]) == short


def test_rings_of_a_few_slots(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full ones are taken out, sent away and exchanged in the middle of a call."""
    whole = outcome(MODELS["blocks"], device)
    host, elsewhere = (
        functools.partial(HostRing, capacity=3),
        functools.partial(DeviceRing, segment_slots=3),
    )
    monkeypatch.setattr("fastcheck._session.HostRing", host)
    monkeypatch.setattr("fastcheck._session.DeviceRing", elsewhere)
    monkeypatch.setattr("fastcheck._session._MAX_SEEN", 40)
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


def test_a_stop_comes_out_of_the_very_hook(device: str) -> None:
    if device != "cpu":
        pytest.skip("a device's records arrive later")
    model = nn.Sequential(Block(), Block(Poison(NAN)), Block())
    monitor = fastcheck.install(model)
    x = torch.randn(8, 8)
    model(x)
    entered = []
    model[1].second.register_forward_pre_hook(lambda *_: entered.append(1))
    model[1].poison.is_on = True
    with pytest.raises(fastcheck.OverflowDetected, match=r"1\.poison"):
        model(x)
    assert not entered  # the next module was not reached
    assert not monitor._observer._local.stack


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


class TestOwnFailures:
    @pytest.mark.parametrize(
        "target", ["found", "refused", "read_elsewhere", "call_ended", "settle_call"]
    )
    def test_training_goes_on(
        self, target: str, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = outcome(MODELS["blocks"], device)[-1]

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("a defect")

        monkeypatch.setattr(Session, target, broken)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert outcome(MODELS["blocks"], device)[-1] == expected

    def test_it_is_said_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = nn.Sequential(Block(), Block(Poison(NAN)), Block())
        monitor = fastcheck.install(model, overflow_nums=-1)
        model(torch.randn(8, 8))
        monkeypatch.setattr(Session, "found", lambda *_: 1 // 0)
        model[1].poison.is_on = True
        with pytest.warns(fastcheck.FastcheckWarning) as said:
            for _ in range(3):
                model(torch.randn(8, 8))
        # It is left alone from then on.
        sites = monitor._session.sites
        made = [sites[int(number)] for number in monitor.records()["site"]]
        assert sum(site.module == "1.poison" and site.role == "output" for site in made) == 2
        texts = [str(warning.message) for warning in said]
        assert len(texts) == len(set(texts))
        assert any("1.poison" in text and "ZeroDivisionError" in text for text in texts)
        monitor.remove()

    def test_a_tensor_that_the_kernel_refuses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        refused = []
        method = Session.refused
        monkeypatch.setattr(
            Session, "refused", lambda *args: (refused.append(1), method(*args))[-1]
        )

        def freed(x: torch.Tensor) -> torch.Tensor:
            y = torch.ones(8) * 1
            if is_bad:
                y.untyped_storage().resize_(0)
            return y

        is_bad = False
        twice = Apply(freed)
        model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(twice, twice), Apply(lambda x: 1))
        monitor = fastcheck.install(model, overflow_nums=-1)
        model(torch.randn(8, 8))
        is_bad = True
        with pytest.warns(fastcheck.FastcheckWarning, match=r"1\.0"):
            assert model(torch.randn(8, 8)) == 1
        assert model(torch.randn(8, 8)) == 1
        assert len(refused) == 1  # its site is not tried again
        monitor.remove()


def test_a_model_that_is_deleted_takes_everything_along(device: str) -> None:
    model = nn.Sequential(Block(), Block()).to(device)
    monitor = fastcheck.install(model)
    for _ in range(2):
        model(torch.randn(8, 8).to(device)).sum().backward()
    session, observer = weakref.ref(monitor._session), weakref.ref(monitor._observer)
    part = weakref.ref(model[0])
    del model, monitor
    gc.collect()
    assert session() is None and observer() is None and part() is None


def test_a_graph_that_outlives_its_monitor(device: str) -> None:
    model = nn.Sequential(Block(), Block()).to(device)
    monitor = fastcheck.install(model)
    losses = [model(torch.randn(8, 8).to(device)).sum() for _ in range(2)]
    monitor.remove()
    losses[0].backward()
    del model, monitor
    gc.collect()
    losses[1].backward()


def test_copies_are_not_observed() -> None:
    model = nn.Sequential(Block(), Block())
    monitor = fastcheck.install(model)
    model(torch.randn(8, 8))
    before = monitor._session.next_seq
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(torch.randn(8, 8)).sum().backward()
    assert monitor._session.next_seq == before
    monitor.remove()
