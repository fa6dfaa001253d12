"""Verdicts at module level: which non-finite numbers are events, and where they come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.types import Verdict
from support.programs.training import Apply, Net, chain, nan_gradient, poison, stopped, train, where

NAN, INF = float("nan"), float("inf")

pytestmark = pytest.mark.usefixtures("fresh_start")


class Parent(nn.Module):
    """Computes something of its own between its two submodules."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.between = between
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self.first(x)))


class TestForward:
    def test_origin_is_the_module_that_made_it(self) -> None:
        model = chain(a=nn.Linear(8, 8), bad=Apply(poison), b=nn.Linear(8, 8))
        fastcheck.install(model)
        stop = stopped(train, model)
        assert where(stop.culprit) == ("bad", "output", "output", "origin")
        assert stop.step == 0
        assert "was finite" in stop.culprit.reason

    def test_a_real_overflow_in_float16(self) -> None:
        model = chain(up=nn.Linear(8, 8), square=Apply(torch.square), b=nn.Linear(8, 8)).half()
        fastcheck.install(model)
        with torch.no_grad():
            model.up.weight.fill_(60.0)
        stop = stopped(model, torch.ones(2, 8, dtype=torch.float16))
        assert where(stop.culprit) == ("square", "output", "output", "origin")
        assert stop.culprit.record["posinf_count"] > 0

    def test_what_follows_is_propagated(self) -> None:
        model = chain(a=nn.Linear(8, 8), bad=Apply(poison), b=nn.Linear(8, 8))
        monitor = fastcheck.install(model, overflow_nums=-1)
        train(model, 1)
        by_verdict = {}
        for event in monitor.events:
            by_verdict.setdefault(event.verdict, []).append(event)
        assert [where(e) for e in by_verdict[Verdict.ORIGIN]] == [
            ("bad", "output", "output", "origin")
        ]
        assert set(by_verdict) == {Verdict.ORIGIN, Verdict.PROPAGATED}
        assert "follows from bad (Apply)" in by_verdict[Verdict.PROPAGATED][0].reason
        assert monitor.event_count == 1

    def test_an_output_that_a_submodule_made_is_propagated(self) -> None:
        model = chain(block=chain(a=nn.Linear(8, 8), bad=Apply(lambda x: (poison(x), x + 1))))
        monitor = fastcheck.install(model, overflow_nums=-1)
        model(torch.ones(2, 8))
        assert [where(e) for e in monitor.events] == [
            ("block.bad", "output", "output[0]", "origin")
        ]

    def test_two_independent_origins_both_count(self) -> None:
        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(8, 8)
                self.left, self.right = Apply(poison), Apply(poison)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.first(x)
                return self.left(x) + self.right(x)

        model = Two()
        monitor = fastcheck.install(model, overflow_nums=-1)
        model(torch.ones(2, 8))
        assert [where(e)[0] for e in monitor.events if e.counted] == ["left", "right"]

    def test_computed_between_submodules(self) -> None:
        model = chain(p=Parent(poison))
        fastcheck.install(model)
        stop = stopped(train, model)
        assert where(stop.culprit) == ("p.last", "input", "input[0]", "origin")
        assert "p.forward computed it between its submodules" in stop.culprit.reason

    def test_a_second_output_is_no_second_origin(self) -> None:
        model = chain(a=nn.Linear(8, 8), b=Apply(lambda x: (poison(x), poison(x, INF))))
        monitor = fastcheck.install(model, overflow_nums=-1)
        model(torch.ones(2, 8))
        assert [where(e)[2:] for e in monitor.events] == [
            ("output[0]", "origin"),
            ("output[1]", "propagated"),
        ]


