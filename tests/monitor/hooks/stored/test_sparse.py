"""The values of sparse tensors are read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fastcheck
from support.programs.training import stopped, where

pytestmark = [
    pytest.mark.usefixtures("fresh_start"),
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC)"),
]

NAN = float("nan")
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": torch.Tensor.to_sparse,
    "coalesced": lambda x: x.to_sparse().coalesce(),
    "csr": torch.Tensor.to_sparse_csr,
}


class Graph(nn.Module):
    """One layer of a graph network; ``adjacency``: sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(adjacency, self.linear(x))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Graph(), Graph()

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, adjacency), adjacency)


def train(model: nn.Module, layout: Callable[[torch.Tensor], torch.Tensor], bad: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        dense = (torch.rand(5, 5) > 0.5).float() + torch.eye(5)
        if step == bad:
            dense[0, 0] = NAN
        optimizer.zero_grad()
        model(torch.randn(5, 4), layout(dense)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
class TestInputs:
    def test_a_nan_in_one_is_the_batchs(
        self, layout: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        model = Deep()
        fastcheck.install(model)
        stop = stopped(train, model, layout, 2)
        assert where(stop.culprit) == ("", "input", "input[1].values", "arrived")
        assert (stop.step, stop.culprit.record["nan_count"]) == (2, 1)

    def test_one_that_is_finite_is_read_once(
        self, layout: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        model = Deep()
        monitor = fastcheck.install(model)
        train(model, layout, -1)
        read = [str(monitor.sites[r["site"]]) for r in monitor.records() if r["step"] == 1]
        assert [name for name in read if "values" in name] == ["Deep · forward · input[1].values"]
        assert not monitor.events


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.SGD])
@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_nan_in_the_weights_of_the_ids(optimizer: type, is_hidden: bool) -> None:
    """``is_hidden``: the loss does not show it; the gradient of the embedding does."""
    model = nn.EmbeddingBag(10, 4, mode="sum", sparse=True)
    fastcheck.install(model)

    def loop() -> None:
        updates = optimizer(model.parameters(), lr=0.01)
        for step in range(4):
            weights = torch.rand(6)
            if step == 2:
                weights[1] = NAN
            updates.zero_grad()
            ids, offsets = torch.randint(0, 10, (6,)), torch.tensor([0, 3])
            found = model(ids, offsets, per_sample_weights=weights)
            loss = found.nan_to_num().square().mean() if is_hidden else found.square().mean()
            loss.backward()
            updates.step()

    stop = stopped(loop)
    assert where(stop.culprit) == ("", "input", "input.per_sample_weights", "arrived")
    assert stop.step == 2
