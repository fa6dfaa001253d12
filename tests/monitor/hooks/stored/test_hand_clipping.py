"""A training loop that clips gradients itself: they are read before, at the end of backward."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.monitor.hooks.state_reader import StateReader
from support.programs.training import Net, batches, stopped, where

from .test_clipping import CLIPS as CLIPS_OF_TORCH
from .test_clipping import clipped_training, gradients_read, spoil

pytestmark = [pytest.mark.fake_hooks, pytest.mark.usefixtures("fresh_start")]

NAN = float("nan")


def present(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def coefficient(model: nn.Module, max_norm: float = 1.0) -> torch.Tensor:
    norm = torch.stack([g.norm() for g in present(model)]).norm()
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def by_mul(model: nn.Module) -> None:
    factor = coefficient(model)
    for gradient in present(model):
        gradient.mul_(factor)


def by_data(model: nn.Module) -> None:
    factor = coefficient(model)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.mul_(factor)


def by_foreach(model: nn.Module) -> None:
    torch._foreach_mul_(present(model), coefficient(model))


def by_new_gradients(model: nn.Module) -> None:
    factor = coefficient(model)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * factor


def rarely(model: nn.Module) -> None:
    if model.steps % 2:  # type: ignore[operator]  # a number, to torch a tensor or a module
        by_mul(model)
    model.steps += 1  # type: ignore[operator]  # a number, to torch a tensor or a module


CLIPS = {
    "mul": by_mul,
    "data": by_data,
    "foreach": by_foreach,
    "new gradients": by_new_gradients,
    "rarely": rarely,
}


def net(device: str = "cpu") -> Any:
    model = Net().to(device)
    model.steps = 0
    return model


class TestTheCulprit:
    @pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
    @pytest.mark.parametrize("at", [0, 3])
    def test_is_the_gradient_that_was_not_finite(
        self, clip: Callable[[nn.Module], Any], at: int, device: str
    ) -> None:
        model = net(device)
        fastcheck.install(model, sync="step")
        spoil(model.head.weight, NAN, at=at)
        stop = stopped(clipped_training, model, clip, 6, device=device)
        assert where(stop.culprit) == ("head", "param_grad", "weight", "origin")
        assert stop.step == at
        assert stop.culprit.record["nan_count"] == 1

    def test_where_no_step_was_clipped_before_the_reason_names_the_change(
        self, device: str
    ) -> None:
        """Nothing was known of this loop: the NaN is in all gradients when they are read."""

        def rare(model: nn.Module) -> None:
            factor = coefficient(model, 1e6)
            if factor != 1:
                for gradient in present(model):
                    gradient.mul_(factor)

        model = net(device)
        fastcheck.install(model, sync="step")
        spoil(model.head.weight, NAN, at=3)
        stop = stopped(clipped_training, model, rare, 6, device=device)
        assert where(stop.culprit)[1] == "param_grad" and stop.step == 3
        assert "changed gradients" in stop.culprit.reason
        assert "may have begun in another" in stop.culprit.reason

    def test_with_sync_never(self, device: str) -> None:
        model = net(device)
        fastcheck.install(model)
        spoil(model.head.bias, NAN, at=2)
        stop = stopped(clipped_training, model, by_mul, 8, device)
        assert where(stop.culprit) == ("head", "param_grad", "bias", "origin")
        assert stop.step == 2

    @pytest.mark.parametrize("at", [1, 7])
    def test_with_accumulated_gradients(self, at: int) -> None:
        model = net()
        fastcheck.install(model)
        spoil(model.head.bias, NAN, at=at)
        stop = stopped(accumulated_training, model, 3)
        assert where(stop.culprit) == ("head", "param_grad", "bias", "origin")
        assert stop.step == at // 3

    def test_under_a_scale_of_the_loops_own(self) -> None:
        model = net()
        fastcheck.install(model)

        def unscale_and_clip(model: nn.Module) -> None:
            torch._foreach_div_(present(model), 1024.0)
            by_mul(model)

        spoil(model.head.bias, NAN, at=3)
        stop = stopped(clipped_training, model, unscale_and_clip, 5)
        assert where(stop.culprit) == ("head", "param_grad", "bias", "origin")

    def test_where_clipping_itself_makes_it(self) -> None:
        model = net()
        fastcheck.install(model)

        def by_zero(model: nn.Module) -> None:
            factor = 1.0 if model.steps < 3 else float("inf")  # type: ignore[operator]  # a number, to torch a tensor or a module
            torch._foreach_mul_(present(model), factor)
            model.steps += 1  # type: ignore[operator]  # a number, to torch a tensor or a module

        stop = stopped(clipped_training, model, by_zero, 6)
        assert stop.step == 3
        assert stop.culprit.verdict.name == "ORIGIN"
        assert "it was finite when backward() ended" in stop.culprit.reason
        assert "or brought it from another gradient" in stop.culprit.reason


def accumulated_training(model: nn.Module, parts: int, steps: int = 4) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, x in enumerate(batches(steps * parts)):
        model(x).square().mean().backward()
        if number % parts == parts - 1:
            by_mul(model)
            optimizer.step()
            optimizer.zero_grad()


class TestWhatIsNoEvent:
    @pytest.mark.parametrize("at", [0, 2])
    def test_a_gradient_that_is_repaired_before_its_use(self, at: int) -> None:
        model = net()
        monitor = fastcheck.install(model)
        spoil(model.head.bias, NAN, at=at)

        def repair(model: nn.Module) -> None:
            for gradient in present(model):
                gradient.nan_to_num_()

        clipped_training(model, repair, 4)
        assert monitor.event_count == 0

    def test_a_gradient_that_nothing_uses(self) -> None:
        model = net()
        monitor = fastcheck.install(model)
        spoil(model.head.bias, NAN, at=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in batches(5):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            by_mul(model)
            if all(bool(g.isfinite().all()) for g in present(model)):
                optimizer.step()
        assert monitor.event_count == 0

    @pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
    def test_a_healthy_run(self, clip: Callable[[nn.Module], Any], device: str) -> None:
        model = net(device)
        monitor = fastcheck.install(model)
        clipped_training(model, clip, 4, device)
        monitor.flush()
        assert not monitor.events


class TestCost:
    @pytest.mark.parametrize("clip", [lambda model: None, by_mul])
    def test_gradients_that_are_finite_leave_one_record(
        self, clip: Callable[[nn.Module], Any]
    ) -> None:
        model = net()
        monitor = fastcheck.install(model)
        clipped_training(model, clip, 4)
        expected = sorted(key for key, _ in model.named_parameters())
        for step in range(4):
            assert sorted(gradients_read(monitor, step)) == expected

    @pytest.mark.parametrize(("clip", "count"), [(lambda model: None, 1), (by_mul, 2)])
    def test_and_two_on_a_device_where_the_loop_clips(
        self, clip: Callable[[nn.Module], Any], count: int, device: str
    ) -> None:
        model = net(device)
        monitor = fastcheck.install(model)
        clipped_training(model, clip, 6, device)
        monitor.flush()
        names = [key for key, _ in model.named_parameters()]
        expected = sorted(names if device == "cpu" else count * names)
        for step in range(4, 6):
            assert sorted(gradients_read(monitor, step)) == expected

    def test_of_accumulated_gradients_only_the_last_are_looked_at(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looked = []
        ask = StateReader._has_nonfinite

        def counted(self: StateReader, tensors: Any) -> bool:
            looked.append(monitor.step_index)
            return ask(self, tensors)

        monkeypatch.setattr(StateReader, "_has_nonfinite", counted)
        model = net()
        monitor = fastcheck.install(model)
        accumulated_training(model, 3)
        assert looked == [0, 0, 0, 1, 2, 3]

    def test_only_in_the_first_step_where_the_loop_changes_none(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looked = []
        monkeypatch.setattr(
            StateReader, "_has_nonfinite", lambda self, tensors: bool(looked.append(1))
        )
        model = net()
        fastcheck.install(model)
        clipped_training(model, CLIPS_OF_TORCH["norm"], 4)
        clipped_training(model, lambda model: None, 4)
        assert looked == [1]

    def test_only_in_the_first_step_without_an_optimizer_too(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looked = []
        monkeypatch.setattr(
            StateReader, "_has_nonfinite", lambda self, tensors: bool(looked.append(1))
        )
        model = net()
        monitor = fastcheck.install(model)
        for x in batches(4):
            model(x).square().mean().backward()
            monitor.step()
        assert looked == [1]


class TestTraining:
    @pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
    def test_is_not_changed(self, clip: Callable[[nn.Module], Any]) -> None:
        def run(is_observed: bool) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = net()
            if is_observed:
                fastcheck.install(model)
            clipped_training(model, clip, 4)
            return [p.detach().clone() for p in model.parameters()]

        assert all(map(torch.equal, run(False), run(True)))
