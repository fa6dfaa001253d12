"""level="op": an overflow in backward names the line of its forward, without sync="call"."""

from __future__ import annotations

import linecache
import threading
from typing import Any, Callable, Optional

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastcheck
from support.programs.op_level import model_with, train
from support.programs.training import Apply, change_gradient, stopped

pytestmark = pytest.mark.usefixtures("op_observer")


def source(stop: fastcheck.OverflowDetected) -> str:
    """The text of the line that the culprit names, and its function."""
    assert stop.culprit.site.direction == "backward"
    place, _, function = stop.culprit.line.rpartition(" in ")
    path, _, number = place.rpartition(":")
    return f"{linecache.getline(path, int(number)).strip()} in {function}"


def fault_of(model: nn.Module, **options: Any) -> str:
    monitor = fastcheck.install(model, level="op", record="stats")
    try:
        return source(stopped(train, model, 1, **options))
    finally:
        monitor.remove()


def where_trap(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = torch.where(x > 1e9, torch.log(x * 0), y)  # log
    return z + 1


def root_at_zero(x: torch.Tensor) -> torch.Tensor:
    y = (x * 0).abs()
    y = torch.sqrt(y)  # root
    return x + y


def complex_division(x: torch.Tensor) -> torch.Tensor:
    z = torch.complex(x, x)
    zero = torch.complex(x * 0, x * 0) * 1e-30
    z = torch.where(x > 1e9, z / zero, z)  # division
    return z.real + z.imag


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = (x * 0).abs()
    y[:, 1:].sqrt_()  # view
    return x + y


FAULTS = [
    (where_trap, "# log in where_trap"),
    (root_at_zero, "# root in root_at_zero"),
    (complex_division, "# division in complex_division"),
    (in_place, "# view in in_place"),
]


@pytest.mark.parametrize(("function", "line"), FAULTS, ids=[f.__name__ for f, _ in FAULTS])
def test_the_line_is_that_of_the_forward(function: Any, line: str) -> None:
    assert fault_of(model_with(function)).endswith(line)


def test_also_of_a_later_step() -> None:
    model = model_with(lambda x: torch.sqrt(x.abs() + 1))
    fastcheck.install(model, level="op", record="stats")

    def before(step: int) -> None:
        if step == 3:
            model[1].function = root_at_zero

    stop = stopped(train, model, 5, before)
    assert stop.step == 3
    assert source(stop).endswith("# root in root_at_zero")


def test_a_layer_of_torchs_own() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            nn.init.constant_(self.linear.weight, 1e30)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1e-30
            y = self.linear(y)  # layer
            return y + x

    model = nn.Sequential(nn.Linear(8, 8), Block())
    assert fault_of(model, loss=lambda y: y.sum() * 1e20).endswith("# layer in forward")


def test_what_is_computed_before_the_forward() -> None:
    """The step of the observer begins with the model's forward."""
    scale = nn.Parameter(torch.zeros(4, 4))
    model = model_with(lambda x: x)
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.0)
    fastcheck.install(model, level="op", record="stats")

    def loop() -> None:
        for step in range(4):
            optimizer.zero_grad()
            target = torch.sqrt(scale.abs() + (step < 2))  # target
            value = (model(torch.ones(4, 8)) - target).square().mean()
            value.backward()
            optimizer.step()

    assert source(stopped(loop)).endswith("# target in loop")


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # torch's takes any arguments
        (x,) = ctx.saved_tensors
        zero = x * 0
        return gradient / zero  # wrong


def test_a_function_whose_backward_is_wrong() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            torch.sqrt(x.abs())  # sees the number of the function's node
        y: torch.Tensor = Wrong.apply(x)
        return y

    model = model_with(function)
    fastcheck.install(model, level="op", record="stats")
    stop = stopped(train, model, 1)
    assert source(stop).endswith("# wrong in backward")
    assert stop.culprit.site.module == "1"


def test_an_op_that_makes_no_node_is_not_the_forward_of_a_function() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch.sqrt(x.detach().abs())  # its number is that of the function's node
        y: torch.Tensor = Wrong.apply(x)
        return y

    model = model_with(function)
    fastcheck.install(model, level="op", record="stats")
    stop = stopped(train, model, 1)
    assert source(stop).endswith("# wrong in backward")
    assert "sqrt" not in str(stop.culprit.site.op)


