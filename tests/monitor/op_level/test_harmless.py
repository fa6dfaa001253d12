"""level="op": harmless infinities, and those of healthy models, are not events."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fastcheck
from fastcheck.verdict.benign import why_benign
from support.programs.op_level import Attention, causal, model_with, train, verdicts
from support.programs.training import batches

pytestmark = pytest.mark.usefixtures("op_observer")

INF = float("inf")


def two_masks_summed(scores: torch.Tensor) -> torch.Tensor:
    low = torch.finfo(scores.dtype).min
    n = scores.shape[-1]
    mask = torch.zeros(n, n, dtype=scores.dtype).masked_fill(torch.ones(n, n).triu(1).bool(), low)
    return scores + mask + mask


def where_mask(scores: torch.Tensor) -> torch.Tensor:
    keep = torch.ones(scores.shape[-1], scores.shape[-1]).tril().bool()
    return torch.where(keep, scores, torch.tensor(-INF, dtype=scores.dtype))


def added_mask(scores: torch.Tensor) -> torch.Tensor:
    n = scores.shape[-1]
    return scores + torch.full((n, n), -INF, dtype=scores.dtype).triu(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("mask", [causal, two_masks_summed, where_mask, added_mask])
def test_a_mask_is_no_event(mask: Any, dtype: torch.dtype) -> None:
    model = Attention(dtype=dtype)
    model.mask = mask
    monitor = fastcheck.install(model, level="op", record="stats")
    train(model, 3, shape=(2, 6, 8), dtype=dtype)
    assert monitor.event_count == 0
    assert verdicts(monitor) <= {"intended", "absorbed"}
    assert verdicts(monitor)  # the infinities were seen, and distinguished


def test_a_stored_mask_is_no_event() -> None:
    model = Attention()
    model.register_buffer("stored", torch.full((6, 6), -INF).triu(1))
    model.mask = lambda scores: scores + model.stored
    monitor = fastcheck.install(model, level="op", record="stats")
    train(model, 2, shape=(2, 6, 8))
    assert monitor.event_count == 0


def test_scaled_dot_product_attention_is_no_event() -> None:
    class Sdpa(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True)

    model = Sdpa()
    monitor = fastcheck.install(model, level="op", record="stats")
    train(model, 3, shape=(2, 6, 8))
    assert monitor.event_count == 0


def test_a_masked_row_in_torchs_attention_is_no_event() -> None:
    class Masked(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.full((6, 6), -INF).triu(1)
            mask[0] = -INF  # torch's own kernel gives zeros there
            q, k, v = (one(x).unsqueeze(1) for one in (self.q, self.k, self.v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    model = Masked()
    monitor = fastcheck.install(model, level="op", record="stats", overflow_nums=-1)
    with torch.no_grad():
        model(torch.ones(2, 6, 8))
    monitor.remove()
    assert monitor.event_count == 0


def test_what_attention_keeps_for_its_backward_is_benign() -> None:
    """By the rule alone: the CPU's kernel leaves zeros there, others leave infinities."""
    op = "aten._scaled_dot_product_flash_attention"
    assert "log-sum-exp" in str(why_benign(op, 1))
    assert why_benign(op, 0) is None


def test_a_sigmoid_made_of_exp_absorbs_its_infinity() -> None:
    model = model_with(lambda x: 1 / (1 + torch.exp((x.abs() + 1) * 1e4)))
    monitor = fastcheck.install(model, level="op", record="stats", overflow_nums=-1)
    with torch.no_grad():
        for x in batches(3):
            model(x)
    monitor.remove()
    assert monitor.event_count == 0
    assert "absorbed" in verdicts(monitor)


def test_an_infinity_written_as_a_number_is_intended_whatever_becomes_of_it() -> None:
    model = model_with(lambda x: (torch.full((3,), -INF), x.masked_fill(x > 9, INF), x)[2])
    monitor = fastcheck.install(model, level="op", record="health")
    train(model, 2)
    monitor.remove()
    assert monitor.event_count == 0
    assert verdicts(monitor) == {"intended"}


