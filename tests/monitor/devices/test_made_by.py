"""The operator that made the numbers of a stop, on an accelerator: with ``sync="call"``, and where
the stop comes steps later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable, Optional

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.monitor.session.derivatives import _copy_written
from fastcheck.record.statistics import statistics_of
from support.devices.training_on_fake import NAME, fake
from support.programs.training import Apply

pytestmark = [
    pytest.mark.fake_accelerator,
    pytest.mark.usefixtures("fake_accelerator", "op_observer"),
]


def test_in_the_graph_of_the_loss() -> None:
    model = nn.Linear(4, 4).to(NAME)
    with (
        fastcheck.install(model, sync="call"),
        pytest.raises(fastcheck.OverflowDetected) as stop,
    ):
        (model(torch.ones(2, 4).to(NAME)) * 0).log().mean().backward()
    made = stop.value.report.made_by
    assert made is not None and made.operator == "LogBackward0"
    assert statistics_of(made.inputs[0][1]).zero_count == 8


def stop_of(
    loss: Callable[[torch.Tensor], torch.Tensor], step: int = 3, model: Optional[nn.Module] = None
) -> fastcheck.OverflowDetected:
    """The stop of a training whose loss is this one in one step; it comes steps later."""
    torch.manual_seed(0)
    model = (model or nn.Linear(4, 4)).to(NAME)
    # A list operator of the fake device counts no versions.
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    monitor = fastcheck.install(model)
    with pytest.raises(fastcheck.OverflowDetected) as stop, monitor:
        for i in range(8):
            # The host is ahead of the device, on a machine under load too.
            fake.set_delay(2000 if i == step else 0)
            optimizer.zero_grad()
            y = model(torch.rand(2, 4).to(NAME))
            (loss if i == step else torch.mean)(y).backward()
            optimizer.step()
    fake.set_delay(0)
    assert stop.value.step == step and monitor.step_index > step
    assert stop.value.report.weights_intact is False
    return stop.value


@pytest.mark.parametrize(
    ("loss", "operator", "advice"),
    [
        (lambda y: (y * 0).log().mean(), "LogBackward0", "self is 0 throughout: log(0) is -Inf"),
        (lambda y: (y / (y * 0)).sum(), "DivBackward0", "other is 0 throughout"),
        (lambda y: (y[0, :1].std() + y).sum(), "StdBackward0", "std of one element is 0/0"),
        (lambda y: ((y + 200).exp() * 0).sum(), "ExpBackward0", "exp of more than 88.7"),
        (lambda y: ((y * 0).log() * (y * 0)).sum(), "MulBackward0", "0 * Inf is NaN"),
        (
            lambda y: nn.functional.nll_loss(y, torch.full((2,), -100).to(NAME)),
            "NllLossBackward0",
            "A mean over no targets is 0/0: there are no rows, or every target",
        ),
    ],
)
def test_in_the_graph_of_an_earlier_loss(
    loss: Callable[[torch.Tensor], torch.Tensor], operator: str, advice: str
) -> None:
    stop = stop_of(loss)
    made = stop.report.made_by
    assert made is not None and made.operator == operator and not made.is_backward
    assert advice in " ".join(str(stop).split())


def test_a_quotient_by_a_count_keeps_no_dividend() -> None:
    """It may have been anything: it is not said to be finite, and a module's NaN is not its own."""
    stop = stop_of(lambda y: y.sum() / (y.detach() > 1e9).sum())
    made = stop.report.made_by
    assert made is not None and "its operator divided by 0" in made.how
    assert statistics_of(dict(made.inputs)["other"]).dtype == "int64"
    assert "The divisor other is 0" in str(stop)

    numbers = [0.0] * 3 + [torch.inf] + [0.0] * 8
    function = Apply(lambda x: x + (number := numbers.pop(0)) - number)
    model = nn.Sequential(nn.Linear(4, 4), function)
    stop = stop_of(lambda y: y.sum() / (y.detach() > 1e9).sum(), model=model)
    assert stop.culprit.site.module == "1" and stop.report.made_by is None


def test_an_operand_without_a_graph_of_an_earlier_loss() -> None:
    made = stop_of(lambda y: (y * (y.detach() * 0).log()).mean()).report.made_by
    assert made is not None and not made.operator
    assert "MulBackward0 in the graph of the loss read it in a tensor that has no graph" in made.how


