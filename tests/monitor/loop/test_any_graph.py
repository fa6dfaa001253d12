"""Checks of a loss's graph, on graphs of operators that were put together at random."""

from __future__ import annotations

import contextlib
import random
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastcheck
from fastcheck.monitor.loop import loss_forms
from fastcheck.monitor.loop.loss_forms import LossForms, classes_of
from support.sampling import IS_WHOLE

Function = Callable[[Tensor], Any]

#: A few raise on some shapes, and are left out there.
OPERATORS: tuple[Function, ...] = (
    *(lambda x: x.mean(dim=None), lambda x: x.mean(None, True), lambda x: x.mean((0, -1))),
    *(lambda x: x.sum(dim=None), lambda x: x.sum(-1, True), lambda x: x.var(None)),
    *(lambda x: x.norm(), lambda x: x.norm(dim=-1), lambda x: x.std(), lambda x: x.prod()),
    *(lambda x: x.softmax(-1), lambda x: x.softmax(0), lambda x: x.log_softmax(0)),
    *(lambda x: x.logsumexp(-1), lambda x: x.max(-1)[0], lambda x: x.amax(), lambda x: x.cumsum(0)),
    *(lambda x: x.transpose(0, -1), lambda x: x.permute(*range(x.dim())[::-1]), lambda x: x[None]),
    *(lambda x: x.reshape(-1), lambda x: x.flatten(0, -2), lambda x: x.unflatten(-1, (-1, 1))),
    *(lambda x: x.squeeze(), lambda x: x.unsqueeze(-1), lambda x: x.select(0, -1)),
    *(lambda x: x[..., :1], lambda x: x[:, -1], lambda x: x.expand(2, *x.shape)),
    *(lambda x: torch.cat((x, x), -1), lambda x: torch.stack((x, x)), lambda x: x.flip(0)),
    *(lambda x: -x, lambda x: x * x, lambda x: 2 * x, lambda x: 1 - x, lambda x: x / x),
    *(lambda x: (1 - (-x).exp()) ** 2 * x, lambda x: (x - x).exp(), lambda x: x.abs() ** 0.5),
    *(lambda x: x ** torch.arange(1, 4)[:, None], lambda x: (x.abs() + 1) ** x, lambda x: 2**x),
    *(lambda x: x * (x < 0.5), lambda x: x * torch.zeros(0), lambda x: x / torch.ones(()) * 0.5),
    *(lambda x: x.clamp(0, 1), lambda x: x.sigmoid(), lambda x: F.leaky_relu(x)),
    *(lambda x: F.dropout(x, 0.5), lambda x: F.normalize(x, dim=-1)),
    *(lambda x: F.layer_norm(x, x.shape[-1:]), lambda x: torch.where(x > 0, x, 0.0)),
    *(lambda x: x.double(), lambda x: torch.complex(x, x).abs(), lambda x: x @ x.mT),
    *(lambda x: F.linear(x, torch.ones(3, x.shape[-1])), lambda x: F.max_pool1d(x, 1)),
    *(lambda x: F.conv1d(x, torch.ones(2, x.shape[1], 1)), lambda x: nn.LSTM(x.shape[-1], 4)(x)[0]),
    *(lambda x: nn.GRU(x.shape[-1], 4, bidirectional=True)(x)[1],),
    *(lambda x: nn.MultiheadAttention(x.shape[-1], 1)(x, x, x)[0],),
    *(
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: nn.Embedding(5, 3)(x.long() % 5),
    ),
)
LOSSES: tuple[Function, ...] = (
    *(Tensor.mean, Tensor.sum, lambda x: x.mean(dim=None), lambda x: x.square().mean()),
    *(lambda x: F.mse_loss(x, torch.rand_like(x)), lambda x: F.l1_loss(x, x.detach() + 1)),
    lambda x: F.mse_loss(x, torch.rand_like(x), reduction="none").sum(),
    lambda x: F.binary_cross_entropy_with_logits(x, torch.rand_like(x)),
    lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long)),
    lambda x: F.kl_div(x.log_softmax(-1), torch.rand_like(x)),
    lambda x: F.cosine_similarity(x, torch.rand_like(x), -1).mean(),
    lambda x: (x ** torch.arange(1, 4)[:, None]).mean(),
    lambda x: F.ctc_loss(x, torch.zeros(x.shape[1], 1).long(), (len(x),) * x.shape[1], (1,)),
    lambda x: F.ctc_loss(x, torch.ones(0).long(), (len(x),) * x.shape[1], (0,) * x.shape[1]),
    lambda x: F.triplet_margin_loss(x, x, torch.rand_like(x)),
)
SHAPES = (
    (),
    (1,),
    (4, 3),
    (3, 1),
    (2, 3, 4),
    (1, 2, 3),
    (3, 3, 3),
    (2, 3, 4, 5),
    (0, 3),
    (2, 0, 4),
)
COUNT = 20_000 if IS_WHOLE else 1_000


@pytest.mark.filterwarnings("ignore")
def test_no_check_fails_on_any_graph() -> None:
    draw, looked = random.Random(0), 0
    torch.manual_seed(0)
    for _ in range(COUNT):
        made: Any = torch.rand(draw.choice(SHAPES), requires_grad=True)
        for function in (*draw.choices(OPERATORS, k=draw.randint(1, 4)), draw.choice(LOSSES)):
            with contextlib.suppress(Exception):
                after = function(made)
                made = after if after.numel() < 5_000 else made
        if made.grad_fn is not None:
            looked += 1
            loss = made.sum() if made.dim() else made
            forms = LossForms(set, set, list)
            forms.look([loss])
            forms.look([loss])
            classes_of([loss])
    assert looked > COUNT / 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("attends", [True, False])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_no_check_fails_on_a_nested_tensor(layout: torch.layout, attends: bool) -> None:
    """One with strides has no shape."""
    x = torch.nested.nested_tensor([torch.rand(2, 16), torch.rand(3, 16)], layout=layout)
    made = nn.Linear(16, 16)(x)
    if attends:
        q = made.view(2, -1, 2, 8).transpose(1, 2)
        q = q if layout is torch.jagged else q.contiguous()
        made = F.scaled_dot_product_attention(q, q, q)
    LossForms(set, set, list).look([made.softmax(-1).values().square().mean()])


def test_a_check_that_fails_ends_looks_at_graphs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(node: Any) -> str:
        raise TypeError("of this check")

    monkeypatch.setattr(loss_forms, "_CHECKS", (("moved", fails),))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.warns(fastcheck.FastcheckWarning) as caught, fastcheck.install(model) as monitor:
        for _ in range(40):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        monitor.flush()
    said = [str(warning.message) for warning in caught]
    assert "fastcheck no longer observes the graph of the loss: TypeError: of this check" in said[0]
    assert any("gradients are not cleared" in text for text in said[1:])
