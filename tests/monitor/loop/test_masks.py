"""Tests of masks that torch's attention is given, and of averages whose statistics stay."""

from __future__ import annotations

import copy
import warnings
from typing import Any, Callable

import pytest
import torch
from torch import nn

import fastcheck
from support.told import texts

_ALLOWED = torch.ones(9, 9, dtype=torch.bool).tril()


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor, padding: Any, mask: Any) -> torch.Tensor:
        h = self.embedding(tokens)
        h = self.encoder.layers[0].self_attn(h, h, h, padding, False, mask)[0]
        result: torch.Tensor = self.encoder(h, src_key_padding_mask=padding, mask=mask)
        return result


def told(padding: Any = None, mask: Any = None, pad: int = 0) -> list[str]:
    """The warnings of masks in a call with tokens, and ``pad`` at their end."""
    torch.manual_seed(0)
    tokens = torch.randint(1, 20, (8, 9))
    tokens[torch.arange(9) >= torch.arange(8)[:, None] + 2] = pad
    model = Attends()
    padding = padding(tokens) if callable(padding) else padding
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with fastcheck.install(model) as monitor:
            model(tokens, padding, mask).square().mean().backward()
            monitor.step()
    return [str(one.message) for one in caught if "the mask of " in str(one.message)]


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        (_ALLOWED, "at and below the diagonal"),
        (torch.zeros(9, 9).masked_fill(_ALLOWED, -torch.inf), "at and below the diagonal"),
        (_ALLOWED.float(), "attn_mask is 0 and 1 in torch.float32"),
        (~_ALLOWED, ""),
        (torch.zeros(9, 9).masked_fill(~_ALLOWED, -torch.inf), ""),
        # A window, a bias, and a bias that is learned.
        (~(_ALLOWED & _ALLOWED.T), ""),
        (_ALLOWED.float() * 0.5, ""),
        (torch.zeros(9, 9), ""),
        (_ALLOWED.float().requires_grad_(), ""),
    ],
)
def test_a_mask_of_pairs(mask: torch.Tensor, found: str) -> None:
    said = told(mask=mask)
    assert len(said) == bool(found) and all(found in text for text in said)


@pytest.mark.parametrize(
    ("padding", "pad", "found"),
    [
        (lambda t: t != 0, 0, "it is inverted"),
        (lambda t: t != 3, 3, "it is inverted"),
        (lambda t: torch.zeros(t.shape).masked_fill(t != 0, -torch.inf), 0, "it is inverted"),
        (lambda t: (t != 0).float(), 0, "key_padding_mask is 0 and 1"),
        (lambda t: t == 0, 0, ""),
        (lambda t: torch.zeros(t.shape).masked_fill(t == 0, -torch.inf), 0, ""),
        # Attends to some tokens, which are not at one end; to the first of each row.
        (lambda t: t != 5, 0, ""),
        (lambda t: torch.arange(9).expand(8, 9) > 0, 0, ""),
        (lambda t: torch.zeros(t.shape, dtype=torch.bool), 0, ""),
    ],
)
def test_a_mask_of_padding(padding: Callable[[torch.Tensor], Any], pad: int, found: str) -> None:
    said = told(padding, pad=pad)
    assert len(said) == bool(found) and all(found in text for text in said)


@pytest.mark.parametrize(
    "kind", ["weights alone", "buffers too", "frozen", "in training", "not called"]
)
def test_an_average_that_leaves_out_statistics(kind: str) -> None:
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    teacher = copy.deepcopy(student).train(kind == "in training").requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with fastcheck.install(student, teacher):
            for _ in range(45):
                x = torch.randn(16, 4)
                wanted = x[:, :2] if kind == "not called" else teacher(x)
                optimizer.zero_grad()
                (student(x) - 0.5 * wanted - x[:, :2]).square().mean().backward()
                optimizer.step()
                for mine, other in zip(teacher.parameters(), student.parameters()):
                    mine.data.lerp_(other.data, 0.0 if kind == "frozen" else 0.1)
                if kind == "buffers too":
                    for old, new in zip(teacher.buffers(), student.buffers()):
                        old.data.copy_(new)
    said = [
        str(one.message) for one in caught if "its running statistics have not" in str(one.message)
    ]
    assert len(said) == (kind == "weights alone")
    assert all("1 (BatchNorm1d) is called in evaluation mode" in text for text in said)


@pytest.mark.parametrize(
    ("masked", "is_told"),
    [
        (lambda s, keep: s * keep, True),
        (lambda s, keep: keep.float() * s / 4, True),
        (lambda s, keep: (s * keep) * 0.5 / 2, True),
        (lambda s, keep: s.masked_fill(~keep, -9.0), False),
        (lambda s, keep: s * (1 + keep), False),
        # Rows of padding, and ReLU by hand.
        (lambda s, keep: s * keep[:, :, :1], False),
        (lambda s, keep: s * (s > 0), False),
    ],
)
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_scores_that_are_multiplied_by_a_mask(masked: Any, is_told: bool, function: Any) -> None:
    def program(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        made = model(torch.randn(6, 9, 8))
        keep = torch.ones(9, 9, dtype=torch.bool).tril().expand(6, 9, 9)
        function(masked(made @ made.transpose(1, 2), keep), -1).square().mean().backward()
        optimizer.step()

    said = [text for text in texts(program, 40) if "mask of" in text]
    assert len(said) == is_told and all("multiplies the scores" in text for text in said)
