"""Faults of a training step, each beside its fixed version, for prove_faults.py.

``place``: the module that has the fault, as the model names it; where it is none, ``"the loss"``,
``"the step"`` (one that calls the model several times), ``"the update"``, or ``"the reduction"`` of
ranks. A layer, an attention or a loss is a function of a few lines, which is put into the decoder
of prove_model.py; a program is a step of its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from accuracy.prove_model import (
    HEADS,
    WIDTH,
    WORDS,
    Attending,
    Batch,
    Block,
    Losing,
    Mix,
    Mixing,
    Model,
    Packing,
    Program,
    accumulated,
    attend,
    causal,
    loss_of,
    packed,
    targets,
    trained,
)

LOSS, STEP, UPDATE, REDUCTION = "the loss", "the step", "the update", "the reduction"


@dataclass(frozen=True)
class Fault:
    """A fault and how it is made: ``make(True)`` has it, ``make(False)`` has not."""

    name: str
    source: str
    place: str
    make: Callable[[bool], Program]


FAULTS: list[Fault] = []


def fault(
    source: str, place: str
) -> Callable[[Callable[[bool], Program]], Callable[[bool], Program]]:
    def add(make: Callable[[bool], Program]) -> Callable[[bool], Program]:
        FAULTS.append(Fault(make.__name__, source, place, make))
        return make

    return add


def layer(
    name: str,
    source: str,
    wrong: Mixing,
    right: Mixing,
    prepare: Callable[[Any], object] = lambda self: None,
) -> None:
    def make(is_faulty: bool) -> Program:
        return trained(Model(Mix(wrong if is_faulty else right, prepare)))

    FAULTS.append(Fault(name, source, "mix", make))


def attention(name: str, source: str, wrong: Attending, right: Attending = attend) -> None:
    def make(is_faulty: bool) -> Program:
        return trained(Model(attending=wrong if is_faulty else right))

    FAULTS.append(Fault(name, source, "blocks.1.attention", make))


def loss(name: str, source: str, wrong: Losing, right: Losing = loss_of) -> None:
    def make(is_faulty: bool) -> Program:
        return trained(Model(), wrong if is_faulty else right)

    FAULTS.append(Fault(name, source, LOSS, make))


# Rows that reach each other


def _normal(x: torch.Tensor, dims: Any) -> torch.Tensor:
    return (x - x.mean(dims, keepdim=True)) / (x.std(dims, keepdim=True) + 1e-5)


def _rounded(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    scale = largest / 127
    return x + (torch.round(x / scale) * scale - x).detach()


layer(
    "mean over the batch",
    "a mean over the wrong dimension",
    lambda self, x, mask: x - x.mean(0, keepdim=True),
    lambda self, x, mask: x - x.mean(-1, keepdim=True),
)
layer(
    "normalised over all",
    "a normalisation by hand without dim=",
    lambda self, x, mask: _normal(x, (0, 1, 2)),
    lambda self, x, mask: _normal(x, -1),
)
layer(
    "global maximum",
    "a scale of the whole tensor",
    lambda self, x, mask: x / x.detach().abs().max(),
    lambda self, x, mask: x / x.detach().abs().amax(-1, keepdim=True),
)
layer(
    "quantised with one scale",
    "activations quantised dynamically by tensor where they were to be by token",
    lambda self, x, mask: _rounded(x, x.abs().max()),
    lambda self, x, mask: _rounded(x, x.abs().amax(-1, keepdim=True)),
)
layer(
    "softmax over rows",
    "softmax without dim=, of a 3-D tensor: dimension 0",
    lambda self, x, mask: x * x.softmax(0),
    lambda self, x, mask: x * x.softmax(-1),
)
layer(
    "view for transpose",
    "view() to [tokens, rows] where transpose() was meant",
    lambda self, x, mask: (
        x.reshape(x.shape[1], x.shape[0], -1).cumsum(0).reshape(x.shape) / x.shape[2]
    ),
    lambda self, x, mask: x.transpose(0, 1).cumsum(0).transpose(0, 1) / x.shape[2],
)
layer(
    "shift over flattened rows",
    "token shift: the last token of a row reaches the first of the next",
    lambda self, x, mask: x.flatten(0, 1).roll(1, 0).view_as(x),
    lambda self, x, mask: F.pad(x, (0, 0, 1, -1)),
)
layer(
    "shift along rows",
    "roll(1, 0) of a batch",
    lambda self, x, mask: x.roll(1, 0),
    lambda self, x, mask: F.pad(x, (0, 0, 1, -1)),
)
layer(
    "first row for all",
    "an index of rows where tokens were meant",
    lambda self, x, mask: x * x[:1].sigmoid(),
    lambda self, x, mask: x * x[:, :1].sigmoid(),
)
layer(
    "threshold of the batch",
    "tokens are kept that are among the larger half of the batch",
    lambda self, x, mask: x * (x.norm(dim=-1, keepdim=True) > x.norm(dim=-1).median()),
    lambda self, x, mask: x * (x.norm(dim=-1, keepdim=True) > 0.5),
)


class _MeanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, is_faulty: bool) -> torch.Tensor:
        ctx.is_faulty = is_faulty
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]  # torch's takes any arguments
        return (grad.sum(0, keepdim=True).expand_as(grad) if ctx.is_faulty else grad) * 2, None


layer(
    "backward that mixes rows",
    "a kernel whose backward reduces over rows",
    lambda self, x, mask: _MeanBackward.apply(x, True),
    lambda self, x, mask: _MeanBackward.apply(x, False),
)

# Padding


def _real_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)


def _last(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    last = mask.sum(1, keepdim=True) - 1
    return x.gather(1, last.expand(-1, -1, x.shape[2]))


def _reversed(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    at = (mask.sum(1, keepdim=True) - 1 - torch.arange(x.shape[1])[None, :, None]).clamp(min=0)
    return x.gather(1, at.expand_as(x))


def _smoothed(x: torch.Tensor) -> torch.Tensor:
    return F.avg_pool1d(x.transpose(1, 2), 3, stride=1, padding=1).transpose(1, 2)


def _attended(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Linear attention that is not causal."""
    keys = x.exp() * mask
    state = torch.einsum("btk,btv->bkv", keys, x * mask)
    return torch.einsum("btk,bkv->btv", x.exp(), state) / torch.einsum(
        "btk,bk->bt", x.exp(), keys.sum(1)
    ).unsqueeze(-1)


