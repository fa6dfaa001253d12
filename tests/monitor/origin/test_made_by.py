"""The operator that made the numbers of a module-level stop, found in what is still in memory."""

from __future__ import annotations

import json
import math
import re
import warnings
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastcheck
from fastcheck.monitor.origin import kept_graph, made_again
from fastcheck.monitor.session.derivatives import SavedByNode
from fastcheck.record.statistics import statistics_of
from fastcheck.report.message import packed, unpacked
from support.programs.losses import Loss, maker_of, stop_of
from support.programs.training import batches

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")


def of_nothing(y: torch.Tensor) -> torch.Tensor:
    empty = y[y < 0]
    return torch.stack([F.binary_cross_entropy_with_logits(empty, empty.detach()), y.mean()]).sum()


def cross_entropy(y: torch.Tensor) -> torch.Tensor:
    ignored = torch.full((len(y),), -100)
    return nn.functional.cross_entropy(y, ignored) + y.mean()


def too_long(y: torch.Tensor) -> torch.Tensor:
    labels = torch.ones(1, 30, dtype=torch.long)
    scores = y.unsqueeze(1).log_softmax(-1)
    return nn.functional.ctc_loss(scores, labels, torch.tensor([len(y)]), torch.tensor([30]))


def boxes(y: torch.Tensor) -> torch.Tensor:
    width, height = (y * 0).unbind(-1)[:2]
    return (1 - (torch.atan(width / height) ** 2 * 0.4)).mean()


