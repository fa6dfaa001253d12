"""Step boundaries, found by the optimizers' steps or set by monitor.step()."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastcheck
from support.processes import run_code
from support.programs.training import Net, batches, steps_of, train

pytestmark = pytest.mark.usefixtures("fresh_start")


class TestOptimizers:
    def test_each_optimizer_step_is_a_step(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        train(model, 3)
        assert steps_of(monitor) == [0, 1, 2]
        assert monitor.step_index == 2

    def test_gradient_accumulation_is_one_step(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number, x in enumerate(batches(6)):
            model(x).sum().backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        assert steps_of(monitor) == [0, 1]
        records = monitor.records()
        heads = [
            r
            for r in records
            if str(monitor.sites[r["site"]]) == "head (Linear) · forward · output"
        ]
        assert [(int(r["step"]), int(r["call"])) for r in heads] == [
            (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2),
        ]  # fmt: skip

    def test_optimizers_that_step_in_a_row_share_a_step(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        one = torch.optim.SGD(model.blocks.parameters(), lr=0.01)
        two = torch.optim.Adam(model.head.parameters(), lr=0.01)
        for x in batches(3):
            model(x).sum().backward()
            one.step()
            two.step()
        assert steps_of(monitor) == [0, 1, 2]
        gradients = [
            monitor.sites[r["site"]].module
            for r in monitor.records()
            if r["step"] == 1 and monitor.sites[r["site"]].role == "param_grad"
        ]
        assert len(gradients) == len(list(model.parameters()))

    def test_a_foreign_optimizer_is_no_boundary(self) -> None:
        model, other = Net(), nn.Linear(2, 2)
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
        for x in batches(3):
            model(x)
            other(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert steps_of(monitor) == [0]

    def test_only_the_given_optimizer_ends_a_step(self) -> None:
        model = Net()
        main = torch.optim.SGD(model.parameters(), lr=0.01)
        other = torch.optim.SGD(model.head.parameters(), lr=0.01)
        monitor = fastcheck.install(model, training=fastcheck.Training(optimizer=main))
        for x in batches(2):
            model(x).sum().backward()
            other.step()
            model(x + 1).sum().backward()
            main.step()
        assert steps_of(monitor) == [0, 1]

    def test_adversarial_training_in_turns(self) -> None:
        generator, critic = Net(), nn.Linear(4, 1)
        monitor = fastcheck.install(generator, critic)
        for_critic = torch.optim.SGD(critic.parameters(), lr=0.01)
        for_generator = torch.optim.SGD(generator.parameters(), lr=0.01)
        for x in batches(2):
            fake = generator(x)
            critic(fake.detach()).sum().backward()
            for_critic.step()
            critic(fake).sum().backward()
            for_generator.step()
        assert monitor.event_count == 0
        assert steps_of(monitor) == [0, 1]

    def test_a_closure_runs_inside_its_step(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        for x in batches(2):

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        assert steps_of(monitor) == [0, 1]
        roles = {monitor.sites[r["site"]].role for r in monitor.records() if r["step"] == 1}
        assert "param_grad" in roles

    def test_parameters_are_read_before_the_update(self) -> None:
        model = nn.Linear(3, 3)
        monitor = fastcheck.install(model)
        seen = []
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for x in batches(3, 2, 3):
            seen.append(fastcheck.checksum(model.weight.detach()))
            model(x).sum().backward()
            optimizer.step()
        last: dict[int, int] = {}
        for record in monitor.records():
            if str(monitor.sites[record["site"]]).endswith("parameter weight"):
                last[int(record["step"])] = int(record["checksum"])
        assert list(last.values()) == seen

    def test_parameters_and_gradients_are_read_once_a_step(self) -> None:
        model = Net()
        model.head.tied = model.blocks[0].a.weight
        monitor = fastcheck.install(model)
        train(model, 3)
        names = [str(monitor.sites[r["site"]]) for r in monitor.records() if r["step"] == 1]
        stored = [name for name in names if "optimizer · " in name and "lr" not in name]
        assert len(stored) == len(set(stored)) == 2 * len(list(model.parameters()))

    def test_sparse_gradients_are_read_by_their_values(self) -> None:
        model = nn.Embedding(10, 4, sparse=True)
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        sizes = [
            int(r["numel"])
            for r in monitor.records()
            if monitor.sites[r["site"]].role == "param_grad"
        ]
        assert sizes == [8]

    def test_a_learning_rate_of_zero(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        train(model, 4, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
        assert steps_of(monitor) == [0, 1, 2, 3]
        assert monitor.event_count == 0

    def test_every(self) -> None:
        model = Net()
        monitor = fastcheck.install(model, every=3)
        train(model, 8)
        assert steps_of(monitor) == [0, 3, 6]
        assert monitor.step_index == 7


class TestExplicitSteps:
    def test_from_the_first_call_on_only_it_ends_a_step(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in batches(3):
            for part in (x, x + 1):
                optimizer.zero_grad()
                loss = model(part).sum()
                loss.backward()
                optimizer.step()
            monitor.step(loss=loss)
        # The first optimizer step had already ended step 0 when monitor.step() came for the first
        # time.
        assert steps_of(monitor) == [0, 1, 2, 3]
        losses = [r["step"] for r in monitor.records() if monitor.sites[r["site"]].role == "loss"]
        assert losses == [0, 1, 2, 2, 3, 3]

    def test_right_after_the_optimizer_it_is_the_same_step(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in batches(3):
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
        assert steps_of(monitor) == [0, 1, 2]

    def test_without_any_optimizer_parameters_are_read_all_the_same(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        for x in batches(3):
            model.zero_grad()
            model(x).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
            monitor.step()
        roles = {monitor.sites[r["site"]].role for r in monitor.records() if r["step"] == 2}
        assert {"param", "param_grad"} <= roles

    def test_an_observed_loss_is_in_the_table_and_judged_once(self) -> None:
        model, criterion = Net(), nn.MSELoss()
        monitor = fastcheck.install(model, criterion)
        loss = criterion(model(torch.ones(4, 8)), torch.zeros(4, 4))
        monitor.step(loss=loss)
        assert [row.loss for row in monitor.step_table()] == [loss.item()]
        with pytest.raises(fastcheck.OverflowDetected) as caught:
            monitor.step(loss=criterion(model(torch.ones(4, 8)), torch.full((4, 4), 1e30)))
        assert caught.value.culprit.site.module == "MSELoss" and monitor.event_count == 1


def test_the_boundaries_go_with_a_model_that_is_dropped() -> None:
    done = run_code(
        "import fastcheck, gc, torch\n"
        "from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks\n"
        "before = torch.amp.GradScaler.step\n"
        "model = torch.nn.Linear(1, 1)\n"
        "fastcheck.install(model)\n"
        "assert len(hooks) == 1\n"
        "del model\n"
        "gc.collect()\n"
        "assert not hooks\n"
        "assert torch.amp.GradScaler.step is before\n"
    )
    assert done.returncode == 0, done.stderr


def test_with_a_closure_the_learning_rate_is_that_of_its_own_step() -> None:
    """The closure runs the forward within the optimizer's step, which reads the rate first."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        return loss

    with fastcheck.install(model) as monitor:
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.step(closure)
        rows = monitor.step_table()
    assert [row.learning_rate for row in rows] == [0.1 / (step + 1) for step in range(4)]
    counts = [int((monitor.records()["step"] == step).sum()) for step in range(1, 4)]
    assert len(set(counts)) == 1, counts


