"""Steps of a model whose optimizer holds other tensors: float32 copies of its parameters, those of
functional_call(), the input of a frozen model; and copies that are not written back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastcheck
from support.warned import warned

pytestmark = pytest.mark.usefixtures("fresh_start")
NOT_OURS = "holds none of the model's parameters"
WRITTEN_BACK = "have to be written back"
Make = Callable[[nn.Module], list[Tensor]]


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(dtype)


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    dtype = next(model.parameters()).dtype
    return F.cross_entropy(model(x.to(dtype)).float(), x[:, :3].argmax(1))


def one_by_one(model: nn.Module) -> list[Tensor]:
    return [p.detach().float().clone() for p in model.parameters()]


def flat(model: nn.Module) -> list[Tensor]:
    return [torch.cat([copy.flatten() for copy in one_by_one(model)])]


def give_gradients(model: nn.Module, copies: list[Tensor]) -> None:
    gradients = [p.grad.float() for p in model.parameters() if p.grad is not None]
    if len(copies) == 1:
        gradients = [torch.cat([gradient.flatten() for gradient in gradients])]
    for copy, gradient in zip(copies, gradients):
        copy.grad = gradient


def write_back(model: nn.Module, copies: list[Tensor]) -> None:
    sizes = [p.numel() for p in model.parameters()]
    parts = copies[0].split(sizes) if len(copies) == 1 else copies
    for parameter, part in zip(model.parameters(), parts):
        parameter.data.copy_(part.view_as(parameter))


@contextmanager
def watched(model: nn.Module, level: str) -> Iterator[tuple[fastcheck.Monitor, list[str]]]:
    with warned() as texts, fastcheck.install(model, level=level) as monitor:
        yield monitor, texts


@pytest.mark.parametrize(("clears", "clips"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("make", [one_by_one, flat])
@pytest.mark.parametrize("level", ["module", "op"])
def test_master_copies_end_steps(level: str, make: Make, clears: bool, clips: bool) -> None:
    torch.manual_seed(0)
    model = mlp(torch.bfloat16)
    copies = make(model)
    optimizer = torch.optim.Adam(copies, 1e-2)
    with watched(model, level) as (monitor, texts):
        for step in range(110):
            loss_of(model, step).backward()
            give_gradients(model, copies)
            if clears:
                model.zero_grad()
            if clips:
                nn.utils.clip_grad_norm_(copies, 1.0)
            optimizer.step()
            write_back(model, copies)
            model.zero_grad()
        losses = [row.loss for row in monitor.step_table()]
        summary = " ".join(monitor.summary().split())
    assert len(losses) == 110
    assert losses[-1] < losses[0]
    assert not texts
    assert f"a step ends where Adam steps: it {NOT_OURS}" in summary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_that_are_not_written_back(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = mlp(dtype)
    copies = one_by_one(model)
    optimizer = torch.optim.Adam(copies, 1e-2)
    with watched(model, "module") as (monitor, texts):
        for step in range(120):
            loss_of(model, step).backward()
            give_gradients(model, copies)
            optimizer.step()
            model.zero_grad()
            if step == 5:
                assert not texts
        assert len(monitor.step_table()) == 120
    assert [WRITTEN_BACK in text for text in texts] == [True]


@pytest.mark.parametrize("level", ["module", "op"])
def test_an_infinite_norm_by_which_gradients_of_copies_are_clipped(level: str) -> None:
    model = mlp(torch.bfloat16)
    copies = one_by_one(model)
    optimizer = torch.optim.SGD(copies, 1e-2)
    with fastcheck.install(model, level=level), pytest.raises(fastcheck.OverflowDetected) as stop:
        for step in range(6):
            (loss_of(model, step) * (1e22 if step == 4 else 1.0)).backward()
            give_gradients(model, copies)
            nn.utils.clip_grad_norm_(copies, 1.0)
            optimizer.step()
            write_back(model, copies)
            model.zero_grad()
    assert stop.value.step == 4
    assert "norm" in str(stop.value.culprit.site) and "infinite norm" in str(stop.value)


def test_a_closure_that_makes_gradients_of_copies() -> None:
    """The first step of such an optimizer ends one, too."""
    torch.manual_seed(0)
    model = mlp()
    copies = one_by_one(model)
    optimizer = torch.optim.LBFGS(copies, 0.1, max_iter=3)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for step in range(6):

            def closure(step: int = step) -> Tensor:
                write_back(model, copies)
                model.zero_grad()
                loss = loss_of(model, step)
                loss = (loss * (step != 4)).sqrt()
                loss.backward()  # type: ignore[no-untyped-call]  # torch has it untyped
                give_gradients(model, copies)
                return loss

            optimizer.step(closure)  # type: ignore[no-untyped-call]  # torch has it untyped
    assert stop.value.step == 4
    assert stop.value.culprit.site.direction == "backward"
    assert "SqrtBackward0" in str(stop.value)
    assert all(bool(copy.isfinite().all()) for copy in copies)


@pytest.mark.parametrize("clips", [False, True])
def test_a_bad_gradient_stops_before_the_copies_are_updated(clips: bool) -> None:
    torch.manual_seed(0)
    model = mlp()
    copies = one_by_one(model)
    optimizer = torch.optim.Adam(copies, 1e-2)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for step in range(6):
            loss_of(model, step).backward()
            if step == 4:
                next(model.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]  # it has a gradient by now
            give_gradients(model, copies)
            if clips:
                nn.utils.clip_grad_norm_(copies, 1.0)
            optimizer.step()
            write_back(model, copies)
            model.zero_grad()
    assert stop.value.step == 4
    assert stop.value.culprit.site.role == "param_grad"
    assert all(bool(copy.isfinite().all()) for copy in copies)


def test_a_gradient_that_was_cleared_is_read_when_backward_ends() -> None:
    torch.manual_seed(0)
    model = mlp()
    copies = one_by_one(model)
    optimizer = torch.optim.Adam(copies, 1e-2)
    first = next(model.parameters())
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for step in range(6):
            if step == 4:
                first.register_hook(lambda gradient: gradient * float("nan"))
            loss_of(model, step).backward()
            give_gradients(model, copies)
            model.zero_grad()
            optimizer.step()
            write_back(model, copies)
    assert stop.value.step == 4
    assert "became NaN while it was computed" in stop.value.culprit.reason
    assert all(bool(copy.isfinite().all()) for copy in copies)


def test_functional_call() -> None:
    torch.manual_seed(0)
    model = mlp()
    held = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam(held.values(), 1e-2)
    with watched(model, "module") as (monitor, texts):
        for _ in range(20):
            x = torch.randn(16, 8)
            loss = torch.func.functional_call(model, held, (x,)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert len(monitor.step_table()) == 20
    assert not texts


def test_the_input_of_a_frozen_model_in_evaluation() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    model.eval().requires_grad_(False)
    picture = torch.randn(4, 8, requires_grad=True)
    optimizer = torch.optim.Adam([picture], 1e-2)
    with watched(model, "module") as (monitor, texts):
        for _ in range(60):
            loss = model(picture).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert len(monitor.step_table()) == 60
    assert not texts


def test_the_optimizer_of_another_model_ends_no_step() -> None:
    """Of two models that are trained in turn one is observed: its own optimizer is known to live
    before it steps.
    """
    torch.manual_seed(0)
    model, other = mlp(), mlp()
    own, others = (torch.optim.Adam(one.parameters(), 1e-2) for one in (model, other))
    with fastcheck.install(model) as monitor:
        for step in range(5):
            for one in (model, other):
                loss_of(one, step).backward()
            others.step()
            own.step()
            own.zero_grad()
            others.zero_grad()
        assert len(monitor.step_table()) == 5
        assert "a step ends where" not in monitor.summary()


@pytest.mark.gpu
def test_master_copies_on_a_gpu() -> None:
    model = mlp(torch.float16).cuda()
    copies = one_by_one(model)
    optimizer = torch.optim.Adam(copies, 1e-3)
    with warned() as texts, fastcheck.install(model) as monitor:
        for _ in range(20):
            x = torch.randn(16, 8, device="cuda", dtype=torch.float16)
            model(x).float().square().mean().backward()
            give_gradients(model, copies)
            optimizer.step()
            write_back(model, copies)
            model.zero_grad()
        monitor.flush()
        assert len(monitor.step_table()) == 20
    assert not texts