def test_the_variable_without_a_graph_of_an_earlier_loss() -> None:
    """It is told as it was when backward() was called, though the program has gone on since."""

    def weighted(y: torch.Tensor) -> torch.Tensor:
        counts = y.detach().clamp(0, 0).sum(0)
        return weighted_by({"counts": counts, "weight": counts / counts}, y)

    def weighted_by(batch: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        step_loss = (y * batch["weight"]).mean()
        step_loss.backward()
        return step_loss.detach().requires_grad_()

    made = stop_of(weighted).report.made_by
    assert made is not None and not made.operator
    assert "The first bad element of batch['weight'] is [0]" in made.how
    assert made.variable.startswith("batch['weight'], in an argument of weighted_by, which runs")
    assert made.variable.endswith(
        'return weighted_by({"counts": counts, "weight": counts / counts}, y)'
    )


def test_a_variable_is_named_though_it_was_written_before_and_is_small() -> None:
    def weighted(y: torch.Tensor) -> torch.Tensor:
        share = y.detach() * 0
        share /= share
        (y * share).mean().backward()
        return y.detach().mean().requires_grad_()

    made = stop_of(weighted).report.made_by
    assert made is not None and made.variable.startswith("share, assigned at")


def test_a_result_of_an_earlier_loss_that_its_operator_does_not_keep() -> None:
    def scaled(y: torch.Tensor) -> torch.Tensor:
        total = y.detach().half().requires_grad_().mul(6e4).abs().add(6e4).sum()
        (y.sum() + total.float() * 0).backward()
        return y.detach().mean().requires_grad_()

    stop = stop_of(scaled)
    made = stop.report.made_by
    assert made is not None and made.operator == "SumBackward0"
    assert made.variable.startswith("total, assigned at")
    assert "A sum in float16, which ends at 65,504" in str(stop)


def test_what_a_sum_of_an_earlier_loss_may_have_from_a_variable() -> None:
    def noisy(y: torch.Tensor) -> torch.Tensor:
        unrelated = torch.full((2, 4), torch.inf).to(NAME)
        noise = (y.detach() * 0 - 1).sqrt()
        moved = y + noise
        moved.square().mean().backward()
        return y.detach().mean().requires_grad_() + 0 * unrelated.isnan().sum()

    made = stop_of(noisy).report.made_by
    assert made is not None and "AddBackward0" in made.how
    assert "may have it from noise, which has no graph" in made.how
    assert made.variable.startswith("noise, assigned at")


def test_a_variable_that_was_written_since_is_not_named() -> None:
    def weighted(y: torch.Tensor) -> torch.Tensor:
        weight = y.detach().clone()
        moved = y + weight.fill_(torch.nan)
        loss = moved.square().mean()
        loss.backward()
        weight.zero_()
        return y.detach().mean().requires_grad_()

    made = stop_of(weighted).report.made_by
    assert made is not None and made.operator == "AddBackward0"
    assert made.variable.startswith("moved, assigned at")


def test_a_log_softmax_before_a_sum_of_an_earlier_loss() -> None:
    def smoothed(y: torch.Tensor) -> torch.Tensor:
        logits = y.masked_fill((torch.arange(4) == 3).to(NAME), -torch.inf)
        target = torch.zeros(2, dtype=torch.long).to(NAME)
        loss = nn.functional.cross_entropy(logits, target, label_smoothing=0.1)
        loss.backward()
        return y.detach().mean().requires_grad_()

    assert "log_softmax holds 2 -Inf" in " ".join(str(stop_of(smoothed)).split())


def test_an_operator_comes_before_a_variable_that_was_made_of_its_result() -> None:
    def certain(y: torch.Tensor) -> torch.Tensor:
        wrong = (y.detach() * 0) * (y * 0).log()
        wrong.mean().backward()
        return y.detach().mean().requires_grad_()

    made = stop_of(certain).report.made_by
    assert made is not None and made.operator == "LogBackward0"


def test_what_an_earlier_loss_has_read_from_an_unknown_operator() -> None:
    assert stop_of(lambda y: ((y + torch.inf - torch.inf) * y).mean()).report.made_by is None


def test_what_was_written_since_is_not_read() -> None:
    """The update has made this weight NaN, which the operator has read when it was finite."""

    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.gain

    model = nn.Sequential(nn.Linear(4, 4), Gain())
    stop = stop_of(lambda y: (y * y.detach().sub(torch.nan)).sum(), model=model)
    assert "1.gain" in (stop.report.broken_weights or ())
    made = stop.report.made_by
    assert made is not None and "no graph (other)" in made.how


@pytest.mark.parametrize("step", [0, 3])
def test_a_small_parameter_is_read_as_it_was_before_the_update(step: int) -> None:
    class Sigma(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.sigma = nn.Linear(4, 4), nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.linear(x)
            return result

    model = Sigma().to(NAME)
    if step:
        with torch.no_grad():
            model.sigma.zero_()  # by an update, as it were
    stop = stop_of(lambda y: y.mean() + model.sigma.log().sum(), step, model)
    made = stop.report.made_by
    assert not model.sigma.isfinite().all()
    assert made is not None and made.operator == "LogBackward0"


def test_small_parameters_are_copied_in_one_launch() -> None:
    weights = [torch.ones(3).to(NAME), torch.full((2, 2), 0.5).to(NAME)]
    nodes: list[Any] = [("MulBackward0", k, (), {"other": w}, [1]) for k, w in enumerate(weights)]
    with fake.recorded_launches() as names:
        _copy_written(nodes, False)
    assert len(names) == 1
    for (*_, values, versions), weight in zip(nodes, weights):
        copy = values["other"]
        assert copy.data_ptr() != weight.data_ptr() and torch.equal(copy.cpu(), weight.cpu())
        assert versions == [0]


def test_the_derivative_in_the_graph_of_an_earlier_loss() -> None:
    made = stop_of(lambda y: (y * 0).sqrt().mean()).report.made_by
    assert made is not None and made.operator == "SqrtBackward0" and made.is_backward


def test_the_derivative_of_a_whole_power_of_an_earlier_loss() -> None:
    stop = stop_of(lambda y: y.sub(1e20).pow(3).tanh().sum())
    made = stop.report.made_by
    assert made is not None and made.operator == "PowBackward0"
    assert dict(made.inputs)["exponent"]["max"] == 3
    assert "fractional" not in str(stop)


def test_what_is_kept_of_graphs_is_gone_three_steps_later() -> None:
    model = nn.Linear(4, 4).to(NAME)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fastcheck.install(model) as monitor:
        derivatives = monitor._session.backwards.derivatives
        for _ in range(6):
            model(torch.rand(2, 4).to(NAME)).exp().mean().backward()
            optimizer.step()
        assert [len(derivatives.of(step)) for step in range(6)] == [0, 0, 1, 1, 1, 1]
        frames = [len(list(derivatives.frames(step))) > 0 for step in range(6)]
        assert frames == [False, False, True, True, True, True]


@pytest.mark.parametrize("level", ["module", "op"])
def test_a_state_that_was_loaded_with_nan(level: Any) -> None:
    """It is told in its own step, and the host has not waited."""
    model = nn.Linear(4, 4).to(NAME)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 4).to(NAME)).mean().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][1]["exp_avg_sq"][2] = torch.nan
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(state)
    monitor = fastcheck.install(model, level=level)
    with pytest.raises(fastcheck.OverflowDetected) as stop, monitor:
        fake.set_delay(2000)
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.rand(2, 4).to(NAME)).mean().backward()
            optimizer.step()
            fake.set_delay(0)
    assert stop.value.step == 0 and stop.value.culprit.site.key == "bias.exp_avg_sq"
    assert monitor.step_index > 0


