"""level="op" in training runs: bit-identical training, use beside other tools, bounded memory."""

from __future__ import annotations

import gc
import threading
import types
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fastcheck
from fastcheck.record.format import Flag
from support.programs.op_level import model_with, train
from support.programs.training import Net, batches, stopped

pytestmark = pytest.mark.usefixtures("op_observer")

INF = float("inf")


@pytest.mark.parametrize("record", ["health", "full"])
def test_training_is_bit_identical(record: str) -> None:
    def run(observed: bool) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(0)
        model = Net(dropout=0.2)
        monitor = fastcheck.install(model, level="op", record=record) if observed else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = train(model, 4, optimizer=optimizer)
        if monitor is not None:
            monitor.remove()
        return losses, [p.detach().clone() for p in model.parameters()]

    plain, observed = run(False), run(True)
    assert plain[0] == observed[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], observed[1]))


def test_one_monitor_at_a_time() -> None:
    first = fastcheck.install(Net(), level="op")
    with pytest.raises(fastcheck.ConfigError, match="a single monitor at a time"):
        fastcheck.install(Net(), level="op")
    first.remove()
    fastcheck.install(Net(), level="op").remove()


def test_a_module_level_monitor_beside_it() -> None:
    model = model_with(lambda x: x)
    ops = fastcheck.install(model, level="op", overflow_nums=-1)
    modules = fastcheck.install(model, overflow_nums=-1)
    train(model, 2)
    model[1].function = lambda x: torch.sqrt(-x.abs() - 1)
    train(model, 1)
    assert [e.site.op for e in ops.events if e.counted][:1] == ["aten.sqrt"]
    assert [e.site.module for e in modules.events if e.counted][:1] == ["1"]


def test_gradients_are_scaled_in_the_run_of_the_scaler_alone() -> None:
    model = Net()

    def scaled(scaler: torch.amp.GradScaler) -> bool:
        with fastcheck.install(model, level="op", record="stats") as monitor:
            scaler.scale(model(next(batches(1))).square().mean()).backward()
            records = monitor.records()
            backward = {n for n, site in enumerate(monitor.sites) if site.direction == "backward"}
            flags = records["flags"][np.isin(records["site"], list(backward))]
            assert len(flags)
            return any(int(flag) & Flag.SCALED for flag in flags)

    assert scaled(torch.amp.GradScaler("cpu"))
    assert not scaled(torch.amp.GradScaler("cpu", enabled=False))


def test_every_skips_steps() -> None:
    model = Net()
    monitor = fastcheck.install(model, level="op", every=2)
    train(model, 4)
    assert set(monitor.records()["step"]) == {0, 2}


def test_a_record_for_each_op() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    monitor = fastcheck.install(model, level="op")
    with torch.no_grad():
        y = model(torch.ones(2, 8))
    records = monitor.records()
    spelt = [(monitor.sites[int(r["site"])].op, int(r["call"])) for r in records]
    assert ("aten.addmm", 0) in spelt and ("aten.relu", 0) in spelt
    relu = next(r for r, s in zip(records, spelt) if s[0] == "aten.relu")
    assert int(relu["checksum"]) == fastcheck.stats(y).checksum


def test_checkpointed_backward_counts_once() -> None:
    inner = model_with(lambda x: torch.sqrt(-x.abs() - 1))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return out

    model = Outer()
    monitor = fastcheck.install(model, level="op", overflow_nums=-1)
    train(model, 1)
    assert [e.site.op for e in monitor.events if e.counted] == ["aten.sqrt"]


def test_inference_mode() -> None:
    model = model_with(lambda x: x)
    monitor = fastcheck.install(model, level="op", overflow_nums=-1)
    with torch.inference_mode():
        for step in range(4):
            model[1].function = torch.sqrt if step == 2 else torch.relu_
            model(-torch.ones(2, 8) * 5)
    assert {e.site.op for e in monitor.events if e.counted} == {"aten.sqrt"}
    assert "aten.relu_" in {monitor.sites[int(r["site"])].op for r in monitor.records()}


