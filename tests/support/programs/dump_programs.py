"""Steps of all kinds, for dumps: each program makes one, alike each time. Those here
train, or transform, wrap or intercept calls; those of dump_op_programs.py call single operators.
"""

from __future__ import annotations

import tempfile
import threading
from typing import Any, Callable

import torch
from torch import nn
from torch._higher_order_ops.cond import cond
from torch.nn.utils import stateless
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fastcheck
from support.programs.dump_op_programs import OP_PROGRAMS
from support.programs.dumping import Step
from support.programs.training import Apply, Net, batches, chain


def trained(model: nn.Module, optimizer: Callable[..., Any], **options: Any) -> Step:
    (x,) = batches(1)
    updates = optimizer(model.parameters(), lr=0.1, **options)

    def step() -> None:
        updates.zero_grad()
        model(x).square().mean().backward()
        updates.step()

    step()  # what the optimizer keeps is there
    return step


def training() -> Step:
    model = nn.Sequential(Net(dropout=0.5), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return trained(model, torch.optim.AdamW)


def lists_of_parameters() -> Step:
    return trained(Net(), torch.optim.AdamW, foreach=True, amsgrad=True)


def fused() -> Step:
    return trained(Net(), torch.optim.Adam, fused=True)


def a_second_root() -> Step:
    model, loss = Net(), nn.MSELoss()
    (x,) = batches(1)
    return lambda: loss(model(x), torch.zeros(4, 4)).backward()


def shared_and_called_twice() -> Step:
    layer = nn.Linear(8, 8)
    model = chain(a=layer, act=nn.ReLU(inplace=True), b=layer)
    (x,) = batches(1)

    def step() -> None:
        (model(x) + model(x)).sum().backward()
        model(x).sum().backward()

    return step


def names_beyond_ascii() -> Step:
    model = nn.ModuleDict({'Größe "1"': nn.Linear(8, 8)})
    model.forward = lambda x: model['Größe "1"'](x)  # type: ignore[method-assign]  # a forward of its own, as users set one
    (x,) = batches(1)
    return lambda: model(x).sum().backward()


def checkpointed(*, reentrant: bool) -> Step:
    inner, head = Net(), nn.Linear(4, 2)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return head(checkpoint(inner, x.requires_grad_(), use_reentrant=reentrant))

    model = Apply(forward)
    (x,) = batches(1)
    return lambda: model(x).sum().backward()


def a_closure_of_the_optimizer() -> Step:
    inner, head = nn.Linear(8, 8), nn.Linear(8, 2)
    optimizer = torch.optim.SGD([*inner.parameters(), *head.parameters()], lr=0.1)
    (x,) = batches(1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = head(checkpoint(inner, x, use_reentrant=False)).sum()
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


def gradients_of_gradients() -> Step:
    x = torch.randn(4, 4, requires_grad=True)

    def step() -> None:
        (g,) = torch.autograd.grad(x.tanh().exp().sum(), x, create_graph=True)
        (g * x).sum().backward()

    return step


def transformed() -> Step:
    model = Net()
    (x,) = batches(1)
    weights = dict(model.named_parameters())

    def step() -> None:
        torch.func.vmap(torch.sin)(x)
        torch.func.grad(lambda t: t.square().sum())(x)
        stateless._functional_call(model, weights, (x,))  # type: ignore[no-untyped-call]  # torch has it untyped
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x)

    return step


def several_threads() -> Step:
    x = torch.ones(3, requires_grad=True)

    def step() -> None:
        y = x.sin()
        other = threading.Thread(target=lambda: y.sum().backward())
        other.start()
        other.join()
        x.cos()

    return step


class Doubled(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has it untyped
    """Makes of each sin two."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.sin.default:
            func(*args, **kwargs)
        return func(*args, **kwargs)


def other_modes() -> Step:
    x = torch.randn(3, requires_grad=True)

    def step() -> None:
        with Doubled():  # type: ignore[no-untyped-call]  # torch has it untyped
            x.sin().sum().backward()
        with FlopCounterMode(display=False):
            torch.ones(2, 2).mm(torch.ones(2, 2))

    return step


def within_another_mode() -> Step:
    step = other_modes()

    def within() -> None:
        mode = Doubled()  # type: ignore[no-untyped-call]  # torch has it untyped
        with mode, tempfile.TemporaryDirectory() as directory, fastcheck.Dumper(directory):
            step()

    return within


def subclasses() -> Step:
    x = torch.randn(3, 3)
    one = TwoTensor(x, x.clone())  # type: ignore[no-untyped-call]  # torch has it untyped

    def step() -> None:
        one.mm(one).sin()
        nn.Parameter(x).exp().sum().backward()

    return step


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # torch's takes any arguments
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # torch's takes any arguments
        (x,) = ctx.saved_tensors
        return g * 3 * x * x


@torch.library.custom_op("fastcheck_tests::tripled", mutates_args=())
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def what_autograd_makes_of_calls() -> Step:
    """What is called is not what runs below autograd, or makes several nodes."""

    def step() -> None:
        xs = [torch.randn(2, 2, requires_grad=True) for _ in range(2)]
        sum(y.sum() for y in torch._foreach_mul(xs, 2.0)).backward()  # type: ignore[union-attr]  # sum() of tensors is a tensor
        x = xs[0]
        y = x.clone()
        y[0].mul_(x[1])
        (y.relu() + Cube.apply(x)).sum().backward()  # type: ignore[no-untyped-call]  # torch has it untyped
        tripled(torch.ones(3)).sin()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.mm(x, x).sum().backward()
        with torch.inference_mode():
            nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).reshape(4)
        z = torch.randn(3, dtype=torch.complex64, requires_grad=True)
        (z.conj() * z).real.sum().backward()
        x.detach().sin_().add_(1)

    return step


def higher_order() -> Step:
    x = torch.ones(2)

    def step() -> None:
        x.sin()
        cond(torch.tensor(True), lambda t: t + 1, lambda t: t - 1, (x,))
        x.sin()

    return step


PROGRAMS: list[Callable[[], Step]] = [
    training,
    lists_of_parameters,
    fused,
    a_second_root,
    shared_and_called_twice,
    names_beyond_ascii,
    a_closure_of_the_optimizer,
    gradients_of_gradients,
    *OP_PROGRAMS,
    transformed,
    several_threads,
    other_modes,
    within_another_mode,
    subclasses,
    what_autograd_makes_of_calls,
    higher_order,
]