def test_in_the_call() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), Apply(lambda x: (-x.abs() - 1).sqrt()))
    model.to(NAME)
    with (
        fastcheck.install(model, sync="call"),
        pytest.raises(fastcheck.OverflowDetected) as stop,
    ):
        model(torch.ones(2, 4).to(NAME))
    made = stop.value.report.made_by
    assert made is not None and made.operator == "aten.sqrt"
    assert made.line.endswith("in <lambda>")


def test_beside_another_monitor_nothing_runs_again() -> None:
    """Its thread could wait with Python's lock for what waits for the device."""
    model = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: (-x.abs() - 1).sqrt())).to(NAME)
    with (
        fastcheck.install(nn.Linear(1, 1)),
        fastcheck.install(model, sync="call"),
        pytest.raises(fastcheck.OverflowDetected) as stop,
    ):
        model(torch.ones(2, 4).to(NAME))
    assert stop.value.report.made_by is None


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.first(x) + x[:, :1].sqrt())
        return result


def loop_with_negatives(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Eight steps, the first row of the fourth batch below 0."""
    for step in range(8):
        optimizer.zero_grad()
        x = torch.rand(2, 4)
        x[0] -= 2 if step == 3 else 0
        model(x.to(NAME)).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("is_skipped", [False, True])
def test_in_a_call_that_is_over(is_skipped: bool) -> None:
    """The stop comes before the update, or steps later, when the weights are others."""
    torch.manual_seed(0)
    model = Mixed().to(NAME)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = fastcheck.install(model, sync="step" if is_skipped else "never")
    with pytest.raises(fastcheck.OverflowDetected) as stop, monitor:
        loop_with_negatives(model, optimizer)
    made = stop.value.report.made_by
    assert stop.value.step == 3 and stop.value.report.weights_intact is is_skipped
    assert made is not None and made.operator == "aten.sqrt"
    # The weights are NaN by now, unless the update was skipped.
    assert ("with random numbers of the size that they had" in made.how) is not is_skipped


class Signed(nn.Module):
    """Of numbers like its weight, which is known by its record alone, the root is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 2.0, -1.0, -1.0]))
        self.register_buffer("sign", self.weight.detach().sign())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x * (self.weight * self.sign).sqrt() * x[:, :1].sqrt()
        return result