def test_functorch() -> None:
    model = model_with(lambda x: torch.sqrt(-x.abs() - 1))
    monitor = fastcheck.install(model, level="op", overflow_nums=-1)
    with torch.no_grad():
        out = torch.vmap(model)(torch.ones(3, 8))
    assert out.shape == (3, 4) and bool(out.isnan().all())
    # The tensors under the wrappers are plain ones, and what is computed of them is read.
    assert [e.site.op for e in monitor.events if e.counted] == ["aten.sqrt"]


class _Wrapper(torch.Tensor):
    """A subclass that is not memory itself, and does by hand what it is asked to."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Wrapper:
        made: _Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, _Wrapper) else value

        return _Wrapper(func(*map(unwrap, args), **(kwargs or {})))


def test_a_subclass_is_read_where_its_tensors_are() -> None:
    everything = fastcheck.Stop(count="all")  # nothing uses what is made here
    monitor = fastcheck.install(Net(), level="op", overflow_nums=-1, stop=everything)
    _ = torch.sqrt(_Wrapper(torch.full((2, 4), -1.0))) + 1
    monitor.flush()
    assert [(e.site.op, e.verdict.name) for e in monitor.events if e.counted] == [
        ("aten.sqrt", "ORIGIN"),
        ("aten.add.Tensor", "PROPAGATED"),
    ]


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_compiled_code_is_read_op_by_op(backend: str) -> None:
    model = model_with(lambda x: torch.sqrt(-x.abs() - 1))
    monitor = fastcheck.install(model, level="op", overflow_nums=-1)
    torch.compile(model, backend=backend)(torch.ones(2, 8)).sum().backward()
    monitor.remove()
    assert [e.site.op for e in monitor.events if e.counted] == ["aten.sqrt"]


def test_a_dispatch_mode_beside_it() -> None:
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    model = model_with(lambda x: torch.sqrt(-x.abs() - 1))
    monitor = fastcheck.install(model, level="op", overflow_nums=-1)
    with Mode(), torch.no_grad():
        model(torch.ones(2, 8))
    monitor.flush()
    assert "aten.sqrt.default" in seen
    assert [e.site.op for e in monitor.events if e.counted] == ["aten.sqrt"]


def test_threads() -> None:
    """Each thread's ops are named by the module that the thread is in."""
    model = nn.ModuleDict({f"m{i}": model_with(lambda x: x) for i in range(4)})
    monitor = fastcheck.install(model, level="op", overflow_nums=-1, record="health")
    model["m2"][1].function = lambda x: torch.sqrt(-x.abs() - 1)

    def work(name: str) -> None:
        for _ in range(20):
            with torch.no_grad():
                model[name](torch.ones(2, 8))

    threads = [threading.Thread(target=work, args=(name,)) for name in model]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monitor.flush()
    counted = {(e.site.module, e.site.op) for e in monitor.events if e.counted}
    assert counted == {("m2.1", "aten.sqrt")}
    records = monitor.records()
    of_linear = [r for r in records if monitor.sites[int(r["site"])].op == "aten.addmm"]
    assert len(of_linear) == 4 * 20 * 2


def test_an_exception_in_the_middle() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    model = model_with(fail)
    monitor = fastcheck.install(model, level="op", overflow_nums=-1)
    for _ in range(3):
        with pytest.raises(KeyError):
            model(torch.ones(2, 8))
    model[1].function = lambda x: torch.sqrt(-x.abs() - 1)
    model(torch.ones(2, 8))
    counted = [(e.site.module, e.site.op) for e in monitor.events if e.counted]
    assert counted == [("1", "aten.sqrt")]


def test_a_model_that_is_gone_takes_its_observer_along() -> None:
    fastcheck.install(Net(), level="op")
    gc.collect()
    assert fastcheck._C.op_observer().run() == 0
    fastcheck.install(Net(), level="op").remove()


