"""Tests of batches that are images as they are stored."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastcheck


@pytest.mark.parametrize(
    ("kind", "is_told"),
    [
        ("as stored", True),
        ("last", True),
        ("dense", True),
        ("divided", False),
        ("divided within", False),
        ("norm", False),
        ("norm first", False),
        ("frozen", False),
        ("darker", False),
    ],
)
def test_images_as_they_are_stored(kind: str, is_told: bool) -> None:
    """``last``: channels are; ``frozen``: as the shift by a mean that is a convolution."""
    torch.manual_seed(0)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            first = nn.Linear(768, 8) if kind == "dense" else nn.Conv2d(3, 8, 3)
            first.requires_grad_(kind != "frozen")
            norm = nn.BatchNorm2d(3 if kind == "norm first" else 8)
            after = nn.ReLU() if kind == "dense" else nn.AdaptiveAvgPool2d(1)
            parts = {"norm": [first, norm], "norm first": [norm, first]}.get(kind, [first])
            self.body = nn.Sequential(*parts, after, nn.Flatten(), nn.Linear(8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if kind == "last":
                x = x.permute(0, 3, 1, 2)
            return self.body(x / 255 if kind == "divided within" else x)

    model = Network()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 1e-6)
    with fastcheck.install(model) as monitor:
        for _ in range(10):
            shape = {"last": (8, 16, 16, 3), "dense": (8, 768)}.get(kind, (8, 3, 16, 16))
            x = torch.randint(0, 200 if kind == "darker" else 256, shape).float()
            optimizer.zero_grad()
            F.cross_entropy(
                model(x / 255 if kind == "divided" else x), torch.arange(8) % 4
            ).backward()
            optimizer.step()
    found = [event for event in monitor.watch.events if "as images are stored" in event.text]
    assert len(found) == is_told and not any(event.is_warning for event in found)
    assert all("and body.0 (" in event.text and "from 0 to 255" in event.text for event in found)
