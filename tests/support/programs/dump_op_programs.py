"""Steps of single operators, for dumps: their dtypes, numbers, arguments, layouts and memory."""

from __future__ import annotations

import contextlib
import warnings
from typing import Callable

import torch
from torch import nn

from support.programs.dumping import Step


def dtypes() -> Step:
    def step() -> None:
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int8):
            x = torch.arange(6).reshape(2, 3).to(dtype)
            (x + x).t().contiguous()
            x.clone().ne(0).to(dtype)
        z = torch.randn(4, dtype=torch.complex64)
        z.conj().mul(2)
        z.conj().imag.neg()
        torch.zeros(3, dtype=torch.float8_e4m3fn).view(torch.uint8).bool().logical_not()
        torch.full((2,), 2**62).mul(3)

    return step


def numbers() -> Step:
    inf, nan = float("inf"), float("nan")

    def step() -> None:
        x = torch.randn(3, 4)
        x.masked_fill(x > 0, -inf).softmax(-1)
        x.clamp(min=-1e-30, max=inf).nan_to_num(nan=nan)
        x.add(1e22).mul(0.1).div(3, rounding_mode="floor").pow(-0.0)
        torch.full((2,), nan)
        x.isnan(), x.log().isnan()
        torch.arange(0, 1, 0.25)
        torch.linspace(0, 1, 3)

    return step


def arguments() -> Step:
    def step() -> None:
        x = torch.randn(2, 3, 4)
        generator = torch.Generator().manual_seed(3)
        torch.randn(2, generator=generator)
        torch.empty(2, 3, memory_format=torch.contiguous_format, device="cpu").fill_(1)
        x.to(memory_format=torch.preserve_format, dtype=torch.float64)
        x.sum(dim=(0, 2), keepdim=True, dtype=torch.float64)
        x.flip(())
        x.scatter_reduce(0, torch.zeros(2, 3, 4, dtype=torch.int64), x, reduce="amax")
        x[torch.tensor([1]), :, torch.tensor([0, 2])].mul(True)
        x[None, ..., 1:2].expand(5, 2, 3, 1).sum()
        torch.cat([x, x[:1]]), torch.stack((x, x)), torch.einsum("abc,abc->b", x, x)
        torch.split(x, [1, 2], dim=1)
        torch._foreach_mul([x, x + 1], [2.0, 3])
        torch._foreach_mul([x.to(torch.complex64)] * 2, [2.0, 3j])
        torch._foreach_add_([torch.zeros(2) for _ in range(70)], [float(i) for i in range(70)])
        torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")
        nn.functional.interpolate(x, scale_factor=1.5)

    return step


def written() -> Step:
    def step() -> None:
        x, out = torch.zeros(4, 4), torch.empty(4, 4)
        x.add_(1).t_().mul_(2)
        torch.mm(x, x, out=out)
        torch.max(x, 0, out=(torch.empty(4), torch.empty(4, dtype=torch.int64)))
        x[1] = 3
        x[:, ::2].copy_(out[:, ::2])
        x.index_put_((torch.tensor([0]), torch.tensor([1])), torch.tensor(5.0), accumulate=True)
        x.resize_(8, 8)
        x.zero_()
        x.data.add_(1)
        x.exp()
        x.numpy()[...] = 7
        x.exp()

    return step


def memory_that_nobody_wrote_to() -> Step:
    def step() -> None:
        x = torch.zeros(2, 4).new_empty(2, 4)
        x.shape, x.view(8)
        y = torch.empty(8)
        y[:4].fill_(1)
        y.view(2, 4)
        y[4:].fill_(2)
        y.add(1)
        torch.empty(0).add(1)
        torch.empty_like(y).zero_().exp()
        for _ in range(3):
            torch.empty(1000)
            torch.ones(1000).sin()  # at the address of what was freed

    return step


def other_layouts() -> Step:
    def step() -> None:
        x = torch.eye(3)
        x.to_sparse().mul(2).to_dense()
        torch.zeros(3, device="meta").add(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its end has been announced
            torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).relu()
        freed = torch.ones(100)
        freed.untyped_storage().resize_(0)
        freed.view(10, 10)
        with torch.inference_mode():
            x.add(1).mul_(2)
        with torch.no_grad():
            x.requires_grad_().add(1)
        embedding = nn.Embedding(5, 3, sparse=True)
        embedding(torch.tensor([1, 1, 4])).sum().backward()

    return step


def freed_memory() -> Step:
    freed = torch.ones(1000)

    def step() -> None:
        freed.untyped_storage().resize_(0)
        torch.ops.aten.is_same_size(freed, freed)

    return step


def errors_in_between() -> Step:
    def step() -> None:
        with contextlib.suppress(RuntimeError):
            torch.ones(2) + torch.ones(3)
        with contextlib.suppress(IndexError):
            torch.ones(2).sum(4)
        torch.ones(2).sin()

    return step


def more_than_fits() -> Step:
    x = torch.ones(3)

    def step() -> None:
        y = x
        for _ in range(700):
            y = y.sin()
        torch._foreach_exp([torch.ones(1) + i for i in range(1500)])

    return step


OP_PROGRAMS: list[Callable[[], Step]] = [
    dtypes,
    numbers,
    arguments,
    written,
    memory_that_nobody_wrote_to,
    other_layouts,
    freed_memory,
    errors_in_between,
    more_than_fits,
]