def test_memory_is_free_to_go() -> None:
    """Neither tensors nor their storages are kept."""
    model = nn.Linear(8, 8)
    monitor = fastcheck.install(model, level="op")
    kept = []
    for x in batches(3):
        y = model(x)
        kept.append(weakref.ref(y))
        del y
    assert all(one() is None for one in kept)
    monitor.remove()


def test_a_served_model_keeps_a_bounded_number_of_records() -> None:
    model = nn.Sequential(nn.Linear(1, 1), *(nn.ReLU() for _ in range(100)))
    monitor = fastcheck.install(model, level="op", record="health", overflow_nums=-1)
    with torch.no_grad():
        for _ in range(800):
            model(torch.ones(1))
    assert 40000 < len(monitor.records()) < 70000


def test_the_log_tells_the_op_and_the_line(tmp_path: Path) -> None:
    from fastcheck.log.reader import read_log

    model = model_with(lambda x: torch.sqrt(-x.abs() - 1))
    fastcheck.install(model, level="op", log_dir=tmp_path / "log")
    stopped(train, model, 1)
    event = next(e for e in read_log(tmp_path / "log").events if e.counted)
    assert event.site.op == "aten.sqrt" and "test_runs.py" in event.line


def test_options_that_do_not_go_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(fastcheck.ConfigError, match=r"Filter\(ops=\) is for op level"):
        fastcheck.install(Net(), filter=fastcheck.Filter(ops="mm"))
    model = Net()
    elsewhere = types.SimpleNamespace(device=torch.device("mps"), is_cpu=False, is_meta=False)
    monkeypatch.setattr(model, "named_parameters", lambda **_: [("weight", elsewhere)])
    with pytest.raises(fastcheck.ConfigError, match="can't read mps without making the host wait"):
        fastcheck.install(model, level="op")


class _RunsInWorker(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        torch.ones(3).sum()
        return int(fastcheck._C.op_observer().run())


def test_a_forked_worker_is_not_observed() -> None:
    monitor = fastcheck.install(Net(), level="op")
    loader = torch.utils.data.DataLoader(
        _RunsInWorker(), num_workers=1, multiprocessing_context="fork"
    )
    assert [int(x) for x in loader] == [0, 0]
    assert fastcheck._C.op_observer().run() != 0
    monitor.remove()


class _InTwo:
    """An observer whose records come with one batch and whose incidents with the next, as when
    another thread's hook comes between the two.
    """

    def __init__(self, observer: Any) -> None:
        self._observer = observer
        self._late: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._observer, name)

    def take(self) -> Any:
        records, incidents, *others = self._observer.take()
        due, self._late = self._late, incidents
        return records, due, *others


def test_an_incident_that_comes_after_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with(lambda x: torch.sqrt(-x.abs() - 1))
    monitor = fastcheck.install(model, level="op", overflow_nums=-1)
    monkeypatch.setattr(monitor._session.level, "_ops", _InTwo(fastcheck._C.op_observer()))
    with torch.no_grad():
        model(torch.ones(2, 8))
    monitor.flush()
    assert [e.site.op for e in monitor.events if e.counted] == ["aten.sqrt"]


def test_a_stop_of_a_run_that_is_over_is_not_raised_in_another_models_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monitor = fastcheck.install(nn.Linear(2, 2), level="op")
    session = monitor._session

    def deliver() -> None:
        raise AssertionError("the stop of another model")

    monkeypatch.setattr(monitor._watcher, "_stops", deliver)
    session.event_store.due = [None]  # type: ignore[list-item]  # never read
    with pytest.raises(AssertionError):
        torch.ones(1, requires_grad=True).sum().backward()
    observer = fastcheck._C.op_observer()
    observer.stop(observer.run())
    torch.ones(1, requires_grad=True).sum().backward()
    session.event_store.due.clear()
    monitor.remove()
