"""Tests of Watch(skip_above=): an update with a gradient that is far too large is not applied."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck


class TestSkippedUpdates:
    """Watch(skip_above=): an update with a gradient that is far too large is not applied."""

    @staticmethod
    def run(at: int = 35, factor: Any = None, scaled: bool = False, **options: Any) -> list[float]:
        """By how much each update has changed a weight; the batch is 1,000 times too large once."""
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=8, enabled=scaled)
        watch = fastcheck.Watch(window=32, warm_up=16, skip_above=factor)
        moved = []
        with fastcheck.install(model, watch=watch, record="stats"):
            for step in range(40):
                x = torch.randn(32, 8) * (1000 if step == at else 1)
                optimizer.zero_grad()
                scaler.scale(model(x).square().mean()).backward()
                before = model.weight.detach().clone()
                scaler.step(optimizer)
                scaler.update()
                moved.append(float((model.weight.detach() - before).abs().max()))
                assert model.weight.grad is not None
        return moved

    @pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
    @pytest.mark.parametrize(
        "options",
        [{}, {"fused": True}, {"fused": True, "scaled": True}, {"scaled": True}],
    )
    def test_it_alone_is_skipped(self, options: dict[str, Any]) -> None:
        moved = self.run(factor=10, **options)
        assert [step for step, one in enumerate(moved) if not one] == [35]
        assert all(self.run(**options))

    @pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
    def test_before_enough_is_known_none_is(self) -> None:
        assert all(self.run(at=10, factor=10))

    @pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("how", ["norm", "largest", "value"])
    def test_the_norm_before_clipping_counts(self, how: str, fused: bool) -> None:
        """After clipping no norm is large."""
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=fused)
        watch = fastcheck.Watch(window=32, warm_up=16, skip_above=10)
        moved = []
        with fastcheck.install(model, watch=watch, record="stats") as monitor:
            for step in range(40):
                x = torch.randn(32, 8) * (1000 if step == 35 else 1)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                if how == "value":
                    torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
                else:
                    power = 2.0 if how == "norm" else math.inf
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=power)
                before = model.weight.detach().clone()
                optimizer.step()
                moved.append(float((model.weight.detach() - before).abs().max()))
        assert [step for step, one in enumerate(moved) if not one] == [35]
        skipped = [event for event in monitor.watch.events if "skipped" in event.text]
        assert [event.step for event in skipped] == [35]
        assert skipped[0].value > skipped[0].reference > 0
        assert "the update was skipped: the norm of its gradients is" in str(skipped[0])

    def test_a_loop_that_clips_itself_is_warned_of(self) -> None:
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        watch = fastcheck.Watch(window=32, warm_up=16, skip_above=10)
        with (
            warnings.catch_warnings(record=True) as caught,
            fastcheck.install(model, watch=watch),
        ):
            warnings.simplefilter("always")
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(32, 8)).square().mean().backward()
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad.mul_(0.5)
                optimizer.step()
        texts = [str(one.message) for one in caught]
        assert [text for text in texts if "clip_grad_norm_" in text] == texts and len(texts) == 1

    @pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
    def test_each_update_of_a_step_has_its_own_norm(self) -> None:
        """What the first was clipped from is not the second's. monitor.step() ends the step."""
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
        watch = fastcheck.Watch(window=32, warm_up=16, skip_above=10)
        still = []
        with fastcheck.install(model, watch=watch, record="stats") as monitor:
            for step in range(40):
                for part in range(2):
                    x = torch.randn(32, 8) * (1000 if (step, part) == (35, 0) else 1)
                    optimizer.zero_grad(set_to_none=False)
                    model(x).square().mean().backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    before = model.weight.detach().clone()
                    optimizer.step()
                    if not float((model.weight.detach() - before).abs().max()):
                        still.append((step, part))
                monitor.step()
        assert still == [(35, 0)]

    @pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
    def test_a_fault_that_stays_is_skipped_until_it_is_usual(self) -> None:
        """While the range of norms is learned anew the last limit counts; and what was skipped is
        no update that became smaller.
        """
        torch.manual_seed(0)
        model = nn.Linear(8, 4, bias=False).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        watch = fastcheck.Watch(window=32, warm_up=16, skip_above=10)
        with fastcheck.install(model, watch=watch, record="stats") as monitor:
            for step in range(100):
                x, y = torch.randn(32, 8).bfloat16(), 3 * torch.randn(32, 4)
                loss = (model(x).float() - y).square().mean()
                optimizer.zero_grad()
                (loss * (1000 if 40 <= step < 66 else 1)).backward()
                before = model.weight.detach().clone()
                optimizer.step()
                assert torch.equal(before, model.weight) is (40 <= step < 66)
        events = [event for event in monitor.watch.events if event.step >= 40]
        assert any("the update was skipped" in event.text for event in events)
        assert not any(event.kind == "update" for event in events)

    @pytest.mark.parametrize("value", [1, True, "3", float("nan")])
    def test_what_is_no_factor_is_refused(self, value: Any) -> None:
        with pytest.raises(fastcheck.ConfigError, match="skip_above"):
            fastcheck.Watch(skip_above=value)
