"""Gradients are read before clipping, which would spread one NaN to all of them."""

from __future__ import annotations

from typing import Any, Callable, Optional

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_  # imported before install()

import fastcheck
from fastcheck.calls.stored import TensorBatch
from fastcheck.monitor.hooks.state_reader import EarlyGradients
from fastcheck.record.event import CHANGED_BY_LOOP, MAYBE_CHANGED
from support.programs.training import Net, batches, stopped, where

pytestmark = [pytest.mark.fake_hooks, pytest.mark.usefixtures("fresh_start")]

INF, NAN = float("inf"), float("nan")

CLIPS: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "norm, imported": lambda model: clip_grad_norm_(model.parameters(), 1.0),
    "norm, foreach": lambda model: clip_grad_norm_(list(model.parameters()), 1.0, foreach=True),
    "norm, one by one": lambda model: clip_grad_norm_(model.parameters(), 1.0, foreach=False),
    "norm of one": lambda model: clip_grad_norm_(model.head.weight, 1.0),
    "in two calls": lambda model: _in_two_calls(model),
    "value": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "value, imported": lambda model: clip_grad_value_(model.parameters(), 1.0),
}


def _in_two_calls(model: nn.Module) -> None:
    utils: Any = torch.nn.utils
    if not hasattr(utils, "get_total_norm"):  # before torch 2.6
        clip_grad_norm_(model.parameters(), 1.0)
        return
    parameters = list(model.parameters())
    norm = utils.get_total_norm([p.grad for p in parameters])
    utils.clip_grads_with_norm_(parameters, 1.0, norm)


def spoil(parameter: torch.Tensor, value: float, at: int = 0) -> None:
    """From its backward call ``at`` on, one element of the parameter's gradient is ``value``."""
    calls = [0]

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] <= at:
            return gradient
        gradient = gradient.clone()
        gradient.view(-1)[1] = value
        return gradient

    parameter.register_hook(hook)


def clipped_training(
    model: nn.Module, clip: Callable[[nn.Module], Any], steps: int = 3, device: str = "cpu"
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in batches(steps):
        optimizer.zero_grad()
        model(x.to(device)).square().mean().backward()
        clip(model)
        optimizer.step()


def gradients_read(monitor: fastcheck.Monitor, step: int) -> list[str]:
    records, sites = monitor.records(), monitor.sites
    return [
        sites[r["site"]].key
        for r in records
        if r["step"] == step and sites[r["site"]].role == "param_grad"
    ]


class TestTheCulprit:
    @pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
    @pytest.mark.parametrize("value", [NAN, INF])
    def test_is_the_gradient_that_was_not_finite(
        self, clip: Callable[[nn.Module], Any], value: float, device: str
    ) -> None:
        model = Net().to(device)
        fastcheck.install(model, sync="step")
        spoil(model.head.weight, value, at=1)
        stop = stopped(clipped_training, model, clip, device=device)
        assert where(stop.culprit) == ("head", "param_grad", "weight", "origin")
        assert stop.step == 1
        assert stop.culprit.record["nan_count"] + stop.culprit.record["posinf_count"] == 1

    def test_with_sync_never(self, device: str) -> None:
        model = Net().to(device)
        fastcheck.install(model)
        spoil(model.head.bias, NAN, at=1)
        stop = stopped(clipped_training, model, CLIPS["norm"], 6, device)
        assert where(stop.culprit) == ("head", "param_grad", "bias", "origin")
        assert stop.step == 1

    def test_the_stop_comes_before_torch_refuses_the_norm(self) -> None:
        model = Net()
        fastcheck.install(model)
        spoil(model.head.bias, NAN)
        stop = stopped(
            clipped_training,
            model,
            lambda model: clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True),
        )
        assert where(stop.culprit) == ("head", "param_grad", "bias", "origin")

    def test_of_a_model_whose_gradient_another_loop_clips_is_left_alone(self) -> None:
        model, other = Net(), Net()
        monitor = fastcheck.install(model)
        spoil(other.head.bias, NAN)
        clipped_training(other, CLIPS["norm"])
        assert monitor.event_count == 0
        assert not len(monitor.records())

    @pytest.mark.parametrize(("first", "reason"), [(0, CHANGED_BY_LOOP), (2, MAYBE_CHANGED)])
    def test_is_what_the_loop_has_changed_before_clipping(
        self, first: int, reason: str, device: str
    ) -> None:
        """It divides by a count that is 0, from step ``first`` on or always."""
        model, steps = Net().to(device), iter(range(9))

        def clip(model: nn.Module) -> None:
            step = next(steps)
            for p in model.parameters() if step >= first else ():
                assert p.grad is not None
                p.grad.mul_(NAN if step == 2 else 0.5)
            clip_grad_norm_(model.parameters(), 1.0)

        fastcheck.install(model, sync="step")
        stop = stopped(clipped_training, model, clip, 4, device)
        assert stop.step == 2 and reason in stop.culprit.reason
        assert "try 1. Look between backward() and the update" in " ".join(str(stop).split())


