"""The loss is the tensor that backward() is called on; closures evaluate it several times."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import nn
from torch.autograd import grad  # imported before install()

import fastcheck
from support.programs.training import (
    Apply,
    Net,
    batches,
    chain,
    poison,
    steps_of,
    stopped,
    train,
    where,
)

pytestmark = [pytest.mark.fake_hooks, pytest.mark.usefixtures("fresh_start")]

INF, NAN = float("inf"), float("nan")


def losses_read(monitor: fastcheck.Monitor) -> list[tuple[int, float]]:
    monitor.flush()
    records, sites = monitor.records(), monitor.sites
    return [(int(r["step"]), float(r["max"])) for r in records if sites[r["site"]].role == "loss"]


class TestTheLoss:
    def test_is_read_by_itself(self, device: str) -> None:
        model = Net().to(device)
        monitor = fastcheck.install(model)
        losses = train(model, data=(x.to(device) for x in batches(3)))
        assert losses_read(monitor) == list(enumerate(losses))

    def test_a_finite_output_that_makes_it_infinite(self, device: str) -> None:
        model = chain(body=nn.Linear(8, 8), tail=Apply(lambda x: x + 1e6)).to(device)
        fastcheck.install(model, sync="step")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step() -> None:
            model(torch.ones(2, 8, device=device)).exp().mean().backward()
            optimizer.step()

        stop = stopped(step)
        assert where(stop.culprit) == ("", "loss", "loss", "origin")
        assert str(stop).startswith("1 +Inf in the loss at step 0")

    @pytest.mark.parametrize(
        "loss", [lambda x: x.sum(), lambda x: -x.sum(), lambda x: x.exp().log().mean()]
    )
    def test_a_negative_infinity_in_the_output(
        self, loss: Callable[[torch.Tensor], torch.Tensor], device: str
    ) -> None:
        model = chain(body=nn.Linear(8, 8), tail=Apply(lambda x: poison(x, -INF))).to(device)
        fastcheck.install(model, sync="step")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step() -> None:
            loss(model(torch.ones(2, 8, device=device))).backward()
            optimizer.step()

        stop = stopped(step)
        assert where(stop.culprit) == ("tail", "output", "output", "origin")
        assert "the loss" in stop.culprit.reason

    def test_a_masked_output_is_no_event(self) -> None:
        model = chain(body=nn.Linear(8, 8), tail=Apply(lambda x: poison(x, -INF)))
        monitor = fastcheck.install(model)
        model(torch.ones(2, 8)).softmax(-1).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        assert monitor.event_count == 0

    def test_of_autograd_grad(self) -> None:
        model = Net()
        fastcheck.install(model)
        loss = (model(torch.ones(1, 8)) + 1e6).exp().mean()
        stop = stopped(grad, loss, list(model.parameters()))
        assert where(stop.culprit) == ("", "loss", "loss", "origin")

    def test_a_gradient_of_an_input_is_that_of_no_loss(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        x = torch.ones(1, 8, requires_grad=True)
        grad(model(x).square().mean(), x, create_graph=True)
        assert losses_read(monitor) == []

    def test_of_a_criterion_that_is_observed_is_read_once(self) -> None:
        model, criterion = Net(), nn.MSELoss()
        monitor = fastcheck.install(model, criterion)
        criterion(model(torch.ones(1, 8)), torch.zeros(1, 4)).backward()
        assert losses_read(monitor) == []
        assert any(s.module == "MSELoss" and s.role == "output" for s in monitor.sites)

    def test_another_loss_given_to_step_is_read_too(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        loss = model(torch.ones(1, 8)).square().mean()
        loss.backward()
        monitor.step(loss=loss)
        monitor.step(loss=7.0)
        assert [value for _, value in losses_read(monitor)] == [loss.item(), 7.0]

    def test_of_a_model_that_is_not_observed_is_no_event(self, device: str) -> None:
        model, other = Net().to(device), Net().to(device)
        monitor = fastcheck.install(model, sync="step")
        model(torch.ones(1, 8, device=device))
        (other(torch.ones(1, 8, device=device)) + 1e6).exp().mean().backward()
        monitor.flush()
        assert monitor.event_count == 0

    def test_after_many_losses_of_another_model_it_is_still_found_before_backward(self) -> None:
        model, other = Net(), Net()
        fastcheck.install(model)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
        for x in batches(20):
            model(x)
            other(x).mean().backward()
            optimizer.step()
        loss = (model(torch.ones(1, 8)) + 1e6).exp().mean()
        stop = stopped(loss.backward)
        assert where(stop.culprit) == ("", "loss", "loss", "origin")
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_several_that_are_accumulated(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in batches(4):
            (model(x).square().mean() / 4).backward()
        optimizer.step()
        assert [step for step, _ in losses_read(monitor)] == [0, 0, 0, 0]

    def test_with_retain_graph_it_is_read_once(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        loss = model(torch.ones(1, 8)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        assert len(losses_read(monitor)) == 1

    def test_backward_inside_backward_has_none(self) -> None:
        from torch.utils.checkpoint import checkpoint

        model = Net()
        monitor = fastcheck.install(model)
        x = torch.ones(1, 8, requires_grad=True)
        checkpoint(model, x, use_reentrant=True).square().mean().backward()
        assert len(losses_read(monitor)) == 1

    def test_at_op_level_it_is_read_under_its_name_too(self) -> None:
        model = Net()
        monitor = fastcheck.install(model, level="op")
        losses = train(model, 2)
        assert losses_read(monitor) == list(enumerate(losses))
        monitor.remove()

    def test_a_defect_in_reading_it_leaves_the_steps_as_they_were(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*args: Any) -> None:
            raise RuntimeError("a defect")

        monkeypatch.setattr("fastcheck.monitor.session.session.Session.read_loss", broken)
        model = Net()
        monitor = fastcheck.install(model)
        with pytest.warns(fastcheck.errors.FastcheckWarning, match="the loss: RuntimeError"):
            train(model, 3)
        assert steps_of(monitor) == [0, 1, 2]

    def test_training_is_not_changed(self) -> None:
        torch.manual_seed(0)
        plain = train(Net())
        torch.manual_seed(0)
        model = Net()
        fastcheck.install(model)
        assert train(model) == plain


class TestUnderAScaler:
    def test_the_loss_is_the_unscaled_one(self, device: str) -> None:
        model = Net().to(device)
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler(device, init_scale=1024.0)
        losses = []
        for x in batches(3):
            optimizer.zero_grad()
            loss = model(x.to(device)).square().mean()
            losses.append(loss.item())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert losses_read(monitor) == list(enumerate(losses))

    def test_a_scaled_loss_that_overflows_is_no_event(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        scaler.scale(model(torch.ones(1, 8)).square().sum() + 8).backward()
        scaler.step(optimizer)
        scaler.update()
        assert monitor.event_count == 0

    def test_one_that_is_infinite_before_it_is_scaled_is_an_event(self) -> None:
        model = Net()
        fastcheck.install(model)
        scaler = torch.amp.GradScaler("cpu")

        def step() -> None:
            scaler.scale((model(torch.ones(1, 8)) + 1e6).exp().mean()).backward()

        assert where(stopped(step).culprit) == ("", "loss", "loss", "origin")

    def test_a_scale_of_the_users_own(self) -> None:
        model = Net()
        monitor = fastcheck.install(model, training=fastcheck.Training(scaler=3e38))
        (model(torch.ones(1, 8)).square().mean() * 1e6 * 3e38).backward()
        assert monitor.event_count == 0
        assert ("", "loss", "loss", "scaled") in {where(e) for e in monitor.events}


class TestClosures:
    def closure(self, model: nn.Module, optimizer: Any, device: str = "cpu") -> Any:
        x = next(batches(1)).to(device)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return closure

    @pytest.mark.parametrize("at", [1, 3])
    def test_the_gradient_is_blamed_for_its_nan_and_not_the_parameter(
        self, at: int, device: str
    ) -> None:
        model = Net().to(device)
        fastcheck.install(model, sync="step")
        calls = [0]

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return gradient * NAN if calls[0] == at else gradient

        model.head.bias.register_hook(spoil)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=6)
        stop = stopped(optimizer.step, self.closure(model, optimizer, device))
        assert where(stop.culprit) == ("head", "param_grad", "bias", "origin")

    def test_of_an_optimizer_that_evaluates_once(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step(self.closure(model, optimizer))
        monitor.flush()
        sites = [monitor.sites[r["site"]] for r in monitor.records()]
        gradients = [s.key for s in sites if s.role == "param_grad"]
        assert sorted(gradients) == sorted(key for key, _ in model.named_parameters())

    def test_training_is_not_changed(self) -> None:
        def run(is_observed: bool) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = Net()
            if is_observed:
                fastcheck.install(model)
            optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
            for _ in range(2):
                optimizer.step(self.closure(model, optimizer))
            return [p.detach().clone() for p in model.parameters()]

        assert all(map(torch.equal, run(False), run(True)))