def test_numbers_in_place_of_weights_make_no_operator_guilty() -> None:
    """They make a NaN of the healthy batch before, too."""
    model = Signed().to(NAME)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    with pytest.raises(fastcheck.OverflowDetected) as stop, fastcheck.install(model):
        loop_with_negatives(model, optimizer)
    made = stop.value.report.made_by
    assert stop.value.step == 3 and (made is None or not made.operator)


class Directions(nn.Module):
    """Its rows, of which the last are added later, over their norms."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.rand(6, 4) + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x @ (self.rows / self.rows.norm(dim=1, keepdim=True)).T
        return result


@pytest.mark.parametrize("is_grown", [False, True])
def test_numbers_in_place_of_weights_are_0_as_often(is_grown: bool) -> None:
    model = Directions().to(NAME)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    with pytest.raises(fastcheck.OverflowDetected) as stop, fastcheck.install(model):
        for i in range(8):
            fake.set_delay(2000 if i == 3 else 0)
            if i == 3 and is_grown:
                grown = torch.cat([model.rows.detach(), torch.zeros(2, 4).to(NAME)])
                model.rows = nn.Parameter(grown)
                optimizer.param_groups[0]["params"][0] = model.rows
            optimizer.zero_grad()
            model(torch.rand(2, 4).to(NAME)).square().mean().backward()
            optimizer.step()
            if i == 2 and not is_grown:
                with torch.no_grad():
                    model.rows[2].zero_()
    fake.set_delay(0)
    made = stop.value.report.made_by
    assert stop.value.step == 3 and stop.value.report.weights_intact is False
    assert made is not None and made.operator == "aten.div.Tensor"
    assert dict(made.inputs)["other (aten.linalg_vector_norm)"]["zero_count"] == 1 + is_grown
    assert "and as many zeros, in place of those of its weights" in made.how


class Widening(nn.Module):
    """The exponential of its sum, which is beyond float32 for some weights of that size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 1.0, -1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (x * self.weight).sum(1).exp()
        return result


def test_numbers_in_place_of_weights_that_do_no_harm_are_drawn_again() -> None:
    """Of the second ones the sum is below 0."""
    model = Widening().to(NAME)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    with pytest.raises(fastcheck.OverflowDetected) as stop, fastcheck.install(model):
        for i in range(8):
            fake.set_delay(2000 if i == 3 else 0)
            x = torch.tensor([[0.0, -1e3, 0.0, 0.0]]) if i == 3 else torch.zeros(1, 4)
            optimizer.zero_grad()
            (model(x.to(NAME)) * 0.0).mean().backward()
            optimizer.step()
    fake.set_delay(0)
    made = stop.value.report.made_by
    assert made is not None and made.operator == "aten.exp"


