"""``fastcheck demo``: a real float16 run overflows, is stopped, and is fixed.

A small GPT learns the sources of Python's standard library. Its author forgot to call a norm. The
loss falls normally until a number exceeds float16. No non-finite value is injected.
"""

from __future__ import annotations

import argparse
import io
import math
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Optional

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastcheck

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
        return self.proj(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.act = SquaredReLU()
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


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
        return self.head(self.norm(self.blocks(x)))


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
    """BATCH pieces of the text and their targets, the same bytes one token on: int64 [BATCH,
    CONTEXT].
    """
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
    pieces = text[starts + torch.arange(CONTEXT + 1)]
    return pieces[:, :-1], pieces[:, 1:]


STEPS = 120
WARMUP_STEPS = 100
PEAK_LR = 1.5e-2
# Keeps float16 gradients clear of zero, and Adam's squares of them below float16's end. Adam
# divides it out again, so nothing has to unscale them.
LOSS_SCALE = 256.0
# Adam's usual epsilon, 1e-8, is zero in float16.
ADAM_EPSILON = 1e-4

FLOAT16_MAX = torch.finfo(torch.float16).max
BAR_WIDTH = 40

REMEDY = """\
      def forward(self, x):
          x = x + self.attn(self.norm1(x))
-         return x + self.mlp(x)
+         return x + self.mlp(self.norm2(x))"""


@dataclass
class Run:
    """The results of one training run."""

    losses: list[float] = field(default_factory=list)
    abs_max: dict[str, list[float]] = field(default_factory=dict)  # by module, one for each step
    event_count: int = 0
    stop: Optional[fastcheck.OverflowDetected] = None

    def loss(self, step: int, window: int = 10) -> float:
        """The mean of the ``window`` steps up to ``step``: one batch alone is noise."""
        recent = self.losses[max(step + 1 - window, 0) : step + 1]
        return mean(recent) if recent else math.nan


def train(text: Tensor, *, norm_forgotten: bool, seed: int) -> Run:
    """Trains for STEPS steps, or until fastcheck stops it."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = GPT(norm_forgotten=norm_forgotten).to(torch.float16)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(
        model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), eps=ADAM_EPSILON
    )
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP_STEPS, 1.0, WARMUP_STEPS - 1)

    run = Run()
    monitor = fastcheck.install(
        model,
        criterion,
        overflow_nums=1,
        # The line of an operator is that of a program's code, not of fastcheck's own.
        stop=fastcheck.Stop(find_operator=False),
        log=fastcheck.Log(None, history=STEPS),
    )
    try:
        for step in range(STEPS):
            tokens, targets = random_batch(text, generator)
            loss = criterion(model(tokens).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            (LOSS_SCALE * loss).backward()
            optimizer.step()
            warmup.step()
            run.losses.append(loss.item())
            if step % 10 == 0:
                print(f"   step {step:3d}   loss {run.loss(step):.2f}", flush=True)
    except fastcheck.OverflowDetected as stop:
        run.stop = stop
        print(f"   step {stop.step:3d}   stopped by fastcheck", flush=True)
    finally:
        monitor.remove()
    run.abs_max = abs_max_of_outputs(monitor)
    run.event_count = monitor.event_count
    return run


def abs_max_of_outputs(monitor: fastcheck.Monitor) -> dict[str, list[float]]:
    """The largest magnitude in the output of each module, step by step, out of the records.

    Infinite where the output holds an infinity or a NaN, which the records count apart.
    A module that returns what another has just made, such as MLP its ``down``, has no own records.
    """
    records = monitor.records()
    low, high = np.abs(records["min"]), np.abs(records["max"])
    abs_max = np.maximum(low, high)
    abs_max[(records["flags"] & fastcheck.types.Flag.NONFINITE) != 0] = math.inf
    series = {
        site.module: abs_max[records["site"] == number].tolist()
        for number, site in enumerate(monitor.sites)
        if site.direction == "forward" and site.role == "output"
    }
    return {module: values for module, values in series.items() if values}


def chart(run: Run, module: str) -> str:
    """A stopped run as a table with bars, its last steps one by one."""
    values = run.abs_max[module]
    last = len(values) - 1
    lines = [f"   step    loss   abs max  |1 (log scale){FLOAT16_MAX:>{BAR_WIDTH - 13},.0f}|"]
    for step in sorted({*range(0, last, 10), *range(max(last - 3, 0), last + 1)}):
        held = min(max(values[step], 1.0), FLOAT16_MAX)
        bar = "#" * round(BAR_WIDTH * math.log(held) / math.log(FLOAT16_MAX))
        loss = f"{run.loss(step):.2f}" if step < len(run.losses) else "-"
        lines.append(f"   {step:4d}  {loss:>6}  {values[step]:>8,.0f}  |{bar:<{BAR_WIDTH}}|")
    return "\n".join(lines)


def _explain_remedy(broken: Run, stop: fastcheck.OverflowDetected) -> str:
    """The way from the tensor that overflowed to the line of code."""
    step = stop.step - 1
    acts = [values for module, values in broken.abs_max.items() if module.endswith(".act")]
    growth = " -> ".join(f"{values[step]:,.0f}" for values in acts)
    return f"""\
   In step {step} the mlp.act of blocks 0 to {len(acts) - 1} reached {growth}.
   Each block squares what the block before left in the residual stream, with no norm
   between: norm2 was made and never called. The last norm hides it from the loss.

{REMEDY}"""


def checks(broken: Run, mended: Run) -> dict[str, bool]:
    """The claims of the demo, and whether each held."""
    stop = broken.stop
    if stop is None:
        return {f"without norm2, float16 overflows within {STEPS} steps": False}
    site = stop.culprit.site
    steps = len(mended.losses)
    peak = max(mended.abs_max.get(site.module, []), default=math.inf)
    before = mended.loss(stop.step - 1, window=20)
    after = mended.loss(steps - 1, window=20)
    return {
        f"without norm2 it trained for {stop.step} steps, its loss falling": (
            stop.step >= 10 and broken.loss(stop.step - 1) < broken.loss(9)
        ),
        f"fastcheck stopped it at its first overflow, in {site.module}": (
            site.direction == "forward" and stop.culprit.verdict is fastcheck.types.Verdict.ORIGIN
        ),
        f"with norm2, from the same seed, it trained for {steps} steps without overflow": (
            steps == STEPS and mended.stop is None and mended.event_count == 0
        ),
        f"its {site.module} never exceeded {peak:,.0f}": peak < FLOAT16_MAX / 16,
        f"its loss fell on after step {stop.step}, from {before:.2f} to {after:.2f}": (
            after < before
        ),
    }


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs the demo; returns 0 where each check passed, 1 where one failed."""
    parser = argparse.ArgumentParser(
        prog="fastcheck demo",
        description="Trains a small GPT in float16 until it overflows, and mends it.",
        epilog="exit codes: 0 each check passed; 1 one failed; 2 wrong usage",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default 0)")
    # Matrices this small gain little from a second thread, and lose much when another program
    # keeps that core busy: the threads wait for each other in every product.
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    options = parser.parse_args(argv)
    if options.threads < 1:
        parser.error(f"argument --threads: must be 1 or more, got {options.threads}")
    torch.set_num_threads(options.threads)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the report draws with more than ASCII
    try:
        text = standard_library_text()
    except FileNotFoundError as error:
        print(f"fastcheck demo: {error}", file=sys.stderr)
        return 1
    return 0 if run_both(text, options.seed) else 1


def run_both(text: Tensor, seed: int) -> bool:
    """Trains without and with norm2, and prints the story. True if it went as claimed."""
    started = time.perf_counter()

    print("1. A small GPT learns Python's own sources in float16, watched by one line:")
    print("   fastcheck.install(model, criterion, overflow_nums=1)\n")
    broken = train(text, norm_forgotten=True, seed=seed)
    stop = broken.stop
    if stop is not None:
        module = stop.culprit.site.module
        print(f"\n2. The report of fastcheck\n\n{stop}")
        print(f"\n3. The loss gave no warning. The abs max of {module} did\n")
        print(chart(broken, module))
        print(f"\n4. The cause\n\n{_explain_remedy(broken, stop)}")
        print("\n5. The remedy, from the same seed\n")
    mended = train(text, norm_forgotten=False, seed=seed)
    seconds = time.perf_counter() - started
    print(f"\nIn {seconds:.0f} seconds:")
    results = checks(broken, mended)
    for said, passed in results.items():
        print(f"   {'yes' if passed else 'NO '}  {said}")
    return all(results.values())


if __name__ == "__main__":
    sys.exit(main())
