"""Injects faults into random operators, and counts how many level="op" names exactly.

    python bench/fault_injection.py [--faults N] [--seed S]

Writes bench/results/fault_injection.json. A fault sets one element of the first output of one
operator call, in forward, backward or the optimizer, to NaN or an infinity, by a write to memory
that no operator sees. It is named exactly when the culprit is that operator, by name, call, pass
and step; an infinity may also have the verdict absorbed at that place. The exit status is 1 below
99 %."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fastcheck
import harness
from fastcheck import Verdict

STEPS = 4
KINDS = {"NaN": float("nan"), "+Inf": float("inf"), "-Inf": float("-inf")}


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(F.relu(self.norm(self.conv(x.view(-1, 1, 4, 4)))).flatten(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.qkv(x.view(-1, 4, 4)).chunk(3, -1)
        causal = torch.ones(4, 4).triu(1).bool()
        scores = (q @ k.transpose(-1, -2) / 2).masked_fill(causal, float("-inf"))
        return self.head((scores.softmax(-1) @ v).mean(1))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x)) + x[:, :4]


class Rnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        state = torch.zeros(x.shape[0], 8)
        for part in x.split(4, -1):
            state = self.cell(part, state)
        return self.head(state)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "cnn": Cnn,
    "attention": Attention,
    "gated": Gated,
    "rnn": Rnn,
}


class Call(NamedTuple):
    """One run of one operator in a step, counted from 0 in its pass."""

    op: str
    direction: str
    number: int


class Faulty(TorchDispatchMode):
    """Counts the operators of a step as the observer does, and sets an element of one result."""

    def __init__(self, watch: Callable[[], str]) -> None:
        super().__init__()
        self.target: Optional[Call] = None
        self.value = 0.0
        self.place = 0
        self.seen: Counter[tuple[str, str]] = Counter()
        self.calls: list[Call] = []
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.replace("::", ".")
        if func._overloadname != "default":
            name += f".{func._overloadname}"
        direction = self._watch()
        call = Call(name, direction, self.seen[name, direction])
        self.seen[name, direction] += 1
        self.calls.append(call)
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        first = next((one for one in outputs if isinstance(one, torch.Tensor)), None)
        if call == self.target and first is not None and first.is_floating_point():
            memory = first.detach().numpy()
            memory.flat[self.place % memory.size] = self.value
        return out


def run(
    make: Callable[[], nn.Module], target: Optional[Call], value: float, at: int, place: int
) -> Any:
    """(the monitor after the run, the calls of one healthy step)."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)
    updating = [False]

    def direction() -> str:
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return "optimizer" if updating[0] else "forward"

    mode = Faulty(direction)
    monitor = fastcheck.install(model, level="op", record="stats", overflow_nums=-1)
    generator = torch.Generator().manual_seed(1)
    with mode:
        for step in range(STEPS):
            x = torch.randn(4, 16, generator=generator)
            mode.seen.clear()
            mode.calls = []
            mode.target, mode.value, mode.place = (target if step == at else None), value, place
            optimizer.zero_grad()
            F.cross_entropy(model(x), torch.zeros(4, dtype=torch.long)).backward()
            updating[0] = True
            optimizer.step()
            updating[0] = False
    calls = mode.calls
    monitor.remove()
    return monitor, calls


def places(monitor: Any, step: int, calls: list[Call]) -> dict[Call, int]:
    """The record of the first output of each of these calls, by its sequence number.

    What ran in backward has the name of the forward op, and its own in brackets: there the calls of
    an operator are told apart by their order.
    """
    records = monitor.records()
    made: dict[tuple[str, str], list[int]] = {}
    for record in records[records["step"] == step]:
        site = monitor.sites[int(record["site"])]
        if site.op is None or site.role in ("input", "grad_output"):
            continue
        op = site.label.partition("(")[2].rstrip(")") or site.op
        made.setdefault((op, site.direction), []).append(int(record["seq"]))
    counts = Counter((call.op, call.direction) for call in calls)
    found = {}
    for call in calls:
        seqs, count = made.get((call.op, call.direction), []), counts[call.op, call.direction]
        if seqs and len(seqs) % count == 0:
            found[call] = seqs[call.number * len(seqs) // count]
    return found


def how_named(monitor: Any, seq: int) -> str:
    """ "origin" or "absorbed" when that record is named exactly, else what was reported instead."""
    for event in monitor.events:
        is_named = event.verdict in (Verdict.ORIGIN, Verdict.ABSORBED)
        if int(event.record["seq"]) == seq and is_named:
            return str(event.verdict.name.lower())
        if event.counted:
            return f"{event.verdict.name.lower()} at {event.site}, step {event.step}"
    return "nothing"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    choose = np.random.default_rng(options.seed)
    candidates = {}
    for name, make in MODELS.items():
        monitor, calls = run(make, None, 0.0, 0, 0)
        assert monitor.event_count == 0, f"{name} is not healthy"
        candidates[name] = list(places(monitor, STEPS - 1, calls))
    tally: Counter[tuple[str, str, str]] = Counter()
    misses = []
    for _ in range(options.faults):
        name = str(choose.choice(list(MODELS)))
        target = candidates[name][int(choose.integers(len(candidates[name])))]
        kind = str(choose.choice(list(KINDS)))
        at, place = int(choose.integers(1, STEPS)), int(choose.integers(1 << 20))
        monitor, calls = run(MODELS[name], target, KINDS[kind], at, place)
        said = how_named(monitor, places(monitor, at, calls)[target])
        exact = said in ("origin", "absorbed")
        tally[name, kind, said if exact else "missed"] += 1
        if not exact:
            misses.append(
                {"model": name, "kind": kind, "step": at, **target._asdict(), "said": said}
            )
    exact_count = sum(n for (_, _, said), n in tally.items() if said != "missed")
    rows = [
        [
            name,
            *(
                str(sum(tally[name, kind, said] for kind in KINDS))
                for said in ("origin", "absorbed", "missed")
            ),
        ]
        for name in MODELS
    ]
    print(harness.table(["model", "named as origin", "absorbed there", "missed"], rows))
    for miss in misses:
        print(miss)
    share = exact_count / options.faults
    print(f"{exact_count} of {options.faults} named exactly ({share:.1%})")
    harness.write_results(
        "fault_injection",
        [{"model": m, "kind": k, "said": s, "count": n} for (m, k, s), n in sorted(tally.items())],
        faults=options.faults,
        seed=options.seed,
        exact=exact_count,
        misses=misses,
    )
    return 0 if share >= 0.99 else 1


if __name__ == "__main__":
    sys.exit(main())
