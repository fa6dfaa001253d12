"""Wrong steps as users write them, each beside its right version, for prove_faults.py: models of
their own, not layers of the suite's decoder.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import nn

from accuracy.prove_model import Program
from accuracy.prove_programs import LOSS, Fault

LOOPS: list[Fault] = []
ROWS, TOKENS, WORDS, WIDTH = 6, 8, 30, 16


def loop(source: str, place: str) -> Any:
    def add(make: Callable[[bool], Program]) -> Callable[[bool], Program]:
        LOOPS.append(Fault(make.__name__, source, place, make))
        return make

    return add


def words(masked: bool = True) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(1, WORDS, (ROWS, TOKENS), generator=g)
    lengths = torch.tensor([8, 3, 6, 5, 7, 4])
    mask = (torch.arange(TOKENS) < lengths[:, None]).long()
    found = {
        "ids": ids * mask if masked else ids,
        "labels": torch.randint(0, 5, (ROWS,), generator=g),
    }
    return {**found, "attention_mask": mask} if masked else found


def classified(model: nn.Module, masked: bool = True, relations: Any = "auto") -> Program:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(given: Any) -> Any:
        optimizer.zero_grad()
        logits = model(given["ids"], given["attention_mask"]) if masked else model(given["ids"])
        loss = F.cross_entropy(logits, given["labels"])
        loss.backward()
        optimizer.step()
        return loss

    return Program(model, step, words(masked), optimizer, relations)


def language(model: nn.Module, relations: Any = "auto") -> Program:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(given: Any) -> Any:
        optimizer.zero_grad()
        logits = model(given["ids"], given["attention_mask"])
        wanted = given["ids"].masked_fill(given["attention_mask"] == 0, -100)[:, 1:]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), wanted.flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        return loss

    given = words()
    del given["labels"]
    return Program(model, step, given, optimizer, relations)


class Table(nn.Module):
    """The positional encoding of a tutorial, which is for [tokens, rows, width]."""

    def __init__(self, is_faulty: bool) -> None:
        super().__init__()
        self.is_faulty = is_faulty
        at = torch.arange(50)[:, None] / 10 ** torch.linspace(0, 3, WIDTH)
        self.register_buffer("pe", at.sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.pe[: x.shape[0], None] if self.is_faulty else self.pe[: x.shape[1]])


@loop("positional encoding of [tokens, rows] added to [rows, tokens]", "table")
def table_of_rows(is_faulty: bool) -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.table = nn.Embedding(WORDS, WIDTH), Table(is_faulty)
            self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
            self.head = nn.Linear(WIDTH, 5)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer(self.table(self.embed(ids))).mean(1))

    return classified(Net(), masked=False)


@loop("MultiheadAttention without batch_first=True, given [rows, tokens, width]", "attention")
def rows_attended(is_faulty: bool) -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=not is_faulty)
            self.head = nn.Linear(WIDTH, 5)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))

    return classified(Net(), masked=False)


@loop("nn.LSTM without batch_first=True, given [rows, tokens, width]", "lstm")
def rows_recurred(is_faulty: bool) -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=not is_faulty)
            self.head = nn.Linear(WIDTH, 5)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(self.embed(ids))[0][:, -1])

    return classified(Net(), masked=False)


@loop("view(rows, -1) of the last states [2, rows, width] of a GRU", "")
def states_viewed(is_faulty: bool) -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
            self.head = nn.Linear(2 * WIDTH, 5)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            _, last = self.gru(self.embed(ids))
            if is_faulty:
                return self.head(last.reshape(ids.shape[0], -1))
            return self.head(torch.cat([last[0], last[1]], -1))

    return classified(Net(), masked=False)


@loop("rows sorted by length for a packed RNN, and not put back", "")
def sorted_and_left(is_faulty: bool) -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
            self.head = nn.Linear(WIDTH, 5)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            lengths, order = mask.sum(1).sort(descending=True)
            packed = nn.utils.rnn.pack_padded_sequence(self.embed(ids[order]), lengths, True)
            last = self.gru(packed)[1][0]
            return self.head(last if is_faulty else last[order.argsort()])

    return classified(Net())


@loop("a hidden state that is kept from batch to batch", "rnn.gru")
def state_carried_over(is_faulty: bool) -> Program:
    class Carrying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.state = nn.GRU(WIDTH, WIDTH, batch_first=True), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, state = self.gru(x, self.state if is_faulty else None)
            self.state = state.detach()
            return y

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn = nn.Embedding(WORDS, WIDTH), Carrying()
            self.head = nn.Linear(WIDTH, 5)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.rnn(self.embed(ids))[:, -1])

    return classified(Net(), masked=False)


@loop("a cache of keys and values that training fills too", "attention")
def cache_in_training(is_faulty: bool) -> Program:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.past = nn.Linear(WIDTH, 3 * WIDTH), []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            if is_faulty or not self.training:
                self.past.append((k.detach(), v.detach()))
                k = torch.cat([*(p[0] for p in self.past[:-1]), k], 1)
                v = torch.cat([*(p[1] for p in self.past[:-1]), v], 1)
            return F.scaled_dot_product_attention(q, k, v)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attention = nn.Embedding(WORDS, WIDTH), Cached()
            self.head = nn.Linear(WIDTH, 5)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.attention(self.embed(ids)).mean(1))

    return classified(Net(), masked=False)


class Experts(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.router = nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        flat, real = x.flatten(0, 1), mask.flatten().bool()
        logits = self.router(flat)
        gates = logits.softmax(0 if self.how == "dim" else -1)
        best = gates.argmax(-1)
        out = torch.zeros_like(flat)
        for number, layer in enumerate(self.layers):
            at = (best == number).nonzero().flatten()
            if self.how == "padding":
                at = at[:6]
            elif self.how == "right":
                at = at[real[at]]
            out[at] = layer(flat[at]) * gates[at, number, None]
        return x + out.view_as(x)


def _experts(how: str) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.moe = nn.Embedding(WORDS, WIDTH), Experts(how)
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.head(self.moe(self.embed(ids), mask))

    return language(Net())


@loop("a router whose softmax is over tokens", "moe")
def router_over_tokens(is_faulty: bool) -> Program:
    return _experts("dim" if is_faulty else "right")


@loop("experts with room for six tokens, of which padding takes some", "moe")
def room_taken_by_padding(is_faulty: bool) -> Program:
    return _experts("padding" if is_faulty else "right")


@loop("a branch that the mean of the batch decides", "gate")
def branch_of_the_batch(is_faulty: bool) -> Program:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            if is_faulty:
                return y * 2 if y.mean() > y[:1].mean() else y
            return torch.where(y.mean((1, 2), keepdim=True) > 0, y * 2, y)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.gate = nn.Embedding(WORDS, WIDTH), Gate()
            self.head = nn.Linear(WIDTH, 5)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.gate(self.embed(ids)).mean(1))

    return classified(Net(), masked=False)


def _causal(name: str, source: str, wrong: Any, right: Any) -> None:
    def make(is_faulty: bool) -> Program:
        class Mixing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv1d(WIDTH, WIDTH, 3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + (wrong if is_faulty else right)(self.conv, x)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed, self.mixing = nn.Embedding(WORDS, WIDTH), Mixing()
                self.head = nn.Linear(WIDTH, WORDS)

            def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
                return self.head(self.mixing(self.embed(ids) * mask[..., None]))

        return language(Net(), ["causal"])

    LOOPS.append(Fault(name, source, "mixing", make))


def _conv(conv: Any, x: torch.Tensor, left: int, right: int) -> torch.Tensor:
    return conv(F.pad(x.transpose(1, 2), (left, right))).transpose(1, 2)


_causal("convolution in the middle", "a causal convolution padded on both sides",
        lambda c, x: _conv(c, x, 1, 1), lambda c, x: _conv(c, x, 2, 0))  # fmt: skip
_causal("shift to the left", "token shift by roll(-1)",
        lambda c, x: x.roll(-1, 1) * 0.5, lambda c, x: F.pad(x, (0, 0, 1, -1)) * 0.5)  # fmt: skip
_causal("sum from the end", "a cumulative sum of flipped tokens that is not flipped back",
        lambda c, x: x.flip(1).cumsum(1).flip(1) / 9, lambda c, x: x.cumsum(1) / 9)  # fmt: skip


@loop("labels of a batch that was sorted, beside outputs that were not", LOSS)
def labels_of_another_order(is_faulty: bool) -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 5)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            x = (self.embed(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            return self.head(x)

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(given: Any) -> Any:
        optimizer.zero_grad()
        labels = given["labels"]
        if is_faulty:
            labels = labels[given["attention_mask"].sum(1).argsort()]
        loss = F.cross_entropy(model(given["ids"], given["attention_mask"]), labels)
        loss.backward()
        optimizer.step()
        return loss

    return Program(model, step, words(), optimizer)


@loop("repeat() of rows for several candidates where repeat_interleave() is meant", "")
def candidates_repeated(is_faulty: bool) -> Program:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.choice = nn.Embedding(WORDS, WIDTH), nn.Embedding(5, WIDTH)
            self.score = nn.Bilinear(WIDTH, WIDTH, 1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x, rows = self.embed(ids).mean(1), ids.shape[0]
            many = x.repeat(5, 1) if is_faulty else x.repeat_interleave(5, 0)
            return self.score(many, self.choice.weight.repeat(rows, 1)).view(rows, 5)

    return classified(Net(), masked=False)


@loop("statistics pooling: a standard deviation that takes in the padding", "pool")
def spread_over_padding(is_faulty: bool) -> Program:
    class Pool(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            m = mask[..., None].to(x.dtype)
            mean = (x * m).sum(1) / m.sum(1)
            if is_faulty:
                return torch.cat([mean, x.std(1)], -1)
            spread = (((x - mean[:, None]) ** 2 * m).sum(1) / m.sum(1) + 1e-6).sqrt()
            return torch.cat([mean, spread], -1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.pool = nn.Embedding(WORDS, WIDTH), Pool()
            self.head = nn.Linear(2 * WIDTH, 5)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.head(self.pool(self.embed(ids), mask))

    return classified(Net())
