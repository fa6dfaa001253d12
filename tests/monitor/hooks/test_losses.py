"""The loss is the tensor that backward() is called on; closures evaluate it several times."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any, Callable, Optional

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import grad  # imported before install()
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import fastcheck
from fastcheck.calls.recorder import HookRecorder
from fastcheck.extension import status
from fastcheck.monitor.hooks import losses, optimizers
from fastcheck.record.site import GRAD_LOSS
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
    @pytest.mark.skipif(
        not hasattr(torch.compiler, "_patch_engine_backward"), reason="this torch replaces nothing"
    )
    def test_after_a_trace_that_has_replaced_the_engine(self) -> None:
        model, compiler = Net(), torch.compiler
        with fastcheck.install(model) as monitor:
            losses = train(model)
            with compiler._non_strict_tracing_context(), compiler._patch_engine_backward():
                make_fx(lambda x: model(x).sum().backward())(torch.randn(2, 8))
            model.zero_grad()
            losses += train(model)
            assert losses_read(monitor) == list(enumerate(losses))
        for module in (torch.autograd, torch.autograd.graph):
            assert not hasattr(module._engine_run_backward, "_fastcheck")

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

    def test_before_torch_2_3(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What torch's functions are given is read once more, where it can be read only once."""
        monkeypatch.setattr(optimizers, "hasattr", lambda *_: False, raising=False)
        model = Net()
        monitor = fastcheck.install(model)
        loss = model(torch.ones(1, 8)).square().mean()
        gradients = torch.autograd.grad(2 * loss, model.parameters(), retain_graph=True)
        assert len(gradients) == len(list(model.parameters()))
        weights = (torch.tensor(weight) for weight in (3.0, 4.0))
        torch.autograd.backward(iter([loss, loss]), grad_tensors=weights)
        read = [value / loss.item() for _, value in losses_read(monitor)]
        assert read == pytest.approx([2, 3, 4])

    def test_that_was_given_too_few_gradients_is_read_again_afterwards(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        loss = model(torch.ones(1, 8)).square().mean()
        with pytest.raises(RuntimeError):
            torch.autograd.backward([loss, 2 * loss], [torch.tensor(3.0)])
        loss.backward()
        assert losses_read(monitor)[-1] == (0, loss.item())

    @pytest.mark.skipif(
        not hasattr(torch.autograd, "_engine_run_backward"), reason="before torch 2.3"
    )
    def test_of_an_engine_that_is_called_by_names(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        loss = model(torch.ones(1, 8)).square().mean()
        weight: Any = model.head.weight
        engine: Any = torch.autograd
        (made,) = engine._engine_run_backward(
            t_outputs=(loss,),
            grad_tensors=(torch.ones(()),),
            keep_graph=True,
            create_graph=False,
            inputs=(weight,),
            allow_unreachable=True,
            accumulate_grad=False,
        )
        loss.backward()
        assert torch.equal(made, weight.grad)
        assert losses_read(monitor)[-1] == (0, loss.item())

    def test_of_autograd_grad(self) -> None:
        model = Net()
        fastcheck.install(model)
        loss = (model(torch.ones(1, 8)) + 1e6).exp().mean()
        stop = stopped(grad, loss, list(model.parameters()))
        assert where(stop.culprit) == ("", "loss", "loss of grad()", "origin")

    def test_a_gradient_of_an_input_is_that_of_no_loss(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        x = torch.ones(1, 8, requires_grad=True)
        grad(model(x).square().mean(), x, create_graph=True)
        assert losses_read(monitor) == []

    def test_of_a_criterion_that_is_observed_is_read_under_its_name_too(self, device: str) -> None:
        model, criterion = Net().to(device), nn.MSELoss()
        monitor = fastcheck.install(model, criterion)
        loss = criterion(model(torch.ones(1, 8, device=device)), torch.zeros(1, 4, device=device))
        loss.backward()
        assert losses_read(monitor) == [(0, loss.item())]
        assert any(s.module == "MSELoss" and s.role == "output" for s in monitor.sites)

    def test_another_loss_given_to_step_is_read_too(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        loss = model(torch.ones(1, 8)).square().mean()
        loss.backward()
        monitor.step(loss=loss)
        monitor.step(loss=7.0)
        monitor.step(loss=np.float32(0.5))
        assert [value for _, value in losses_read(monitor)] == [loss.item(), 7.0, 0.5]
        assert {s.label for s in monitor.sites if s.role == "loss"} == {"loss", "given loss"}

    @pytest.mark.parametrize("loss", ["0.5", object(), 1j])
    def test_what_can_be_no_loss_is_an_error_and_ends_no_step(self, loss: Any) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        model(torch.ones(1, 8))
        with pytest.raises(fastcheck.ConfigError, match=f"got:      {type(loss).__name__}: "):
            monitor.step(loss=loss)
        assert monitor.step_index == 0
        for index, empty in enumerate((None, [], {})):
            model(torch.ones(1, 8))
            assert monitor.step_index == index
            monitor.step(loss=empty)

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

    @pytest.mark.skipif(status.module is None, reason="needs the extension")
    @pytest.mark.parametrize("how", ["called", "mapped", "hooked"])
    def test_of_parameters_of_the_programs_own_it_comes_before_the_gradients(
        self, how: str
    ) -> None:
        model, other = Net(), Net()
        fastcheck.install(model)
        own = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        for x in batches(20):  # after as many losses as make the search a short one
            other(x).mean().backward()
        if how == "mapped":
            stacked = {name: torch.stack([p, p]) for name, p in own.items()}
            y = torch.vmap(lambda p: functional_call(model, p, (torch.ones(1, 8),)))(stacked)
        else:
            x = torch.ones(1, 8, requires_grad=True) * 1
            if how == "hooked":
                x.register_hook(lambda gradient: None)
            y = functional_call(model, own, (x,))
        stop = stopped((y + 1e6).exp().mean().backward)
        assert where(stop.culprit) == ("", "loss", "loss", "origin")
        assert all(p.grad is None for p in own.values())

    @pytest.mark.skipif(status.module is None, reason="needs the extension")
    def test_gradients_of_parameters_of_the_programs_own_are_those_of_a_loss(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        own = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        x = torch.ones(1, 8, requires_grad=True)
        y = functional_call(model, own, (x,))
        loss = (y * 3).square().mean()
        grad(y.sum(), x, retain_graph=True)
        grad(loss, list(own.values())[:1], retain_graph=True)
        grad(loss, list(own.values()))
        assert losses_read(monitor) == [(0, loss.item())]
        stop = stopped(lambda: grad(loss / 0, list(own.values())))
        assert where(stop.culprit) == ("", "loss", GRAD_LOSS, "origin")

    @pytest.mark.skipif(status.module is None, reason="needs the extension")
    def test_of_another_models_outputs_is_not_its_loss(self) -> None:
        model, other = Net(), Net()
        monitor, others = fastcheck.install(model), fastcheck.install(other)
        own = {name: p.detach().clone().requires_grad_() for name, p in other.named_parameters()}
        model(torch.ones(1, 8)).mean().backward()
        functional_call(other, own, (torch.ones(1, 8),)).square().mean().backward()
        assert len(losses_read(monitor)) == len(losses_read(others)) == 1

    def test_several_that_are_accumulated(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in batches(4):
            (model(x).square().mean() / 4).backward()
        optimizer.step()
        assert [step for step, _ in losses_read(monitor)] == [0, 0, 0, 0]

    def test_with_retain_graph_it_counts_twice_as_its_gradient_does(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        loss = model(torch.ones(1, 8)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        monitor.step()
        assert table(monitor) == [2 * loss.item()]

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

        monkeypatch.setattr("fastcheck.monitor.session.session.ModuleLevel.read_loss", broken)
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
        assert ("", "loss", "scaled loss", "scaled") in {where(e) for e in monitor.events}

    @pytest.mark.parametrize(
        ("scale", "is_found"), [(1024.0, True), (128, True), (64.0, False), (1000.0, False)]
    )
    def test_a_constant_scale_that_nobody_told(
        self, scale: float, is_found: bool, device: str
    ) -> None:
        """A power of two of at least 128: the loss is as it was before it, to the bit."""
        model = Net().to(device)
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        losses = []
        for make in (lambda loss: loss * scale, lambda loss: scale * loss):
            loss = model(torch.ones(1, 8, device=device)).square().mean()
            scaled = make(loss)
            scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item() if is_found else scaled.item())
        monitor.flush()
        rows = monitor.step_table()
        assert [row.loss for row in rows] == losses
        assert [row.scale for row in rows] == [scale if is_found else None] * 2

    def test_a_constant_scale_that_overflows_is_an_infinite_loss(self) -> None:
        model = Net()
        fastcheck.install(model)

        def step() -> None:
            (model(torch.ones(1, 8)).square().mean() * 1e30 * 2.0**100).backward()

        assert where(stopped(step).culprit) == ("", "loss", "loss", "origin")

    def test_given_and_scaled_have_two_names(self) -> None:
        model = Net()
        monitor = fastcheck.install(model, training=fastcheck.Training(scaler=1024.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        loss = model(torch.ones(1, 8)).square().mean()
        (loss * 1024).backward()
        optimizer.step()
        assert table(monitor) == pytest.approx([loss.item()])
        monitor.step(loss=loss)
        assert table(monitor) == [loss.item()]
        assert losses_read(monitor) == [(0, loss.item() * 1024), (0, loss.item())]
        assert {s.label for s in monitor.sites if s.role == "loss"} == {"scaled loss", "given loss"}


@dataclasses.dataclass
class Output:
    loss: torch.Tensor


class Returns(nn.Module):
    """Returns the loss as ``form`` has it."""

    def __init__(self, form: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.net = Net()
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        return self.form(self.net(x).square().mean())


def table(monitor: fastcheck.Monitor) -> list[Optional[float]]:
    monitor.flush()  # the copies of a device arrive when they like
    return [row.loss for row in monitor.step_table()]


class TestTheLossOfAStep:
    """What the table of steps has, of all that backward() was called on."""

    @pytest.mark.parametrize("level", ["module", "op"])
    @pytest.mark.parametrize(
        ("form", "loss_of"),
        [
            (lambda loss: loss, lambda out: out),
            (lambda loss: (loss, 1), lambda out: out[0]),
            (lambda loss: {"loss": loss}, lambda out: out["loss"]),
            (Output, lambda out: out.loss),
            (Output, lambda out: out.loss / 2),
        ],
    )
    def test_that_a_model_returned(self, form: Any, loss_of: Any, level: Any, device: str) -> None:
        model = Returns(form).to(device)
        monitor = fastcheck.install(model, level=level)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []
        for x in batches(3):
            optimizer.zero_grad()
            loss = loss_of(model(x.to(device)))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert table(monitor) == losses
        monitor.remove()

    @staticmethod
    def loop(backward: Callable[..., Any]) -> list[Optional[float]]:
        """One step; ``backward(loss, model, optimizer)`` makes the gradients, where ``loss()`` is
        that of the model.
        """
        torch.manual_seed(0)
        model, x = Net(), next(batches(1))
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        backward(lambda: model(x).square().mean(), model, optimizer)
        optimizer.step()
        rows = table(monitor)
        monitor.remove()
        return rows

    @property
    def plain(self) -> float:
        loss = self.loop(lambda loss, model, optimizer: loss().backward())[0]
        assert loss is not None
        return loss

    @pytest.mark.parametrize(
        ("backward", "times"),
        [
            (lambda loss, model, o: [(loss() / 4).backward() for _ in range(4)], 1.0),
            (lambda loss, model, o: torch.autograd.backward([loss(), 2 * loss()]), 3.0),
            (lambda loss, model, o: loss().backward(gradient=torch.tensor(0.5)), 0.5),
            (lambda loss, model, o: torch.autograd.backward([loss()], [None]), 1.0),
        ],
    )
    def test_is_the_sum_of_its_parts(self, backward: Any, times: float) -> None:
        assert self.loop(backward) == pytest.approx([times * self.plain])

    def test_a_backward_that_raised_does_not_count(self) -> None:
        def retry(loss: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            interrupted = loss()
            interrupted.grad_fn.register_prehook(lambda gradients: interrupted.no_such_attribute)
            with pytest.raises(AttributeError):
                interrupted.backward()
            optimizer.zero_grad()
            loss().backward()

        assert self.loop(retry) == [self.plain]

    def test_the_graph_of_a_backward_that_raised_is_let_go_of(self) -> None:
        held = []

        def retry(loss: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            interrupted = loss()
            interrupted.grad_fn.register_prehook(lambda gradients: held[0].no_such_attribute)
            held.append(weakref.ref(interrupted))
            with pytest.raises(AttributeError):
                interrupted.backward()
            del interrupted
            gc.collect()
            held.append(held[0]())
            loss().backward()

        self.loop(retry)
        assert held[1] is None

    def test_a_part_whose_gradient_was_thrown_away_does_not_count(self) -> None:
        def backward(loss: Any, model: nn.Module, optimizer: Any) -> None:
            (3 * loss()).backward()
            optimizer.zero_grad()
            (2 * loss()).backward()
            loss().backward()

        assert self.loop(backward) == pytest.approx([3 * self.plain])

    def test_what_grad_was_asked_for_is_no_part(self) -> None:
        def backward(loss: Any, model: nn.Module, optimizer: Any) -> None:
            loss().backward()
            grad(7 * loss(), list(model.parameters()))

        def only(loss: Any, model: nn.Module, optimizer: Any) -> None:
            parameters = list(model.parameters())
            for parameter, gradient in zip(parameters, grad(2 * loss(), parameters)):
                parameter.grad = gradient

        assert self.loop(backward) == pytest.approx([self.plain])
        assert self.loop(only) == pytest.approx([2 * self.plain])

    def test_of_a_closure_is_that_of_its_last_evaluation(self) -> None:
        model, x, losses = Net(), next(batches(1)), []
        monitor = fastcheck.install(model)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

        def closure() -> Any:
            optimizer.zero_grad(set_to_none=False)
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
            return loss

        optimizer.step(closure)
        assert len(losses) > 1 and table(monitor) == losses[-1:]

    def test_of_two_optimizers_is_of_both(self) -> None:
        model, critic = Net(), nn.Linear(4, 1)
        monitor = fastcheck.install(model, critic)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (critic, model)]
        losses = []
        for x in batches(2):
            total = 0.0
            for optimizer in optimizers:
                optimizer.zero_grad()
                loss = critic(model(x)).square().mean()
                loss.backward()
                optimizer.step()
                total += loss.item()
            losses.append(total)
        assert table(monitor) == pytest.approx(losses)


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


def test_leaves_of_a_graph_are_met_in_the_same_order_in_both_languages() -> None:
    weights = [torch.ones(2, requires_grad=True) for _ in range(50)]
    inner = weights[1] * 2
    hidden = torch.utils.checkpoint.checkpoint(lambda x: x * weights[0], inner, use_reentrant=True)
    loss = (torch.stack(weights).sum() * weights[2] + hidden / weights[3]).sum()
    recorder = HookRecorder()
    assert len(list(losses._leaves_of(loss, 2000, recorder))) == 50
    for root in (loss, torch.ones(1), weights[0]):
        for most in range(1, 80):
            met = [id(leaf) for leaf in losses._leaves_of(root, most, recorder)]
            assert met == [id(leaf) for leaf in losses._Leaves(root, most, recorder)]


def test_a_node_of_many_inputs_is_followed_until_a_parameter_is_met() -> None:
    weights = [torch.ones(2, requires_grad=True) for _ in range(3000)]
    loss = torch.stack(weights).sum()
    for leaves in (losses._Leaves, losses._leaves_of):
        met = leaves(loss, 2000, HookRecorder())
        assert [leaf is weights[0] for leaf in met][:2] == [True, False]
