"""The operator that made the numbers of a module-level stop, found in what is still in memory."""

from __future__ import annotations

import itertools
import json
import math
import random
import weakref
from typing import Any, Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastcheck
from fastcheck.log.reader import read_log
from fastcheck.monitor import loss_graph
from fastcheck.monitor.loss_graph import search_derivatives
from fastcheck.monitor.session.derivatives import (
    DECOMPOSITIONS,
    DERIVATIVES,
    Derivatives,
    SavedByNode,
)
from fastcheck.record.statistics import statistics_of
from fastcheck.report.build import report_from_log
from fastcheck.report.message import packed, unpacked
from fastcheck.report.render import headline
from fastcheck.report.stop_report import MadeBy
from support.programs.training import batches

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")

Loss = Callable[[torch.Tensor], torch.Tensor]


def stop_of(loss: Loss, **options: Any) -> fastcheck.OverflowDetected:
    """The stop of a run whose loss is ``loss(y)``, where y are positive logits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Softplus())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fastcheck.install(model, **options), pytest.raises(fastcheck.OverflowDetected) as stop:
        for x in batches(2):
            optimizer.zero_grad()
            loss(model(x)).backward()
            optimizer.step()
    return stop.value


def maker_of(loss: Loss, **options: Any) -> MadeBy:
    made = stop_of(loss, **options).report.made_by
    assert made is not None
    return made


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
    "a sum in half": (lambda y: (y.half() + 6e4).sum().float(), "SumBackward0"),
    "a product": (lambda y: ((y * 1e30) * (y * 1e30)).sum(), "MulBackward0"),
    "a Function of one's own": (lambda y: Halve.apply(y).sum() * 2, "HalveBackward"),
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


def test_its_inputs() -> None:
    made = maker_of(lambda y: (y.sum(-1) / (y[:, 0] * 0)).mean())
    inputs = {name: statistics_of(record) for name, record in made.inputs}
    assert set(inputs) == {"self", "other"}
    assert (inputs["other"].zero_count, inputs["other"].numel) == (4, 4)
    assert inputs["self"].zero_count == 0


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

    text = " ".join(str(stop_of(weighted)).split())
    assert "try 1. The loss read a tensor that is not finite and has no graph" in text


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
    assert made.variable.startswith("scale, assigned at ") and made.variable.endswith("scale = (")


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


# A gradient, after a finite forward

GRADIENTS: dict[str, tuple[Loss, str, str]] = {
    "root of 0": (lambda y: (y * 0).sqrt().mean(), "SqrtBackward0", "is infinite at 0"),
    "a power below 1": (lambda y: ((y * 0) ** 0.5).sum(), "PowBackward0", "(x + eps) ** p"),
    "an exponent that is learned": (
        lambda y: ((y * 0) ** (y[0, 0] * 0 + 0.5)).sum(),
        "PowBackward1",
        "(x + eps) ** p",
    ),
    "acos of 1": (lambda y: (y * 0 + 1).acos().mean(), "AcosBackward0", "clamp(-1 + 1e-4"),
    "where behind a root": (
        lambda y: torch.where(y > 0, y, (y - 9).sqrt()).mean(),
        "SqrtBackward0",
        "The result of sqrt was NaN (of a negative number)",
    ),
    "where behind log": (
        lambda y: torch.where(y > 0, y, (y * 0).log()).mean(),
        "LogBackward0",
        "derivative of log is infinite at 0",
    ),
    "where behind exp": (
        lambda y: torch.where(y > 1e9, (y + 100).exp(), y).mean(),
        "ExpBackward0",
        "0 * Inf is NaN",
    ),
    "where behind a quotient": (
        lambda y: torch.where(y > 0, y, y / (y * 0)).mean(),
        "DivBackward0",
        "divides by n or its square",
    ),
    "Inf over a temperature": (
        lambda y: (y.masked_fill(y > 0.7, -torch.inf) / y.mean()).exp().sum(),
        "DivBackward0",
        "The dividend holds Inf",
    ),
    "equal eigenvalues": (
        lambda y: torch.linalg.eigh(torch.eye(8) + (y.T @ y) * 0)[1].square().sum(0).norm(),
        "LinalgEighBackward0",
        "differences of eigenvalues",
    ),
    "equal singular values": (
        lambda y: torch.linalg.svd(torch.eye(8) + (y.T @ y) * 0)[0][0].sum(),
        "LinalgSvdBackward0",
        "differences of",
    ),
    "a length of nothing": (
        lambda y: torch.hypot(y * 0, y * 0).sum(),
        "HypotBackward0",
        "divides by its result",
    ),
    "ctc of a class that is masked": (
        lambda y: nn.functional.ctc_loss(
            torch.stack([y] * 5).masked_fill(torch.arange(8) == 7, -torch.inf).log_softmax(-1),
            torch.ones(len(y), 2, dtype=torch.long),
            torch.full((len(y),), 5),
            torch.full((len(y),), 2),
        ),
        "CtcLossBackward0",
        "20 NaN or Inf: the gradient of CTC is NaN there",
    ),
    "logsumexp of a masked row": (
        lambda y: torch.stack([y, y - torch.inf]).logsumexp(-1).clamp_min(-5).mean(),
        "LogsumexpBackward0",
        "A row of nothing but -inf",
    ),
    "where behind softmax": (
        lambda y: torch.where(y > 1e9, (y - torch.inf).softmax(-1), y).mean(),
        "SoftmaxBackward0",
        "softmax over nothing but -inf",
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_operator_whose_derivative_is_not_finite(name: str) -> None:
    loss, operator, advice = GRADIENTS[name]
    stop = stop_of(loss)
    made = stop.report.made_by
    assert stop.report.culprit.site.direction == "backward"
    assert made is not None and made.operator == operator and made.is_backward
    assert made.inputs and operator in str(stop)
    assert advice in " ".join(str(stop).split())


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("Atanh", lambda y: (y * 0 + 1).atanh()),
        ("Div", lambda y: y.detach() / (y * 0)),
        ("Reciprocal", lambda y: 1 / (y * 0)),
        ("Log", lambda y: (y * 0).log()),
        ("Pow", lambda y: (y * 0) ** -0.5),
    ],
)
def test_what_forward_made_infinite_comes_before_the_derivative(name: str, make: Loss) -> None:
    """The loss is clamped, and backward multiplies the infinity by 0."""
    stop = stop_of(lambda y: (make(y) - y.detach()).square().clamp(0, 9).mean())
    made = stop.report.made_by
    assert stop.culprit.site.direction == "backward"
    assert made is not None and made.operator == f"{name}Backward0" and not made.is_backward
    assert "in 32 of 32 elements, as many as PowBackward0 has read" in made.how


def test_what_a_masked_class_adds_to_the_loss() -> None:
    def smoothed(y: torch.Tensor) -> torch.Tensor:
        logits = y.masked_fill(torch.arange(8) == 7, -torch.inf)
        target = torch.zeros(len(y), dtype=torch.long)
        return nn.functional.cross_entropy(logits, target, label_smoothing=0.1)

    for options in ({}, {"level": "op"}):
        text = " ".join(str(stop_of(smoothed, **options)).split())
        assert "4 -Inf: a class that is masked with -Inf has a log-probability of -Inf" in text


def test_derivatives_are_those_of_torch() -> None:
    """Where the table says infinite, torch's own gradient is not finite, and nowhere else."""

    def against(loss: Callable[..., torch.Tensor], target: float) -> Loss:
        return lambda x: loss(x, torch.tensor(target).half())

    losses = [
        *(nn.functional.mse_loss, nn.functional.huber_loss, nn.functional.smooth_l1_loss),
        *(nn.functional.binary_cross_entropy_with_logits, nn.functional.soft_margin_loss),
    ]
    functions: list[Callable[..., torch.Tensor]] = [
        *(torch.acos, torch.acosh, torch.asin, torch.atanh, torch.div, torch.erfinv, torch.exp),
        *(torch.exp2, torch.expm1, torch.hypot, torch.log, torch.log10, torch.log1p, torch.log2),
        *(torch.logit, torch.mul, torch.reciprocal, torch.rsqrt, torch.sqrt, torch.sinh),
        *(torch.cosh, torch.lgamma, torch.logaddexp, torch.xlogy),
        *(against(*both) for both in itertools.product(losses, (0.0, 1.0, math.inf, math.nan))),
        lambda x: torch.complex(x.float() * 1e-25, x.float() * 1e-25).angle().half(),
        lambda x: x**0.5,
        lambda x: x**2,
        lambda x, y: x**y,
        lambda x, y: torch.addcdiv(x, x, y),
        lambda x: torch.stack([x, x]).softmax(0)[0],
        lambda x: torch.stack([x, x]).log_softmax(0)[0],
        lambda x: torch.stack([x, x]).logsumexp(-1),
        lambda x: torch.stack([x, x])[None].logsumexp((0, 1), keepdim=True)[0, 0],
    ]
    points = (0.0, 0.5, 1.0, -1.0, 2.0, 200.0, float("inf"), -float("inf"), 1e-3)
    met = set()
    for function in functions:
        of_two = (torch.div, torch.hypot, torch.mul, torch.logaddexp, torch.xlogy)
        count = 1 + (function in of_two)
        count = getattr(getattr(function, "__code__", None), "co_argcount", count)
        for values in itertools.product(points, repeat=count):
            xs = [torch.tensor(value).half().requires_grad_() for value in values]
            y = function(*xs)
            derivatives = Derivatives()
            derivatives.note([y])
            found = search_derivatives(derivatives.graphs)
            gradients = [
                gradient
                for given in (0.0, 1.0)
                for gradient in torch.autograd.grad(
                    y, xs, torch.tensor(given).half(), retain_graph=True
                )
            ]
            is_bad = any(not bool(one.isfinite()) for one in gradients)
            assert (found is not None) == is_bad, (function, values, gradients)
            met.update([] if found is None else [found.operator])
    assert met == DERIVATIVES.keys() - DECOMPOSITIONS - {"CtcLossBackward0"}  # no half


