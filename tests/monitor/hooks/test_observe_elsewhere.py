"""observe(name, tensor) at op level and on devices."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import fastcheck
from fastcheck import Stop, observe
from support.programs.observing import EXPECTED, net, readings, train
from support.programs.training import batches, poison, stopped, where

if os.environ.get("FASTCHECK_FAKE_DEVICE"):
    from support.devices.training_on_fake import NAME as DEVICE
    from support.devices.training_on_fake import fake
else:
    DEVICE = "cpu"

pytestmark = [pytest.mark.fake_hooks, pytest.mark.usefixtures("fresh_start")]


@pytest.mark.usefixtures("op_observer")
class TestOpLevel:
    def test_records_besides_those_of_the_operators(self) -> None:
        model = net()
        monitor = fastcheck.install(model, level="op")
        train(model, 1)
        assert sorted(readings(monitor)) == sorted(EXPECTED)

    def test_the_operator_is_the_culprit_and_the_name_is_a_second_record(self) -> None:
        model = net()
        model[1].before = lambda x: (x - x.max() - 1).sqrt()
        monitor = fastcheck.install(model, level="op", overflow_nums=-1)
        model(next(batches(1)))
        monitor.flush()
        found = [(e.site.module, e.site.op, e.verdict.name) for e in monitor.events[:2]]
        assert found == [("1", "aten.sqrt", "ORIGIN"), ("1.attn.logits", None, "BENIGN")]

    def test_a_mask_is_judged_by_the_operators_alone(self) -> None:
        model = net()
        model[1].before = lambda x: x.masked_fill(torch.eye(4, 8) > 0, -float("inf"))
        model[1].after = lambda x: x.softmax(-1)
        monitor = fastcheck.install(model, level="op")
        train(model, 1)
        assert monitor.event_count == 0
        assert [e.verdict.name for e in monitor.events if e.site.module == "1.attn.logits"] == [
            "BENIGN"
        ]

    def test_what_no_operator_has_made(self) -> None:
        model = net()
        monitor = fastcheck.install(model, level="op", overflow_nums=-1)
        made = torch.frombuffer(bytearray(b"\0\0\xc0\x7f" * 8), dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(observe("batch", made)).sum().backward()
        optimizer.step()
        first = min(monitor.events, key=lambda event: int(event.record["seq"]))
        assert (first.site.module, first.verdict.name) == ("batch", "ARRIVED")

    def test_roles_and_modules_are_selected(self) -> None:
        model = net()
        monitor = fastcheck.install(
            model, level="op", filter=fastcheck.Filter(roles=["output"]), exclude="1"
        )
        train(model, 1)
        assert readings(monitor) == ["loss.mse (observe) · forward · output"]

    def test_a_replay_reads_it_too(self) -> None:
        model = net()
        model[1].before = lambda x: (x - x.max() - 1).sqrt()
        monitor = fastcheck.install(model, stop=Stop(replay=True))
        stop = stopped(monitor.run, lambda x: model(x).sum().backward(), next(batches(1)))
        assert stop.culprit.site.module == "1.attn.logits"
        assert stop.report.replay.report.culprit.site.op == "aten.sqrt"


@pytest.mark.skipif(DEVICE == "cpu", reason="make test-fake-device runs it")
class TestDevice:
    def test_records_and_bits(self, fake_accelerator: Any) -> None:
        plain, watched = net().to(DEVICE), net().to(DEVICE)
        losses = train(plain, 3, DEVICE)
        monitor = fastcheck.install(watched)
        assert train(watched, 3, DEVICE) == losses
        monitor.flush()
        assert readings(monitor) == EXPECTED * 3

    def test_the_event_comes_with_the_drain(self, fake_accelerator: Any) -> None:
        model = net().to(DEVICE)
        model[1].before = poison
        monitor = fastcheck.install(model)
        model(next(batches(1)).to(DEVICE))
        stop = stopped(monitor.flush)
        assert where(stop.culprit) == ("1.attn.logits", "output", "output", "origin")

    def test_nothing_waits(self, fake_accelerator: Any) -> None:
        model = net().to(DEVICE)
        monitor = fastcheck.install(model, stop=Stop(max_lag=None))
        x = next(batches(1)).to(DEVICE)
        model(x)
        before = fake.counters()
        for _ in range(3):
            observe("probe", model(x))
        spent = fake.counters() - before
        assert spent.synchronisations == 0 and spent["blocking_copy"] == 0
        monitor.remove()

    @pytest.mark.usefixtures("op_observer")
    def test_op_level(self, fake_accelerator: Any) -> None:
        model = net().to(DEVICE)
        model[1].before = poison
        monitor = fastcheck.install(model, level="op", overflow_nums=-1)
        train(model, 1, DEVICE)
        monitor.flush()
        assert sorted(readings(monitor)) == sorted(EXPECTED)
        named = [e for e in monitor.events if e.site.module == "1.attn.logits"]
        assert named[0].verdict.name == "BENIGN"
