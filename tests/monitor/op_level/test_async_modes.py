"""level="op" on an accelerator together with modes, autocast, scalers, checkpoints, threads, a
kernel that fails, and devices that it does not support.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastcheck
from fakes import fake_device
from fastcheck.types import Verdict
from support.programs.op_level import loop, model_with
from support.programs.training import Net, batches

pytestmark = [pytest.mark.fake_accelerator, pytest.mark.usefixtures("op_observer")]
fake: Any = fake_device.load()
NAME = fake.name()


class TestBesideOthers:
    def test_a_dispatch_mode_sees_what_it_would_see(self) -> None:
        class Seen(TorchDispatchMode):
            def __init__(self) -> None:
                super().__init__()
                self.names: list[str] = []

            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                self.names.append(str(func))
                return func(*args, **(kwargs or {}))

        def run(is_watched: bool) -> tuple[list[str], int]:
            torch.manual_seed(0)
            model = Net().to(NAME)
            data = [x.to(NAME) for x in batches(2)]
            monitor = fastcheck.install(model, level="op") if is_watched else None
            with Seen() as seen:
                loop(model, data)
            if monitor is not None:
                monitor.remove()
            return seen.names, 0 if monitor is None else len(monitor.records())

        alone, _ = run(False)
        beside, records = run(True)
        assert beside == alone and records > 100

    def test_autocast_does_not_change_what_is_read(self) -> None:
        x = torch.randn(4, 8)
        model = nn.Linear(8, 4).to(NAME)
        with fastcheck.install(model, level="op") as monitor:
            with torch.autocast(NAME, dtype=torch.bfloat16):
                y = model(x.to(NAME))
            monitor.flush()
        found = {int(c) for c in monitor.records()["checksum"]}
        assert int(fastcheck.stats(y.cpu(), record="full").checksum) in found

    @pytest.mark.parametrize("sync", ["never", "step", "call"])
    def test_a_scaler_that_skips(self, sync: str) -> None:
        model = nn.Linear(8, 1).to(NAME)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(NAME, init_scale=2.0**127)
        options: dict[str, Any] = {"overflow_nums": -1, "sync": sync}
        with fastcheck.install(model, level="op", **options) as monitor:
            for _ in range(3):
                optimizer.zero_grad()
                scaler.scale(model(torch.ones(2, 8).to(NAME) * 100).sum() * 100).backward()
                scaler.step(optimizer)
                scaler.update()
        counted = [(str(e.site), e.step, e.verdict, e.reason) for e in monitor.events if e.counted]
        assert not counted
        assert any(event.verdict is Verdict.SCALED for event in monitor.events)

    def test_checkpointing(self) -> None:
        model = model_with(lambda x: torch.exp(x.abs() * 1e4)).to(NAME)

        def forward(x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)

        x = torch.randn(4, 8).to(NAME)
        with fastcheck.install(model, level="op", overflow_nums=-1) as monitor:
            forward(x).sum().backward()
            monitor.flush()
        assert [e.site.op for e in monitor.events if e.counted] == ["aten.exp"]
        assert any("recomputed" in event.reason for event in monitor.events)

    def test_several_threads(self) -> None:
        model = nn.Linear(8, 8).to(NAME)
        errors: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(20):
                    model(torch.ones(2, 8).to(NAME)).sum().backward()
            except BaseException as error:
                errors.append(error)

        with fastcheck.install(model, level="op", overflow_nums=-1) as monitor:
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            monitor.flush()
        assert not errors and monitor.event_count == 0
        assert len(np.unique(monitor.records()["seq"])) == len(monitor.records()) > 4 * 20 * 4

    def test_without_gradients(self) -> None:
        model = model_with(lambda x: torch.sqrt(-x.abs() - 1)).to(NAME)
        x = torch.ones(2, 8).to(NAME)
        monitor = fastcheck.install(model, level="op", overflow_nums=-1)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                for _ in range(3):
                    model(x)
        monitor.flush()
        counted = [event.site.op for event in monitor.events if event.counted]
        assert counted == ["aten.sqrt"] * 6
        monitor.remove()

    def test_a_kernel_that_fails_is_said_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = nn.Linear(8, 4).to(NAME)
        x = torch.ones(2, 8).to(NAME)
        plain = model(x).cpu()
        monitor = fastcheck.install(model, level="op")
        model(x)
        ring = next(iter(monitor._session.rings.of.values()))

        def broken(*args: Any) -> None:
            raise RuntimeError("no such kernel")

        monkeypatch.setattr(ring, "observe", broken)
        with pytest.warns(fastcheck.FastcheckWarning, match="no such kernel"):
            assert torch.equal(model(x).cpu(), plain)
        monitor.remove()


class TestRefused:
    @pytest.fixture(autouse=True)
    def _without_streams(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fastcheck.monitor.op_level.level.streams_of", lambda device: None)

    def test_a_model_on_a_device_without_streams(self) -> None:
        with pytest.raises(fastcheck.ConfigError, match="no streams and events"):
            fastcheck.install(Net().to(NAME), level="op")
        fastcheck.install(Net().to(NAME), level="op", sync="call").remove()

    def test_tensors_on_one_pass_unread_and_that_is_said(self) -> None:
        model = model_with(lambda x: torch.sqrt(-x.abs() - 1))
        with fastcheck.install(model, level="op", overflow_nums=-1) as monitor:
            _ = torch.ones(4).to(NAME) * 2
            _ = torch.ones(4).to(NAME) * 2
            model(torch.ones(2, 8)).sum().backward()
        assert [event.site.op for event in monitor.events if event.counted] == ["aten.sqrt"]
        said = " ".join(monitor.summary().split())
        assert "op level does not read fake:0: torch.fake has no streams" in said
        assert "device can't be read without waiting" in said