def test_two_optimizers_with_closures_step_in_one_step() -> None:
    """As Lightning's manual optimisation does: its closure does nothing."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in model]
    with fastcheck.install(model) as monitor:
        for _ in range(3):
            model(torch.ones(2, 8)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step(lambda: 0.0)
        assert monitor.step_index == 2


class Called(nn.Module):
    """A model that is called by another name than its own too, by which no hook of it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight

    def loss(self, x: torch.Tensor, divisor: float) -> torch.Tensor:
        return (x @ self.weight / torch.tensor(divisor)).mean()


@pytest.mark.parametrize("level", ["module", "op"])
def test_a_model_that_is_never_called_has_steps_and_losses(level: str) -> None:
    model = Called()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fastcheck.install(model, level=level), pytest.raises(fastcheck.OverflowDetected) as stop:
        for step in range(6):
            optimizer.zero_grad()
            for divisor in (1.0, 0.0 if step == 4 else 1.0):  # gradients are accumulated
                model.loss(torch.ones(3, 4), divisor).backward()
            optimizer.step()
    report = stop.value.report
    assert stop.value.step == 4 and report.weights_intact
    if level == "module":
        assert stop.value.culprit.site.role == "loss"
        assert report.made_by is not None and report.made_by.operator == "DivBackward0"


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize("calls", ["mmm", "momom", "oomm"])
def test_a_model_that_is_not_always_called_by_its_own_name(level: str, calls: str) -> None:
    model = Called()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    with fastcheck.install(model, level=level) as monitor:
        for call in calls:
            optimizer.zero_grad()
            x = torch.randn(3, 4)
            loss = model.loss(x, 1.0) if call == "m" else model(x).square().mean()
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
        assert [(row.step, row.loss) for row in monitor.step_table()] == list(enumerate(losses))


@pytest.mark.parametrize("level", ["module", "op"])
def test_a_penalty_of_the_weights_before_the_first_call_is_a_part_of_the_loss(level: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    with fastcheck.install(model, level=level) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            penalty = model.weight.square().sum()
            penalty.backward()
            loss = model(torch.randn(3, 4)).square().mean()
            loss.backward()
            losses.append(penalty.item() + loss.item())
            optimizer.step()
        assert [row.loss for row in monitor.step_table()] == pytest.approx(losses)


def test_gradients_that_are_written_without_a_backward_have_steps() -> None:
    model = Called()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for step in range(6):
            model.weight.grad = torch.full((4, 2), float("nan") if step == 4 else 1.0)
            optimizer.step()
    assert stop.value.step == 4 and stop.value.report.weights_intact
