"""The model of the training benches: a float32 transformer with AdamW. Needs torch and NumPy."""

from __future__ import annotations

import torch
from torch import nn

import harness

VOCABULARY, WIDTH, LAYERS, HEADS, BATCH, SEQUENCE = harness.size(
    (1024, 512, 6, 8, 8, 128), (64, 32, 2, 2, 2, 16)
)


class Transformer(nn.Module):
    """Token ids [batch, sequence] to logits [batch, sequence, vocabulary]; causal, dropout on."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(SEQUENCE, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("place", torch.arange(SEQUENCE))
        mask = nn.Transformer.generate_square_subsequent_mask(SEQUENCE)
        self.register_buffer("mask", mask)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(self.place)
        x = self.layers(x, mask=self.mask, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Trainer:
    """A model with its optimizer. Trainers with the same seed take bit-identical steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Transformer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        torch.manual_seed(index)  # dropout
        logits = self.model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()
