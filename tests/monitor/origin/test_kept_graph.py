"""The operator whose derivative is not finite, after a finite forward."""

from __future__ import annotations

import itertools
import math
import weakref
from typing import Any, Callable

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.monitor.origin.kept_graph import search_derivatives, search_operators
from fastcheck.monitor.session.derivatives import (
    DECOMPOSITIONS,
    DERIVATIVES,
    Derivatives,
)
from support.programs.losses import Loss, stop_of

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")


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
    "qr of columns that depend on each other": (
        lambda y: torch.linalg.qr(y[:, :1] * torch.ones(8) * 0)[0].sum(),
        "LinalgQrBackward0",
        "divides by the diagonal of R",
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
    without_half = {"CtcLossBackward0", "LinalgQrBackward0"}
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
            derivatives.note(0, [y])
            found = search_derivatives(derivatives.of(0))
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
    assert met == DERIVATIVES.keys() - DECOMPOSITIONS - without_half


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
        (graph,) = derivatives.of(0)
        # 36 MB are too much.
        assert [(one.name, one.values["result"].shape) for one in graph] == [
            ("SqrtBackward0", (4, 8))
        ]
        assert roots[0]() is None  # nor is the graph held
        assert graph[0].values["result"].grad_fn is None
        step()
        assert len(derivatives.of(0)) == 2
        optimizer.step()
        step()
        assert not derivatives.of(0) and len(derivatives.of(1)) == 1


def test_bounds_of_what_is_kept_for_derivatives() -> None:
    def kept(loss: torch.Tensor) -> list[str]:
        derivatives = Derivatives()
        derivatives.note(0, [loss])
        return [saved.name for graph in derivatives.of(0) for saved in graph]

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
    derivatives.note(0, [loss])
    found = search_derivatives(derivatives.of(0))
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
    derivatives.note(0, [loss])
    assert derivatives.of(0) == [] and unpacked == []


@pytest.mark.parametrize("name", ["pos_weight", "weight", "input"])
def test_a_weight_of_a_loss_that_is_infinite_was_made_before(name: str) -> None:
    """As 99 / 0 of a label without positives; a logit that is infinite has a graph."""
    read = {
        n: torch.ones(4).index_fill(0, torch.tensor(1), math.inf if n == name else 1.0)
        for n in ("pos_weight", "weight", "input")
    }
    y = read.pop("input").requires_grad_() * 1
    loss = nn.functional.binary_cross_entropy_with_logits(y, torch.zeros(4), **read)
    derivatives = Derivatives()
    derivatives.note(0, [loss])
    made = search_operators(derivatives.of(0))
    if name == "input":
        assert made is None
    else:
        assert made is not None and made.operator == ""
        assert f"The first bad element of {name} is [1], in row 1: 1 of 4" in made.how