def test_a_hook_on_a_gradient() -> None:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 0  # hook

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(hook)
        return y

    assert fault_of(model_with(function)).endswith("# hook in hook")


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("is_module", [False, True])
def test_under_checkpointing(use_reentrant: bool, is_module: bool) -> None:
    inner = Apply(root_at_zero) if is_module else root_at_zero

    def function(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(inner, x, use_reentrant=use_reentrant)
        return y

    model = model_with(function)
    if is_module:
        model[1].inner = inner
    assert fault_of(model).endswith("# root in root_at_zero")


def test_a_gradient_of_a_gradient() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        x = y.float() * 0
        (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        return y.sum() + gradient.square().sum().sqrt()  # penalty

    assert fault_of(model_with(lambda x: x), loss=loss).endswith("# penalty in loss")


def test_a_second_derivative_of_an_op_goes_back_to_its_call() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        x = (y.float() * 0).abs() + 1e-30
        root = x**0.5  # half
        (gradient,) = torch.autograd.grad(root.sum(), x, create_graph=True)
        return y.sum() + (gradient * 1e-20).sum()

    assert fault_of(model_with(lambda x: x), loss=loss).endswith("# half in loss")


def test_two_threads() -> None:
    """Each has numbers of its own, which are the same."""
    model = model_with(lambda x: x)
    stops: list[Optional[fastcheck.OverflowDetected]] = []
    fastcheck.install(model, level="op", record="stats")
    ready = threading.Barrier(2)

    def run(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x = torch.ones(4, 8, requires_grad=True)
        try:
            y = function(x) if function is root_at_zero else torch.exp(x)
            ready.wait()
            y.sum().backward()
            float(x.grad.sum())  # type: ignore[union-attr]  # it has one
        except fastcheck.OverflowDetected as stop:
            stops.append(stop)

    threads = [threading.Thread(target=run, args=(f,)) for f in (torch.exp, root_at_zero)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not stops:
        stops.append(stopped(train, model, 1))
    assert stops[0] is not None
    assert source(stops[0]).endswith("# root in root_at_zero")


def test_code_that_is_gone_by_the_time_of_backward() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        names: dict[str, Any] = {"torch": torch}
        text = "def made(x):\n    y = (x * 0).abs()\n    return x + torch.sqrt(y)\n"
        exec(compile(text, "made.py", "exec"), names)
        y: torch.Tensor = names.pop("made")(x)
        return y

    model = model_with(function)
    fastcheck.install(model, level="op", record="stats")
    stop = stopped(train, model, 1)
    assert stop.culprit.line == "made.py:3 in made"


def test_a_change_of_the_gradient_in_a_lambda() -> None:
    model = model_with(lambda x: change_gradient(x, lambda g: g / 0 * 0))  # lambda
    assert fault_of(model).endswith("# lambda in <lambda>")


def test_ops_that_run_while_a_line_is_looked_up_are_not_observed() -> None:
    """Finalizers run where Python does. ``line`` also begins another run, as a finalizer may."""
    observer = fastcheck._C.op_observer()
    culprit, restarts = torch.zeros(4), [False]

    def line() -> str:
        torch.linalg.vector_norm(torch.ones(3)).exp()
        if restarts[0]:
            observer.stop(observer.run())
            observer.start(1, str)
            torch.ones(3).exp()
        return "a line"

    observer.start(1, line)
    try:
        torch.log(culprit)
        assert observer.next_seq() == 2, "log, and what it reads"
        assert [one["line"] for one in observer.take()[1]] == ["a line"]
        restarts[0] = True
        torch.log(culprit)
        assert (observer.next_seq(), observer.take()[1]) == (0, []), "of the run before"
        torch.log(culprit)
        assert [one["line"] for one in observer.take()[1]] == [""]
    finally:
        observer.stop(observer.run())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("scale", [-1.0, 0.0], ids=["forward", "backward"])
def test_the_line_is_none_of_a_compiled_graph(backend: str, scale: float) -> None:
    """A finding of backward has the line of its forward's call, which is looked up elsewhere."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x).abs().add(1).mul(scale).sqrt()

    def call(x: torch.Tensor) -> Any:
        return compiled(x)

    def run() -> None:
        call(torch.ones(2, 8)).sum().backward()

    model = Model()
    compiled = torch.compile(model, backend=backend)
    with fastcheck.install(model, level="op"):
        stop = stopped(run)
    # What stands in the place of forward() has its name, and none of its lines but the first.
    line = call.__code__.co_firstlineno + 1
    assert stop.culprit.line == f"{__file__}:{line} in call"