class _LengthBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, is_faulty: bool) -> torch.Tensor:
        ctx.factor = 1 / x.shape[1] if is_faulty else 0.125
        return x * 0.125

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]  # torch's takes any arguments
        return grad * ctx.factor, None


layer(
    "mean over padding",
    "mean pooling without the mask, in sentence embeddings",
    lambda self, x, mask: x.mean(1, keepdim=True),
    lambda self, x, mask: _real_mean(x, mask),
)
layer(
    "maximum over padding",
    "max pooling without the mask",
    lambda self, x, mask: x.amax(1, keepdim=True),
    lambda self, x, mask: x.masked_fill(mask == 0, -1e4).amax(1, keepdim=True),
)
layer(
    "last position for last token",
    "hidden_states[:, -1] of a batch that is padded at the right",
    lambda self, x, mask: x[:, -1:],
    lambda self, x, mask: _last(x, mask),
)
layer(
    "normalised over tokens",
    "F.normalize(x), whose default is dimension 1, of [rows, tokens, width]",
    lambda self, x, mask: F.normalize(x),
    lambda self, x, mask: F.normalize(x, dim=-1),
)
layer(
    "instance norm over padding",
    "F.instance_norm() of padded sequences",
    lambda self, x, mask: F.instance_norm(x.transpose(1, 2)).transpose(1, 2),
    lambda self, x, mask: F.layer_norm(x, (WIDTH,)),
)
layer(
    "convolution over padding",
    "a convolution that reads the padding behind the last token",
    lambda self, x, mask: _smoothed(x),
    lambda self, x, mask: _smoothed(x * mask),
)
layer(
    "positions relative to the padded length",
    "positions divided by the length of the batch",
    lambda self, x, mask: x * torch.linspace(0, 1, x.shape[1])[None, :, None],
    lambda self, x, mask: x * torch.linspace(0, 1, 32)[: x.shape[1]][None, :, None],
)
layer(
    "reversed with its padding",
    "flip(1) of padded sequences, for a backward direction by hand",
    lambda self, x, mask: x.flip(1),
    lambda self, x, mask: _reversed(x, mask),
)
layer(
    "linear attention to padding",
    "a linear attention whose state takes in the padding",
    lambda self, x, mask: _attended(x, torch.ones_like(mask)),
    lambda self, x, mask: _attended(x, mask),
)
layer(
    "backward divided by the length",
    "VERDICT 12, 13: a scale of backward that is not that of forward",
    lambda self, x, mask: _LengthBackward.apply(x, True),
    lambda self, x, mask: _LengthBackward.apply(x, False),
)


