"""The advice of runs that stop fits what they do."""

from __future__ import annotations

import math

import pytest
import torch

import fastcheck
from support.operator_reports import said


@pytest.mark.parametrize("level", ["module", "op"])
def test_a_loss_that_overflows_in_float16_is_computed_in_float32(level: str) -> None:
    model = torch.nn.Linear(8, 64).half()
    with fastcheck.install(model, level=level), pytest.raises(fastcheck.OverflowDetected) as stop:
        y = model(torch.ones(16, 8, dtype=torch.float16))
        torch.nn.functional.mse_loss(y, torch.full_like(y, 60.0), reduction="sum").backward()
    text = said(stop.value)
    assert "in float16, which ends at 65,504: a term of it, or their sum" in text
    assert "log(0)" not in text


def test_a_product_between_the_model_and_the_loss_in_float16() -> None:
    model = torch.nn.Linear(8, 64).half()
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        y = model(torch.full((16, 8), 200.0, dtype=torch.float16))
        scores = y @ y.T
        scores.float().mean().backward()
    assert "try 1. MmBackward0 left the range of float16, which ends at 65,504" in said(stop.value)


def test_a_product_may_have_read_what_overflowed_before() -> None:
    """A sum in float16 that the graph does not hold: it holds the factor alone."""
    model = torch.nn.Linear(8, 64).half()
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        y = model(torch.full((16, 8), 90.0, dtype=torch.float16))
        (2.0 * (y.tril() + 3e4).sum()).float().backward()
    text = said(stop.value)
    assert "MulBackward0 left the range" not in text and "numbers up to" not in text
    assert "read Inf, in what is not held, or left the range of float16" in text


@pytest.mark.parametrize("level", ["module", "op"])
def test_lbfgs_without_a_line_search(level: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=30.0)
    x = torch.randn(32, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 100 * x[:, :1] ** 3).square().mean()
        loss.backward()
        return loss

    with fastcheck.install(model, level=level), pytest.raises(fastcheck.OverflowDetected) as stop:
        optimizer.step(closure)
    assert "try 1. Numbers left the range of float32 within a step of LBFGS" in said(stop.value)


def test_an_infinite_batch_is_no_fault_of_lbfgs() -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    batches = iter([torch.randn(8, 4), torch.randn(8, 4), torch.full((8, 4), math.inf)])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(next(batches)).square().mean()
        loss.backward()
        return loss

    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        optimizer.step(closure)
    assert "try 1. The batch was non-finite" in said(stop.value)


@pytest.mark.parametrize("level", ["module", "op"])
def test_an_average_of_weights_that_grows(level: str) -> None:
    torch.manual_seed(0)  # it is read in the first step, and when it is infinite
    model, average = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    stops = pytest.raises(fastcheck.OverflowDetected)
    with fastcheck.install(model, average, level=level, watch=False), stops as stop:
        for _ in range(200):
            x = torch.ones(8, 4)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            for old, new in zip(average.parameters(), model.parameters()):
                old.mul_(3.0).sub_(2.0 * new.detach())
            average(x)
    assert "the sign and the decay of an average of weights" in said(stop.value)
    assert "lower the learning rate" not in said(stop.value)


