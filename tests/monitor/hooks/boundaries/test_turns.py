"""Several optimizers in one iteration: one iteration is one step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from support.programs.training import Net, batches, steps_of, stopped, where

pytestmark = pytest.mark.usefixtures("fresh_start")

NAN = float("nan")


@pytest.fixture(autouse=True)
def no_old_optimizers() -> None:
    """Those of other tests may be garbage still."""
    gc.collect()


class Pair:
    """A generator and a critic that are trained in turns."""

    def __init__(self, rate: float = 0.01) -> None:
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
        self.critic = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        self.for_generator = torch.optim.SGD(self.generator.parameters(), lr=rate)
        self.for_critic = torch.optim.SGD(self.critic.parameters(), lr=rate)

    def of_critic(self, real: torch.Tensor) -> torch.Tensor:
        self.for_critic.zero_grad()
        fake = self.generator(torch.randn(4, 4)).detach()
        loss: torch.Tensor = self.critic(fake).square().mean() + self.critic(real).mean()
        return loss

    def of_generator(self) -> torch.Tensor:
        self.for_generator.zero_grad()
        loss: torch.Tensor = -self.critic(self.generator(torch.randn(4, 4))).mean()
        return loss

    def train_critic(self, real: torch.Tensor) -> None:
        self.of_critic(real).backward()
        self.for_critic.step()

    def train_generator(self) -> None:
        self.of_generator().backward()
        self.for_generator.step()


def outputs(monitor: fastcheck.Monitor, site: str) -> list[int]:
    return [int(r["step"]) for r in monitor.records() if str(monitor.sites[r["site"]]) == site]


class TestOneIterationIsOneStep:
    @pytest.mark.parametrize("critic_first", [True, False])
    def test_from_the_first_one_on(self, critic_first: bool) -> None:
        pair = Pair()
        monitor = fastcheck.install(pair.generator, pair.critic)
        for x in batches(3):
            if critic_first:
                pair.train_critic(x)
            pair.train_generator()
            if not critic_first:
                pair.train_critic(x)
        assert steps_of(monitor) == [0, 1, 2]
        calls = outputs(monitor, "Sequential.2 (Linear) · forward · output")
        assert calls == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert monitor.event_count == 0

    def test_with_three_optimizers(self) -> None:
        models = [nn.Linear(8, 8) for _ in range(3)]
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in models]
        monitor = fastcheck.install(*models)
        for x in batches(4):
            for model, optimizer in zip(models, optimizers):
                model(x).sum().backward()
                optimizer.step()
        assert steps_of(monitor) == [0, 1, 2, 3]

    def test_with_given_optimizers(self) -> None:
        pair = Pair()
        given = [pair.for_critic, pair.for_generator]
        monitor = fastcheck.install(
            pair.generator, pair.critic, training=fastcheck.Training(optimizer=given)
        )
        for x in batches(3):
            pair.train_critic(x)
            pair.train_generator()
        assert steps_of(monitor) == [0, 1, 2]

    @pytest.mark.parametrize("updates", ["one", "after each", "two scalers"])
    def test_under_loss_scaling(self, updates: str) -> None:
        pair = Pair()
        monitor = fastcheck.install(pair.generator, pair.critic)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        other = torch.amp.GradScaler("cpu", init_scale=4.0) if updates == "two scalers" else scaler
        for x in batches(3):
            scaler.scale(pair.of_critic(x)).backward()
            scaler.step(pair.for_critic)
            if updates != "one":
                scaler.update()
            other.scale(pair.of_generator()).backward()
            other.step(pair.for_generator)
            other.update()
        assert steps_of(monitor) == [0, 1, 2]

    def test_an_optimizer_that_comes_later(self) -> None:
        pair = Pair()
        monitor = fastcheck.install(pair.generator, pair.critic)
        for x in batches(2):
            pair.train_critic(x)
            pair.train_generator()
        extra = nn.Parameter(torch.ones(8))
        pair.critic.register_parameter("extra", extra)
        late = torch.optim.SGD([extra], lr=0.01)
        for x in batches(3):
            pair.train_critic(x)
            pair.train_generator()
            (pair.critic(x) * extra).sum().backward()
            late.step()
        # Where it steps for the first time nothing was known of it.
        assert steps_of(monitor) == [0, 1, 2, 3, 4, 5]

    def test_an_iteration_that_is_broken_off(self) -> None:
        pair = Pair()
        monitor = fastcheck.install(pair.generator, pair.critic)
        for number, x in enumerate(batches(5)):
            pair.train_critic(x)
            if number != 2:
                pair.train_generator()
        assert steps_of(monitor) == [0, 1, 2, 3]


class TestOthers:
    def test_five_updates_of_one_for_each_of_the_other(self) -> None:
        pair = Pair()
        monitor = fastcheck.install(pair.generator, pair.critic)
        for _ in range(3):
            for x in batches(5):
                pair.train_critic(x)
            pair.train_generator()
        # The first two are taken for one; then each update is a step.
        assert steps_of(monitor) == list(range(3 * 6 - 1))

    def test_an_optimizer_that_never_steps(self) -> None:
        pair = Pair()
        monitor = fastcheck.install(pair.generator, pair.critic)
        for x in batches(4):
            pair.train_critic(x)
        assert steps_of(monitor) == [0, 1, 2]

    def test_a_part_of_the_model_that_none_trains(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.01)
        for x in batches(3):
            model(x).sum().backward()
            optimizer.step()
        assert steps_of(monitor) == [0, 1, 2]

    def test_one_that_was_made_again_for_the_same_parameters(self) -> None:
        model = Net()
        old = torch.optim.SGD(model.blocks.parameters(), lr=0.01)
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in batches(3):
            model(x).sum().backward()
            optimizer.step()
        assert steps_of(monitor) == [0, 1, 2]
        assert old is not optimizer

    @pytest.mark.parametrize("comes_again", [False, True])
    def test_one_that_takes_the_place_of_another(self, comes_again: bool) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        first = torch.optim.SGD(model.head.parameters(), lr=0.01)
        second = None
        losses = []
        for number, x in enumerate(batches(9)):
            if number == 3:
                second = torch.optim.SGD(model.parameters(), lr=0.01)
            is_first = second is None or (comes_again and number == 6)
            optimizer = first if is_first else second
            assert optimizer is not None
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert [row.loss for row in monitor.step_table()] == losses

    def test_two_of_the_same_parameters(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        both = [torch.optim.SGD(model.parameters(), lr=rate) for rate in (0.01, 0.001)]
        for x in batches(3):
            for optimizer in both:
                model(x).sum().backward()
                optimizer.step()
        assert steps_of(monitor) == [0, 1, 2, 3, 4, 5]

    def test_one_of_another_model(self) -> None:
        model, other = Net(), Net()
        optimizers = [torch.optim.SGD(m.head.parameters(), lr=0.01) for m in (model, other)]
        monitor = fastcheck.install(model)
        for x in batches(3):
            model(x).sum().backward()
            optimizers[0].step()
        assert steps_of(monitor) == [0, 1, 2]


class TestEvents:
    def culprit(self, spoil: Callable[[Pair, int], Any], sync: str = "never") -> Any:
        pair = Pair()
        fastcheck.install(pair.generator, pair.critic, sync=sync)

        def loop() -> None:
            for number, x in enumerate(batches(6)):
                pair.train_critic(x)
                spoil(pair, number)
                pair.train_generator()

        return stopped(loop)

    def test_in_the_second_model_have_the_number_of_their_iteration(self) -> None:
        def spoil(pair: Pair, number: int) -> None:
            if number == 3:
                pair.generator[2].weight.register_hook(lambda gradient: gradient * NAN)

        stop = self.culprit(spoil)
        assert stop.step == 3
        assert where(stop.culprit) == ("2", "param_grad", "weight", "origin")

    def test_a_weight_that_the_first_update_has_spoiled(self) -> None:
        def spoil(pair: Pair, number: int) -> None:
            if number == 3:
                with torch.no_grad():
                    pair.critic[0].weight[0, 0] = NAN

        stop = self.culprit(spoil)
        assert stop.step == 3
        assert where(stop.culprit) == ("Sequential.0", "param", "weight", "arrived")
        assert "just before the update of step 3" in stop.culprit.reason

    def test_a_gradient_of_the_first_that_the_second_backward_makes_is_none(self) -> None:
        """It is cleared before anything uses it."""
        pair = Pair()
        monitor = fastcheck.install(pair.generator, pair.critic)
        turn = [""]

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * NAN if turn[0] == "generator" else gradient

        pair.critic[2].weight.register_hook(hook)
        for x in batches(4):
            turn[0] = "critic"
            pair.train_critic(x)
            turn[0] = "generator"
            pair.train_generator()
        assert monitor.event_count == 0


def test_the_table_has_one_row_for_each() -> None:
    pair = Pair()
    monitor = fastcheck.install(pair.generator, pair.critic)
    for x in batches(4):
        pair.train_critic(x)
        pair.train_generator()
    assert [row.step for row in monitor.step_table()] == [0, 1, 2, 3]
    assert all(row.loss is not None and row.gradient_norm for row in monitor.step_table())


def test_a_dropped_optimizer_is_not_waited_for() -> None:
    pair = Pair()
    monitor = fastcheck.install(pair.generator, pair.critic)

    def loop(data: Iterator[torch.Tensor]) -> None:
        for x in data:
            pair.train_critic(x)

    for x in batches(2):
        pair.train_critic(x)
        pair.train_generator()
    del pair.for_generator
    gc.collect()
    loop(batches(3))
    assert steps_of(monitor) == [0, 1, 2, 3, 4]