def test_uninitialised_memory_is_no_event() -> None:
    def scratch(x: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(x.shape)
        memory.view(-1).t()
        torch.zeros_like(memory)
        memory[:2] = 1
        return x + memory[:2].sum() + memory.fill_(2).sum()

    model = model_with(scratch)
    monitor = fastcheck.install(model, level="op", record="stats")
    torch.use_deterministic_algorithms(True)  # which fills what is uninitialised with NaN
    try:
        train(model, 3)
    finally:
        torch.use_deterministic_algorithms(False)
    assert monitor.event_count == 0


def test_gradients_under_loss_scaling_wait_for_the_scaler() -> None:
    model = model_with(lambda x: x)
    monitor = fastcheck.install(model, level="op", record="stats")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for x in batches(4):
        optimizer.zero_grad()
        scaler.scale(model(x).square().sum() * 1e3).backward()
        scaler.step(optimizer)
        scaler.update()
    assert monitor.event_count == 0
    assert "scaled" in verdicts(monitor)


def test_a_benign_op_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastcheck.verdict import benign

    monkeypatch.setattr(benign, "_RULES", list(benign._RULES))
    fastcheck.benign("aten.sq?t", reason="squares of complex numbers are taken elsewhere")
    model = model_with(lambda x: torch.sqrt(-x.abs() - 1).nan_to_num())
    monitor = fastcheck.install(model, level="op")
    with torch.no_grad():
        model(torch.ones(2, 8))
    assert monitor.event_count == 0
    assert {(e.verdict.name, e.reason) for e in monitor.events} == {
        ("BENIGN", "squares of complex numbers are taken elsewhere")
    }


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.1)
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.body(x.view(-1, 1, 8, 8)).flatten(2).logsumexp(-1))
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(8, 8, num_layers=2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.cell(x.view(-1, 8, 8))[0][:, -1])
        return y


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(8)
        padding = torch.zeros(x.shape[0], 8).masked_fill(torch.arange(8) > 5, -INF)
        y: torch.Tensor = self.layer(x.view(-1, 8, 8), src_mask=mask, src_key_padding_mask=padding)
        return torch.as_tensor(self.head(y[:, 0]))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(16, 8, padding_idx=0), nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.view(-1, 64) > 0).long() * 7
        y: torch.Tensor = self.head(F.gelu(self.norm(self.table(tokens).mean(1))))
        return y


def skip_what_torch_has_not(model: nn.Module, dtype: torch.dtype) -> None:
    """Which types an LSTM may have is for the CPU to say."""
    try:
        with torch.autocast("cpu", dtype=dtype):
            model(torch.zeros(4, 64)).float().sum().backward()
    except RuntimeError as error:
        pytest.skip(f"torch can't run it in {dtype} on this CPU: {error}")
    model.zero_grad()


@pytest.mark.parametrize("mode", ["float32", "bfloat16 autocast", "float16 and GradScaler"])
@pytest.mark.parametrize("kind", [Convolutional, Recurrent, Encoder, Tokens])
def test_a_healthy_model_has_no_event(kind: type[nn.Module], mode: str) -> None:
    model = kind()
    dtype = torch.float16 if "GradScaler" in mode else torch.bfloat16
    if kind is Recurrent and mode != "float32":
        skip_what_torch_has_not(model, dtype)
    monitor = fastcheck.install(model, level="op", record="stats")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled="GradScaler" in mode)
    for x in batches(5, 4, 64):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=mode != "float32"):
            loss = F.cross_entropy(model(x).float(), torch.zeros(4, dtype=torch.long))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    monitor.remove()
    counted = [e for e in monitor.events if e.counted]
    assert not counted, [(str(e.site), e.reason) for e in counted]