class Balanced(nn.Module):
    """Its divisor is 0 with its own weight, and with no other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([3.0, -1.0, -1.0, -1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x / (x * self.weight).sum(1, keepdim=True)
        return result


def test_in_a_module_by_what_the_graph_has_kept() -> None:
    torch.manual_seed(0)
    model = Balanced().to(NAME)
    optimizer = torch.optim.SGD(model.parameters(), 0.0, foreach=False)
    with pytest.raises(fastcheck.OverflowDetected) as stop, fastcheck.install(model):
        for step in range(8):
            optimizer.zero_grad()
            x = torch.ones(2, 4) if step == 3 else torch.rand(2, 4)
            model(x.to(NAME)).mean().backward()
            optimizer.step()
    made = stop.value.report.made_by
    assert stop.value.step == 3 and stop.value.culprit.site.role == "output"
    assert made is not None and made.operator == "DivBackward0"
    assert statistics_of(dict(made.inputs)["other"]).zero_count == 2


def test_what_an_operator_has_carried_is_not_said_to_be_its_own() -> None:
    """What made it in the module is not known: it does so once."""
    numbers = [0.0] * 3 + [torch.inf] + [0.0] * 8
    function = Apply(lambda x: x + (number := numbers.pop(0)) - number)
    model = nn.Sequential(nn.Linear(4, 4), function)
    stop = stop_of(lambda y: -y.log_softmax(1).mean(), model=model)
    assert stop.culprit.site.module == "1" and stop.report.made_by is None


@pytest.fixture
def default_device() -> Iterator[None]:
    torch.set_default_device(NAME)
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("default_device")
def test_no_stop_within_a_backward() -> None:
    """It waits for the end of that: nothing can run again within it. torch's default device, which
    is suspended there, is that of what runs again.
    """
    torch.manual_seed(0)
    model = nn.Sequential(Apply(lambda x: x + torch.zeros(1)), Mixed())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = fastcheck.install(model)
    session, stops = monitor._session, monitor._boundary._stop_handler

    def deliver(gradient: torch.Tensor) -> None:
        fake.release()
        fake.synchronize()
        with session.lock:
            session.collect()
        assert session.event_store.due
        stops()
        delivered.append(True)

    delivered: list[bool] = []
    batches = [torch.rand(2, 4).sub(2 * (step == 3)).to(NAME) for step in range(5)]
    with pytest.raises(fastcheck.OverflowDetected) as stop, monitor:
        for step, x in enumerate(batches):
            if step == 3:
                fake.synchronize()  # two steps at most may be open on it
                fake.hold()  # the host is ahead of the device
            optimizer.zero_grad()
            y = model(x)
            if step == 4:
                y.register_hook(deliver)
            y.mean().backward()
            assert step < 4
            optimizer.step()
    made = stop.value.report.made_by
    assert delivered and made is not None and made.operator == "aten.sqrt"


@pytest.mark.parametrize("has_parameters", [False, True])
def test_within_a_backward_nothing_runs_again(has_parameters: bool) -> None:
    """The device's thread of autograd, which would run the second backward, waits for it."""
    model = nn.Linear(4, 4).to(NAME)
    function = Apply(lambda x: (x * 0).sqrt().mean())
    criterion = nn.Sequential(nn.Linear(4, 4), function).to(NAME) if has_parameters else function
    stop = fastcheck.Stop(count="all")
    with (
        fastcheck.install(model, criterion, sync="call", stop=stop),
        pytest.raises(fastcheck.OverflowDetected) as stopped,
    ):
        criterion(model(torch.ones(2, 4).to(NAME)) * 1).backward()
    made = stopped.value.report.made_by
    assert made is not None and made.operator == "SqrtBackward0"  # not "aten.sqrt"


def test_the_row_of_a_bad_batch() -> None:
    model = nn.Linear(4, 4).to(NAME)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(fastcheck.OverflowDetected) as stop, fastcheck.install(model, sync="step"):
        for step in range(8):
            optimizer.zero_grad()
            x = torch.rand(6, 4)
            x[4, 1] = float("nan") if step == 3 else 0.0
            model(x.to(NAME)).mean().backward()
            optimizer.step()
    assert stop.value.step == 3
    assert "The first bad element of input[0] is [4, 1], in row 4" in " ".join(
        str(stop.value).split()
    )


def test_in_an_earlier_call_of_a_step() -> None:
    """The stop comes while the model runs on another batch, which was not written in place."""
    torch.manual_seed(0)
    model = Mixed().to(NAME)
    with (
        fastcheck.install(model),
        torch.no_grad(),
        pytest.raises(fastcheck.OverflowDetected) as stop,
    ):
        for sign in (1, -1, 1, 1, 1, 1, 1, 1):
            model(torch.rand(2, 4).to(NAME) * sign)
            torch.fake.synchronize()
    assert "written in place" not in str(stop.value)


def test_a_nan_that_is_written_into_the_batch() -> None:
    model = nn.Linear(4, 4).to(NAME)
    with (
        fastcheck.install(model, level="op", sync="call"),
        pytest.raises(fastcheck.OverflowDetected) as stop,
    ):
        x = torch.ones(2, 4).to(NAME)
        x[0, 1] = float("nan")
        model(x).sum().backward()
    assert stop.value.culprit.site.label == "input[0]"
    assert "it is part of the batch, into which" in stop.value.culprit.reason
