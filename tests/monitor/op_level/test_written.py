"""Writes in place at op level: what was there before, what was written, and who is blamed."""

from __future__ import annotations

import gc
import io
from typing import Any, Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fastcheck
from fastcheck.types import Verdict
from support.programs.op_level import culprit

pytestmark = pytest.mark.usefixtures("op_observer")

INF = float("inf")
Write = Callable[[torch.Tensor], Any]


def setitem(x: torch.Tensor) -> None:
    x[0, 0] = INF


def index_put(x: torch.Tensor) -> None:
    x[x == x[0, 0]] = INF


def through_data(x: torch.Tensor) -> None:
    x.data[0, 0] = INF


def through_numpy(x: torch.Tensor) -> None:
    x.numpy()[0, 0] = INF


def out(x: torch.Tensor) -> None:
    torch.full((8,), INF, out=x[0])


WRITES: dict[str, Write] = {
    "setitem": setitem,
    "fill_": lambda x: x[0].fill_(INF),
    "masked_fill_": lambda x: x.masked_fill_(torch.eye(6, 8).bool(), INF),
    "index_put_": index_put,
    "copy_": lambda x: x[1].copy_(torch.tensor([INF] + [0.0] * 7)),
    "data": through_data,
    "numpy": through_numpy,
    "out": out,
}