class Halve(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        result = x / 0
        context.save_for_backward(result)
        return result

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Root(torch.autograd.Function):
    """Keeps nothing of what it has made."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.abs().sub(1e3).sqrt()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


LOSSES: dict[str, tuple[Loss, str]] = {
    "std of one element": (lambda y: (y[0, 0] / y[0, :1].std()).mean(), "StdBackward0"),
    "var of one element": (lambda y: y[0, :1].var() + y.mean(), "VarBackward0"),
    "var over a dim": (lambda y: (y[:1].var(0) + 1).sum(), "VarBackward0"),
    "0/0 in a box": (boxes, "DivBackward0"),
    "a mask of nothing": (lambda y: y.sum() / torch.zeros(()), "DivBackward0"),
    "log of 0": (lambda y: -(y * 0).log().mean(), "LogBackward0"),
    "log of 0 whose result nobody keeps": (lambda y: -(y * 0).log().sum() + 1, "LogBackward0"),
    "x log 0": (lambda y: 1 - torch.xlogy(y - 2, torch.zeros(8)).sum(), "XlogyBackward0"),
    "exp": (lambda y: (y + 200).exp().mean() - 1, "ExpBackward0"),
    "a power of 0": (lambda y: ((y * 0) ** -2).sum(), "PowBackward0"),
    "a power that overflows": (lambda y: (y + 1e30).square().mean(), "PowBackward0"),
    "root of a negative number": (lambda y: (-y - 1).sqrt().mean(), "SqrtBackward0"),
    "every target ignored": (cross_entropy, "NllLossBackward0"),
    "a transcript longer than its frames": (too_long, "CtcLossBackward0"),
    "a mean over nothing": (lambda y: y[:0].mean() + y.sum(), "MeanBackward0"),
    "a loss of nothing": (of_nothing, "BinaryCrossEntropyWithLogitsBackward0"),
    "a sum in half": (lambda y: (y.half() + 6e4).sum().float(), "SumBackward0"),
    "half a sum in half": (lambda y: (0.5 * (y.half() + 6e4).sum()).float(), "SumBackward0"),
    "a product": (lambda y: ((y * 1e30) * (y * 1e30)).sum(), "MulBackward0"),
    "a Function of one's own": (lambda y: Halve.apply(y).sum() * 2, "HalveBackward"),
    "one that keeps nothing": (lambda y: Root.apply(y).mean(), "RootBackward"),
    "its sum over a count": (lambda y: -Root.apply(y).sum() / torch.tensor(8.0), "RootBackward"),
    "its mean over nothing": (lambda y: Root.apply(y[:0]).mean(), "MeanBackward0"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_first_operator_of_a_loss(name: str) -> None:
    loss, operator = LOSSES[name]
    stop = stop_of(loss)
    made = stop.report.made_by
    assert made is not None and made.operator == operator
    for _, record in made.inputs:
        assert statistics_of(record).nonfinite_count == 0
    if made.result is not None:
        assert statistics_of(made.result).nonfinite_count > 0
    assert operator in str(stop)


class LogCosh(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x)
        return x.abs() + F.softplus(-2 * x.abs())

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        (x,) = context.saved_tensors
        return gradient * x.sinh() / x.cosh()


def test_a_backward_of_the_program_in_the_graph_of_the_loss() -> None:
    made = maker_of(lambda y: LogCosh.apply(y * 1000).mean())
    assert made.operator == "" and made.how.startswith("LogCosh, in the graph of the loss, has a")
    assert [line.rpartition(": ")[2] for line in made.written] == [
        "return gradient * x.sinh() / x.cosh()"
    ]


def test_a_backward_of_a_library_is_not_accused() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        made: Any = checkpoint(lambda x: (x * 0).sqrt(), y, use_reentrant=True)
        return made.mean()

    assert "CheckpointFunction, in" not in str(stop_of(loss))


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda y: y[:0].mean(), "try 1. A mean over no elements is 0/0: self is empty."),
        (lambda y: torch.special.i0(y * 0 + 100).mean(), "log(0), x/0 or exp of a large number"),
    ],
)
def test_a_loss_that_was_small_in_its_last_steps_did_not_overflow(loss: Loss, told: str) -> None:
    """A loss of random numbers may be 70 times as large in the next step, and far from Inf."""
    values = iter((lambda y: y.mean() * 0 + 0.03, lambda y: y.mean() * 0 + 2.0, loss))
    text = " ".join(str(stop_of(lambda y: next(values)(y), steps=3)).split())
    assert "grew 67 times in 1 step" in text
    assert told in text and "Stop the growth" not in text


def test_its_inputs() -> None:
    made = maker_of(lambda y: (y.sum(-1) / (y[:, 0] * 0)).mean())
    inputs = {name: statistics_of(record) for name, record in made.inputs}
    assert set(inputs) == {"self (SumBackward1)", "other (MulBackward0)"}
    other = inputs["other (MulBackward0)"]
    assert (other.zero_count, other.numel) == (4, 4)
    assert inputs["self (SumBackward1)"].zero_count == 0


@pytest.mark.parametrize(
    ("divisor", "told"),
    [
        (lambda y: (y * 0).norm(dim=-1)[:, None], "It is a norm: that of a row of zeros is 0."),
        (lambda y: (y * 0).square().sum(-1).sqrt().unsqueeze(-1), "It is a root, of 0 there"),
        (lambda y: (y * 0).std(-1, keepdim=True), "It is a standard deviation, which is 0"),
        (lambda y: (y * 0).sum(-1, keepdim=True), "It is a sum: nothing was"),
    ],
)
def test_the_operator_that_made_a_divisor(divisor: Loss, told: str) -> None:
    """In the graph of the loss, and in a module that is run again."""
    assert told in " ".join(str(stop_of(lambda y: (y / divisor(y)).mean())).split())

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / divisor(super().forward(x))

    model = Scaled(8, 8)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        model(torch.ones(4, 8))
    assert told in " ".join(str(stop.value).split())


def test_a_count_that_is_0() -> None:
    stop = stop_of(lambda y: (y.sum(-1) / torch.tensor([1, 0, 2, 3])).mean())
    made = stop.report.made_by
    assert made is not None
    assert statistics_of(dict(made.inputs)["other"]).zero_count == 1
    assert "The divisor other is 0 in 1 of 4 elements" in str(stop)


def test_a_power_that_overflows_is_explained() -> None:
    """And no negative number is blamed."""
    text = " ".join(str(stop_of(lambda y: (1e30 * (y - 0.5)).square().mean())).split())
    assert "a power of it is beyond the range of float32" in text
    assert "fractional power" not in text.partition("log ")[0]


def test_the_derivative_by_a_learned_exponent_of_negative_numbers() -> None:
    """Its power is finite: the exponent is 2."""
    model = nn.Sequential(nn.Linear(4, 4))
    model.exponent = nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        model(torch.ones(2, 4)).sub(9).pow(model.exponent).mean().backward()
        optimizer.step()
    text = " ".join(str(stop.value).split())
    assert "8 negative numbers" in text and "the derivative of x ** p by p" in text


def test_a_power_with_exponents_of_a_tensor() -> None:
    assert maker_of(lambda y: (y**y + (y * 0).log()).mean()).operator == "LogBackward0"


def test_a_value_from_outside_the_graph() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        advantage = y.detach()[:1, 0]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        result = (advantage * y).mean()
        result.backward()
        return result

    stop = stop_of(loss)
    made = stop.report.made_by
    assert made is not None and made.operator == ""
    assert "MulBackward0" in made.how and "no graph" in made.how
    assert made.variable.startswith("advantage, assigned at ")
    assert made.variable.endswith("(advantage.std() + 1e-8)")
    assert statistics_of(made.inputs[0][1]).numel == 1


def test_a_value_from_outside_whose_variable_is_gone() -> None:
    def weighted(y: torch.Tensor) -> torch.Tensor:
        count = (y.detach() > 1e9).sum()
        weight = y.numel() / count / (y.numel() / count - 1)
        return (weight * y).mean()

    stop = stop_of(weighted)
    text = " ".join(str(stop).split())
    assert "try 1. The loss read a tensor that is not finite and has no graph" in text
    assert "Look where it is made: it divides, and 0/0 is NaN" in text
    assert stop.report.made_by is not None
    (place,) = stop.report.made_by.written
    assert place.endswith("in weighted: weight = y.numel() / count / (y.numel() / count - 1)")


def test_what_a_bad_value_was_assigned_from() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        given = y.detach()[:1, 0]
        scale = (
            given.std()  # of one element
            + 1e-8
        )
        shifted = given - given.mean()
        print(end="")
        advantage = shifted / scale
        result = (advantage * y).mean()
        result.backward()
        return result

    made = maker_of(loss)
    assert "advantage was assigned from scale, which is not finite either" in made.how
    assert made.variable.startswith("scale, assigned at ") and made.variable.endswith(
        ": scale = ( given.std() + 1e-8 )"
    )


def test_what_a_value_was_assigned_from_that_goes_on_with_its_own_name() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        reward = torch.ones(4)
        reward[2] = torch.nan
        returns, run = torch.zeros(4), torch.zeros(())
        for k in reversed(range(4)):
            run = reward[k] + 0.9 * run
            returns[k] = run
        returns = (returns - returns.mean()) / (returns.std() + 1e-8)
        result = (returns * y[:, 0]).mean()
        result.backward()
        return result

    made = maker_of(loss)
    assert "returns was assigned from reward, which is not finite either" in made.how
    assert "reward, assigned at" in made.variable


@pytest.mark.parametrize("is_fixed", [False, True])
def test_of_two_branches_neither_is_said_to_have_run(is_fixed: bool) -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        scale = y.detach()[:1, 0].std()
        if is_fixed:
            scale = scale * 2
        whole = scale + 1
        result = (whole * y).mean()
        result.backward()
        return result

    variable = maker_of(loss).variable
    first = loss.__code__.co_firstlineno + 1
    assert variable.startswith(f"scale, assigned at {__file__}:{first} or {first + 2} in loss: ")
    assert variable.endswith("scale = y.detach()[:1, 0].std(); scale = scale * 2")


def test_a_view_of_a_variable_is_that_variable() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        rewards = torch.ones(2, len(y) // 2)
        advantage = (rewards - 1) / rewards.std(1, keepdim=True)
        result = (advantage.flatten()[:, None] * y).mean()
        result.backward()
        return result

    made = maker_of(loss)
    assert "The first bad element of advantage is [0, 0], in row 0: 2 of 2 rows hold" in made.how
    assert made.variable.endswith("advantage = (rewards - 1) / rewards.std(1, keepdim=True)")


@pytest.mark.parametrize("is_alone", [True, False])
def test_minus_infinity_from_outside_that_a_difference_made_nan_of(is_alone: bool) -> None:
    """The log of the first variance of a diffusion, which is 0. Of other elements it is none."""

    def loss(y: torch.Tensor) -> torch.Tensor:
        table = torch.tensor([0.0, 0.1]).log().repeat(len(y) // 2)[:, None]
        fraction = y.sigmoid()
        mixed = (1 - fraction) * table - 2 * fraction
        rows = torch.arange(len(y))[:, None]
        least = table if is_alone else torch.where(rows == 0, -math.inf, 0.0)
        return (least - mixed).exp().mean()

    made = maker_of(loss)
    assert ("MulBackward0 in the graph of the loss read it" in made.how) is is_alone
    assert ("holds -Inf alone, as the log of 0 is" in made.how) is is_alone


def test_what_the_line_of_a_composite_loss_has_read() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        goal = torch.tensor([0.0, 1.0]).log().expand(len(y), 2)
        result = nn.functional.kl_div(y[:, :2], goal, log_target=True, reduction="batchmean")
        result.backward()
        return result

    made = maker_of(loss)
    assert "DivBackward0, the first operator in the graph of the loss" in made.how
    assert "may have it from goal, which has no graph" in made.how
    assert made.variable.endswith("goal = torch.tensor([0.0, 1.0]).log().expand(len(y), 2)")


def test_the_line_that_assigns_an_element() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        losses: dict[str, torch.Tensor] = {}
        losses["box"] = (y * 0).log().sum()
        losses["class"] = y.mean()
        result = sum(losses.values(), torch.zeros(()))
        result.backward()
        return result

    variable = maker_of(loss).variable
    assert variable.startswith("the result is used in losses['box'], assigned at ")
    assert variable.endswith(' in loss: losses["box"] = (y * 0).log().sum()')


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_target_behind_a_difference_that_is_scaled(factor: float) -> None:
    """A difference keeps nothing, and its product the factor alone."""

    def loss(y: torch.Tensor) -> torch.Tensor:
        target = torch.zeros_like(y)
        target[1, 0] = float("nan")
        result = ((y - target) * factor).square().mean()
        result.backward()
        return result

    stop = stop_of(loss)
    assert "or came in there (a target)" in stop.culprit.reason
    made = stop.report.made_by
    assert made is not None and made.operator == "" and "may have it from target" in made.how
    assert made.variable.startswith("target, assigned at ")


@pytest.mark.parametrize("count", [4096.0, 1e-3])
def test_a_sum_that_is_divided_by_a_count(count: float) -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        result = (y * 0 + 5e3).half().sum() / torch.tensor(count).half()
        result.backward()
        return result

    made = maker_of(loss)
    assert made.operator == ("SumBackward0" if count > 1 else "DivBackward0")


def test_a_result_that_only_a_local_variable_holds() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        total = (y * 1e4).half().sum()
        whole = 1 - 2 * total.float() / (total + total).float()
        whole.backward()
        return whole

    made = maker_of(loss)
    assert made.operator == "SumBackward0"
    assert made.variable.startswith("total, assigned at ")


def test_the_local_variable_that_it_has_led_to() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        fine = y.mean()
        bad = (y * 0).log().sum()
        total = bad + fine
        total.backward()
        return total

    variable = maker_of(loss).variable
    assert variable.startswith("the result is used in bad, assigned at ")
    assert variable.endswith("bad = (y * 0).log().sum()")


def test_the_mean_of_nothing_that_was_put_together() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        chosen = [nn.functional.softplus(part[part < 0]) for part in y.chunk(2)]
        result = torch.cat(chosen).sigmoid().mean()
        result.backward()
        return result

    text = " ".join(str(stop_of(loss)).split())
    assert "try 1. A mean over no elements is 0/0: self is empty" in text


@pytest.mark.parametrize(
    ("logarithm", "added", "dtype"), [(8, 65504.0, torch.half), (88, 3e38, torch.float)]
)
def test_a_sum_that_overflows_is_not_what_it_has_added(
    logarithm: int, added: float, dtype: torch.dtype
) -> None:
    def total(y: torch.Tensor) -> torch.Tensor:
        small = (y * 0 + logarithm).to(dtype).exp()
        return -(small + torch.full(y.shape, added).to(dtype)).mean()

    def loss(y: torch.Tensor) -> torch.Tensor:
        result = total(y)
        result.backward()
        return result

    made = stop_of(loss).report.made_by
    assert made is None or "its operand with a graph is finite" not in made.how


def test_the_cause_of_a_target_is_advised_on_by_its_own_numbers() -> None:
    """A maximum over actions all of which are masked is -Inf, and that times 0 is NaN."""

    def loss(y: torch.Tensor) -> torch.Tensor:
        best = y.detach().masked_fill(torch.eye(len(y), 8) == 0, -torch.inf)[:, 0]
        target = torch.zeros(len(y)) * best
        result = F.mse_loss(y[:, 0], target)
        result.backward()
        return result

    stop = stop_of(loss)
    made = stop.report.made_by
    assert made is not None and [name for name, _ in made.inputs] == ["target", "best"]
    said = " ".join(str(stop).split())
    assert "a maximum over what is masked whole, and 0 * Inf is NaN" in said


def test_a_product_with_a_whole_number_that_is_0() -> None:
    """ultralytics#25097: the sum of predictions times 0 for a batch that has no target."""

    def loss(y: torch.Tensor) -> torch.Tensor:
        result = (y * 1e38 * 8).sum() * 0
        result.backward()
        return result

    made = maker_of(loss)
    assert made.operator == "MulBackward0"
    ((name, record),) = made.inputs
    assert name == "other" and record["zero_count"] == 1


@pytest.mark.parametrize("name", ["huber_loss", "mse_loss", "smooth_l1_loss"])
def test_a_mean_loss_of_nothing(name: str) -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        result = getattr(F, name)(y[y < 0], torch.zeros(0)) + y.mean()
        result.backward()
        return result

    assert maker_of(loss).operator == name.title().replace("_", "") + "Backward0"


def test_an_empty_batch_is_not_what_a_mean_has_added() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        chosen = y[y < 0]
        result = (chosen - torch.zeros(0)).mean()
        result.backward()
        return result

    made = stop_of(loss).report.made_by
    assert made is not None and made.operator in ("MeanBackward0", "SubBackward0")


def test_the_numbers_of_a_quotient_are_not_those_of_its_dividend() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        parts = (y * torch.tensor([1e30] + [1.0] * 7) * 1e20).sum(0) / torch.tensor(4.0)
        result = parts.sum()
        result.backward()
        return result

    made = maker_of(loss)
    assert made.operator == "DivBackward0" and made.result is not None


def test_the_dtype_of_a_quotient_is_not_that_of_its_dividend() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        result = (y * 0 + 5e3).half().sum() / torch.tensor([4096.0])
        result.backward()
        return result

    made = maker_of(loss)
    assert made.operator == "DivBackward0" and made.result is not None


@pytest.mark.parametrize("is_mean", [True, False])
def test_what_a_sum_has_added_from_outside_of_the_graph(is_mean: bool) -> None:
    def total(y: torch.Tensor, prior: torch.Tensor) -> torch.Tensor:
        added = y.log_softmax(-1) + prior
        return -(added.mean() if is_mean else added.sum())

    def loss(y: torch.Tensor) -> torch.Tensor:
        result = total(y, torch.eye(len(y), y.shape[1]).log())
        result.backward()
        return result

    stop = stop_of(loss)
    made, text = stop.report.made_by, " ".join(str(stop).split())
    assert made is not None and made.operator == ""
    assert "AddBackward0 in the graph of the loss: its operand with a graph is finite" in made.how
    assert "try 1. The loss read a tensor, or a number, that is not finite" in text


@pytest.mark.parametrize("is_divergence", [True, False])
def test_a_divergence_from_logarithms(is_divergence: bool) -> None:
    """Without log_target=True kl_div() takes the logarithm of its target."""
    target = torch.randn(4, 8).log_softmax(-1)

    def loss(y: torch.Tensor) -> torch.Tensor:
        if is_divergence:
            result = nn.functional.kl_div(y.log_softmax(-1), target, reduction="batchmean")
        else:
            result = (torch.zeros(4, 8).log() - target.exp() * y.log_softmax(-1)).sum()
        result.backward()
        return result

    stop = stop_of(loss)
    made, text = stop.report.made_by, " ".join(str(stop).split())
    assert made is not None
    assert "SubBackward0 in the graph of the loss: its operand with a graph is finite" in made.how
    assert ("its target has numbers below 0" in made.how) is is_divergence
    remedy = "try 1. If the target of kl_div holds log-probabilities, pass log_target=True"
    assert (remedy in text) is is_divergence


def test_what_a_sum_within_a_product_has_added_from_outside_of_the_graph() -> None:
    """As a divergence does, of a target with zeros: p * (log(p) - log(q))."""
    target = torch.eye(4, 8)

    def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (p * (p.log() - q.log())).sum(-1).mean()

    made = maker_of(lambda y: divergence(target, y))
    assert made.operator == ""
    assert "SubBackward0 in the graph of the loss: its operand with a graph is finite" in made.how
    assert maker_of(lambda y: divergence(target + 1, y * 0)).operator == "LogBackward0"

    def of_known_products(y: torch.Tensor) -> torch.Tensor:
        products = target * (target.log() - y.log())
        result = products.sum()
        result.backward()
        return result

    assert maker_of(of_known_products).operator == "MulBackward0"


def test_anomaly_mode_gives_the_line() -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        made = maker_of(lambda y: (y * 0).log().mean())
    assert made.line.startswith(f"{__file__}:") and made.line.endswith("in <lambda>")


def test_an_infinity_on_purpose_is_not_blamed() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        masked = y.masked_fill(torch.eye(*y.shape).bool(), float("-inf"))
        return masked.softmax(-1).log_softmax(-1).sum() + (y[0] * 0).reciprocal().sum()

    assert maker_of(loss).operator == "ReciprocalBackward0"


def test_what_is_not_kept_is_not_claimed() -> None:
    # An addition keeps nothing of what it read.
    made = maker_of(lambda y: (y.sum() + torch.tensor(float("nan"))) * 2)
    assert "while what it read was" not in made.how


def test_saved_tensors_with_hooks_are_left_alone() -> None:
    unpacked_in = []

    def loss(y: torch.Tensor) -> torch.Tensor:
        calls = len(unpacked_in)

        def unpack(tensor: torch.Tensor) -> torch.Tensor:
            unpacked_in.append(calls)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            value = (y * 0).log().mean()
        checkpointed: Any = checkpoint(lambda x: x.exp(), y, use_reentrant=False)
        return value + checkpointed.mean()

    stop_of(loss)
    assert unpacked_in == []


def test_the_graph_is_as_before() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    x = torch.rand(3, 4)

    def gradients(**options: Any) -> list[torch.Tensor]:
        model.zero_grad()
        with fastcheck.install(model, **options):
            loss = (model(x).mean() * 0).log() + model(x).square().sum()
            with pytest.raises(fastcheck.OverflowDetected):
                loss.backward()
        loss.backward()  # the search has freed nothing
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    state = torch.get_rng_state()
    found = gradients()
    assert torch.equal(state, torch.get_rng_state())
    model.zero_grad()
    ((model(x).mean() * 0).log() + model(x).square().sum()).backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    for one, other in zip(found, expected):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_it_travels_with_the_report() -> None:
    report = stop_of(lambda y: (y * 0).log().mean()).report
    known = unpacked(packed(report))
    assert known.made_by is not None and packed(known) == packed(report)
    assert json.loads(packed(report))["made_by"]["operator"] == "LogBackward0"


@pytest.mark.parametrize("makes", [nn.MSELoss(), lambda y, goal: (y - goal).square().mean()])
def test_a_bad_target_is_named_with_its_first_bad_element_and_row(
    makes: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    model = nn.Linear(6, 3)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        goal = torch.randn(8, 3)
        goal[5, 2] = float("nan")
        makes(model(torch.randn(8, 6)), goal).backward()
    text = " ".join(str(stop.value).split())
    assert "first bad element of goal is [5, 2], in row 5: 1 of 8 rows holds NaN" in text
    assert "try 1. goal was not finite before the loss read it" in text


def test_what_is_computed_between_two_models() -> None:
    first, second = nn.Linear(6, 3), nn.Linear(3, 2)
    with fastcheck.install(first, second), pytest.raises(fastcheck.OverflowDetected) as stop:
        y = first(torch.randn(8, 6))
        second(y / (y.norm(dim=-1, keepdim=True) * 0))
    made, text = stop.value.report.made_by, " ".join(str(stop.value).split())
    assert stop.value.culprit.verdict is fastcheck.types.Verdict.ARRIVED
    assert made is not None and made.operator == "DivBackward0"
    assert "the first operator in the graph of input[0] whose result is not finite" in text
    assert "try 1. The divisor other (MulBackward0) is 0 throughout" in text
    assert made.written[0].endswith(": second(y / (y.norm(dim=-1, keepdim=True) * 0))")


@pytest.mark.parametrize("level", ["module", "op"])
def test_a_learning_rate_that_is_nan_is_named(level: str) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    warns = pytest.warns(fastcheck.WatchWarning, match="step 1: SGD has stepped with a learning")
    stops = pytest.raises(fastcheck.OverflowDetected)
    with warns, fastcheck.install(model, level=level), stops as stop:
        for step in range(4):
            optimizer.param_groups[0]["lr"] = float("nan") if step == 1 else 0.1
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
    text = " ".join(str(stop.value).split())
    assert "try 1. SGD has stepped with a learning rate of nan" in text
    assert "has no steps, or that takes a root of what is below 0 past its end." in text
    assert "lr 0.1" not in text


@pytest.mark.parametrize(
    ("kind", "setting", "said"),
    [
        ("SGD", {"lr": -0.1}, "a learning rate of -0.1, as a schedule gives that goes on past"),
        ("SGD", {"momentum": 1.2}, "a momentum of 1.2: it has to be below 1"),
        ("SGD", {"weight_decay": 50.0}, "a weight decay of 50 at a learning rate of 0.1: with a"),
        ("AdamW", {"weight_decay": 50.0}, "a weight decay of 50 at a learning rate of 0.1: with a"),
        ("Adam", {"weight_decay": -5.0}, "a weight decay of -5: below 0 it makes weights grow"),
        ("Adam", {"betas": (0.9, 1.0)}, "a beta of 1: it has to be at least 0 and below 1"),
        ("RMSprop", {"eps": -1.0}, "an eps of -1: below 0 it may make a divisor 0"),
        ("Adam", {"weight_decay": 50.0}, ""),
        ("Adamax", {"betas": (0.9, 1.0)}, ""),
        ("SGD", {"momentum": 1.0, "weight_decay": 5.0}, ""),
    ],
)
@pytest.mark.parametrize("level", ["module", "op"])
def test_a_setting_at_which_nothing_can_train_comes_first(
    level: str, kind: str, setting: dict[str, Any], said: str
) -> None:
    """It is warned of, too: as a rule the weights stay finite for long."""
    model = nn.Linear(6, 3)
    optimizer = getattr(torch.optim, kind)(model.parameters(), 0.1)
    with pytest.warns() as caught, fastcheck.install(model, level=level):
        warnings.warn("one of several", stacklevel=1)
        with pytest.raises(fastcheck.OverflowDetected) as stop:
            for step in range(4):
                optimizer.param_groups[0].update(setting if step else {})
                optimizer.zero_grad()
                (model(torch.randn(8, 6)) / float(step < 3)).square().mean().backward()
                optimizer.step()
    text = " ".join(str(stop.value).split())
    assert (f"try 1. {kind} has stepped with {said}" in text) == bool(said)
    is_warned = any(f"step 1: {kind} has stepped with {said}" in str(w.message) for w in caught)
    assert is_warned == bool(stop.value.report.fault) == bool(said)


class _Growing(nn.Module):
    """Returns what it is given times a number that grows from call to call."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.factor *= 2.0**14
        return x * self.factor


class _Block(nn.Module):
    """May leave its norm out."""

    def __init__(self, calls_norm: bool, act: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8).requires_grad_(calls_norm)
        self.act, self.calls_norm = act, calls_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.norm(x) if self.calls_norm else x)


@pytest.mark.parametrize("calls_norm", [True, False])
def test_a_norm_that_is_never_called_is_named_where_numbers_grow(calls_norm: bool) -> None:
    model = nn.Sequential(_Block(True, nn.Tanh()), _Block(calls_norm, _Growing()))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-30)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.arange(16.0).view(2, 8)).mean().backward()
            optimizer.step()
    assert stop.value.report.silent_norms == (() if calls_norm else ("1.norm (LayerNorm)",))
    is_named = "1.norm (LayerNorm) was never seen running" in " ".join(str(stop.value).split())
    assert is_named == (not calls_norm)


def test_a_loss_that_is_an_argument_is_named_with_the_call() -> None:
    weight = torch.tensor(0.0).log()

    def backward(loss: torch.Tensor) -> torch.Tensor:
        loss.backward()
        return loss.detach().requires_grad_()

    made = stop_of(lambda y: backward(-(y * weight).mean())).report.made_by
    assert made is not None
    assert made.variable.startswith(f"loss, an argument of backward, which runs from {__file__}:")
    assert made.variable.endswith(
        "stop_of(lambda y: backward(-(y * weight).mean())).report.made_by"
    )


@pytest.mark.parametrize("name", ["LogBackward0", "RsqrtBackward0", "MulBackward0", "VarBackward0"])
def test_of_a_node_that_has_kept_nothing_nothing_is_known(name: str) -> None:
    saved = SavedByNode(name, 0, (True,), {}, [])
    assert made_again.made_bad(name, saved.values) is None
    assert kept_graph._result_of(saved) is None


def test_a_quotient_of_an_infinity_was_not_made_by_the_division() -> None:
    values = {"self": torch.tensor([math.inf, 1.0, 1.0]), "other": torch.tensor([0.0, 0.0, 1.0])}
    found = made_again.made_bad("DivBackward0", values)
    assert found is not None and found.tolist() == [False, True, False]


def test_a_weight_that_the_loss_alone_reads() -> None:
    """It is no module's input, and was finite when it was read before its update."""
    model = nn.Linear(4, 2)
    model.scale = nn.Parameter(torch.ones(2))
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for x in batches(3, 4):
            (model(x) * model.scale).sum().backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
            with torch.no_grad():
                model.scale.div_(0).mul_(0)
    assert stop.value.culprit.site.key == "scale"
    assert "no longer is" in stop.value.culprit.reason


def test_the_row_of_a_target_at_op_level() -> None:
    model = nn.Linear(4, 2)
    target = torch.rand(6, 2).log().numpy()
    target[4, 1] = -math.inf
    with fastcheck.install(model, level="op"), pytest.raises(fastcheck.OverflowDetected) as stop:
        y = torch.from_numpy(target)
        nn.functional.l1_loss(model(torch.ones(6, 4)), y).backward()
    text = " ".join(str(stop.value).split())
    assert "it may be this one. The first bad element of y is [4, 1], in row 4: 1 of 6" in text


def test_a_variable_that_is_assigned_from_itself() -> None:
    """Curt-Park/rainbow-is-all-you-need#17: the line before has made it."""

    model = nn.Linear(8, 8)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        weight = torch.zeros(8) ** -0.4
        weight = weight / weight.max()
        (weight * model(torch.rand(4, 8))).mean().backward()
    made = stop.value.report.made_by
    assert made is not None
    assert re.search(r"test_made_by.py:(\d+) or \d+ in test_a_variable", made.variable)
    assert "** -0.4; weight = weight / weight.max()" in made.variable
    assert "a negative power of 0 Inf" in " ".join(str(stop.value).split())


def test_a_target_of_a_function_that_is_finite_everywhere() -> None:
    """tensorflow/addons#914: the ratio of a padded box is 0/0, that of a prediction is not."""
    box = torch.zeros(8)

    def loss(y: torch.Tensor) -> torch.Tensor:
        return (torch.atan(y[0]) - torch.atan(box / box)).square().mean()

    made = maker_of(loss)
    assert (made.operator, made.how.partition(":")[0]) == (
        "",
        "SubBackward0 in the graph of the loss",
    )
    assert "its operand with a graph is finite" in made.how
    assert "torch.atan(box / box)" in " ".join(made.written)


def test_what_an_operand_without_a_graph_was_taken_from() -> None:
    """MONAI/GenerativeModels#489: a table of a schedule is NaN at its first step, and a step in the
    loop takes it.
    """
    table = torch.ones(20)
    table[0] = float("nan")
    unread = torch.full((20,), float("nan"))
    model = nn.Linear(8, 1)
    x, at = torch.rand(4, 8), torch.tensor([3, 0, 2, 5])
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        weighted = table[at] * model(x)[:, 0].square()
        loss = weighted.mean()
        loss.backward()
    assert unread.isnan().all()
    made = stop.value.report.made_by
    assert made is not None and made.variable.startswith("table, assigned at ")
    assert "weighted was assigned from table, which is not finite either" in made.how
    assert "The first bad element of table is [0], in row 0: 1 of 20 rows" in made.how

    def step() -> None:
        weighted = table[at] * model(x)[:, 0].square()
        weighted.mean().backward()

    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        step()
    made = stop.value.report.made_by
    assert made is not None and made.variable == "table in step"


@pytest.mark.parametrize("divides", [True, False])
def test_a_hook_on_a_gradient(divides: bool) -> None:
    """One that divides a gradient by its norm of 0; or has no line that makes NaN of numbers."""
    model = nn.Linear(8, 2)

    def by_norm(gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.norm()

    def added(gradient: torch.Tensor) -> torch.Tensor:
        return gradient + math.inf

    model.weight.register_hook(by_norm if divides else added)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for factor in (1, 0):
            (factor * model(torch.rand(4, 8))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    made = stop.value.report.made_by
    is_told = made is not None and made.how.startswith("weight has a hook of the program")
    assert is_told is divides
    assert made is None or "in by_norm: return gradient / gradient.norm()" in made.written[0]


@pytest.mark.parametrize("is_made_before", [False, True])
def test_a_root_that_where_hides_is_named_not_what_has_read_it(is_made_before: bool) -> None:
    """flowjax#239: a spline outside of its domain. ``is_made_before``: 0/0 made the NaN."""
    model, bounds = nn.Linear(8, 3), torch.tensor([1.0, 1.0, 0.0])
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        y = model(torch.rand(4, 8)).sigmoid()
        inside = torch.tensor([True, True, False])
        spread = (y * bounds) / (y * bounds) if is_made_before else y + 2 * bounds - 1.5
        depth = torch.where(inside, spread.sqrt().log(), torch.zeros_like(y))
        depth.mean().backward()
    made = stop.value.report.made_by
    assert made is not None
    assert made.operator == ("DivBackward0" if is_made_before else "SqrtBackward0")
    told = " ".join(str(stop.value).split())
    if not is_made_before:
        assert "known not to be finite, in as many elements as LogBackward0 has read" in told
        assert "NaN (or it read NaN, which is not held): clamp before" in told


@pytest.mark.parametrize("size", [torch.square, torch.abs])
@pytest.mark.parametrize("is_table", [False, True])
def test_minus_infinity_of_which_a_square_or_a_magnitude_is_made(
    size: Loss, is_table: bool
) -> None:
    """The log of a depth of 0, and that of a schedule at its end, beside a mask that does no harm:
    what is infinite in the loss was -Inf before.
    """
    logs = torch.arange(8.0).log()
    mask = torch.zeros(8).index_fill(0, torch.tensor(3), -math.inf)

    def loss(y: torch.Tensor) -> torch.Tensor:
        masked = (y + mask).softmax(-1).square().mean()
        value = y.sigmoid() * logs + 0.5 if is_table else logs - y
        return size(value).mean() + masked

    made = maker_of(loss)
    assert made.how.startswith(f"{'Mul' if is_table else 'Sub'}Backward0")
    if is_table:
        assert "that has no graph (other)" in made.how and "-Inf alone, as the log" in made.how
    else:
        assert "logs - y" in " ".join(made.written) and made.result is not None
        assert made.result["neginf_count"] == made.result["numel"] / 8


def test_minus_infinity_whose_square_nobody_made_is_not_named() -> None:
    """A power of -1 makes 0 of -Inf, and exp of a power of 3, too: another one made the NaN."""
    logs = torch.arange(8.0).log()

    def loss(y: torch.Tensor) -> torch.Tensor:
        beside = (logs - y.abs()).pow(-1).mean() + (logs - y).pow(3).exp().mean()
        return beside + (y * 0 / (y[:, :1] * 0)).mean()

    assert maker_of(loss).operator == "DivBackward0"
