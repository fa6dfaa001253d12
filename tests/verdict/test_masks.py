"""Masks at module level: an infinity that a softmax absorbs is not an event, and hides none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from support.programs.op_level import causal
from support.programs.training import Apply, Net, batches, chain, poison, stopped, train, where

NAN, INF = float("nan"), float("inf")

pytestmark = pytest.mark.usefixtures("fresh_start")


class Attention(nn.Module):
    """One head; the masked scores pass through a module, so that they are seen."""

    def __init__(self, masking: Any) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.masking = Apply(masking)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.masking(self.q(x) @ self.k(x).transpose(-1, -2))
        return x + self.softmax(scores) @ self.v(x)


class TestMasks:
    def test_a_causal_mask_is_no_event(self) -> None:
        model = chain(one=Attention(causal), two=Attention(causal))
        monitor = fastcheck.install(model)
        train(model, 3, data=batches(3, 2, 5, 8))
        assert monitor.event_count == 0
        assert {where(e) for e in monitor.events} == {
            ("one.masking", "output", "output", "unresolved"),
            ("two.masking", "output", "output", "unresolved"),
        }

    def test_a_nan_after_healthy_masked_steps_is_named_exactly(self) -> None:
        model = chain(one=Attention(causal), two=Attention(causal), three=Attention(causal))
        fastcheck.install(model)

        def break_it(step: int) -> None:
            if step == 5:
                model.two.masking.function = lambda scores: poison(causal(scores))

        stop = stopped(train, model, 8, data=batches(8, 2, 5, 8), before_step=break_it)
        assert stop.step == 5
        assert where(stop.culprit) == ("two.masking", "output", "output", "origin")

    def test_a_nan_in_the_first_masked_step_is_named_exactly(self) -> None:
        model = chain(one=Attention(causal), two=Attention(lambda s: poison(causal(s))))
        fastcheck.install(model)
        stop = stopped(model, torch.ones(2, 5, 8))
        assert where(stop.culprit) == ("two.masking", "output", "output", "origin")

    def test_a_mask_that_did_no_harm_before_is_not_blamed_later(self) -> None:
        # By its name the second module is no softmax.
        model = chain(mask=Apply(causal), rows=Apply(lambda s: s.softmax(-1)), c=nn.Linear(5, 5))
        fastcheck.install(model)

        def break_it(step: int) -> None:
            if step == 3:
                model.rows.function = lambda s: poison(s.softmax(-1))

        stop = stopped(train, model, 5, data=batches(5, 5, 5), before_step=break_it)
        assert where(stop.culprit) == ("rows", "output", "output", "origin")

    def test_a_mask_that_another_module_took_well_is_not_blamed(self) -> None:
        class TwoReaders(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mask, self.c = Apply(causal), nn.Linear(5, 5)
                self.well = Apply(lambda s: s.softmax(-1))
                self.badly = Apply(lambda s: poison(s.softmax(-1)))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                scores = self.mask(self.c(x))
                return self.well(scores) + self.badly(scores)

        model = TwoReaders()
        fastcheck.install(model)
        stop = stopped(model, torch.ones(5, 5))
        assert where(stop.culprit) == ("badly", "output", "output", "origin")

    def test_a_mask_given_with_the_batch_is_not_blamed(self) -> None:
        model, add = Net(), Apply(lambda x, mask: poison(x + mask))
        fastcheck.install(model, add)
        stop = stopped(add, torch.ones(5, 5), torch.full((5, 5), -INF).triu(1))
        assert where(stop.culprit) == ("Apply", "output", "output", "origin")

    def test_a_fully_masked_row_is_an_origin_at_the_softmax(self) -> None:
        model = chain(one=Attention(lambda scores: torch.full_like(scores, -INF)))
        fastcheck.install(model)
        stop = stopped(model, torch.ones(2, 5, 8))
        assert where(stop.culprit) == ("one.softmax", "output", "output", "origin")
        assert "masked entirely" in stop.culprit.reason

    def test_a_transformer_with_a_float_mask(self) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        monitor = fastcheck.install(model)
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in batches(3, 2, 5, 8):
            model(x, mask=mask).square().mean().backward()
            optimizer.step()
        assert monitor.event_count == 0
        with torch.no_grad():
            model.layers[1].linear1.weight[0, 0] = NAN
        stop = stopped(model, x, mask=mask)
        assert where(stop.culprit) == ("layers.1.linear1", "param", "weight", "arrived")

    @pytest.mark.usefixtures("op_observer")
    @pytest.mark.parametrize("level", ["module", "op"])
    @pytest.mark.parametrize("stored", ["buffer", "trained", "trained from other numbers than 0"])
    def test_a_mask_that_is_stored(self, stored: str, level: str) -> None:
        """Trained, it may be a table of transitions, some of which are forbidden."""

        class Masked(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                mask = torch.full((5, 5), -INF).triu(1)
                if stored == "buffer":
                    self.register_buffer("mask", mask)
                else:
                    self.mask = nn.Parameter(mask if stored == "trained" else mask + 0.5)
                self.inner = nn.Linear(5, 5)
                self.bad = False

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = torch.softmax(self.inner(x) + self.mask, -1)
                return poison(y) if self.bad else y

        model = Masked()
        monitor = fastcheck.install(model, level=level)
        train(model, 2, data=batches(2, 5, 5), optimizer=torch.optim.AdamW(model.parameters()))
        assert monitor.event_count == 0
        model.bad = True
        stop = stopped(model, torch.ones(5, 5))
        assert where(stop.culprit) == ("", "output", "output", "origin")
        role = "buffer" if stored == "buffer" else "parameter"
        assert (
            level == "op" or f"finite, but for {role} mask, which has held" in stop.culprit.reason
        )

    def test_a_log_of_zero_is_promoted_by_the_nan_it_causes(self) -> None:
        model = chain(
            a=nn.Linear(8, 8), act=nn.ReLU(), log=Apply(torch.log), sub=Apply(lambda x: x - x)
        )
        fastcheck.install(model)
        stop = stopped(model, torch.ones(2, 8))
        assert where(stop.culprit) == ("log", "output", "output", "origin")
        assert "did harm" in stop.culprit.reason
        assert stop.culprit.record["neginf_count"] > 0

    def test_a_log_of_zero_is_promoted_by_its_gradient(self) -> None:
        log, exp = Apply(torch.log), Apply(torch.exp)
        model = chain(a=nn.Linear(8, 8), zero=Apply(lambda x: x - x), log=log, exp=exp)
        fastcheck.install(model)
        y = model(torch.ones(2, 8))
        stop = stopped(y.sum().backward)
        assert where(stop.culprit) == ("log", "output", "output", "origin")
        assert "it reached the gradient of a." in stop.culprit.reason

    def test_a_log_of_zero_is_promoted_by_the_loss(self) -> None:
        model = chain(a=nn.Linear(8, 8), act=nn.ReLU(), log=Apply(torch.log))
        monitor = fastcheck.install(model)
        y = model(torch.randn(4, 8))
        assert monitor.event_count == 0
        stop = stopped(monitor.step, loss=y.mean())
        assert where(stop.culprit) == ("log", "output", "output", "origin")

    def test_the_batch_is_promoted_too(self) -> None:
        model = chain(sub=Apply(lambda x: x - x), b=nn.Linear(8, 8))
        fastcheck.install(model)
        x = torch.ones(2, 8)
        x[0, 0] = -INF
        stop = stopped(model, x)
        assert where(stop.culprit) == ("", "input", "input[0]", "arrived")
