"""What install(watch=True) costs: by number of sites, and as a share of training steps.

    python bench/watch_cost.py [--steps N]     writes bench/results/watch_cost.json

*arithmetic*: ``Watcher.add`` on the records of a step, of so many sites. *training*: models of
three sizes on one thread of the CPU, where all of the watch runs on the training thread. The time
within its calls, and in noting what the loop does, is added up and divided by that of all steps.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

import fastcheck
import harness
from accuracy.watch_programs import Block
from fastcheck.log.step_table import StepRow
from fastcheck.monitor.loop.facts import Facts
from fastcheck.record.format import RECORD_DTYPE
from fastcheck.record.site import Site, SiteTable
from fastcheck.watch.options import Watch
from fastcheck.watch.watcher import Watcher

__all__ = ["arithmetic"]

#: Share of a step that the watch may take at 1,000 sites.
BAR = 0.002
WARM_UP = harness.size(70, 2)
#: What is noted of a training loop.
FACTS = ("backward_began", "backward_ended", "before_update", "after_update")
#: By name: width, blocks, sequences of a batch, their length.
SIZES = {
    "gpt of 2 blocks of 32": (32, 2, 16, 16),
    "gpt of 6 blocks of 256": (256, 6, 4, 64),
    "gpt of 24 blocks of 512": (512, 24, 2, 128),
}


def arithmetic(sites: int = 1000, steps: int = 300, together: int = 1) -> dict[str, Any]:
    """Seconds of the watch for one step of so many tensors, on one thread, where so many steps are
    judged together.
    """
    table = SiteTable()
    for number in range(sites):
        table.intern(Site(f"layers.{number}", "Linear", "forward", "output", 0, "output"))
    generator = np.random.default_rng(0)
    watcher, seconds, held = Watcher(Watch(), table), [], []
    for step in range(steps):
        records = np.zeros(sites, RECORD_DTYPE)
        size = np.exp(generator.normal(0, 0.1, sites))
        for name, values in {
            "site": np.arange(sites), "step": step, "depth": 3, "dtype": 1, "numel": 4096,
            "seq": np.arange(sites) + step * sites, "max": 4 * size, "min": -4 * size,
            "sum_sq": 4096 * size**2,
        }.items():  # fmt: skip
            records[name] = values
        row = StepRow(0, step, float(generator.normal(2, 0.1)), False, None, 1e-3, 1.0)
        held.append((row, [records]))
        if len(held) == together:
            began = time.perf_counter()
            watcher.add(*held)
            seconds.append((time.perf_counter() - began) / together)
            held.clear()
    spread = harness.spread(np.array(seconds[WARM_UP // together :]))
    return {"sites": sites, "together": together, "seconds": spread}


@contextmanager
def timed(owner: type, name: str, seconds: list[float]) -> Iterator[None]:
    """Appends how long each call of a method takes."""
    plain = getattr(owner, name)

    def method(*args: Any) -> Any:
        began = time.perf_counter()
        found = plain(*args)
        seconds.append(time.perf_counter() - began)
        return found

    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, plain)


class Model(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(x)))


def training(name: str, steps: int) -> dict[str, Any]:
    width, blocks, batch, length = SIZES[name]
    torch.manual_seed(0)
    model = Model(width, blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = fastcheck.install(model, overflow_nums=-1)
    judging: list[float] = []
    noting: list[float] = []
    whole = []
    with ExitStack() as stack:
        stack.enter_context(timed(Watcher, "add", judging))
        for method in FACTS:
            stack.enter_context(timed(Facts, method, noting))
        for step in range(WARM_UP + steps):
            if step == WARM_UP:
                judging.clear()
                noting.clear()
            began = time.perf_counter()
            x = torch.randint(64, (batch, length))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
            optimizer.step()
            whole.append(time.perf_counter() - began)
    monitor.remove()
    total = sum(whole[WARM_UP:])
    return {
        "model": name,
        "sites": len({int(site) for site in monitor.records()["site"]}),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "step": harness.spread(np.array(whole[WARM_UP:])),
        "judging_seconds": sum(judging) / steps,
        "noting_seconds": sum(noting) / steps,
        "share": (sum(judging) + sum(noting)) / total,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    steps = harness.size(300, 16)
    sizes = harness.few((100, 1000, 10000))
    found = [arithmetic(sites, steps, k) for sites in sizes for k in (1, 8)]
    for one in found:
        one["step_seconds_at_bar"] = one["seconds"]["median"] / BAR
        print(*one.values(), sep=" | ", flush=True)
    rows = []
    for name in harness.few(SIZES):
        steps = harness.size(options.steps, 20) if "512" not in name else options.steps // 10
        rows.append(training(name, steps))
        print(*rows[-1].values(), sep=" | ", flush=True)
    harness.write_results("watch_cost", rows, bar=BAR, arithmetic=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