def _by_hand(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    real: torch.Tensor,
    fill: float = -1e9,
    dim: int = -1,
    scale: float = 0.0,
) -> torch.Tensor:
    seen = causal(q) & real[:, None, None]
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    return scores.masked_fill(~seen, fill).softmax(dim) @ v


def _masked_after(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, real: torch.Tensor, again: bool
) -> torch.Tensor:
    """Attention that is not causal, masked after its softmax."""
    weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) * real[:, None, None]
    return (weights / weights.sum(-1, keepdim=True) if again else weights) @ v


def _flat(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """All rows as one sequence, without a mask of blocks."""
    rows, heads, tokens, width = q.shape
    q, k, v = (t.transpose(0, 1).reshape(1, heads, rows * tokens, width) for t in (q, k, v))
    y = attend(q, k, v, real.reshape(1, -1))
    return y.reshape(heads, rows, tokens, width).transpose(0, 1)


def _of_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, real: torch.Tensor, wrong: bool
) -> torch.Tensor:
    """A 3-D attention, [rows * heads, tokens, width]."""
    mask = real.repeat(HEADS, 1) if wrong else real.repeat_interleave(HEADS, 0)
    q2, k2, v2 = (t.flatten(0, 1) for t in (q, k, v))
    seen = causal(q) & mask[:, None]
    return F.scaled_dot_product_attention(q2, k2, v2, attn_mask=seen).view_as(q)


def _everywhere(q: Any, k: Any, v: Any, seen: torch.Tensor) -> torch.Tensor:
    """Not causal; the first token is always seen."""
    seen = seen | (torch.arange(q.shape[-2]) == 0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


attention(
    "mask ignored",
    "attended padding: a mask that is not passed on",
    lambda q, k, v, real: F.scaled_dot_product_attention(q, k, v),
    lambda q, k, v, real: _everywhere(q, k, v, real[:, None, None]),
)
attention(
    "mask added as 0 and 1",
    "a mask of integers as attn_mask, which is added",
    lambda q, k, v, real: F.scaled_dot_product_attention(
        q, k, v, attn_mask=real[:, None, None].to(q.dtype)
    ),
    lambda q, k, v, real: _everywhere(q, k, v, real[:, None, None]),
)
attention(
    "mask inverted",
    "key_padding_mask, where True means padding, given as a mask of real tokens",
    lambda q, k, v, real: _everywhere(q, k, v, ~real[:, None, None]),
    lambda q, k, v, real: _everywhere(q, k, v, real[:, None, None]),
)
attention(
    "mask of queries",
    "a mask along the wrong dimension of the scores",
    lambda q, k, v, real: _everywhere(q, k, v, real[:, None, :, None]),
    lambda q, k, v, real: _everywhere(q, k, v, real[:, None, None]),
)
attention(
    "fill of -3",
    "a fill that is not far enough below the scores",
    lambda q, k, v, real: (
        (q @ k.transpose(-1, -2)).masked_fill(~real[:, None, None], -3.0).softmax(-1) @ v
    ),
    lambda q, k, v, real: (
        (q @ k.transpose(-1, -2)).masked_fill(~real[:, None, None], -1e9).softmax(-1) @ v
    ),
)
attention(
    "masked after the softmax",
    "weights of padding removed, and their share not given back",
    lambda q, k, v, real: _masked_after(q, k, v, real, False),
    lambda q, k, v, real: _masked_after(q, k, v, real, True),
)
attention(
    "softmax over queries",
    "dim=-2 in a softmax by hand",
    lambda q, k, v, real: _by_hand(q, k, v, real, dim=-2),
    _by_hand,
)
attention(
    "scaled by the length",
    "a scale of the number of tokens, not of the width of a head",
    lambda q, k, v, real: _by_hand(q, k, v, real, scale=q.shape[-2] ** -0.5),
    _by_hand,
)
attention(
    "mask of the first row",
    "attention_mask[0] for the whole batch",
    lambda q, k, v, real: attend(q, k, v, real[:1]),
)
attention(
    "mask repeated in another order",
    "repeat() of a mask where repeat_interleave() is meant, in 3-D attention",
    lambda q, k, v, real: _of_heads(q, k, v, real, True),
    lambda q, k, v, real: _of_heads(q, k, v, real, False),
)
attention(
    "rows as one sequence",
    "transformers#46634: sequences that are packed attend to each other",
    _flat,
)
attention(
    "fast path without its scale",
    "another backend, another scale: OpGuard's and Megatron's tables",
    lambda q, k, v, real: F.scaled_dot_product_attention(
        q, k, v, causal(q), scale=1.0 if torch.backends.cuda.flash_sdp_enabled() else None
    ),
    lambda q, k, v, real: F.scaled_dot_product_attention(q, k, v, causal(q)),
)

# The loss


def _summed(logits: torch.Tensor, given: Batch) -> torch.Tensor:
    return loss_of(logits, given, reduction="sum")


def _smooth(logits: torch.Tensor, given: Batch, is_masked: bool) -> torch.Tensor:
    flat = -logits[:, :-1].log_softmax(-1).mean(-1)
    real = given["labels"][:, 1:] != -100
    return loss_of(logits, given) + 0.1 * (flat[real].mean() if is_masked else flat.mean())


def _size(logits: torch.Tensor, given: Batch, is_masked: bool) -> torch.Tensor:
    squares = logits.logsumexp(-1).square()
    real = given["attention_mask"].bool()
    return loss_of(logits, given) + 0.1 * (squares[real].mean() if is_masked else squares.mean())


def _flat_shift(logits: torch.Tensor, given: Batch, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1)[:-1], given["ids"].flatten()[1:])