def test_what_is_kept_for_derivatives_is_small_and_gone_after_the_step() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    roots: list[Any] = []

    def step() -> None:
        y = model(torch.rand(4, 8)).sigmoid()
        large = torch.rand(3000, 3000).requires_grad_().sqrt()
        root = y.sqrt()
        roots.append(weakref.ref(root))
        (root.mean() + large.mean()).backward()

    with fastcheck.install(model) as monitor:
        derivatives = monitor._session.backwards.derivatives
        step()
        (graph,) = derivatives.graphs
        # 36 MB are too much.
        assert [(one.name, one.values["result"].shape) for one in graph] == [
            ("SqrtBackward0", (4, 8))
        ]
        assert roots[0]() is None  # nor is the graph held
        assert graph[0].values["result"].grad_fn is None
        step()
        assert len(derivatives.graphs) == 2
        optimizer.step()
        step()
        assert len(derivatives.graphs) == 1


def test_bounds_of_what_is_kept_for_derivatives() -> None:
    def kept(loss: torch.Tensor) -> list[str]:
        derivatives = Derivatives()
        derivatives.note([loss])
        return [saved.name for graph in derivatives.graphs for saved in graph]

    near = torch.zeros(()).requires_grad_().sqrt()
    for _ in range(35):
        near = near + 1
    assert kept(near) == ["SqrtBackward0"]
    assert kept(near + 1) == []
    large = torch.zeros(3 << 20).requires_grad_()
    assert len(kept(large.exp().sum())) == 1
    assert len(kept(large.exp().sum() + large.sqrt().sum())) == 1  # both are 24 MB
    root = torch.zeros(4).requires_grad_().sqrt()
    loss = root.sum()
    root.detach().zero_()  # backward could not read it either
    assert kept(loss) == []


