"""Tensors that can not be read, and what the error has to name."""

from __future__ import annotations

import warnings
from typing import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from support.helpers import DEVICE


def freed() -> torch.Tensor:
    x = torch.ones(1000, device=DEVICE)
    x.untyped_storage().resize_(0)
    return x


def shrunk() -> torch.Tensor:
    x = torch.ones(1000, device=DEVICE)[10:]
    x.untyped_storage().resize_(400)
    return x


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3, device=DEVICE)


def quiet(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


UNREADABLE: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "sparse": (lambda: torch.ones(3).to_sparse(), "(?i)sparse"),
    "sparse_csr": (lambda: torch.ones(3, 3).to_sparse_csr(), "(?i)sparse"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        "quantized",
    ),
    "meta": (lambda: torch.ones(3, device="meta"), "meta"),
    "fake": (fake, "fake"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "(?i)nested|jagged",
    ),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), "(?i)mkldnn"),
    "freed": (freed, "storage"),
    "shrunk": (shrunk, "storage"),
}
