"""override(device="cpu") on the fake accelerator: operators run on the CPU and return to the
device, in forward and, on the device's own thread, in backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import fastcheck
from fakes import fake_device

pytestmark = pytest.mark.fake_accelerator


fake: Any = fake_device.load()
NAME = fake.name()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    fake.synchronize()


@pytest.fixture(scope="module", autouse=True)
def _wrong() -> Iterator[None]:
    """``devicelab::square``, which is wrong on the device alone, and so is its gradient."""
    library = torch.library.Library("devicelab", "DEF")
    library.define("square(Tensor x) -> Tensor")
    library.define("square_backward(Tensor g, Tensor x) -> Tensor")
    library.impl("square", lambda x: x * x, "CPU")
    library.impl("square_backward", lambda g, x: 2 * g * x, "CPU")
    library.impl("square", lambda x: x * x * 1.5, "PrivateUse1")
    library.impl("square_backward", lambda g, x: 7 * g * x, "PrivateUse1")
    yield
    library._destroy()


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.ops.devicelab.square(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.ops.devicelab.square_backward(gradient, *ctx.saved_tensors)


def gradient(around: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.tensor([1.0, 2.0, 3.0]).to(NAME).requires_grad_()
    with around:
        y = _Square.apply(x)
        y.sum().backward()
    assert x.grad is not None
    assert y.device.type == x.grad.device.type == NAME
    return y.detach().cpu(), x.grad.cpu()


def test_forward_and_backward_are_computed_by_the_cpu() -> None:
    y, dx = gradient(contextlib.nullcontext())
    assert y.tolist() == [1.5, 6.0, 13.5]
    assert dx.tolist() == [7.0, 14.0, 21.0]
    chosen = fastcheck.override("devicelab.*", device="cpu")
    y, dx = gradient(chosen)
    assert y.tolist() == [1.0, 4.0, 9.0]
    assert dx.tolist() == [2.0, 4.0, 6.0]
    assert chosen.ran == {"devicelab.square": 1, "devicelab.square_backward": 1}


def test_all_of_a_model() -> None:
    def losses(around: Any) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)).to(NAME)
        optimizer = torch.optim.Adam(model.parameters())
        data = torch.randn(3, 4, 8)
        found = []
        for x in data:
            x = x.to(NAME)
            with around:
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        return found

    chosen = fastcheck.override(device="cpu")
    assert losses(chosen) == pytest.approx(losses(contextlib.nullcontext()), rel=1e-6)
    assert chosen.ran["aten.addmm"] == 6
    assert chosen.ran["aten.relu_"] == 3


def test_dropout_has_the_same_mask() -> None:
    def run(around: Any) -> torch.Tensor:
        torch.manual_seed(1)
        x = torch.full((1000,), 1.1).to(NAME)
        with around:
            return functional.dropout(x, 0.3).cpu()

    y, plain = run(fastcheck.override(device="cpu")), run(contextlib.nullcontext())
    assert torch.equal(y == 0, plain == 0)
    assert 200 < int((y == 0).sum()) < 400


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_random_numbers_of_the_other_generator(dtype: Any) -> None:
    """Those that the CPU draws for the same seed; the device's own advances all the same."""

    def run(device: str, around: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        x = torch.full((200,), 1.1).to(device).requires_grad_()
        torch.manual_seed(5)
        if device != "cpu":
            torch.rand(3, device=device)  # or both would draw the same
        with around:
            y = functional.dropout(x, 0.3)
            y.sum().backward()
            noise = torch.empty(8, device=device).normal_()
            assert x.grad is not None
            made = [y.detach().cpu(), x.grad.cpu(), noise.cpu()]
        return made, torch.rand(4, device=device).cpu()

    chosen = fastcheck.override(device="cpu", dtype=dtype, random=True)
    found, after = run(NAME, chosen)
    plain, plain_after = run(NAME, contextlib.nullcontext())
    assert not torch.equal(plain[2], found[2])
    wanted, _ = run("cpu", contextlib.nullcontext())
    if dtype is None:
        assert all(map(torch.equal, found[:2], wanted[:2]))
        assert torch.equal(found[2], wanted[2])
    assert torch.equal(found[0] == 0, found[1] == 0)
    assert 30 < int((found[0] == 0).sum()) < 90
    assert torch.equal(after, plain_after)
    assert not any("random" in reason for reason in chosen.left_out.values())


def test_bisect_finds_the_wrong_kernel() -> None:
    def run(override: Any) -> float:
        x = torch.linspace(0.0, 1.0, 16).to(NAME).requires_grad_()
        with override:
            y = torch.relu(_Square.apply(x.sin()).exp() - 1).mean()
        return float(y.detach())

    wanted = float((torch.linspace(0.0, 1.0, 16).sin().square().exp() - 1).mean())
    found = fastcheck.bisect(run, lambda value: abs(value - wanted), device="cpu")
    assert found.culprits == ("devicelab.square",)
