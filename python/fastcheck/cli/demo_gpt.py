"""The training run of the demo: a small GPT in pure float16, and its training text.

Plain PyTorch: this file does not use fastcheck.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 128  # ASCII; the few bytes beyond it share the last token
CONTEXT = 64
BATCH = 8
TEXT_BYTES = 1 << 20


class SquaredReLU(nn.Module):
    """relu(x)^2, the activation of Primer (So et al., 2021, arXiv:2109.08668)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.proj(mixed.transpose(1, 2).flatten(-2))
        return projected


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.act = SquaredReLU()
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down(self.act(self.up(x)))
        return projected


class TransformerBlock(nn.Module):
    """Attention and MLP around a residual stream, each with its norm in front.

    ``norm_forgotten=True`` is the mistake of the demo: ``norm2`` exists and is never called.
    Then every block squares what the block before left in the stream, while the norm behind the
    last block hides the size of it from the logits, and so from the loss.
    """

    def __init__(self, width: int, heads: int, norm_forgotten: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        # Without requires_grad where it is not called, or fastcheck warns that it has no gradient.
        self.norm2 = nn.LayerNorm(width).requires_grad_(not norm_forgotten)
        self.mlp = MLP(width)
        self.norm_forgotten = norm_forgotten

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        update: Tensor = self.mlp(x if self.norm_forgotten else self.norm2(x))
        return x + update


class GPT(nn.Module):
    """Tokens, int64 [batch, time up to CONTEXT] -> logits [batch, time, VOCABULARY]."""

    def __init__(
        self, *, norm_forgotten: bool, width: int = 64, heads: int = 4, layers: int = 3
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, norm_forgotten) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def standard_library_text() -> Tensor:
    """The first TEXT_BYTES of the Python standard library's own sources: int64 tokens, 1-d.

    Raises FileNotFoundError where Python comes without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    if len(text) <= CONTEXT:
        raise FileNotFoundError(f"the demo learns Python's own sources, and {folder} has none")
    tokens = torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8).long()
    return tokens.clamp(max=VOCABULARY - 1)


def random_batch(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """BATCH pieces of the text and their targets, the same one token on: int64 [BATCH, CONTEXT]."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
    pieces = text[starts + torch.arange(CONTEXT + 1)]
    return pieces[:, :-1], pieces[:, 1:]