class TestArrivals:
    def test_the_batch(self) -> None:
        model = Net()
        fastcheck.install(model)
        x = torch.ones(4, 8)
        x[2, 3] = NAN
        stop = stopped(model, x)
        assert where(stop.culprit) == ("", "input", "input[0]", "arrived")
        assert "batch" in stop.culprit.reason

    def test_every_bad_batch_of_an_evaluation_counts(self) -> None:
        model = Net()
        monitor = fastcheck.install(model, overflow_nums=-1)
        with torch.no_grad():
            for value in (NAN, 1.0, NAN):
                model(torch.full((4, 8), value))
        assert monitor.event_count == 2

    @pytest.mark.parametrize("value", [NAN, INF, -INF])
    def test_a_loaded_weight_is_named_before_what_is_computed(self, value: float) -> None:
        model = Net()
        fastcheck.install(model)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        state["blocks.1.b.weight"][0, 0] = value
        model.load_state_dict(state)
        stop = stopped(train, model)
        assert where(stop.culprit) == ("blocks.1.b", "param", "weight", "arrived")
        assert "checkpoint" in stop.culprit.reason

    @pytest.mark.parametrize("value", [INF, -INF])
    def test_a_weight_that_an_update_broke(self, value: float) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def blow_up(step: int) -> None:
            if step == 2:
                with torch.no_grad():
                    model.blocks[1].a.bias.fill_(value)

        stop = stopped(train, model, 5, optimizer=optimizer, before_step=blow_up)
        assert where(stop.culprit) == ("blocks.1.a", "param", "bias", "arrived")
        assert stop.step == 2
        assert "finite just before the update of step 1" in stop.culprit.reason
        assert monitor.event_count == 1

    def test_a_broken_weight_counts_once_a_step(self) -> None:
        model = Net()
        monitor = fastcheck.install(model, overflow_nums=-1)
        with torch.no_grad():
            model.blocks[0].a.weight.fill_(NAN)
            model.head.weight.fill_(NAN)
        train(model, 3)
        assert monitor.event_count == 3

    def test_behind_an_excluded_module(self) -> None:
        model = chain(a=nn.Linear(8, 8), bad=Apply(poison), b=nn.Linear(8, 8))
        fastcheck.install(model, exclude="bad")
        stop = stopped(train, model)
        assert where(stop.culprit) == ("b", "input", "input[0]", "arrived")
        assert "excluded" in stop.culprit.reason

    def test_in_a_step_that_every_skips(self) -> None:
        model = Net()
        fastcheck.install(model, every=4)

        def blow_up(step: int) -> None:
            if step == 2:
                with torch.no_grad():
                    model.head.weight.fill_(NAN)

        stop = stopped(train, model, 8, before_step=blow_up)
        # By then the updates of steps 2 and 3 have spread it to every weight.
        assert stop.step == 4
        assert where(stop.culprit) == ("blocks.0.a", "param", "weight", "arrived")
        assert "finite just before the update of step 0" in stop.culprit.reason

    def test_computed_outside_the_observed_modules(self) -> None:
        model, criterion = Net(), nn.MSELoss()
        fastcheck.install(model, criterion)
        logits = model(torch.ones(4, 8))
        stop = stopped(criterion, poison(logits), torch.zeros(4, 4))
        assert where(stop.culprit) == ("MSELoss", "input", "input[0]", "arrived")
        assert "outside the observed modules" in stop.culprit.reason

    def test_a_step_before_does_not_make_it_look_computed_outside(self) -> None:
        model, criterion = chain(a=nn.Linear(8, 8), bad=Apply(poison)), nn.MSELoss()
        monitor = fastcheck.install(model, criterion, overflow_nums=-1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            # .double() is a tensor that no module made.
            criterion(model(torch.ones(2, 8)).double(), torch.zeros(2, 8).double()).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.a.weight.data.fill_(0.1)
            model.a.bias.data.fill_(0.1)
        assert monitor.event_count == 2

    def test_a_nan_in_a_buffer(self) -> None:
        model = chain(a=nn.Linear(8, 8), norm=nn.BatchNorm1d(8))
        fastcheck.install(model)
        model.eval()
        model.norm.running_mean[0] = NAN
        stop = stopped(model, torch.ones(4, 8))
        assert where(stop.culprit) == ("norm", "buffer", "running_mean", "arrived")

    def test_an_infinite_buffer_is_no_event(self) -> None:
        model = chain(a=nn.Linear(8, 8), b=Net())
        model.a.register_buffer("best", torch.full((), INF))
        monitor = fastcheck.install(model)
        train(model, 3)
        assert monitor.event_count == 0
        assert {e.verdict for e in monitor.events} == {Verdict.UNRESOLVED}

    def test_an_infinite_buffer_is_not_what_its_module_made_a_nan_of(self) -> None:
        model = chain(a=nn.Linear(8, 8), bad=Apply(lambda x: (x - x.max() - 1).log()))
        model.bad.register_buffer("best", torch.full((), INF))
        fastcheck.install(model)
        stop = stopped(train, model)
        assert where(stop.culprit) == ("bad", "output", "output", "origin")

    @pytest.mark.parametrize("is_training", [True, False])
    @pytest.mark.parametrize("first", [INF, -INF])
    def test_an_infinite_buffer_is_not_what_became_nan_between_modules(
        self, first: float, is_training: bool
    ) -> None:
        """As the least or largest number of an observer, before its first batch."""
        model = Parent(lambda h: (h - h.max() - 1).log())
        model.register_buffer("seen", torch.full((2,), first))
        model.first.register_buffer("seen", torch.full((), first))
        fastcheck.install(model.train(is_training))
        stop = stopped(train, model)
        assert where(stop.culprit) == ("last", "input", "input[0]", "origin")
        assert (
            "from finite values, but for buffer seen and 1 more, which have held NaN or Inf; "
            in stop.culprit.reason
        )

    def test_an_infinite_buffer_that_is_a_factor_is_named_with_its_operator(self) -> None:
        model = Parent(lambda h: h * model.scale)
        model.register_buffer("scale", torch.full((1,), INF))
        fastcheck.install(model)
        stop = stopped(train, model)
        assert stop.culprit.site.op == "aten.mul.Tensor"
        assert "it made infinities beside those that it read" in stop.culprit.reason
        assert "other (buffer scale) holds 1 Inf, of which mul makes" in " ".join(str(stop).split())


class TestBackward:
    def test_a_gradient_is_blamed_on_the_module_that_computed_it(self) -> None:
        model = chain(a=nn.Linear(8, 8), bad=Apply(nan_gradient), b=nn.Linear(8, 8))
        fastcheck.install(model)
        stop = stopped(train, model)
        assert where(stop.culprit) == ("bad", "grad_input", "input[0]", "origin")
        assert stop.culprit.site.direction == "backward"

    def test_the_innermost_module_is_blamed(self) -> None:
        model = chain(a=nn.Linear(8, 8), block=chain(bad=Apply(nan_gradient), c=nn.Linear(8, 8)))
        fastcheck.install(model)
        stop = stopped(train, model)
        assert where(stop.culprit) == ("block.bad", "grad_input", "input[0]", "origin")

    def test_a_module_that_hands_its_input_on_is_not_blamed(self) -> None:
        model = chain(
            a=nn.Linear(8, 8), same=chain(inner=nn.Identity()), bad=Apply(nan_gradient), b=Net()
        )
        fastcheck.install(model)
        stop = stopped(train, model)
        assert where(stop.culprit) == ("bad", "grad_input", "input[0]", "origin")

    def test_the_loss_outside_the_model_is_blamed(self) -> None:
        model = Net()
        fastcheck.install(model)
        y = model(torch.ones(4, 8))
        stop = stopped(nan_gradient(y).sum().backward)
        assert where(stop.culprit) == ("head", "grad_output", "output", "origin")
        assert "after the model" in stop.culprit.reason

    def test_code_between_submodules_is_blamed(self) -> None:
        model = chain(p=Parent(nan_gradient), q=nn.Linear(8, 8))
        fastcheck.install(model)
        stop = stopped(train, model)
        assert where(stop.culprit) == ("p.first", "grad_output", "output", "origin")
        assert "the code in p.forward" in stop.culprit.reason

    def test_gradients_after_the_first_are_propagated(self) -> None:
        model = chain(a=nn.Linear(8, 8), bad=Apply(nan_gradient), b=nn.Linear(8, 8))
        monitor = fastcheck.install(model, overflow_nums=-1)
        train(model, 1)
        counted = [where(e) for e in monitor.events if e.counted]
        assert counted == [("bad", "grad_input", "input[0]", "origin")]
        assert ("a", "param_grad", "weight", "propagated") in map(where, monitor.events)

    def test_gradients_of_a_non_finite_forward_are_propagated(self) -> None:
        model = chain(a=nn.Linear(8, 8), bad=Apply(poison), b=nn.Linear(8, 8))
        monitor = fastcheck.install(model, overflow_nums=-1)
        train(model, 1)
        backward = [e for e in monitor.events if e.site.role.startswith("grad")]
        assert {e.verdict for e in backward} == {Verdict.PROPAGATED}

    def test_a_parameter_gradient_that_overflows_alone(self) -> None:
        model = nn.Linear(8, 8)
        fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        before = model.weight.detach().clone()
        model(torch.ones(2, 8)).sum().backward()
        model.weight.grad[0, 0] = INF
        stop = stopped(optimizer.step)
        assert where(stop.culprit) == ("", "param_grad", "weight", "origin")
        assert torch.equal(model.weight, before)


class TestLoss:
    def test_an_overflow_in_the_loss_itself(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        y = model(torch.ones(4, 8))
        stop = stopped(monitor.step, loss=y.sum() * INF)
        assert where(stop.culprit) == ("", "loss", "given loss", "origin")

    def test_the_criterion_that_was_observed_is_named(self) -> None:
        model, criterion = Net(), Apply(lambda y: y.square().sum() * INF)
        fastcheck.install(model, criterion)
        stop = stopped(criterion, model(torch.ones(4, 8)))
        assert where(stop.culprit) == ("Apply", "output", "output", "origin")

    def test_minus_infinity_as_a_loss_is_no_mask(self) -> None:
        model, criterion = Net(), Apply(lambda y: y.sum() * 0 - INF)
        monitor = fastcheck.install(model, criterion)
        loss = criterion(model(torch.ones(4, 8)))
        assert monitor.event_count == 0
        stop = stopped(monitor.step, loss=loss)
        assert where(stop.culprit) == ("Apply", "output", "output", "origin")

    @pytest.mark.parametrize("loss", [NAN, {"a": torch.tensor(1.0), "b": torch.tensor(INF)}])
    def test_numbers_and_structures(self, loss: Any) -> None:
        monitor = fastcheck.install(Net())
        assert stopped(monitor.step, loss=loss).culprit.site.role == "loss"


class TestCheckpointing:
    def test_a_recompute_that_alone_goes_wrong_stops_before_the_update(self) -> None:
        from torch.utils.checkpoint import checkpoint

        runs = []

        def unreliable(x: torch.Tensor) -> torch.Tensor:
            runs.append(x)
            return poison(x) if len(runs) == 2 else x * 1

        inner = chain(a=nn.Linear(8, 8), bad=Apply(unreliable), b=nn.Linear(8, 8))
        model = chain(first=nn.Linear(8, 8), body=Apply())
        model.body.inner = inner
        model.body.function = lambda x: checkpoint(inner, x, use_reentrant=True)
        fastcheck.install(model)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        stop = stopped(train, model, 1)
        assert where(stop.culprit) == ("body.inner.bad", "output", "output", "arrived")
        assert all(map(torch.equal, before, model.parameters()))

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_a_recomputed_overflow_counts_once(self, reentrant: bool) -> None:
        from torch.utils.checkpoint import checkpoint

        class Checkpointed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = chain(a=nn.Linear(8, 8), bad=Apply(poison), b=nn.Linear(8, 8))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return checkpoint(self.inner, x, use_reentrant=reentrant)

        model = chain(first=nn.Linear(8, 8), body=Checkpointed(), last=nn.Linear(8, 8))
        monitor = fastcheck.install(model, overflow_nums=-1)
        train(model, 1)
        assert [where(e)[0] for e in monitor.events if e.counted] == ["body.inner.bad"]
        assert any(e.record["flags"] & fastcheck.types.Flag.RECOMPUTE for e in monitor.events)