def test_leaves_do_not_hide_what_is_kept_for_derivatives() -> None:
    leaves = [torch.zeros(()).requires_grad_() for _ in range(100)]
    loss = torch.stack(leaves).sum() + leaves[0].sqrt().neg().mean()
    derivatives = Derivatives()
    derivatives.note([loss])
    found = search_derivatives(derivatives.graphs)
    assert found is not None and found.operator == "SqrtBackward0"


def test_what_hooks_have_packed_is_not_unpacked_for_derivatives() -> None:
    y = torch.rand(4).requires_grad_()
    unpacked: list[Any] = []

    def unpack(tensor: Any) -> Any:
        unpacked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        loss = y.sqrt().sum()
    derivatives = Derivatives()
    derivatives.note([loss])
    assert derivatives.graphs == [[]] and unpacked == []


# The call that the stop interrupts, run again


class Block(nn.Module):
    """A model that makes a NaN when ``is_on``: batch norm, dropout, a counter and a cache."""

    def __init__(self, bad: Loss) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.drop, self.lstm = nn.Dropout(0.5), nn.LSTM(8, 8, batch_first=True)
        self.calls, self.cache, self.bad, self.is_on = 0, [torch.zeros(1)], bad, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.cache.append(x.detach())
        self.cache[0].add_(random.random())
        x = self.drop(self.norm(self.first(x)))
        x = x + self.lstm(x.unsqueeze(1))[0].squeeze(1)
        if self.is_on:
            x = self.bad(x)
        return self.last(x)