def _row_shift(logits: torch.Tensor, given: Batch) -> torch.Tensor:
    ids = given["ids"].masked_fill(given["attention_mask"] == 0, -100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _balanced(logits: torch.Tensor, given: Batch, is_masked: bool) -> torch.Tensor:
    shares = logits[..., :4].softmax(-1)
    real = given["attention_mask"].bool()
    mean = (shares[real] if is_masked else shares.flatten(0, 1)).mean(0)
    return loss_of(logits, given) + 0.1 * mean.square().sum()


def _weighted(logits: torch.Tensor, given: Batch, by_index: bool) -> torch.Tensor:
    rows = len(logits)
    losses = loss_of(logits, given, reduction="none").view(rows, -1).sum(-1)
    weight = torch.arange(rows) + 1.0 if by_index else given["ids"][:, 0] + 1.0
    return (losses * weight).sum() / 100


loss(
    "divided by all positions",
    "a loss that is divided by labels.numel(): ignored targets count",
    lambda logits, given: _summed(logits, given) / given["labels"].numel(),
)
loss(
    "padding as target",
    "labels = input_ids, with the padding",
    lambda logits, given: F.cross_entropy(
        logits[:, :-1].flatten(0, 1), given["ids"][:, 1:].flatten()
    ),
)
loss(
    "label smoothing over ignored targets",
    "a smoothing term by hand",
    lambda logits, given: _smooth(logits, given, False),
    lambda logits, given: _smooth(logits, given, True),
)
loss(
    "z-loss over padding",
    "an auxiliary loss without the mask",
    lambda logits, given: _size(logits, given, False),
    lambda logits, given: _size(logits, given, True),
)
loss(
    "balance of experts over padding",
    "Megatron-LM#7452: a load balance that counts padding",
    lambda logits, given: _balanced(logits, given, False),
    lambda logits, given: _balanced(logits, given, True),
)
loss(
    "shift across rows",
    "a shift after the batch was flattened: a row predicts the first token of the next",
    _flat_shift,
    _row_shift,
)
loss(
    "weights of another order",
    "sample weights by index, of a batch that a sampler has shuffled",
    lambda logits, given: _weighted(logits, given, True),
    lambda logits, given: _weighted(logits, given, False),
)


@fault("LOSS.08 (ms-swift, verl#5877), nanoVLM#204: mean of means", STEP)
def micro_batch_means(is_faulty: bool) -> Program:
    def weights(parts: list[Batch]) -> list[tuple[int, float]]:
        whole = sum(map(targets, parts))
        each = [1 / len(parts) / targets(part) if is_faulty else 1 / whole for part in parts]
        return list(enumerate(each))

    return accumulated(Model(), weights)


@fault("Megatron-LM#6660: the first micro-batch is computed twice", STEP)
def doubled_micro_batch(is_faulty: bool) -> Program:
    def weights(parts: list[Batch]) -> list[tuple[int, float]]:
        again = [0, *range(len(parts))] if is_faulty else range(len(parts))
        return [(index, 1 / sum(map(targets, parts))) for index in again]

    return accumulated(Model(), weights)


@fault("accumulation that leaves out the remainder", STEP)
def dropped_remainder(is_faulty: bool) -> Program:
    def weights(parts: list[Batch]) -> list[tuple[int, float]]:
        kept = parts[: len(parts) - 1] if is_faulty and len(parts) > 1 else parts
        return [(index, 1 / sum(map(targets, kept))) for index in range(len(kept))]

    return accumulated(Model(), weights)


@fault("backward of the last micro-batch alone", STEP)
def last_micro_batch_alone(is_faulty: bool) -> Program:
    def weights(parts: list[Batch]) -> list[tuple[int, float]]:
        kept = [len(parts) - 1] if is_faulty else range(len(parts))
        return [(index, 1 / sum(targets(parts[i]) for i in kept)) for index in kept]

    return accumulated(Model(), weights)


@fault("a count of tokens that is the first micro-batch's", STEP)
def count_of_the_first(is_faulty: bool) -> Program:
    def weights(parts: list[Batch]) -> list[tuple[int, float]]:
        counted = len(parts) * targets(parts[0]) if is_faulty else sum(map(targets, parts))
        return [(index, 1 / counted) for index in range(len(parts))]

    return accumulated(Model(), weights)


@fault("trimmed to the length of the first row", "")
def trimmed_to_the_first(is_faulty: bool) -> Program:
    def trim(given: Batch) -> Batch:
        lengths = given["attention_mask"].sum(1)
        length = int(lengths[0] if is_faulty else lengths.max())
        return {name: tensor[:, :length] for name, tensor in given.items()}

    return trained(Model(), before=trim)


# Left padding, packing, autocast


def packing(name: str, source: str, wrong: Mixing, right: Mixing, relations: Any = "auto") -> None:
    def make(is_faulty: bool) -> Program:
        program = packed(Packing(Mix(wrong if is_faulty else right)))
        program.relations = relations
        return program

    FAULTS.append(Fault(name, source, "mix", make))


packing(
    "last token by the length",
    "the sum of a mask as an index, of a batch that is padded at the left",
    lambda self, x, mask: _last(x, mask),
    lambda self, x, mask: (x * mask * (self.positions == 1)[..., None]).sum(1, keepdim=True),
    "left_padded",
)
packing(
    "state of padding",
    "a recurrence that runs over padding at the left",
    lambda self, x, mask: F.pad(x, (0, 0, 1, -1)) * (self.positions < 3)[..., None],
    lambda self, x, mask: x * (self.positions < 3)[..., None],
)
packing(
    "shift across packed rows",
    "token shift or convolution over the border of two sequences that are packed",
    lambda self, x, mask: F.pad(x * mask, (0, 0, 1, -1)),
    lambda self, x, mask: F.pad(x * mask, (0, 0, 1, -1)) * (self.positions > 0)[..., None],
)


@fault("transformers#39997: packed sequences that attend to each other", "blocks.1.attention")
def segments_ignored(is_faulty: bool) -> Program:
    def without(q: Any, k: Any, v: Any, real: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, real.any(1))

    return packed(Packing(attending=without if is_faulty else attend))


@fault("positions that do not restart, or that count the padding at the left", "")
def positions_by_the_column(is_faulty: bool) -> Program:
    def before(given: Batch) -> Batch:
        columns = torch.arange(given["ids"].shape[1]).expand_as(given["ids"])
        return {**given, "positions": columns if is_faulty else given["positions"]}

    return packed(Packing(), before)


def _within_autocast(name: str, source: str, wrong: Mixing, right: Mixing) -> None:
    def make(is_faulty: bool) -> Program:
        program = trained(Model(Mix(wrong if is_faulty else right)))
        step = program.step

        def cast(given: Batch) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return step(given)

        program.step = cast
        return program

    FAULTS.append(Fault(name, source, "mix", make))


def _angles(self: Any, x: torch.Tensor, mask: torch.Tensor, is_cast: bool) -> torch.Tensor:
    at = torch.arange(1000.0, 1000.0 + x.shape[1])[:, None]
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        return x * torch.sin(at @ torch.linspace(0.1, 1, WIDTH)[None]).to(x.dtype)


def _hashed(self: Any, x: torch.Tensor, mask: torch.Tensor, is_cast: bool) -> torch.Tensor:
    at = torch.arange(500.0, 500.0 + x.shape[1])[:, None]
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        return x * ((at @ torch.ones(1, 1)) % 3).to(x.dtype)


_within_autocast(
    "angles in bfloat16",
    "rotary angles within autocast",
    lambda self, x, mask: _angles(self, x, mask, True),
    lambda self, x, mask: _angles(self, x, mask, False),
)
_within_autocast(
    "counts in bfloat16",
    "integers above 256 in bfloat16 (NUM.08)",
    lambda self, x, mask: _hashed(self, x, mask, True),
    lambda self, x, mask: _hashed(self, x, mask, False),
)

# What a step draws, in training and in evaluation


def _own_generator(self: Any) -> None:
    self.generator = torch.Generator().manual_seed(0)
    self.numbers = np.random.RandomState(0)


def _noise(x: torch.Tensor, drawn: Any) -> torch.Tensor:
    return x * torch.as_tensor(drawn, dtype=x.dtype)


layer(
    "own generator",
    "a torch.Generator that no checkpoint has",
    lambda self, x, mask: x * torch.rand(x.shape, generator=self.generator),
    lambda self, x, mask: x * (torch.rand(x.shape) if self.training else 0.5),
    _own_generator,
)
layer(
    "own generator of NumPy",
    "a RandomState that no checkpoint has",
    lambda self, x, mask: _noise(x, self.numbers.rand(*x.shape)),
    lambda self, x, mask: _noise(x, np.random.rand(*x.shape) if self.training else 0.5),
    _own_generator,
)
layer(
    "seed of the system",
    "random numbers that no seed makes again",
    lambda self, x, mask: _noise(x, os.urandom(1)[0] / 255),
    lambda self, x, mask: _noise(x, 0.5),
)
layer(
    "dropout in evaluation",
    "transformers-33844: F.dropout() without training=",
    lambda self, x, mask: F.dropout(x, 0.1),
    lambda self, x, mask: F.dropout(x, 0.1, self.training),
)
layer(
    "dropout made in forward",
    "nn.Dropout() made in forward(), which eval() does not reach",
    lambda self, x, mask: nn.Dropout(0.1)(x),
    lambda self, x, mask: F.dropout(x, 0.1, self.training),
)
layer(
    "noise in evaluation",
    "jitter of a router that is not for training alone",
    lambda self, x, mask: x * (1 + 0.1 * torch.rand(x.shape)),
    lambda self, x, mask: x * (1 + 0.1 * torch.rand(x.shape) if self.training else 1),
)
layer(
    "a list that eval() does not reach",
    "layers in a Python list",
    lambda self, x, mask: self.drops[0](x),
    lambda self, x, mask: self.drop(x),
    lambda self: (
        vars(self).update(drops=[nn.Dropout(0.1)]) or self.add_module("drop", nn.Dropout(0.1))
    ),
)

# State that a checkpoint leaves out, and state of each call


def _counted(self: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    return x * min(1.0, self.calls / 100)


def _averaged(self: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    y = x * (1 + self.average)
    if self.training:
        self.average = 0.9 * self.average + 0.1 * float(x.detach()[0, 0].mean())
    return y


def _averaged_in_buffer(self: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    y = x * (1 + self.mean.clone())
    if self.training:
        with torch.no_grad():
            self.mean.lerp_(x[0, 0].mean(), 0.1)
    return y


def _iterated(self: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Power iteration in training, for the norm of the layer's weight."""
    weight = self.inside.weight.detach()
    if self.training:
        with torch.no_grad():
            self.u.copy_(F.normalize(weight @ F.normalize(weight.t() @ self.u, dim=0), dim=0))
    return x / (weight.t() @ self.u.clone()).norm()


def _buffer(name: str, persistent: bool, size: tuple[int, ...] = ()) -> Callable[[Any], None]:
    return lambda self: self.register_buffer(name, torch.ones(size), persistent=persistent)


layer(
    "counter in forward",
    "a warm-up by a counter that a checkpoint does not have",
    _counted,
    lambda self, x, mask: x * 0.1,
    lambda self: vars(self).update(calls=0),
)
layer(
    "average in an attribute",
    "an average of activations as a Python number",
    _averaged,
    _averaged_in_buffer,
    lambda self: vars(self).update(average=0.0) or _buffer("mean", True)(self),
)


@fault("register_buffer(persistent=False) of what is trained", "mix")
def buffer_not_saved(is_faulty: bool) -> Program:
    return trained(Model(Mix(_averaged_in_buffer, _buffer("mean", not is_faulty))))


@fault("pytorch-51800: the vector of a spectral norm outside of state_dict()", "mix")
def power_iteration_not_saved(is_faulty: bool) -> Program:
    return trained(Model(Mix(_iterated, _buffer("u", not is_faulty, (WIDTH,)))))


@fault("a tensor that is trained and is no nn.Parameter", "mix")
def parameter_not_registered(is_faulty: bool) -> Program:
    torch.manual_seed(0)
    gain = torch.ones(WIDTH, requires_grad=True) if is_faulty else nn.Parameter(torch.ones(WIDTH))
    mix = Mix(lambda self, x, mask: x * self.gain, lambda self: setattr(self, "gain", gain))
    model = Model(mix)
    weights = {id(p): p for p in (*model.parameters(), gain)}
    return trained(model, optimizer=torch.optim.AdamW(weights.values(), lr=1e-2))


@fault("layers in a Python list, given to the optimizer by hand", "mix")
def layers_not_registered(is_faulty: bool) -> Program:
    own: Any = [nn.Linear(WIDTH, WIDTH)]
    held = own if is_faulty else nn.ModuleList(own)
    mix = Mix(lambda self, x, mask: self.held[0](x), lambda self: setattr(self, "held", held))
    model = Model(mix)
    weights = {id(p): p for p in (*model.parameters(), *own[0].parameters())}
    return trained(model, optimizer=torch.optim.AdamW(weights.values(), lr=1e-2))


class _Momentum(torch.optim.Optimizer):
    """Momentum, in the optimizer's state or in an attribute."""

    def __init__(self, parameters: Any, is_own: bool) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.own: dict[Any, torch.Tensor] = {}
        self.is_own = is_own

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # of fewer arguments than its base's
        for p in self.param_groups[0]["params"]:
            held = self.own if self.is_own else self.state[p]
            key = p if self.is_own else "momentum"
            held[key] = 0.9 * held.get(key, torch.zeros_like(p)) + p.grad
            p -= 0.01 * held[key]


@fault("an optimizer whose state is in an attribute", UPDATE)
def momentum_not_saved(is_faulty: bool) -> Program:
    model = Model()
    return trained(model, optimizer=_Momentum(model.parameters(), is_faulty))


@fault("a schedule by a counter of the loop", UPDATE)
def schedule_of_the_loop(is_faulty: bool) -> Program:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    calls = 0

    def before(given: Batch) -> Batch:
        nonlocal calls
        calls += 1
        optimizer.param_groups[0]["lr"] = 1e-3 / (calls if is_faulty else 1)
        return given

    return trained(model, optimizer=optimizer, before=before)


class _Rounding(Model):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {name: t.bfloat16() for name, t in state.items()}


@fault("weights that are trained in float32 and saved in bfloat16", "embed")
def saved_in_bfloat16(is_faulty: bool) -> Program:
    return trained(_Rounding() if is_faulty else Model())


class _Renaming(Model):
    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        swap = {"blocks.0.attention.qkv": "blocks.1.attention.qkv"}
        swap.update({new: old for old, new in swap.items()})
        renamed = {}
        for name, tensor in state.items():
            module, _, last = name.rpartition(".")
            renamed[f"{swap.get(module, module)}.{last}"] = tensor
        return super().load_state_dict(renamed, *args, **kwargs)


@fault("a conversion of names that changes two layers", "blocks.0.attention.qkv")
def layers_swapped_in_loading(is_faulty: bool) -> Program:
    return trained(_Renaming() if is_faulty else Model())


class _Untying(Model):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.head.weight = nn.Parameter(self.embed.weight.detach().clone())
        return super().load_state_dict(*args, **kwargs)


@fault("tied weights that to_empty() or a load has untied (verl, OPT)", "embed")
def untied_in_loading(is_faulty: bool) -> Program:
    return trained(_Untying() if is_faulty else Model())


layer(
    "cache by length",
    "a mask that is kept for each length, whatever its content",
    lambda self, x, mask: x * self.cache.setdefault(x.shape[1], mask),
    lambda self, x, mask: x * mask,
    lambda self: vars(self).update(cache={}),
)
layer(
    "cache of the first call",
    "a state that is kept between calls",
    lambda self, x, mask: x + self.cache.setdefault(x.shape, x.detach()),
    lambda self, x, mask: x + x.detach(),
    lambda self: vars(self).update(cache={}),
)


@fault("an offset of the vocabulary that is added in place", "")
def ids_changed_in_place(is_faulty: bool) -> Program:
    def before(given: Batch) -> Batch:
        if is_faulty:
            given["ids"].add_(1).remainder_(WORDS)
            return given
        return {**given, "ids": (given["ids"] + 1) % WORDS}

    return trained(Model(), before=before)


@fault("images that are normalised in place", "")
def images_changed_in_place(is_faulty: bool) -> Program:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    images = torch.rand(4, 3, 6, 6), torch.tensor([0, 3, 1, 2])

    def step(given: Any) -> torch.Tensor:
        x, y = given
        x = x.sub_(0.5).div_(0.2) if is_faulty else (x - 0.5) / 0.2
        return F.cross_entropy(model(x), y)

    return Program(model, step, images)


# Activation checkpointing


class _Recomputing(Model):
    keeps_rng = True

    def run_block(self, block: nn.Module, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        if block is self.blocks[0]:
            return block(x, real)  # type: ignore[no-any-return]  # a module's result is Any
        return checkpoint(  # type: ignore[no-any-return]  # torch has it untyped
            block, x, real, use_reentrant=False, preserve_rng_state=self.keeps_rng
        )


@fault("preserve_rng_state=False with dropout: another dropout in backward", "blocks.1.drop")
def recomputed_with_other_dropout(is_faulty: bool) -> Program:
    model = _Recomputing()
    model.keeps_rng = not is_faulty
    return trained(model)


class _DoublingBlock(Block):
    is_faulty = True

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        if self.is_faulty:
            x.data.mul_(2.0)
        else:
            x = x * 2.0
        return super().forward(x, real)


@fault("TTrace 2: a recompute with a wrong input, changed in place", "blocks.1")
def recomputed_from_a_changed_input(is_faulty: bool) -> Program:
    model = _Recomputing()
    model.blocks[1] = _DoublingBlock()
    model.blocks[1].is_faulty = is_faulty  # type: ignore[assignment]  # a block's own attribute
    return trained(model)


class _CountingBlock(Block):
    calls = 0

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x * (1.5 if self.calls % 2 else 0.5), real)


@fault("a layer that counts its calls, and is called again in backward", "blocks.1")
def recomputed_with_a_counter(is_faulty: bool) -> Program:
    model = _Recomputing()
    model.blocks[1] = _CountingBlock() if is_faulty else Block()
    return trained(model)


@fault("reentrant checkpoint of what needs no gradient", "blocks.0")
def recomputed_without_gradients(is_faulty: bool) -> Program:
    class First(Model):
        def run_block(self, block: nn.Module, x: torch.Tensor, real: torch.Tensor) -> Any:
            return checkpoint(block, x, real, use_reentrant=is_faulty)

    model = First()
    model.embed.weight.requires_grad_(False)
    model.place.weight.requires_grad_(False)
    return trained(model)


# Recurrent models, and shared parameters


class _Recurrent(nn.Module):
    def __init__(self, is_faulty: bool, both: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=both)
        self.head = nn.Linear(2 * WIDTH if both else WIDTH, WORDS)
        self.is_faulty, self.both = is_faulty, both

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x, lengths = self.embed(ids), mask.sum(1)
        if self.is_faulty:
            y, last = self.rnn(x)
        else:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, False)
            y, last = self.rnn(packed)
            y, _ = nn.utils.rnn.pad_packed_sequence(y, True, total_length=ids.shape[1])
        return self.head(y if self.both else y + last[-1][:, None])  # type: ignore[no-any-return]  # a module's result is Any


@fault("a bidirectional GRU without pack_padded_sequence()", "rnn")
def unpacked_both_directions(is_faulty: bool) -> Program:
    return trained(_Recurrent(is_faulty, True))


@fault("the last state of a GRU, after its padding", "rnn")
def state_after_padding(is_faulty: bool) -> Program:
    return trained(_Recurrent(is_faulty, False))


@fault("a hook on a tied weight that is meant for one of its places", "embed")
def hook_on_a_tied_weight(is_faulty: bool) -> Program:
    model = Model()
    if is_faulty:
        model.embed.weight.register_hook(lambda grad: grad * 2)
    return trained(model)