class TestOnceOnly:
    @pytest.mark.parametrize("name", [name for name in CLIPS if name != "value, imported"])
    def test_a_gradient_that_was_read_is_not_read_again(self, name: str, device: str) -> None:
        if not hasattr(torch.nn.utils, "get_total_norm") and name != "norm":
            pytest.skip("nothing shows the end of the function there")
        model = Net().to(device)
        monitor = fastcheck.install(model)
        clipped_training(model, CLIPS[name], device=device)
        monitor.flush()
        expected = sorted(key for key, _ in model.named_parameters())
        # In the first step of a device it is found out whether the loop changes gradients too.
        for step in range(0 if device == "cpu" else 1, 3):
            assert sorted(gradients_read(monitor, step)) == expected
        assert monitor.event_count == 0

    def test_the_record_is_of_the_gradient_before_clipping(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        model(torch.ones(1, 8)).sum().backward()
        expected = model.head.weight.grad.abs().sum().item()
        clip_grad_norm_(model.parameters(), 1e-3)
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        (record,) = [
            r
            for r in monitor.records()
            if monitor.sites[r["site"]].key == "head.weight"
            and monitor.sites[r["site"]].role == "param_grad"
        ]
        assert record["abs_sum"] == pytest.approx(expected, rel=1e-6)

    def test_what_changes_after_clipping_is_read_again(self) -> None:
        model = Net()
        fastcheck.install(model)

        def clip_and_spoil(model: nn.Module) -> None:
            clip_grad_norm_(model.parameters(), 1.0)
            model.get_parameter("head.bias").grad[0] = NAN  # type: ignore[index]  # it has a gradient by now

        stop = stopped(clipped_training, model, clip_and_spoil)
        assert where(stop.culprit) == ("head", "param_grad", "bias", "origin")

    def test_a_new_gradient_in_the_same_step_is_read(self) -> None:
        model = Net()
        fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model(torch.ones(1, 8)).sum().backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.zero_grad()
        spoil(model.head.bias, NAN)
        model(torch.ones(1, 8)).sum().backward()
        stop = stopped(optimizer.step)
        assert where(stop.culprit) == ("head", "param_grad", "bias", "origin")

    def test_accumulated_gradients(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number, x in enumerate(batches(6)):
            model(x).square().mean().backward()
            if number % 3 == 2:
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        assert len(gradients_read(monitor, 0)) == len(list(model.parameters()))

    def test_two_optimizers_read_each_their_own(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        one = torch.optim.SGD(model.blocks.parameters(), lr=0.01)
        two = torch.optim.SGD(model.head.parameters(), lr=0.01)
        for x in batches(2):
            model(x).sum().backward()
            clip_grad_norm_(model.parameters(), 1.0)
            one.step()
            two.step()
        assert len(gradients_read(monitor, 1)) == len(list(model.parameters()))

    def test_a_shared_parameter_is_read_once(self) -> None:
        model = Net()
        model.blocks[1].a.weight = model.blocks[0].a.weight
        monitor = fastcheck.install(model)
        clipped_training(model, CLIPS["norm"])
        assert gradients_read(monitor, 1).count("blocks.0.a.weight") == 1
        assert "blocks.1.a.weight" not in gradients_read(monitor, 1)


class TestUnderAScaler:
    def scaled_step(self, model: nn.Module, scaler: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 8)).square().mean()).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    def test_a_skipped_step_is_no_event(self, device: str) -> None:
        model = Net().to(device)
        monitor = fastcheck.install(model)
        spoil(model.head.weight, INF)
        scaler = torch.amp.GradScaler(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in batches(2):
            optimizer.zero_grad()
            scaler.scale(model(x.to(device)).square().mean()).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        monitor.flush()
        assert monitor.event_count == 0
        found = {where(event) for event in monitor.events}
        assert ("head", "param_grad", "weight", "scaled") in found

    def test_what_the_optimizer_uses_all_the_same_is_one(self) -> None:
        model = Net()
        fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu")
        spoil(model.head.weight, NAN)
        scaler.scale(model(torch.ones(2, 8)).square().mean()).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        stop = stopped(optimizer.step)  # not by the scaler
        assert where(stop.culprit) == ("head", "param_grad", "weight", "origin")


class TestTraining:
    @pytest.mark.parametrize("name", CLIPS)
    def test_is_not_changed(self, name: str) -> None:
        def run(is_observed: bool) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = Net()
            if is_observed:
                fastcheck.install(model)
            clipped_training(model, CLIPS[name])
            return [p.detach().clone() for p in model.parameters()]

        assert all(map(torch.equal, run(False), run(True)))

    def test_the_functions_are_put_back(self) -> None:
        from torch.nn.utils import clip_grad

        before = vars(clip_grad).copy(), vars(torch.nn.utils).copy()
        fastcheck.install(Net()).remove()
        assert (vars(clip_grad), vars(torch.nn.utils)) == before

    def test_an_empty_generator_is_warned_of_as_before(self) -> None:
        fastcheck.install(Net())
        with pytest.warns(UserWarning, match="empty generator"):
            torch.nn.utils.clip_grad_norm_((p for p in ()), 1.0)

    def test_weights_that_do_not_move_are_still_found(self) -> None:
        class Held(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:  # type: ignore[override]  # torch's has overloads
                kept = self.param_groups[0]["params"][0]
                before = kept.detach().clone()
                result = super().step(closure)
                with torch.no_grad():
                    kept.copy_(before)
                return result

        model = Net()
        fastcheck.install(model)
        optimizer = Held(model.parameters(), lr=0.01)
        with pytest.warns(fastcheck.errors.FastcheckWarning, match=r"blocks\.0\.a\.weight"):
            for x in batches(15):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()


@pytest.mark.skipif(not hasattr(torch.nn.utils, "get_total_norm"), reason="torch 2.6")
class TestTheNorm:
    def test_that_overflows_while_every_gradient_is_finite(self, device: str) -> None:
        model = Net().to(device)
        fastcheck.install(model, sync="step")
        for parameter in model.head.parameters():
            parameter.register_hook(lambda gradient: torch.full_like(gradient, 3e38))
        stop = stopped(clipped_training, model, CLIPS["norm"], device=device)
        assert stop.culprit.site.role == "grad_norm"
        assert stop.culprit.verdict.name == "ORIGIN"
        assert "every gradient" in stop.culprit.reason

    def test_is_no_event_of_its_own_where_a_gradient_is_not_finite(self) -> None:
        model = Net()
        monitor = fastcheck.install(model, overflow_nums=-1)
        spoil(model.head.bias, NAN, at=2)
        clipped_training(model, CLIPS["norm"])
        roles = {(e.site.role, e.verdict.name) for e in monitor.events if e.step == 2}
        assert ("grad_norm", "PROPAGATED") in roles


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_gradient_is_known_again_until_something_writes_to_it(is_compiled: bool) -> None:
    early, batch = EarlyGradients(), TensorBatch()
    early.ordinary = early.ordinary if is_compiled else None
    gradients = [torch.rand(3) for _ in range(3)]
    for site, gradient in enumerate(gradients):
        batch.add(gradient, site, "param_grad")

    def known() -> list[Optional[int]]:
        return [early.find(gradient) for gradient in gradients]

    assert not early.begin(0)
    early.add(batch, range(3), 7)
    assert early.begin(0) and known() == [7, 8, 9]
    gradients[0].mul_(2.0)
    gradients[1].mul_(2.0)
    early.changed(gradients[1:])
    assert known() == [None, 8, 9]
    gradients[2].data = torch.rand(3)
    assert known() == [None, 8, None]
    assert not early.begin(1) and known() == [None] * 3
