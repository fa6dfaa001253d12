"""Tests of dimensions that are mixed up, of criteria that are given numbers of a narrow range, and
of targets that attention can see or that are padding: by the graph of a loss.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Optional

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fastcheck.monitor.loop.loss_forms import LossForms
from support.told import texts


def _forms(loss: Tensor) -> dict[str, str]:
    return LossForms(set, set, list).look([loss])


def _entropy(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1])


# A view in place of a transposition


@pytest.mark.parametrize(
    ("flatten", "is_moved"),
    [
        (lambda y: y.reshape(-1, 5), True),
        (lambda y: F.relu(y).view(-1, 5), True),
        (lambda y: y.view(2, 24, 5).mean(1), True),
        (lambda y: y.permute(0, 2, 3, 1).reshape(-1, 5), False),
        (lambda y: y.flatten(2).transpose(1, 2).reshape(-1, 5), False),
        (lambda y: y.flatten(1)[:, :5], False),
        (lambda y: y.view(2, 5, 24).mean(2), False),
    ],
)
def test_channels_of_a_convolution(flatten: Callable[[Tensor], Tensor], is_moved: bool) -> None:
    forms = _forms(_entropy(flatten(nn.Conv2d(3, 5, 1)(torch.randn(2, 3, 4, 6)))))
    assert ("moved" in forms) == is_moved
    assert not is_moved or "convolution, of shape [2, 5, 4, 6], was viewed as" in forms["moved"]


@pytest.mark.parametrize("make", [lambda x: nn.Linear(5, 8)(x).relu(), nn.LayerNorm(5)])
def test_features_that_become_channels(make: Callable[[Tensor], Tensor]) -> None:
    y = make(torch.randn(2, 6, 5))
    features = y.shape[-1]
    said = _forms(y.reshape(2, features, 3, 2).mean())["moved"]
    assert said.startswith("the result of a layer whose features are last, of shape [2, 6, ")
    assert said.endswith(f"was viewed as [2, {features}, 3, 2]")
    assert "moved" not in _forms(y.transpose(1, 2).reshape(2, features, 3, 2).mean())
    assert "moved" not in _forms(y.reshape(2, 6, features, 1).mean())


@pytest.mark.parametrize(
    ("shape", "is_moved"), [((2, 5, 6), True), ((2, 6, 5), False), ((2, 10, 3), False)]
)
def test_features_that_become_classes(shape: tuple[int, ...], is_moved: bool) -> None:
    """Cross entropy has its classes in dimension 1."""
    y = nn.Linear(4, 5)(torch.randn(2, 6, 4)).reshape(shape)
    assert ("moved" in _forms(_entropy_of(y))) is is_moved
    assert "moved" not in _forms(_entropy_of(y.transpose(1, 2)))


def _entropy_of(y: Tensor) -> Tensor:
    return F.cross_entropy(y, torch.zeros(y.shape[0], y.shape[2], dtype=torch.long))


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("is_of_batch", [False, True])
def test_states_that_become_those_of_others(make: Any, is_of_batch: bool) -> None:
    """Of (layers, batch, hidden) and (time, batch, hidden). ``is_of_batch``: the view is right."""
    layer = make(3, 4, num_layers=2, bidirectional=True)
    y, state = layer(torch.randn(5, 6, 3))
    state = state[0] if isinstance(state, tuple) else state
    if is_of_batch:
        y, state = y.transpose(0, 1), state.transpose(0, 1)
    said = [_forms(of.reshape(6, -1).mean()).get("moved", "") for of in (F.dropout(y, 0.1), state)]
    assert [text.rpartition("of shape ")[2] for text in said] == (
        ["", ""]
        if is_of_batch
        else ["[5, 6, 8], was viewed as [6, 40]", "[4, 6, 4], was viewed as [6, 16]"]
    )
    assert "moved" not in _forms(y.reshape(-1, 8).mean())
    assert "moved" not in _forms(layer(torch.randn(6, 6, 3))[0].reshape(6, -1).mean())


def test_what_is_stacked_may_be_flattened() -> None:
    parts = [nn.Linear(3, 4)(torch.randn(6, 3)) for _ in range(5)]
    for made in (torch.stack(parts, 1).view(6, -1), torch.stack(parts).view(5, 24)):
        assert "moved" not in _forms(made.mean())
    assert "moved" in _forms(torch.stack(parts).view(6, 5, 4).mean())


# Attention that has time in dimension 0


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("needs_weights", [False, True])
def test_attention_over_the_samples(is_first: bool, needs_weights: bool) -> None:
    layer, norm = nn.MultiheadAttention(8, 2, batch_first=is_first), nn.LayerNorm(8)
    x = nn.Linear(3, 8)(torch.randn(5, 6, 3))
    y = norm(x + layer(x, x, x, need_weights=needs_weights)[0])
    pooled = (y[:, -1], y.mean(1), y[:, 0] + 1)
    assert [_forms(_entropy(of)).get("over_samples", "") for of in pooled] == (
        [""] * 3 if is_first else ["[5, 6, 8]"] * 3
    )
    of_time = (y[-1], y.mean(0), y.transpose(0, 1)[:, 0], y.reshape(-1, 8), y.mean((0, 1))[None])
    assert not any("over_samples" in _forms(_entropy(of)) for of in of_time)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_an_encoder_over_the_samples(dropout: float) -> None:
    for is_first in (False, True):
        part = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=is_first)
        y = nn.TransformerEncoder(part, 2, enable_nested_tensor=False)(torch.randn(5, 6, 8))
        assert ("over_samples" in _forms(_entropy(y.mean(1)))) is not is_first


def test_a_decoder_gives_a_vector_a_shape() -> None:
    assert "moved" not in _forms(nn.Linear(4, 60)(torch.randn(2, 4)).view(2, 5, 4, 3).mean())


def test_as_many_features_as_columns_are_read_both_ways() -> None:
    y = nn.Linear(8, 6)(torch.randn(2, 36, 8))
    assert "moved" not in _forms(y.view(2, 6, 6, 6).mean())
    assert "moved" not in _forms(y.view(-1, 6).view(2, 6, 6, 6).mean())
    assert "moved" not in _forms(nn.Conv2d(3, 6, 1)(torch.randn(2, 3, 6, 6)).flatten(1, 2).mean())


@pytest.mark.parametrize("places", [1, 5])
def test_shapes_that_are_read_both_ways(places: int) -> None:
    y = nn.Conv1d(3, 5, 1)(torch.randn(2, 3, places))
    assert "moved" not in _forms(_entropy(y.view(2, places, 5).mean(1)))


def _attention(split: str, join: str, fused: bool, heads: int = 4, places: int = 6) -> Tensor:
    x = torch.randn(2, places, 16)
    layers = [nn.Linear(16, 16) for _ in range(3)]

    def part(of: Tensor) -> Tensor:
        if split == "view":
            return of.view(2, heads, places, -1)
        if split == "flat":
            return of.view(2 * heads, places, -1)
        return of.view(2, places, heads, -1).transpose(1, 2)

    q, k, v = (part(layer(x)) for layer in layers)
    if fused:
        made = F.scaled_dot_product_attention(q, k, v)
    else:
        made = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ v
    if join == "transpose":
        made = made.transpose(1, 2)
    return _entropy(made.reshape(2, places, 16).mean(1))


@pytest.mark.parametrize("fused", [False, True])
def test_heads(fused: bool) -> None:
    assert "moved" not in _forms(_attention("transpose", "transpose", fused))
    split = _forms(_attention("view", "transpose", fused))["moved"]
    assert split == "what attention is given, of shape [2, 6, 16], was viewed as [2, 4, 6, 4]"
    joined = _forms(_attention("transpose", "view", fused))["moved"]
    assert joined == "the result of attention, of shape [2, 4, 6, 4], was viewed as [2, 6, 16]"


def test_heads_beside_the_samples() -> None:
    assert "[8, 6, 4]" in _forms(_attention("flat", "view", False))["moved"]


def test_as_many_heads_as_places_are_read_both_ways() -> None:
    assert "moved" not in _forms(_attention("view", "view", False, places=4))


def test_torchs_own_attention_moves_nothing() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0)
    assert "moved" not in _forms(_entropy(layer(torch.randn(6, 2, 16)).mean(0)))


@pytest.mark.parametrize(
    ("sides", "is_mixed"),
    [
        (lambda z: F.normalize(z, dim=0) @ F.normalize(z, dim=0).T, True),
        (lambda z: F.normalize(z.T, dim=1).T @ F.normalize(z, dim=0).T, True),
        (lambda z: F.normalize(z, dim=1) @ F.normalize(z, dim=1).T, False),
        (lambda z: F.normalize(z, dim=-1) @ F.normalize(z, dim=-1).T, False),
        (lambda z: F.normalize(z, dim=0).T @ F.normalize(z, dim=0), False),
        (lambda z: F.normalize(z, dim=0) @ z.T, False),
    ],
)
def test_norms_over_the_samples(sides: Callable[[Tensor], Tensor], is_mixed: bool) -> None:
    forms = _forms(_entropy(sides(nn.Linear(4, 16)(torch.randn(8, 4)))))
    text = forms.get("across_samples", "")
    assert ("by their norms over dimension" in text) == is_mixed


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize(
    ("take", "is_last"),
    [
        (lambda y: y[:, -1], True),
        (lambda y: y.select(1, 5), True),
        (lambda y: y[-1], False),
        (lambda y: y[:, 0], False),
    ],
)
def test_the_last_sample(take: Callable[[Tensor], Tensor], is_last: bool, is_first: bool) -> None:
    x = torch.randn(6, 6, 4)
    for kind in (nn.LSTM, nn.GRU):
        for layer in (kind(4, 3), kind(4, 3, 2, bidirectional=True)):
            layer.batch_first = is_first
            forms = _forms(_entropy(take(layer(x)[0])))
            assert ("last_sample" in forms) == (is_last and not is_first)


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize(
    ("take", "lengths", "said"),
    [
        (lambda y, n: y[:, -1], (5, 4, 2), "2 of 3 sequences"),
        (lambda y, n: y[:, -1, :], (5, 5, 2), "1 of 3 sequences"),
        (lambda y, n: y[:, -1], (5, 5, 5), ""),
        (lambda y, n: y[:, 0], (5, 4, 2), ""),
        (lambda y, n: y[torch.arange(3), n - 1], (5, 4, 2), ""),
        (lambda y, n: sum(y[:, t] * (t < n)[:, None] for t in range(5)), (5, 4, 2), ""),
        (lambda y, n: y.sum(1) / n[:, None], (5, 4, 2), ""),
    ],
)
def test_the_last_place_of_what_was_packed(
    take: Any, lengths: tuple[int, ...], said: str, is_first: bool, is_sorted: bool
) -> None:
    count = torch.tensor(lengths if is_sorted else lengths[::-1])
    for layer in (nn.LSTM(4, 6, batch_first=is_first), nn.GRU(4, 6, 2, bidirectional=True)):
        x = torch.randn(3, 5, 4) if is_first else torch.randn(5, 3, 4)
        layer.batch_first = is_first
        packed = pack_padded_sequence(x, count, is_first, is_sorted)
        y, _ = pad_packed_sequence(layer(packed)[0], is_first)
        forms = _forms(_entropy(take(y if is_first else y.transpose(0, 1), count)))
        assert forms.get("padded", "") == said


def test_the_last_place_of_what_a_loop_has_filled() -> None:
    cell, state, y = nn.GRUCell(4, 6), torch.zeros(3, 6), torch.zeros(5, 3, 6)
    for t in range(5):
        state = cell(torch.randn(3, 4), state)
        y[t, : 3 - t // 2] = state[: 3 - t // 2]
    assert "padded" not in _forms(_entropy(y[-1]))
    rows = nn.Linear(4, 6)(torch.randn(18, 4))
    for t in range(0, 6, 2):
        y = torch.zeros(6, 3, 6) if t == 0 else y
        y[t : t + 2] = rows[3 * t : 3 * t + 6].view(2, 3, 6)
    assert "padded" not in _forms(_entropy(y[-1]))


# Criteria


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (torch.sigmoid, "sigmoid, numbers from 0 to 1: no probability is above 0.35"),
        (torch.tanh, "tanh, numbers from -1 to 1: no probability is above 0.6"),
        (lambda y: 30 * torch.tanh(y / 30), ""),
    ],
)
def test_what_cross_entropy_is_given(given: Callable[[Tensor], Tensor], found: str) -> None:
    forms = _forms(_entropy(given(nn.Linear(4, 6)(torch.randn(16, 4)))))
    assert found in forms.get("given_twice", "") and ("given_twice" in forms) == bool(found)


@pytest.mark.parametrize(
    ("given", "is_dropped"),
    [
        (lambda y: F.dropout(y, 0.5), True),
        (lambda y: F.dropout(y, 0.5).view(32, 3), True),
        (lambda y: y * (y > 0), False),
        (lambda y: y * torch.full_like(y, 2.0), False),
        (lambda y: y * torch.rand_like(y), False),
        (lambda y: F.dropout(y, 0.5, training=False), False),
    ],
)
def test_logits_that_dropout_has_lost(given: Callable[[Tensor], Tensor], is_dropped: bool) -> None:
    logits = given(nn.Linear(4, 6)(torch.randn(16, 4)))
    binary = F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))
    for loss in (_entropy(logits), binary):
        assert ("dropped" in _forms(loss)) == is_dropped


@pytest.mark.parametrize("given", [torch.tanh, F.relu, lambda y: y.softmax(-1)])
def test_what_a_binary_criterion_is_given(given: Callable[[Tensor], Tensor]) -> None:
    y = nn.Linear(4, 6)(torch.randn(16, 4))
    target = torch.ones_like(y)
    assert "given_twice" in _forms(F.binary_cross_entropy_with_logits(given(y), target))
    assert "given_twice" not in _forms(F.binary_cross_entropy_with_logits(y, target))


@pytest.mark.parametrize(
    ("scale", "found"),
    [
        (lambda y: y * 0.07, "cosines times 0.07: no probability is above 0.14"),
        (lambda y: (y / 10).masked_fill(torch.eye(8, dtype=torch.bool), -1e9), "cosines times 0.1"),
        (lambda y: y / 0.07, ""),
        (lambda y: y / 0.5, ""),
        (lambda y: y, ""),
        (lambda y: y * torch.full((8, 1), 0.07), ""),
    ],
)
def test_cosines_as_logits(scale: Callable[[Tensor], Tensor], found: str) -> None:
    z = F.normalize(nn.Linear(4, 16)(torch.randn(8, 4)), dim=-1)
    assert found in (text := _forms(_entropy(scale(z @ z.T))).get("narrow", ""))
    assert bool(text) == bool(found)
    # How many are left of classes that are masked is not known.
    assert ("no probability" in text) == ("no probability" in found)


def test_products_that_are_no_cosines() -> None:
    z = nn.Linear(4, 16)(torch.randn(8, 4))
    assert "narrow" not in _forms(_entropy(z @ z.T * 0.25))


def test_clamped_logits() -> None:
    y = nn.Linear(4, 1)(torch.randn(16, 4)).squeeze(1)
    target = torch.ones(16)
    assert "clamp()" in _forms(F.binary_cross_entropy(y.clamp(0, 1), target))["clamped"]
    p = torch.sigmoid(y).clamp(1e-6, 1 - 1e-6)
    assert "clamped" not in _forms(F.binary_cross_entropy(p, target))


# Tokens


class _Tagger(nn.Module):
    def __init__(self, mask: Optional[str], padding: Optional[int] = None) -> None:
        super().__init__()
        self.mask, self.embedding = mask, nn.Embedding(12, 8, padding_idx=padding)
        self.parts, self.head = nn.Linear(8, 24), nn.Linear(8, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.parts(x)[:, None].chunk(3, -1)
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool)
        mask = mask.tril() if self.mask in ("causal", "fused") else mask
        if self.mask in ("fused", "open"):
            made = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        elif self.mask == "is_causal":
            made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            made = (q @ k.transpose(2, 3)).masked_fill(~mask, -math.inf).softmax(-1) @ v
        y: Tensor = self.head(x + made[:, 0])
        return y


@pytest.mark.parametrize("mask", [None, "open", "causal", "fused", "is_causal"])
def test_targets_that_attention_sees(mask: Optional[str]) -> None:
    tokens = torch.randint(0, 12, (4, 10))
    logits = _Tagger(mask)(tokens[:, :-1])
    assert (
        "sees_next" in _forms(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
    ) == (mask in (None, "open"))


def test_what_a_decoder_sees_counts() -> None:
    """An encoder that is given the same tokens has a mask of none."""
    tokens = torch.randint(0, 12, (4, 10))
    decoder = _Tagger("causal")
    encoded = _Tagger(None)(tokens[:, :-1])
    logits = decoder(tokens[:, :-1]) + encoded
    assert "sees_next" not in _forms(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


def test_targets_of_masked_tokens_are_not_seen() -> None:
    tokens = torch.randint(1, 12, (4, 10))
    is_hidden = torch.rand(4, 10) < 0.5
    logits = _Tagger(None)(tokens.masked_fill(is_hidden, 0))
    target = tokens.masked_fill(~is_hidden, -100)
    assert "sees_next" not in _forms(F.cross_entropy(logits.flatten(0, 1), target.flatten()))


@pytest.mark.parametrize(
    ("options", "padding", "is_told"),
    [
        ({}, 0, True),
        ({"ignore_index": 0}, 0, False),
        ({"reduction": "none"}, 0, False),
        ({}, None, False),
    ],
)
def test_padding_that_counts(
    options: dict[str, Any], padding: Optional[int], is_told: bool
) -> None:
    tokens = torch.randint(1, 12, (4, 10))
    tokens[:, 5:] = 0
    logits = _Tagger(None, padding)(tokens).flatten(0, 1)
    of = tokens * 5 % 12
    elsewhere, several = of.clone(), of + (tokens == 0) * torch.arange(10)
    elsewhere[:, :2] = 0
    for target, may_tell in ((of, True), (elsewhere, False), (several, False)):
        loss = F.cross_entropy(logits, target.flatten(), **options).mean()
        assert _forms(loss).get("padding") == ("20 of 40 targets" if is_told and may_tell else None)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda t: t != 0, ""),
        (lambda t: t == 0, "inverted"),
        (lambda t: (t != 0).float(), "0 and 1 in torch.float32"),
        (lambda t: (t != 0).float().log(), ""),
        (lambda t: torch.rand(4, 10), ""),
    ],
)
def test_masks_of_the_function(make: Callable[[Tensor], Tensor], found: str) -> None:
    tokens = torch.randint(1, 12, (4, 10))
    tokens[:, 6:] = 0
    x = nn.Embedding(12, 8)(tokens)[:, None]
    made = F.scaled_dot_product_attention(x, x, x, attn_mask=make(tokens)[:, None, None])
    fault = _forms(_entropy(made.flatten(0, 2))).get("mask", "")
    assert found in fault and bool(fault) == bool(found)


def test_what_is_said() -> None:
    """Each form in a run, with its text."""
    head, norm = nn.Conv1d(4, 3, 1), nn.LSTM(4, 4)

    def program(model: nn.Module, optimizer: Any) -> None:
        y = model(torch.randn(8, 8))
        optimizer.zero_grad()
        moved = _entropy(head(y.view(4, 4, 2).repeat(1, 1, 2)).reshape(-1, 3))
        last = norm(y.view(2, 4, 4))[0][:, -1].square().mean()
        z = F.normalize(y, dim=-1)
        (moved + last + _entropy(z @ z.T * 0.1)).backward()
        optimizer.step()

    said = texts(program, 22)
    for part in (
        "a view keeps the order of the elements",
        "of shape [2, 4, 4], the last element of dimension 1 is taken",
        "cross entropy is given cosines times 0.1",
    ):
        assert sum(part in text and "in 3 checks in a row" in text for text in said) == 1