def test_a_root_of_what_float16_does_not_hold() -> None:
    """The root keeps its result alone."""
    model = torch.nn.Linear(8, 512).half()
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        y = model(torch.full((4, 8), 40.0, dtype=torch.float16))
        norms = y.pow(2).sum(-1).sqrt()
        norms.float().mean().backward()
    assert "try 1. What was given to SqrtBackward0 left the range of float16" in said(stop.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_running_variance_that_grows(dtype: torch.dtype) -> None:
    """In float32 that is data that grows from step to step; float16 ends at the square of 256."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fastcheck.install(model, watch=False), pytest.raises(fastcheck.OverflowDetected) as stop:
        for step in range(60):
            optimizer.zero_grad()
            x = torch.randn(16, 8) * 1.5 ** (step if dtype is torch.float16 else 2 * step)
            model(x.to(dtype)).float().square().mean().backward()
            optimizer.step()
    assert stop.value.culprit.site.label == "running_var"
    first = (
        "keep this norm and its input in float32" if dtype is torch.float16 else "look at the data"
    )
    assert first in said(stop.value).partition("try 1. ")[2].partition(" 2. ")[0]


class Scores(torch.nn.Module):
    """Attention scores in float16 that go on in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.half()
        return (half @ half.T).float().softmax(-1) @ x


def test_a_product_in_float16_that_goes_on_in_float32() -> None:
    model = torch.nn.Sequential(Scores(), torch.nn.Linear(4, 2))
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        model(torch.full((8, 4), 300.0)).sum().backward()
    first = said(stop.value).partition("try 1. ")[2].partition(" 2. ")[0]
    assert "mm left the range of float16, which ends at 65,504" in first
    assert "float32 or bfloat16" in first and "range of float32" not in first


def stopped_by(loss: torch.Tensor) -> str:
    with pytest.raises(fastcheck.OverflowDetected) as stop:
        loss.backward()
    return said(stop.value)


def test_a_difference_of_infinities() -> None:
    """The node of a difference keeps nothing; that of exp has a NaN of a NaN alone."""
    model = torch.nn.Linear(4, 4)
    hidden = torch.full((8, 4), True)
    with fastcheck.install(model):
        scores = model(torch.rand(8, 4)).masked_fill(hidden, -math.inf)
        logs = scores - scores.logsumexp(-1, keepdim=True)
        text = stopped_by(logs.sum())
    assert "why SubBackward0" in text
    assert "try 1. self holds 32 -Inf, of which sub makes NaN" in text and "masked whole" in text
    with fastcheck.install(model):
        rows = model(torch.rand(8, 4)).sum(-1) + torch.full((8,), -math.inf)
        best = torch.stack([rows, rows]).max
        text = stopped_by((torch.full((8,), -math.inf) - best(0).values).exp().sum())
    assert "why SubBackward0" in text and "8 8 0" in text
    assert "try 1. SubBackward0 makes NaN of Inf - Inf alone" in text


def test_the_line_of_a_known_operator_that_keeps_nothing() -> None:
    model = torch.nn.Linear(4, 4)
    with fastcheck.install(model):
        counts = torch.zeros(4)
        logits = model(torch.rand(8, 4)) - torch.log(counts / 8)
        text = stopped_by(torch.nn.functional.cross_entropy(logits, torch.arange(8) % 4))
    assert "variable logits, assigned at" in text
    assert "try 1. Look at the line that assigns it: log(0) is -Inf" in text


def test_a_singular_system() -> None:
    class Solve(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.solve_ex(x @ x.mT, torch.ones(len(x), 4, 1))[0].squeeze(-1)

    model = torch.nn.Sequential(Solve(), torch.nn.Linear(4, 2))
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        model(torch.ones(3, 4, 2)).sum().backward()
    assert "where the matrix is singular or nearly so" in said(stop.value)


@pytest.mark.parametrize("is_of_data", [False, True])
def test_an_update_whose_weights_are_why_the_loss_overflows(is_of_data: bool) -> None:
    """A learning rate of 3e9 for 3e-4: nothing has grown yet but the weights. A target that is NaN
    is NaN whatever they are.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), 3e9)
    target = torch.ones(16, 1)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for _ in range(3):
            difference = model(torch.rand(16, 4)) - target
            loss = difference.abs().mean() if is_of_data else (difference**8).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            target = torch.full((16, 1), math.nan) if is_of_data else target
    text = said(stop.value)
    assert (
        "try 1. An update, or a write by the program, since step 0 took the largest number of"
        in text
    ) is not is_of_data
    assert ("lower the learning rate (it is now Adam: 3.00e+09)" in text) is not is_of_data


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2)])
def test_a_mean_over_no_targets_of_any_shape(shape: tuple[int, ...], level: str) -> None:
    model = torch.nn.Conv1d(3, 4, 1)
    y = torch.full(shape, -100)
    with fastcheck.install(model, level=level), pytest.raises(fastcheck.OverflowDetected) as stop:
        logits = model(torch.rand(1, 3, 8)).reshape(shape[0], 4, *shape[1:])
        torch.nn.functional.cross_entropy(logits, y).backward()
    assert "try 1. A mean over no targets is 0/0: every target is ignore_index" in said(stop.value)


@pytest.mark.parametrize("table", [torch.linspace(0, 1, 4).log()])
def test_a_table_that_was_made_before_the_run_is_no_sample(table: torch.Tensor) -> None:
    model = torch.nn.Linear(4, 4)
    with fastcheck.install(model, level="op"), pytest.raises(fastcheck.OverflowDetected) as stop:
        (model(torch.rand(4, 4)).sigmoid() * table[:, None]).square().mean().backward()
    text = said(stop.value)
    assert "try 1. It was not finite before mul read it (other), and no operator that was" in text
    assert "as a table of a schedule or class weights" in text and "samples" not in text


def test_the_line_of_a_loss_that_holds_a_logarithm_says_more_than_a_list_of_causes() -> None:
    model = torch.nn.Linear(4, 4)
    depth = torch.arange(4.0)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        (depth.log() - model(torch.rand(2, 4))).pow(2).mean().backward()
    text = said(stop.value)
    assert "try 1. Look at the lines that may have made it: log(0) is -Inf" in text
    assert "binary_cross_entropy" not in text


@pytest.mark.parametrize("is_after", [False, True])
def test_when_an_operator_outside_of_the_model_has_run(is_after: bool) -> None:
    """The loss, and an update of the program's own, which comes after backward."""
    model = torch.nn.Linear(4, 2)
    with fastcheck.install(model, level="op"), pytest.raises(fastcheck.OverflowDetected) as stop:
        for _ in range(3):
            model.zero_grad()
            y = model(torch.ones(3, 4))
            (y if is_after else y / torch.zeros(())).sum().backward()
            with torch.no_grad():
                model.weight.sub_(model.weight.grad / torch.zeros(()), alpha=0.1)
    assert "when step 0 (counted from 0), outside of backward()." in said(stop.value)


def test_when_an_operator_of_the_model_has_run() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / (x - x)

    model = Model()
    with fastcheck.install(model, level="op"), pytest.raises(fastcheck.OverflowDetected) as stop:
        model(torch.ones(3, requires_grad=True)).sum().backward()
    assert "when step 0 (counted from 0), in the forward pass." in said(stop.value)


def test_a_buffer_that_was_made_of_a_degree_of_0() -> None:
    class Graph(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.adjacency @ x)

    model = Graph(3, 2)
    inverse = 1 / torch.tensor([1.0, 2.0, 0.0])
    model.register_buffer("adjacency", torch.diag(inverse) @ torch.ones(3, 3))
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        model(torch.ones(3, 3)).sum().backward()
    assert "x/0 is Inf (a count of 0" in said(stop.value).partition(" 2. ")[0]


@torch.jit.script
def sinc(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) / x


def test_a_function_that_torch_jit_has_compiled() -> None:
    model = torch.nn.Linear(4, 2, bias=False)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for factor in (1.0, 1.0, 1.0, 0.0):
            y = sinc(model(torch.ones(3, 4)) * factor)
            y.sum().backward()
    text = said(stop.value)
    assert "DifferentiableGraphBackward: the first operator in the graph" in text
    assert "::" not in text and "a function that torch.jit has compiled" in text
    assert "try 1. Look in that function for 0/0" in text and "PYTORCH_JIT=0" in text


@pytest.mark.parametrize("is_division", [True, False])
def test_the_line_before_a_module_that_is_given_infinity(is_division: bool) -> None:
    def slopes(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x / t

    make = slopes if is_division else (lambda x, t: x.exp())
    model = torch.nn.ModuleDict({"rnn": torch.nn.GRU(3, 2), "head": torch.nn.Linear(2, 1)})
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for size in (1.0, 0.0):
            x, t = torch.full((4, 3), 1.0 + 200 * (size == 0)), torch.full((4, 1), size)
            given = make(x, t)
            model["head"](model["rnn"](given)[0]).sum().backward()
    first = said(stop.value).partition("try 1. ")[2].partition(" 2. ")[0]
    assert ("it divides, and 0/0 is NaN" in first) == is_division
    assert ("No observed module made it" in first) != is_division


@pytest.mark.parametrize("is_derivative", [True, False])
def test_a_division_that_no_line_of_the_program_has(is_derivative: bool) -> None:
    """The derivative of a distance, of points one of which is at the origin."""
    model = torch.nn.Linear(1, 1)

    def radius(point: torch.Tensor) -> torch.Tensor:
        return model(point.square().sum().sqrt()[None])[0]

    slopes = torch.func.vmap(torch.func.grad(radius))
    points = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        if is_derivative:
            slopes(points).square().mean().backward()
        else:
            y = model(points[:, :1])
            (y / points.norm(dim=1)[:, None]).square().mean().backward()
    text = said(stop.value)
    assert "The divisor other is 0 in 1 of 2 elements" in text
    assert ("may be the derivative of a root or a norm, as torch.func" in text) is is_derivative
