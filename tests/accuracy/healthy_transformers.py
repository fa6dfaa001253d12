"""Small transformers that train without a fault, with the infinities and large finite numbers of
healthy attention masks. Each returns its loss on a batch of its own.
"""

from __future__ import annotations

import math
from typing import Callable

import torch
from torch import nn
from torch.nn import functional as F

from accuracy.healthy_models import INF, Healthy, Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Callable[[Tensor], Tensor]) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return mask(scores).softmax(-1) @ v


class Gpt(Healthy):
    """Causal, masked with -inf."""

    def __init__(self, words: int = 32, width: int = 16) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(8, width)
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def mask(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        return scores.masked_fill(torch.ones(n, n).triu(1).bool(), -INF)

    def forward(self) -> Tensor:
        ids = torch.randint(32, (2, 9))
        x = self.embed(ids[:, :-1]) + self.place(torch.arange(8))
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + attend(q, k, v, self.mask)
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten())


class Alibi(Gpt):
    """A bias with finfo.min added to a mask with finfo.min: -inf in float16, and no harm."""

    def mask(self, scores: Tensor) -> Tensor:
        n, low = scores.shape[-1], torch.finfo(scores.dtype).min
        place = torch.arange(n)
        slope = (place[None] - place[:, None]).to(scores.dtype)
        causal = torch.full((n, n), low, dtype=scores.dtype).triu(1)
        padding = torch.zeros(n, dtype=scores.dtype)
        padding[-1] = low
        return scores + slope * 0.5 + (causal + padding)


class Encoder(Healthy):
    """torch's own, with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 2)

    def forward(self) -> Tensor:
        padding = torch.arange(6)[None] >= torch.tensor([6, 3, 1])[:, None]
        y = self.net(self.batch(3, 6, 16), src_key_padding_mask=padding)
        return F.cross_entropy(self.head(y[:, 0]), torch.randint(2, (3,)))


class Bert(Gpt):
    """Rows that are padded entirely, masked with a large finite number, and not in the loss."""

    def mask(self, scores: Tensor) -> Tensor:
        padded = torch.zeros((*scores.shape[:-2], 1, scores.shape[-1]), dtype=torch.bool)
        padded[0] = True
        padded[1, ..., 5:] = True
        return scores.masked_fill(padded, torch.finfo(scores.dtype).min)

    def forward(self) -> Tensor:
        ids = torch.randint(32, (2, 8))
        x = self.embed(ids) + self.place(torch.arange(8))
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + attend(q, k, v, self.mask)
        targets = torch.where(torch.rand(2, 8) < 0.3, ids, -100)
        targets[1, 0] = ids[1, 0]
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), ignore_index=-100)


class Fused(Gpt):
    """scaled_dot_product_attention, causal."""

    def forward(self) -> Tensor:
        ids = torch.randint(32, (2, 9))
        x = self.embed(ids[:, :-1]) + self.place(torch.arange(8))
        heads = [t.view(2, 8, 2, 8).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + y.transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten())


class Vit(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.zeros(1, 1, 16))
        self.block = nn.TransformerEncoderLayer(16, 4, 32, 0.1, "gelu", batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self) -> Tensor:
        x = self.patch(self.batch(3, 3, 8, 8)).flatten(2).mT
        x = torch.cat([self.token.expand(3, -1, -1).to(x.dtype), x], 1)
        targets = torch.randint(4, (3,))
        return F.cross_entropy(self.head(self.block(x)[:, 0]), targets, label_smoothing=0.1)


TRANSFORMERS: dict[str, Callable[[], Healthy]] = {
    "gpt, causal": Gpt,
    "gpt, fused attention": Fused,
    "alibi, finfo.min twice": Alibi,
    "encoder with padding": Encoder,
    "bert, rows all padding": Bert,
    "vit": Vit,
}