@pytest.mark.parametrize("write", WRITES)
def test_an_infinity_that_is_written_into_the_batch_is_the_batch(write: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    monitor = fastcheck.install(model, level="op")
    with pytest.raises(fastcheck.OverflowDetected) as stop:
        for step in range(3):
            x = torch.randn(6, 8)
            if step == 2:
                WRITES[write](x)
            model(x).square().mean().backward()
            monitor.step()
    event = stop.value.culprit
    assert (event.site.role, event.site.label, event.verdict.name) == (
        "input",
        "input[0]",
        "ARRIVED",
    )
    assert stop.value.step == 2 and event.record["numel"] == 48
    if write not in ("numpy", "data"):  # whose writes no other tensor shows
        assert "test_written.py" in event.reason


@pytest.mark.parametrize("write", WRITES)
def test_an_infinity_that_is_written_into_a_weight_began_there(write: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    monitor = fastcheck.install(model, level="op")
    with pytest.raises(fastcheck.OverflowDetected) as stop:
        for step in range(3):
            if step == 2:
                with torch.no_grad():
                    WRITES[write](model[0].weight)
            model(torch.randn(6, 8)).square().mean().backward()
            monitor.step()
    event = stop.value.culprit
    assert stop.value.step == 2
    if write == "numpy":
        assert event.verdict is Verdict.ARRIVED
    elif write == "copy_":  # of a tensor that no operator has made
        assert (event.site.role, event.site.op) == ("input", "aten.copy_")
    else:
        assert event.verdict is Verdict.ORIGIN and event.site.module == ""
        assert "it was written into 0.weight" in event.reason
    if write != "numpy":
        assert "test_written.py" in event.line


class Bounded(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 2)
        self.bound = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x.clamp(max=self.bound.abs())), self.bound


@pytest.mark.parametrize("value", [INF, -INF])
def test_an_infinity_in_a_parameter_that_is_not_trained_is_a_bound(value: float) -> None:
    model = Bounded()
    monitor = fastcheck.install(model, level="op", overflow_nums=-1)
    for _ in range(3):
        model.bound.fill_(value)
        model(torch.randn(6, 8))[0].square().mean().backward()
        monitor.step()
    monitor.remove()
    assert monitor.event_count == 0


@pytest.mark.parametrize("made", ["mul", "view"])
def test_what_is_computed_of_the_batch_stays_its_operators(made: str) -> None:
    model = nn.Linear(8, 2)
    fastcheck.install(model, level="op")
    with pytest.raises(fastcheck.OverflowDetected) as stop:
        x = torch.randn(6, 8) * 1e30 * 1e30
        model(x if made == "mul" else x[1:]).sum().backward()
    assert stop.value.culprit.site.op == "aten.mul.Tensor"


HIDING: dict[str, Write] = {
    "fill_diagonal_": lambda x: x.fill_diagonal_(-INF),
    "fill_": lambda x: x[:, 0].fill_(-INF),
    "masked_fill_": lambda x: x.masked_fill_(torch.eye(6).bool(), -INF),
    "setitem": lambda x: x.__setitem__((slice(None), 1), -INF),
    "index_put_": lambda x: x.__setitem__(torch.eye(6).bool(), -INF),
    "data": lambda x: x.data[0].fill_(-INF),
    "numpy": lambda x: x.detach().numpy().__setitem__((0, 0), -INF),
    "out": lambda x: torch.full((6,), -INF, out=x.detach()[0]),
}


@pytest.mark.parametrize("write", HIDING)
def test_a_nan_is_not_lost_where_an_infinity_is_written_into_its_tensor(write: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    fastcheck.install(model, level="op", stop=fastcheck.Stop(protect_weights=False))
    with pytest.raises(fastcheck.OverflowDetected) as stop:
        z = F.normalize(model(torch.randn(6, 8)), dim=-1)
        scores = torch.sub(z, z * float("nan")) @ z.T
        with torch.no_grad() if write == "out" else torch.enable_grad():
            HIDING[write](scores)
        logits = torch.cat([scores, scores], 1)
        F.cross_entropy(logits, torch.tensor([1, 0, 3, 2, 5, 4])).backward()
    assert culprit(stop.value) == ("", "aten.mul.Tensor", "forward", "origin")


def test_parts_of_one_tensor_are_traced_to_what_made_it() -> None:
    """Queries, keys and values are slices, which composite operators read one by one."""
    torch.manual_seed(0)
    model = nn.Linear(8, 24)
    fastcheck.install(model, level="op")
    with pytest.raises(fastcheck.OverflowDetected) as stop:
        x = torch.randn(1, 6, 8)
        qkv = model(torch.cat([x[:, :5], x[:, 5:] * float("nan")], 1))
        qkv[0, 0] = -INF
        q, k, v = qkv.view(1, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        out = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        out.sum().backward()
    made = [e for e in stop.value.report.events if e.verdict.name in ("ORIGIN", "ARRIVED")]
    assert [e.site.op for e in made] == ["aten.mul.Tensor"]


def test_a_nan_that_was_written_over_is_gone() -> None:
    model = nn.Linear(8, 8)
    monitor = fastcheck.install(model, level="op")
    with torch.no_grad():
        scores = model(torch.randn(6, 8))
        scores = torch.cat([scores[:, :1] * float("nan"), scores[:, 1:]], 1)
        scores[:, 0].fill_(-INF)
        assert scores.softmax(-1).sum().item() > 0
    monitor.remove()
    assert monitor.event_count == 0


def test_inputs_are_what_was_read_not_the_memory_around_it() -> None:
    model = nn.Linear(2, 1)
    fastcheck.install(model, level="op")
    with pytest.raises(fastcheck.OverflowDetected) as stop:
        numbers = torch.arange(17.0) * 2
        (model(torch.ones(1, 2)) / (numbers[16:17] * 0 + numbers[:1])).sum().backward()
    sizes = {site.label.split(" ")[0]: int(r["numel"]) for site, r in stop.value.report.inputs}
    assert stop.value.culprit.site.op == "aten.div.Tensor" and sizes["self"] == 1
    with pytest.raises(fastcheck.OverflowDetected) as stop:
        (model(torch.ones(1, 2)) / numbers[:1]).sum().backward()
    (other,) = [r for site, r in stop.value.report.inputs if site.label.startswith("other")]
    assert (int(other["numel"]), int(other["zero_count"])) == (1, 1)
    assert "elements" in str(stop.value)


class Decoder(nn.Module):
    """Is called by a method, as the decoder of a latent diffusion model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * 0 / (x * 0)).clamp(-1, 1)


LEAVES: dict[str, Write] = {
    "numpy": lambda x: x.numpy(),
    "tolist": lambda x: x.tolist(),
    "file": lambda x: torch.save(x, io.BytesIO()),
    "picture": lambda x: (x * 127.5 + 128).to(torch.uint8),
    "int copy": lambda x: torch.zeros(2, 4, dtype=torch.int32).copy_(x),
}


@pytest.mark.parametrize("way", LEAVES)
def test_a_nan_that_leaves_torch_was_used(way: str) -> None:
    model = Decoder()
    monitor = fastcheck.install(model, level="op")
    with pytest.raises(fastcheck.OverflowDetected) as stop, torch.no_grad():
        LEAVES[way](model.decode(torch.randn(2, 4)))
        monitor.remove()
    assert stop.value.culprit.site.op == "aten.div.Tensor"


@pytest.mark.parametrize("way", LEAVES)
def test_what_leaves_without_a_nan_is_no_event(way: str) -> None:
    model = Decoder()
    monitor = fastcheck.install(model, level="op")
    with torch.no_grad():
        x = model.decode(torch.randn(2, 4))
        LEAVES[way](torch.nan_to_num(x))
        LEAVES[way](torch.where(x.isnan(), torch.zeros(()), x))
        (x != x).tolist()
    monitor.remove()
    assert monitor.event_count == 0
    del monitor, model
    gc.collect()
    assert "numpy" not in vars(torch.Tensor) and "tolist" not in vars(torch.Tensor)


@pytest.mark.parametrize("optimizer", ["SGD", "SparseAdam"])
def test_the_values_of_a_sparse_gradient_are_not_the_optimizers_fault(optimizer: str) -> None:
    model = nn.Embedding(8, 4, sparse=True)
    sgd = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    fastcheck.install(model, level="op", stop=fastcheck.Stop(protect_weights=False))
    with pytest.raises(fastcheck.OverflowDetected) as stop:
        for factor in (1.0, 2.0, float("nan"), 1.0):
            sgd.zero_grad()
            model(torch.tensor([1, 2, 2])).square().sum().backward()
            model.weight.grad *= factor
            sgd.step()
    event = stop.value.culprit
    assert (event.site.op, event.site.direction) == ("aten.mul_.Tensor", "forward")


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x + self.shift)


def stop_after(write: Callable[[Shifted], Any]) -> fastcheck.OverflowDetected:
    model = Shifted()
    with fastcheck.install(model, level="op"), pytest.raises(fastcheck.OverflowDetected) as stop:
        for _ in range(2):
            model(torch.tensor([[3.0], [-3.0]]).expand(2, 4)).sum().backward()
            write(model)
    return stop.value


def test_the_table_of_inputs_has_all_of_a_weight_that_was_written_in_part() -> None:
    def write(model: Shifted) -> None:
        model.layer.weight.data[0, 0] = -INF

    stop = stop_after(write)
    assert stop.culprit.site.op == "aten.addmm"
    assert {site.label: int(r["numel"]) for site, r in stop.report.inputs}["mat2"] == 32


def test_what_numpy_wrote_to_a_buffer_is_no_batch() -> None:
    stop = stop_after(lambda model: model.shift.numpy().fill(float("nan")))
    assert stop.culprit.site.label == "other" and "the batch given to" not in str(stop)