def stop_of_model(
    model: Any, steps: int = 3, loss: Loss = torch.mean, **options: Any
) -> fastcheck.OverflowDetected:
    optimizer = torch.optim.Adam(model.parameters())
    with fastcheck.install(model, **options), pytest.raises(fastcheck.OverflowDetected) as stop:
        for index, x in enumerate(batches(steps)):
            model.is_on = index == steps - 1
            optimizer.zero_grad()
            loss(model(x)).backward()
            optimizer.step()
    return stop.value


def negative_root(x: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(-x.abs() - 1)


def test_the_operator_in_a_call() -> None:
    seen = []

    def bad(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.detach().clone())
        return negative_root(x)

    torch.manual_seed(0)
    stop = stop_of_model(Block(bad))
    made = stop.report.made_by
    assert made is not None and made.operator == "aten.sqrt"
    assert torch.equal(*seen)  # the same dropout
    assert made.line.startswith(f"{__file__}:") and made.line.endswith("in negative_root")
    (name, record), *_ = made.inputs
    largest = float((-seen[0].abs() - 1).max())
    assert name == "self" and statistics_of(record).max == largest
    assert made.result is not None and statistics_of(made.result).nan_count == 32
    assert "Block was run again" in str(stop)


def test_an_operator_that_read_infinities_too_made_more_of_them() -> None:
    def masked_twice(x: torch.Tensor) -> torch.Tensor:
        lowest = torch.full((1, 8), torch.finfo(torch.float16).min, dtype=torch.float16)
        mask = torch.cat([lowest, lowest + lowest])  # its second row is -Inf
        return (x[:2].half() * 2000 + mask).softmax(-1).float().log()

    stop = stop_of_model(Block(masked_twice))
    made = stop.report.made_by
    assert made is not None
    assert [statistics_of(record).inf_count for _, record in made.inputs] == [0, 8]
    assert made.how.startswith(
        "aten.add.Tensor made NaN or Inf in addition to those that it read: Block"
    )


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The states of two runs are the same; lists under "values" and "gradients" hold tensors."""
    assert found.keys() == expected.keys()
    for name, known in expected.items():
        if name == "generator":
            assert torch.equal(found[name], known)
        elif name not in ("values", "gradients"):
            assert found[name] == known, name
        else:
            assert len(found[name]) == len(known)
            for one, other in zip(found[name], known):
                assert (one is None) == (other is None)
                assert one is None or torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_a_call_is_run_on_copies() -> None:
    """Everything is as a run without the search leaves it, bit for bit."""

    def state_after(find_operator: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        random.seed(0)
        model = Block(negative_root)
        before = nn.Linear(8, 8)
        model.norm.register_forward_hook(lambda *_: None)
        hooks = [dict(module._forward_hooks) for module in model.modules()]
        objects = {name: id(value) for name, value in vars(model).items()}
        optimizer = torch.optim.Adam(model.parameters())
        stop = fastcheck.Stop(find_operator=find_operator)
        with fastcheck.install(model, stop=stop), torch.autocast("cpu", torch.bfloat16):
            with pytest.raises(fastcheck.OverflowDetected) as raised:
                for index, x in enumerate(batches(3)):
                    model.is_on = index == 2
                    optimizer.zero_grad()
                    y = before(x)
                    model(y).float().square().mean().backward()
                    optimizer.step()
            assert torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
        found = raised.value.report.made_by
        assert (found is not None) == find_operator
        y.sum().backward()  # the graph in front of the call is whole
        assert hooks == [dict(module._forward_hooks) for module in model.modules()]
        assert objects["cache"] == id(model.cache) and objects["_modules"] == id(model._modules)
        tensors = [*model.parameters(), *model.buffers(), *before.parameters(), *model.cache]
        return {
            "values": [tensor.detach().clone() for tensor in tensors],
            "gradients": [p.grad for p in [*model.parameters(), *before.parameters()]],
            "versions": [tensor._version for tensor in tensors],
            "generator": torch.get_rng_state(),
            "random": random.getstate(),
            "calls": model.calls,
            "names": [list(vars(module)) for module in model.modules()],
        }

    assert_same(state_after(True), state_after(False))


def test_hooks_of_the_call_itself_do_not_run_twice() -> None:
    model = Block(negative_root)
    seen: list[int] = []

    def halve(module: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
        seen.append(module.calls)
        return args[0] / 2

    model.register_forward_pre_hook(halve)
    made = stop_of_model(model).report.made_by
    assert made is not None and made.operator == "aten.sqrt"
    assert seen == [0, 1, 2]


def test_code_between_submodules() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x) / (x * 0))

    made = stop_of_model(Mixed()).report.made_by
    assert made is not None and made.operator == "aten.div.Tensor"
    assert {name: statistics_of(one).zero_count for name, one in made.inputs}["other"] == 32


def test_an_input_that_was_written_in_place() -> None:
    class Writing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return super().forward(x)

    made = stop_of_model(Writing(negative_root)).report.made_by
    assert made is not None and made.operator == ""
    assert "could not be run again: input[0] was written in place since" in made.how


def test_an_error_of_the_second_run_is_said() -> None:
    class Once(Block):
        ran: set[int] = set()  # noqa: RUF012  # state that no module holds

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.is_on and self.ran:
                raise LookupError("only once")
            self.ran.update([1] if self.is_on else [])
            return super().forward(x)

    made = stop_of_model(Once(negative_root)).report.made_by
    assert made is not None and made.operator == ""
    assert "could not be run again: LookupError: only once" in made.how


def test_a_second_run_that_is_finite_is_not_held_against_the_stop() -> None:
    seen: list[int] = []

    def once(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return negative_root(x) if len(seen) == 1 else x

    made = stop_of_model(Block(once)).report.made_by
    assert made is not None and made.operator == ""
    assert "no operator in it could be named" in made.how and "finite" not in made.how


def test_it_can_be_switched_off() -> None:
    stop = stop_of_model(Block(negative_root), stop=fastcheck.Stop(find_operator=False))
    assert stop.report.made_by is None


# A call that is over, run again forward and backward


def where_root(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 9, x, (x * 0).sqrt())


def one_row(x: torch.Tensor) -> torch.Tensor:
    return x + 0 * x[:1].detach().var(0)


class Deep(nn.Module):
    """The root of 0 is farther from the loss than what is kept of its graph."""

    def __init__(self, bad: Loss) -> None:
        super().__init__()
        self.block, self.last, self.is_on = Block(bad), nn.Linear(4, 4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.block.is_on = self.is_on
        x = self.block(x)
        for _ in range(80):
            x = x + 1e-3
        return self.last(x)


@pytest.mark.parametrize("count", ["origin", "all"])
def test_the_operator_of_a_backward_in_a_module(count: str) -> None:
    """count="all" stops within the backward, in a hook."""
    torch.manual_seed(0)
    stop = stop_of_model(Deep(where_root), stop=fastcheck.Stop(count=count))
    made = stop.report.made_by
    assert made is not None and made.operator == "aten.sqrt" and made.is_backward
    assert made.line.startswith(f"{__file__}:") and made.line.endswith("in where_root")
    assert dict(made.inputs).keys() == {"self", "other"}
    assert statistics_of(dict(made.inputs)["other"]).zero_count == 32
    text = " ".join(str(stop).split())
    assert "(in SqrtBackward0) made it" in text
    assert "Deep was run again on its inputs, forward and backward, with random gradients" in text
    assert "The derivative of sqrt is infinite at 0" in text


def test_a_backward_is_run_on_copies() -> None:
    """Everything is as a run without the search leaves it, bit for bit."""

    def state_after(find_operator: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        random.seed(0)
        model = Deep(where_root)
        seen: list[str] = []
        model.block.norm.register_full_backward_hook(lambda *_: seen.append("backward"))
        model.block.first.weight.register_hook(lambda _: seen.append("gradient"))
        model.register_forward_pre_hook(lambda *_: seen.append("forward"))
        stop = fastcheck.Stop(find_operator=find_operator)
        found = stop_of_model(model, stop=stop).report.made_by
        assert (found is not None and found.operator == "aten.sqrt") == find_operator
        tensors = [*model.parameters(), *model.buffers(), *model.block.cache]
        return {
            "values": [tensor.detach().clone() for tensor in tensors],
            "gradients": [parameter.grad for parameter in model.parameters()],
            "versions": [tensor._version for tensor in tensors],
            "generator": torch.get_rng_state(),
            "random": random.getstate(),
            "calls": model.block.calls,
            "seen": seen,
        }

    assert_same(state_after(True), state_after(False))


def test_the_gradient_of_a_parameter_that_is_used_by_itself() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.last, self.is_on = nn.Parameter(torch.zeros(8)), nn.Linear(8, 4), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(x * self.scale.sqrt() if self.is_on else x)

    stop = stop_of_model(Scaled())
    made = stop.report.made_by
    assert stop.report.culprit.site.role == "param_grad"
    assert made is not None and made.operator == "aten.sqrt" and made.line.endswith("in forward")


def test_a_buffer_that_its_module_has_made_non_finite() -> None:
    class Norm(nn.Module):
        variance: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("variance", torch.ones(8))
            self.is_on = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.variance.lerp_(x[: 1 if self.is_on else 4].var(0), 0.1)
            return x

    model = nn.Sequential(nn.Linear(8, 8), Norm())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for index, x in enumerate(batches(4)):
            model[1].is_on = index == 2
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    made = stop.value.report.made_by
    assert made is not None and made.operator == "aten.var.correction"
    text = " ".join(str(stop.value).split())
    assert "In 1: aten.var.correction made NaN or Inf of finite values" in text
    assert "var of one element is 0/0" in text and "Buffer 1.variance keeps" in text


class Running(nn.Module):
    """Divides by what it has counted before this call. The count is a buffer."""

    seen: torch.Tensor

    def __init__(self, written: str) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(()))
        self.written = written

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.detach().mean() * 0 / self.seen
        if self.written == "in place":
            self.seen += len(x)
        elif self.written == "by .data":
            self.seen.data += len(x)
        else:
            self.seen = self.seen + len(x)
        return x + scale


@pytest.mark.parametrize("written", ["in place", "by .data", "replaced"])
@pytest.mark.parametrize("when", [0, 2])
def test_a_call_runs_again_with_its_buffers_as_they_were(written: str, when: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Running(written), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for index, x in enumerate(batches(4)):
            if index == when:
                model[1].seen.data.zero_()
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    made = stop.value.report.made_by
    assert stop.value.step == when
    assert made is not None and made.operator == "aten.div.Tensor" and "in 1 made it" in made.how
    assert float(model[1].seen) == 4  # that of the run itself


def test_a_part_that_runs_again_leaves_the_buffers_beside_it() -> None:
    class Root(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 0).log()

    class Task(nn.Module):
        """A whole step within a call."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.root = nn.Linear(8, 8), Root()
            self.optimizers = [torch.optim.SGD(self.parameters(), 0.1)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.root(self.linear(x).detach())
            (self.linear(x).sum() + y.sum()).backward()
            self.optimizers[0].step()
            return y  # type: ignore[no-any-return]

    model = nn.Sequential(Running("in place"), Task())
    seen = model[0].seen
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        model(torch.ones(4, 8))
    made = stop.value.report.made_by
    assert made is not None and "1 was run again" in made.how
    assert model[0].seen is seen and float(seen) == 5


def test_the_infinities_that_a_maximum_over_nothing_leaves() -> None:
    class Pool(nn.Module):
        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(~keep, -math.inf).amax(1)

    pool, head = Pool(), nn.Linear(1, 2)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    with fastcheck.install(head, pool), pytest.raises(fastcheck.OverflowDetected) as stop:
        for x in batches(2):
            keep = torch.ones(4, 8, dtype=torch.bool)
            keep[1] = False
            optimizer.zero_grad()
            head(pool(x, keep)[:, None]).mean().backward()
            optimizer.step()
    made = stop.value.report.made_by
    assert stop.value.culprit.site.module == "Pool"
    assert (
        made is not None and made.operator == "aten.amax" and "left -Inf in its result" in made.how
    )
    assert "check that no row is masked whole" in str(stop.value)


def test_the_log_of_0_in_a_target_is_not_what_the_loss_made() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        goal = torch.tensor([1.0, 0.0, 2.0, 1.0]).log()
        nn.functional.smooth_l1_loss(model(torch.ones(1, 4)), goal[None]).backward()
    text = " ".join(str(stop.value).split())
    assert "SmoothL1LossBackward0 in the graph of the loss read it in a tensor that has no" in text
    assert "The first bad element of target is [0, 1]" in text
    assert "It holds -Inf alone, as the log of 0 is" in text
    assert "while what it read was" not in text


def test_a_buffer_that_was_never_finite_is_blamed_in_training() -> None:
    class Rotary(nn.Module):
        cos: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cos", torch.full((8,), math.inf).cos())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.cos

    model = nn.Sequential(nn.Linear(8, 8), Rotary(), nn.Linear(8, 1))
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        model(torch.ones(2, 8)).mean().backward()
    assert (stop.value.culprit.site.role, stop.value.culprit.site.label) == ("buffer", "cos")
    assert "it was non-finite when it was first read" in stop.value.culprit.reason


def test_a_weight_that_no_optimizer_holds() -> None:
    """An average of weights, corrected by 0 at first."""
    student, teacher = nn.Linear(4, 2), nn.Linear(4, 2).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    with fastcheck.install(student, teacher), pytest.raises(fastcheck.OverflowDetected) as stop:
        for step in range(3):
            x = torch.ones(2, 4)
            optimizer.zero_grad()
            (student(x) - teacher(x)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                for p in teacher.parameters():
                    p.mul_(0).div_(torch.tensor(1 - 0.9**step))
    assert stop.value.culprit.reason.endswith("no optimizer that has stepped holds it")
    assert stop.value.report.learning_rates == ()


def test_the_backward_of_a_criterion_that_is_installed() -> None:
    class Distance(nn.Module):
        def forward(self, x: torch.Tensor, is_on: bool) -> torch.Tensor:
            y = x.abs().sqrt() if is_on else x
            for _ in range(80):
                y = y + 1e-3
            return y.mean()

    model, criterion = nn.Sequential(nn.Linear(8, 8)), Distance()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = fastcheck.install(model, criterion)
    with pytest.raises(fastcheck.OverflowDetected) as stop:
        for index, x in enumerate(batches(4)):
            optimizer.zero_grad()
            criterion(model(x) * (index != 2), index == 2).backward()
            optimizer.step()
    made = stop.value.report.made_by
    assert made is not None and made.operator == "aten.sqrt" and made.line.endswith("in forward")
    assert "Distance was run again on its inputs, forward and backward" in made.how
    # The monitor of the run has not seen it.
    assert [one.call.node.path for one in monitor._session.passes.held] == ["", "Distance"]
    monitor.remove()
    assert stop.value.report.event_count == 1


def test_a_call_that_is_not_the_same_again_explains_nothing() -> None:
    class Other(Deep):
        count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Other.count += 1
            return super().forward(x) * Other.count

    stop = stop_of_model(Other(where_root))
    assert stop.report.culprit.site.direction == "backward"
    assert stop.report.made_by is None


class Careful(nn.Module):
    """Has a finite gradient where that of its result is large."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient / (gradient.abs() > 0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.Function.apply(x)
        return result


@pytest.mark.parametrize("is_in_loss", [False, True])
def test_what_only_the_random_gradients_do_is_not_blamed(is_in_loss: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity(), Careful())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for x in batches(3):
            optimizer.zero_grad()
            y = model(x)
            result = y.clone()
            if is_in_loss:
                result.register_hook(lambda g: g.index_fill(0, torch.tensor(0), float("nan")))
            (result.sum() * 0.1).backward()
            model[0].bias.grad[0] = float("nan")
            optimizer.step()
    culprit = stop.value.report.culprit.site
    assert culprit.role == "grad_output" if is_in_loss else culprit.key == "0.bias"
    assert stop.value.report.made_by is None


def test_the_copies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastcheck.monitor.call_again._MOST_BYTES", 1000)
    made = stop_of_model(Block(negative_root)).report.made_by
    assert made is not None and made.operator == ""
    assert "Block was not run again: a copy of its parameters and buffers" in made.how


def test_what_is_held_of_calls() -> None:
    model = nn.ModuleDict({"first": nn.Linear(8, 8), "last": nn.Linear(8, 8)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fastcheck.install(model) as monitor:
        passes = monitor._session.passes
        for _ in range(2):
            x = torch.rand(4, 8)
            y = model["first"](x)
            model["last"](y).mean().backward()
            assert [one.call.node.path for one in passes.held] == ["first", "last"]
            # No graph is held.
            assert passes.held[0].args[0] is x
            assert passes.held[1].args[0].grad_fn is None and passes.held[1].args[0].requires_grad
            optimizer.step()
        del x
        with torch.no_grad():
            model["first"](torch.rand(4, 8))
        assert len(passes.held) == 0
        for _ in range(20):
            model["first"](torch.rand(4, 8))
        assert len(passes.held) == 8
        model["first"](torch.rand((1 << 21) + 1, 8))
        model["first"](torch.rand(4, 8))
        assert [len(one.args[0]) for one in passes.held] == [4]
        model["first"](torch.rand(4, 8)).exp().mean().backward()
        derivatives = monitor._session.backwards.derivatives
        assert len(derivatives.graphs) == 1
    assert not passes.held and not derivatives.graphs  # remove()


@pytest.mark.parametrize("level", ["module", "op"])
def test_a_bad_batch_is_named_with_its_first_bad_element_and_row(level: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fastcheck.install(model, level=level), pytest.raises(fastcheck.OverflowDetected) as stop:
        for step in range(4):
            x = torch.randn(8, 6)
            if step == 2:
                x[5, 2], x[7, 0] = float("nan"), float("inf")
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    text = " ".join(str(stop.value).split())
    assert "first bad element of input[0] is [5, 2], in row 5: 2 of 8 rows hold" in text
    assert "look at the data, not at the model" in text


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
    assert "try 1. The divisor other is 0 throughout" in text
    assert "To find the line, run again" in text


@pytest.mark.parametrize("level", ["module", "op"])
def test_a_learning_rate_that_is_nan_is_named(level: str) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fastcheck.install(model, level=level), pytest.raises(fastcheck.OverflowDetected) as stop:
        for step in range(4):
            optimizer.param_groups[0]["lr"] = float("nan") if step == 1 else 0.1
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
    text = " ".join(str(stop.value).split())
    assert "try 1. SGD has stepped with a learning rate of nan" in text
    assert "lr 0.1" not in text


class _Masked(nn.Module):
    """Attention to two keys, of which a mask rules out the second with -Inf, or both."""

    def __init__(self, is_whole: bool) -> None:
        super().__init__()
        self.is_whole, self.attend = is_whole, _Attend()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.tensor([-65504.0, -65504.0]).half()
        mask = mask + torch.tensor([-65504.0 if self.is_whole else 0.0, -65504.0]).half()
        return self.attend(x, mask)


class _Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2, 2).half()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.out((x + mask).softmax(-1))


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_mask_that_did_no_harm_is_not_blamed(is_whole: bool) -> None:
    """Of the mask and the sum the one is, of which the NaN was computed."""
    model = _Masked(is_whole)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        model(torch.full((3, 2), -64.0).half())
    report = stop.value.report
    site, made = report.culprit.site, report.made_by
    assert made is not None
    if is_whole:
        assert (site.module, site.op, site.label) == ("attend", None, "input[1]")
        assert made.site is not None and made.site.module == ""
        return
    assert site == made.site
    assert (site.module, site.module_type, site.op) == ("attend", "_Attend", "aten.add.Tensor")
    assert str(stop.value).startswith("6 -Inf in output of aten.add.Tensor #1 in attend (_Attend)")
    assert "it made infinities beside those that it read" in report.culprit.reason
    assert [one.label for one, _ in report.inputs] == ["self", "other"]
    assert [e.site for e in report.events if e.counted] == [site]
    # The log, and what reads it, have the same verdict.
    assert report.log_path is not None
    log = read_log(report.log_path)
    (event,) = (one for one in log.events if one.counted)
    assert (event.site, event.line, event.verdict) == (
        site,
        report.culprit.line,
        fastcheck.types.Verdict.ORIGIN,
    )
    shown = report_from_log(log, event, "fastcheck")
    assert shown is not None and headline(shown) == headline(report)
    assert [record["neginf_count"] for _, record in shown.inputs] == [0, 1]
    assert unpacked(packed(report)) is not None


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


def test_a_quotient_of_an_infinity_was_not_made_by_the_division() -> None:
    values = {"self": torch.tensor([math.inf, 1.0, 1.0]), "other": torch.tensor([0.0, 0.0, 1.0])}
    found = loss_graph._made_by_node(SavedByNode("DivBackward0", 0, (True, True), values))
    assert found is not None and found.tolist() == [False, True, False]


def test_weights_that_the_loop_itself_breaks() -> None:
    """No optimizer ends a step: the weights were finite earlier in the same one."""
    model = nn.Linear(4, 1)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for x in (torch.ones(2, 4), torch.zeros(2, 4), torch.ones(2, 4)):
            model.zero_grad()
            model(x).square().mean().backward()
            with torch.no_grad():
                model.weight -= 0.1 * model.weight.grad / model.weight.grad.norm()
    text = " ".join(str(stop.value).split())
    assert "it was finite when step 0 began, and no optimizer has stepped since" in text
    assert "A write in this step broke weight" in text and "0/0" in text
    assert "first read" not in text and "check the checkpoint" not in text
