"""Three people's training loops, observed by one line: silent while healthy, an answer when not.

    python bench/loops.py [LOOP ...] [--fault FAULT] [--show]

writes bench/results/loops.json. The loops: nanoGPT's shape, a plain loop around a classifier of
transformers, and a GAN with two optimizers. Each runs healthy, with a learning
rate 100 times too high, a corrupt batch, a wrong mask, and the square root of 0 in its loss. The
answer is the text of the exception or of the first warning; it has to come within a minute, and to
name what is wrong. A mask that is wrong and finite is a question for ``fastcheck.prove``, which is
asked where the run itself says nothing. Exit status 1 where an answer is missing or a healthy loop
is not silent.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import nn

import fastcheck
import harness

FAULTS = ("healthy", "learning rate", "corrupt batch", "wrong mask", "sqrt(0)")
STEPS, FAULT_STEP = 160, 100
SECONDS = 60.0


class Loop(NamedTuple):
    """``train``: what a person calls for each step. ``prove``: the question of the same step to
    prove(), of a loop whose model has a mask.
    """

    modules: tuple[nn.Module, ...]
    train: Callable[[int], Any]
    prove: Optional[Callable[[], Any]] = None


# ---- nanoGPT's shape ----------------------------------------------------------------------------

TEXT = (
    "The quick brown fox jumps over the lazy dog, and the lazy dog sleeps on. "
    "Pack my box with five dozen liquor jugs; the five boxing wizards jump quickly. "
) * 8
BLOCK, BATCH, WIDTH, HEADS, VOCABULARY = 32, 8, 32, 4, 128


class Attention(nn.Module):
    def __init__(self, diagonal: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        mask = torch.tril(torch.ones(BLOCK, BLOCK), diagonal)
        self.register_buffer("bias", mask.view(1, 1, BLOCK, BLOCK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        split = self.c_attn(x).split(WIDTH, dim=2)
        q, k, v = (part.view(rows, length, HEADS, -1).transpose(1, 2) for part in split)
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = att.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(rows, length, WIDTH))


class Block(nn.Module):
    def __init__(self, diagonal: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention(diagonal)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, diagonal: int = 0) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(BLOCK, WIDTH),
                "h": nn.ModuleList(Block(diagonal) for _ in range(2)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.apply(self._init)
        self.lm_head.weight = self.transformer["wte"].weight

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, Any]:
        x = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(idx.size(1)))
        for block in self.transformer["h"]:
            x = block(x)
        x = self.transformer["ln_f"](x)
        logits = self.lm_head(x)
        return x, F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


def gpt(fault: str) -> Loop:
    model = GPT(diagonal=-1 if fault == "wrong mask" else 0)
    rate = 1e-3 * (100 if fault == "learning rate" else 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    data = torch.tensor(list(TEXT.encode()))

    def train(i: int) -> None:
        starts = torch.randint(len(data) - BLOCK - 1, (BATCH,))
        x = torch.stack([data[s : s + BLOCK] for s in starts.tolist()])
        y = torch.stack([data[s + 1 : s + 1 + BLOCK] for s in starts.tolist()])
        if fault == "corrupt batch" and i == FAULT_STEP:
            y = torch.randint(VOCABULARY, y.shape)
        hidden, loss = model(x, y)
        if fault == "sqrt(0)" and i == FAULT_STEP:
            apart = hidden[:, 1:] - hidden[:, 1:]
            loss = loss + apart.square().sum(-1).sqrt().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return Loop((model,), train)


# ---- A plain loop with transformers -------------------------------------------------------------


def classifier(fault: str) -> Loop:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    rate = 1e-3 * (100 if fault == "learning rate" else 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def batch() -> dict[str, torch.Tensor]:
        ids = torch.randint(2, 64, (16, 24))
        lengths = torch.randint(8, 25, (16,))
        mask = (torch.arange(24) < lengths[:, None]).long()
        ids = ids * mask
        labels = (ids[:, 0] >= 32).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def outputs_of(inputs: dict[str, torch.Tensor]) -> Any:
        if fault == "wrong mask":  # as of a library whose masks are true where there is padding
            inputs = {**inputs, "attention_mask": (inputs["attention_mask"] == 0).long()}
        return model(**inputs, output_hidden_states=True)

    def train(i: int) -> None:
        inputs = batch()
        if fault == "corrupt batch" and i == FAULT_STEP:
            inputs["labels"] = 1 - inputs["labels"]
        outputs = outputs_of(inputs)
        loss = outputs.loss
        if fault == "sqrt(0)" and i == FAULT_STEP:
            first = outputs.hidden_states[-1][:, :1]
            loss = loss + first.var(1, correction=0).sqrt().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def prove() -> Any:
        return fastcheck.prove(lambda inputs: outputs_of(inputs).loss, batch(), model=model)

    return Loop((model,), train, prove)


# ---- A GAN --------------------------------------------------------------------------------------


def gan(fault: str) -> Loop:
    generator = nn.Sequential(nn.Linear(8, 64), nn.LeakyReLU(0.2), nn.Linear(64, 16))
    critic = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    rate = 1e-3 * (100 if fault == "learning rate" else 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=rate, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=rate, betas=(0.5, 0.999))
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)

    def train(i: int) -> None:
        real = torch.randn(64, 16).tanh() + 1
        if fault == "corrupt batch" and i == FAULT_STEP:
            real = real * 1e4
        fake = generator(torch.randn(64, 8))
        of_critic.zero_grad()
        loss = F.binary_cross_entropy_with_logits(critic(real), ones)
        loss = loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        loss = F.binary_cross_entropy_with_logits(critic(fake), ones)
        if i >= FAULT_STEP and fault == "wrong mask":
            missing = real > 1e3
            loss = loss + (fake - real).square()[missing].mean()
        if i >= FAULT_STEP and fault == "sqrt(0)":
            loss = loss + (fake - fake.detach()).square().sum(1).sqrt().mean()
        loss.backward()
        of_generator.step()

    return Loop((generator, critic), train)


LOOPS: dict[str, Callable[[str], Loop]] = {
    "nanoGPT's shape": gpt,
    "transformers": classifier,
    "GAN": gan,
}
#: What a right answer names, in its first warning or in the exception. Where two models train
#: against each other, a rate that is too high shows in their loss alone.
NAMES = {
    "learning rate": r"learning rate|updates are large|the loss is",
    "corrupt batch": r"batch|targets|input",
    "wrong mask": r"mask|softmax|empty|no elements|padd",
    "sqrt(0)": r"sqrt",
}


class Answer(NamedTuple):
    text: str
    seconds: float
    how: str


def ask(make: Callable[[str], Loop], fault: str) -> Answer:
    """The first thing that is said, and after how many seconds of the run."""
    torch.manual_seed(0)
    loop = make(fault)
    begun, first = time.monotonic(), 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = fastcheck.install(*loop.modules, overflow_nums=1)
        try:
            for i in range(harness.size(STEPS, 8)):
                loop.train(i)
                if said(caught) and not first:
                    first = time.monotonic() - begun
            monitor.flush()
        except fastcheck.OverflowDetected as stop:
            return Answer(str(stop), time.monotonic() - begun, "stop")
        finally:
            monitor.remove()
    texts = said(caught)
    if texts:
        return Answer(texts[0], first or time.monotonic() - begun, "warning")
    if loop.prove is not None and fault == "wrong mask":
        begun = time.monotonic()  # the question is another one than the run
        found = loop.prove()
        if not found.holds:
            return Answer(str(found), time.monotonic() - begun, "prove")
    return Answer("", time.monotonic() - begun, "silence")


def said(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if "fastcheck" in one.category.__module__]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("loops", nargs="*", metavar="LOOP", help=", ".join(LOOPS))
    parser.add_argument("--fault", choices=FAULTS, help="this one only")
    parser.add_argument("--show", action="store_true", help="print the answers in full")
    options = parser.parse_args()
    unknown = set(options.loops) - set(LOOPS)
    if unknown:
        parser.error(f"no loops {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    rows, here = [], os.getcwd()
    header = ["loop", "fault", "answer", "after", "what it says first"]
    print(harness.table(header, []), flush=True)
    with tempfile.TemporaryDirectory() as scratch:  # logs of the stops
        os.chdir(scratch)
        try:
            for name in harness.few(options.loops or LOOPS):
                for fault in harness.few(FAULTS if options.fault is None else (options.fault,)):
                    rows.append(row(name, LOOPS[name], fault, options.show))
                    print(harness.table(cells_of(rows[-1]), []).partition("\n")[0], flush=True)
        finally:
            os.chdir(here)
    missing = [one for one in rows if not one["is_right"]]
    bars = [harness.bar("loops without the right answer", len(missing), at_most=0)]
    harness.print_bars(bars)
    if not options.loops and options.fault is None:
        harness.write_results("loops", rows, bars=bars)
    return 0 if harness.IS_SMOKE or not missing else 1


def row(name: str, make: Callable[[str], Loop], fault: str, show: bool) -> dict[str, Any]:
    answer = ask(make, fault)
    if fault == "healthy":
        is_right = not answer.text
    else:
        is_right = re.search(NAMES[fault], answer.text) is not None and answer.seconds <= SECONDS
    if show:
        print(f"=== {name}, {fault}: {answer.how}\n{answer.text}\n")
    # Of a proof the first relation that differs, of other texts the first line.
    lines = answer.text.strip().splitlines() or [""]
    differing = [at for at, line in enumerate(lines) if " differs " in line]
    shown = lines[differing[0] : differing[0] + 2] if differing else lines[:1]
    return {
        "loop": name,
        "fault": fault,
        "how": answer.how,
        "seconds": round(answer.seconds, 1),
        "said": re.sub(r"/\S*/site-packages/", "", " ".join(" ".join(shown).split())),
        "is_right": is_right,
    }


def cells_of(found: dict[str, Any]) -> list[str]:
    how = found["how"] + ("" if found["is_right"] else " (not right)")
    return [found["loop"], found["fault"], how, f"{found['seconds']} s", found["said"]]


if __name__ == "__main__":
    sys.exit(main())
