"""fastcheck does not break the run it observes: exceptions, leaks, long runs, its own failures."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.log.history import History
from fastcheck.ring.host import CAPACITY
from support.processes import run_code
from support.programs.training import (
    Apply,
    Net,
    batches,
    change_gradient,
    nan_gradient,
    poison,
    stopped,
    train,
    where,
)
from support.sampling import IS_WHOLE

pytestmark = pytest.mark.usefixtures("fresh_start")


def fail(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("out of memory")


def interrupt(x: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt


class TestExceptionsOfTheModel:
    @pytest.mark.parametrize("failing", [fail, interrupt], ids=["error", "interrupt"])
    def test_in_forward(self, failing: Any) -> None:
        inner = nn.Sequential(nn.Linear(8, 8), Apply(failing), nn.Linear(8, 8))
        model = nn.Sequential(nn.Linear(8, 8), inner, Apply())
        monitor = fastcheck.install(model)
        for _ in range(3):
            with pytest.raises((RuntimeError, KeyboardInterrupt)):
                model(torch.ones(2, 8))
        inner[1].function = lambda x: x
        # What runs after it is not thought to be inside the call that was left.
        stop = stopped(model, torch.full((2, 8), float("nan")))
        assert where(stop.culprit) == ("", "input", "input[0]", "arrived")
        train(model, 2)
        assert monitor.step_index == 2

    def test_a_model_that_calls_itself(self) -> None:
        class Recursive(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.leaf = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
                y = self.leaf(x)
                return self(y, depth - 1) * 1 if depth else y * float("nan")

        model = Recursive()
        monitor = fastcheck.install(model, overflow_nums=-1)
        model(torch.ones(2, 8), 2)
        # The innermost call made it, and the outer ones carried it on: each was seen to end.
        assert [(where(e)[2:], int(e.record["call"])) for e in monitor.events] == [
            (("output", "origin"), 2),
            (("output", "propagated"), 1),
            (("output", "propagated"), 0),
        ]

    def test_an_interrupt_that_the_model_catches(self) -> None:
        class Patient(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.bad = nn.Sequential(nn.Linear(8, 8), Apply(interrupt))
                self.good = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                try:
                    return self.bad(x)
                except KeyboardInterrupt:
                    return poison(self.good(x))

        model = nn.Sequential(nn.Linear(8, 8), Patient())
        fastcheck.install(model)
        stop = stopped(model, torch.ones(2, 8))
        assert where(stop.culprit) == ("1", "output", "output", "origin")

    def test_caught_within_forward(self) -> None:
        class Careful(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.bad = nn.Sequential(nn.Linear(8, 8), Apply(fail))
                self.good = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                try:
                    return self.bad(x)
                except RuntimeError:
                    return self.good(poison(x))

        model = nn.Sequential(nn.Linear(8, 8), Careful(), nn.Linear(8, 8))
        fastcheck.install(model)
        stop = stopped(model, torch.ones(2, 8))
        assert where(stop.culprit) == ("1.good", "input", "input[0]", "origin")
        assert stop.culprit.reason.startswith("1.forward computed it")

    def test_in_backward(self) -> None:
        model = nn.Sequential(
            nn.Linear(8, 8), Apply(lambda x: change_gradient(x, fail)), nn.Linear(8, 8)
        )
        monitor = fastcheck.install(model)
        with pytest.raises(RuntimeError, match="out of memory"):
            train(model, 1)
        model[1].function = lambda x: x
        train(model, 2)
        model[1].function = nan_gradient
        stop = stopped(train, model, 1)
        assert where(stop.culprit) == ("1", "grad_input", "input[0]", "origin")
        assert monitor.event_count == 1

    def test_a_hook_of_the_user_that_raises(self) -> None:
        model = Net()
        fastcheck.install(model)
        handle = model.head.register_forward_hook(lambda *args: fail(torch.ones(1)))
        with pytest.raises(RuntimeError, match="out of memory"), warnings.catch_warnings():
            warnings.simplefilter("error")
            model(torch.ones(2, 8))
        handle.remove()
        train(model, 2)


class TestOwnFailures:
    """An error inside fastcheck is reported once, and training continues unchanged."""

    @pytest.fixture
    def expected(self) -> list[float]:
        torch.manual_seed(3)
        return train(Net(), 4)

    @pytest.mark.parametrize(
        "target",
        [
            "fastcheck.ring.host.HostRing.next_slot",
            "fastcheck.ring.host.HostRing.observe_list",
            "fastcheck.monitor.hooks.module_observer._pass",
            "fastcheck.monitor.hooks.module_observer.flatten_arguments",
            "fastcheck.monitor.hooks.module_observer.can_hold_nonfinite",
            "fastcheck.monitor.hooks.module_observer.ModuleObserver._watch",
            "fastcheck.log.history.History.add",
            "fastcheck.monitor.session.session.Session.close_step",
            "fastcheck.monitor.hooks.state_reader.StateReader.read_for_update",
            "fastcheck.ring.host.HostRing.take",
        ],
    )
    def test_training_goes_on(
        self, target: str, expected: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        torch.manual_seed(3)
        model = Net()
        monitor = fastcheck.install(model)

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("a defect")

        monkeypatch.setattr(target, broken)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            losses = train(model, 4)
        assert losses == expected
        texts = [str(warning.message) for warning in said]
        assert texts
        assert len(texts) == len(set(texts))
        assert all("no longer observes" in text and "a defect" in text for text in texts)
        monkeypatch.undo()
        assert "a defect" in monitor.summary()

    @pytest.mark.parametrize(
        "target",
        [
            "fastcheck.ring.host.HostRing.observe_list",
            "fastcheck.monitor.hooks.module_observer._pass",
            "fastcheck.monitor.session.session.Session.close_step",
        ],
    )
    def test_training_goes_on_where_warnings_are_errors(
        self,
        target: str,
        expected: list[float],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """pytest makes errors of them."""
        torch.manual_seed(3)
        model = Net()
        monitor = fastcheck.install(model)
        monkeypatch.setattr(target, lambda *args, **kwargs: 1 // 0)
        assert train(model, 4) == expected
        assert "ZeroDivisionError" in capsys.readouterr().err
        monkeypatch.undo()
        assert "ZeroDivisionError" in monitor.summary()

    def test_the_judge_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = nn.Sequential(nn.Linear(8, 8), Apply(poison))
        fastcheck.install(model)
        judge = "fastcheck.verdict.module_rules.ModuleRules._judge_forward"
        monkeypatch.setattr(judge, lambda *args: 1 // 0)
        with pytest.warns(fastcheck.FastcheckWarning, match="ZeroDivisionError"):
            model(torch.ones(2, 8))

    @pytest.mark.parametrize("part", ["build_report", "_has_made_more", "StopHandler._made_by"])
    def test_a_stop_whose_evidence_fails_is_still_a_stop(
        self, part: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = nn.Sequential(nn.Linear(8, 8), Apply(poison))
        fastcheck.install(model)
        build = f"fastcheck.monitor.session.stop_handler.{part}"
        monkeypatch.setattr(build, lambda *args: 1 // 0)
        with pytest.warns(fastcheck.FastcheckWarning, match="ZeroDivisionError"):
            stop = stopped(model, torch.ones(2, 8))
        assert where(stop.culprit) == ("1", "output", "output", "origin")

    def test_a_stop_after_an_error_of_its_own_tells_of_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is not observed any more may be what the stop came of."""
        model = nn.Sequential(nn.Linear(8, 8), Apply(lambda x: x))
        fastcheck.install(model)
        reader = "fastcheck.monitor.hooks.state_reader.StateReader.read_for_update"
        with monkeypatch.context() as broken:
            broken.setattr(reader, lambda *args, **kwargs: 1 // 0)
            with pytest.warns(fastcheck.FastcheckWarning, match="ZeroDivisionError"):
                train(model, 1)
        model[1].function = poison
        text = " ".join(str(stopped(train, model, 1)).split())
        assert "no longer observes optimizer steps: ZeroDivisionError" in text

    def test_the_findings_of_a_scaler_cannot_be_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = Net()
        fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        monkeypatch.setattr("fastcheck.monitor.hooks.step_watcher.found_by", lambda *args: 1 // 0)
        before = [parameter.clone() for parameter in model.parameters()]
        scaler.scale(model(torch.ones(2, 8)).sum()).backward()
        with pytest.warns(fastcheck.FastcheckWarning, match="ZeroDivisionError"):
            scaler.step(optimizer)
        scaler.update()
        assert not any(map(torch.equal, model.parameters(), before))

    def test_remove_where_the_last_records_cannot_be_read(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        train(model, 2)
        monkeypatch.setattr("fastcheck.monitor.session.session.Session.flush", lambda *args: 1 // 0)
        with pytest.warns(fastcheck.FastcheckWarning, match="ZeroDivisionError"):
            monitor.remove()
        assert not any(module._forward_hooks for module in model.modules())

    def test_keyboard_interrupt_passes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = Net()
        fastcheck.install(model)
        monkeypatch.setattr(
            "fastcheck.ring.host.HostRing.next_slot", lambda *args: interrupt(torch.ones(1))
        )
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(2, 8))


class TestLeaks:
    def test_a_removed_monitor_and_its_model_go(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        train(model, 3)
        y = model(torch.ones(2, 8))
        session = weakref.ref(monitor._session)
        of_model = weakref.ref(model)
        monitor.remove()
        del monitor
        gc.collect()
        # A graph that still stands, and the model, hold nothing of the monitor.
        assert session() is None
        del model, y
        gc.collect()
        assert of_model() is None

    def test_a_monitor_does_not_keep_its_model(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        train(model, 2)
        of_model = weakref.ref(model)
        del model
        gc.collect()
        assert of_model() is None
        assert "head output" in monitor.summary()
        monitor.remove()

    def test_a_model_may_be_collected_while_another_is_connected(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The garbage collector runs where it likes: within our own locks too."""
        from fastcheck.monitor.hooks import optimizers

        others = optimizers.watchers._others

        def collecting(listener: Any) -> Any:
            gc.collect()
            return others(listener)

        monkeypatch.setattr(optimizers.watchers, "_others", collecting)
        fastcheck.install(Net())  # not referenced, and freed by the collector only
        thread = threading.Thread(target=fastcheck.install, args=(Net(),), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    def test_activations_and_gradients_are_not_kept(self) -> None:
        kept: list[weakref.ref[torch.Tensor]] = []

        def note(x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(x)
            kept.append(weakref.ref(y))
            if y.requires_grad:
                y.register_hook(lambda gradient: kept.append(weakref.ref(gradient)))
            return y

        model = nn.Sequential(nn.Linear(8, 8), Apply(note), nn.Linear(8, 8))
        fastcheck.install(model)
        train(model, 2)
        model(torch.ones(2, 8))
        assert len(kept) == 5
        assert all(reference() is None for reference in kept)

    def test_a_stop_that_was_caught_keeps_nothing(self) -> None:
        kept: list[weakref.ref[torch.Tensor]] = []

        def bad(x: torch.Tensor) -> torch.Tensor:
            y = poison(x)
            kept.append(weakref.ref(y))
            return y

        model = nn.Sequential(nn.Linear(8, 8), Apply(bad))
        monitor = fastcheck.install(model)
        stopped(train, model, 1)
        gc.collect()
        assert kept[0]() is None
        assert monitor.event_count == 1

    def test_memory_is_flat_over_many_steps(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        monitor = fastcheck.install(model, log=fastcheck.Log(None, history=10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        x = torch.ones(1, 2)
        sizes = []
        last = 5_000 if IS_WHOLE else 2_000
        for step in range(last + 1):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if step in (last // 2, 3 * last // 4, last):
                _ = monitor.watch.events  # steps that wait for the watch are judged
                gc.collect()
                sizes.append((len(gc.get_objects()), len(monitor.sites), resident_bytes()))
        objects, sites, resident = zip(*sizes)
        assert max(objects) - min(objects) < 50
        assert len(set(sites)) == 1
        assert max(resident) - min(resident) < 2 * 2**20
        assert len(monitor.records()) < 200

    def test_forwards_without_any_step_in_bounded_memory(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        most, forwards = (65536, 45_000) if IS_WHOLE else (2048, 2000)
        monkeypatch.setattr("fastcheck.monitor.session.session._MAX_SEEN", most)
        monkeypatch.setattr(History.__init__, "__defaults__", (most, True))
        model = nn.Sequential(nn.Linear(2, 2), Apply())
        monitor = fastcheck.install(model, overflow_nums=-1)
        for number in range(forwards):
            # Every tenth pass overflows: findings must not pile up either.
            model[1].function = poison if number % 10 == 0 else torch.tanh
            # Tensors of inference mode are not remembered.
            with torch.no_grad() if number % 2 else torch.inference_mode():
                model(torch.ones(1, 2))
        session = monitor._session
        assert monitor.event_count == forwards // 10
        assert len(session.step.calls) == 0
        each = 3  # tensors of a pass: what is too much is forgotten when the next one begins
        assert 0 < len(session.level.seen) <= most + each < forwards // 2 * each
        assert len(monitor.records()) <= most + CAPACITY < 4 * forwards

    def test_findings_are_renewed_in_a_step_that_never_ends(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fastcheck.monitor.session.event_store._MAX_FINDINGS", 50)
        model = nn.Sequential(nn.Linear(2, 2), Apply(poison))
        monitor = fastcheck.install(model, overflow_nums=-1)
        with torch.no_grad():
            for _ in range(200):
                model(torch.ones(1, 2))
        assert len(monitor._session.step.findings.all) <= 51
        assert monitor.event_count == 200
        assert len(monitor.events) == 200
        assert "200 counted" in monitor.summary()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_the_random_state_is_not_touched() -> None:
    model = Net()
    fastcheck.install(model)
    before = torch.get_rng_state()
    of_numpy = np.random.get_state()[1].copy()
    for x in batches(2):
        model(x).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == of_numpy).all()


class Freed(nn.Module):
    """With a weight and a buffer whose memory was freed, as shards are between their uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(300, 300)
        self.register_buffer("table", torch.ones(300, 300))
        for tensor in (self.unused.weight, self.table):
            tensor.untyped_storage().resize_(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).square() / x.sum()


def read_freed() -> None:
    """A read of freed memory would end the process."""
    model, x = Freed(), torch.zeros(2, 4)

    def step(batch: torch.Tensor) -> torch.Tensor:
        return model(batch).sum()

    assert fastcheck.rerun(step, x + 1, model=model).identical
    with pytest.raises(fastcheck.ConfigError, match="whose memory was not freed"):
        fastcheck.prove(step, x + 1, model=model)
    with fastcheck.install(model, stop=fastcheck.Stop(replay=True)) as monitor:
        monitor.run(step, x + 1)
    fastcheck.install(model, record="range")
    model(x + 1)
    made_by = stopped(model, x).report.made_by
    assert (
        made_by is not None and "the memory of a tensor that it may read was freed" in made_by.how
    )


def test_memory_that_was_freed_is_not_copied() -> None:
    done = run_code("from monitor.test_robustness import read_freed; read_freed()")
    assert done.returncode == 0, done.stderr
