"""A training step of small models, where the host's work for a call weighs as much as the numbers:
with default options, without the watch, and at op level, each beside a plain step; and the kernels
alone on as many bytes, which no hook is faster than. A step of the MLP and of the convolutional
network takes 5 to 7 ms.

    python bench/small_models.py [--rounds N]    writes bench/results/small_models.json, prints a
                                                 Markdown table
    python bench/small_models.py --parts         where the time of the default options goes
    python bench/small_models.py --trim          with malloc's own ways, see below

Every case has a model of its own, and takes 64 or 128 steps (models whose step is long: 16) in turn
with the others, on one thread: so many the watch judges together, and as in a run of its own the
caches are left to it meanwhile. What is compared is the processor time of that thread: backward on
the CPU runs on it, and other programs of the machine count only by what they take of the caches.

Freed memory is kept in the process: by default glibc gives what lies at the end of its heap back to
the system, and takes it again page by page. Whether a step does so depends on what happens to lie
behind, with a tool and without one; ``--trim`` leaves it so.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import time
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import torch
from torch import nn

import fastcheck
import harness
from fastcheck import _C
from fastcheck.calls.stored import TensorBatch
from fastcheck.monitor.hooks.losses import LossReader
from fastcheck.monitor.hooks.state_reader import StateReader
from fastcheck.monitor.hooks.step_numbers import StepNumbers
from fastcheck.monitor.hooks.step_watcher import StepWatcher
from fastcheck.monitor.session.derivatives import Derivatives
from fastcheck.monitor.session.session import ModuleLevel, Session
from fastcheck.monitor.watching import Watching
from fastcheck.monitor.weights.stalled import StalledWeights
from fastcheck.monitor.weights.updates import UpdateWatcher
from fastcheck.record.format import RECORD_DTYPE, Depth

VOCABULARY, SEQUENCE, HEADS = 256, harness.size(64, 8), 4
PLAIN, BARE = "plain", "bare hooks that read"
CASES: dict[str, dict[str, Any]] = {
    "plain again (A/A)": {},
    "default options": {"level": "module"},
    "watch=False": {"level": "module", "watch": False},
    'level="op"': {"level": "op"},
}


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.act, self.down, self.drop = nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        out: torch.Tensor = x + self.drop(self.down(self.act(self.up(self.norm2(x)))))
        return out


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(SEQUENCE, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        self.register_buffer("place", torch.arange(SEQUENCE))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(self.place)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def conv_net() -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in ((3, 8), (8, 16), (16, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 4 * 4, 10))


def mlp() -> nn.Sequential:
    layers = [nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers)


class Experts(nn.Module):
    """2,500 modules of four small parameters each, which are used all together."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ModuleList(
            nn.ParameterList(torch.randn(64) / 8 for _ in range(4))
            for _ in range(harness.size(2500, 3))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.stack(list(self.parameters())).T


class Model(NamedTuple):
    """``batch``: makes inputs and classes. ``bar``: for default options. ``together``: the steps of
    a round.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    bar: Optional[float]
    together: int


def transformer(width: int, layers: int, sequences: int, bar: float) -> Model:
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(VOCABULARY, (sequences, SEQUENCE + 1))
        return ids[:, :-1], ids[:, 1:]

    return Model(lambda: Transformer(width, layers), batch, bar, 64 if width < 128 else 16)


def classifier(make: Callable[[], nn.Module], *shape: int) -> Model:
    return Model(make, lambda: (torch.randn(shape), torch.randint(10, shape[:1])), 1.05, 128)


MODELS = {
    "4 layers of 64": transformer(64, 4, 2, bar=1.15),
    "MLP 784-256-256-10, batch of 352": classifier(mlp, 352, 784),
    "3 convolutions of 32 x 32, batch of 28": classifier(conv_net, 28, 3, 32, 32),
    "4 layers of 256": transformer(256, 4, 4, bar=1.02),
    "6 layers of 512": transformer(512, 6, 8, bar=1.01),
    "10,000 parameters of 64": classifier(Experts, 4, 64)._replace(bar=None, together=16),
}


class Trainer:
    """A model with its optimizer. Trainers of the same model take bit-identical steps."""

    def __init__(self, model: Model) -> None:
        torch.manual_seed(0)
        self.model, self.batch = model.make(), model.batch
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, index: int) -> None:
        torch.default_generator.manual_seed(index)  # the batch, and dropout
        inputs, classes = self.batch()
        logits = self.model(inputs)
        nn.functional.cross_entropy(logits.flatten(0, -2), classes.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def seconds_of(step: Callable[[int], object], index: int) -> float:
    began = time.thread_time()
    step(index)
    return time.thread_time() - began


class BareHooks:
    """Reads what passes, by the fewest hooks of torch's own that meet it: outputs of modules, their
    gradients, parameters and the gradients of these. It keeps nothing, judges nothing, and knows no
    names: no tool that reads as much in Python does less.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._parameters = list(trainer.model.parameters())
        self._slots = torch.zeros(2 * len(self._parameters) * RECORD_DTYPE.itemsize).byte()
        for module in trainer.model.modules():
            module.register_forward_hook(self._output)
        trainer.optimizer.register_step_pre_hook(self._update)

    def _read(self, tensors: list[torch.Tensor]) -> None:
        none = [0] * len(tensors)
        _C.observe_list(tensors, self._slots, 0, int(Depth.FULL), none, 0, 0, 0)

    def _output(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        self._read([output])
        if output.requires_grad:
            output.register_hook(lambda gradient: self._read([gradient]))

    def _update(self, *args: Any) -> None:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self._read(self._parameters + gradients)


class Reading:
    """The kernels alone, on tensors of the sizes that the last step of a monitor has read.
    ``is_near``: one tensor is read as often as there were of its size, from the nearest cache that
    holds it; otherwise each has its own, and the data come from wherever all of them lie.
    """

    def __init__(self, monitor: fastcheck.Monitor, is_near: bool) -> None:
        monitor.flush()
        records = monitor.records()
        last = records[records["step"] == records["step"].max()]
        sizes, counts = np.unique(last["numel"], return_counts=True)
        self._lists = [
            [torch.randn(n)] * count if is_near else [torch.randn(n) for _ in range(count)]
            for n, count in zip(sizes.tolist(), counts.tolist())
        ]
        self._slots = torch.zeros(int(counts.max()) * last.itemsize, dtype=torch.uint8)

    def __call__(self, index: int) -> None:
        for each in self._lists:
            none = [0] * len(each)
            _C.observe_list(each, self._slots, 0, int(Depth.FULL), none, index, 0, 0)


#: Whether each reads from the nearest cache.
READINGS = {"the kernels alone, cached": True, "the kernels alone, from memory": False}


def measure(name: str, rounds: int, warm_up: int) -> list[dict[str, Any]]:
    trainers = {case: Trainer(MODELS[name]) for case in (PLAIN, *CASES, BARE)}
    BareHooks(trainers[BARE])
    monitors = {c: fastcheck.install(trainers[c].model, **CASES[c]) for c in CASES if CASES[c]}
    together = harness.size(MODELS[name].together, 2)

    def repeated(case: Callable[[int], object]) -> Callable[[int], None]:
        def run(index: int) -> None:
            for step in range(index * together, (index + 1) * together):
                case(step)

        return run

    steps = {case: repeated(trainer.step) for case, trainer in trainers.items()}
    seconds = harness.time_rounds(steps, rounds, warmup=warm_up, clock=time.thread_time)
    weights = [list(trainer.model.parameters()) for trainer in trainers.values()]
    assert all(all(map(torch.equal, weights[0], other)) for other in weights[1:])
    monitor = monitors["default options"]
    readings = {case: repeated(Reading(monitor, is_near)) for case, is_near in READINGS.items()}
    seconds |= harness.time_rounds(readings, rounds, clock=time.thread_time)
    for monitor in monitors.values():
        assert not monitor.events
        monitor.remove()
    return [
        {
            "model": name,
            "case": case,
            "seconds": harness.spread(each / together),
            "ratio": harness.ratio(each, seconds[PLAIN]),
            "bar": MODELS[name].bar if case == "default options" else None,
        }
        for case, each in seconds.items()
    ]


#: What the monitor does for a step as a whole, by methods; the rest is hooks.
PARTS: dict[str, list[tuple[type, str]]] = {
    "what the model stores is found": [
        (StateReader, "_held_by"),
        (StateReader, "owned_by"),
        (TensorBatch, "add_stored"),
        (TensorBatch, "add_gradients"),
    ],
    "and read": [(ModuleLevel, "observe_list")],
    "do weights move": [
        (UpdateWatcher, "look_at_parameters"),
        (UpdateWatcher, "look_at_buffers"),
        (StalledWeights, "settle"),
    ],
    "the loss and its graph": [
        (LossReader, "lead_to_model"),
        (LossReader, "began"),
        (LossReader, "ended"),
        (Derivatives, "note"),
    ],
    "what the training loop does": [(StepWatcher, "_notice")],
    "learning rates": [(StepNumbers, "learning_rates")],
    "the watch": [(Watching, "step_ended")],
    "the end of the step": [(StepWatcher, "close_step"), (Session, "begin_step_if_closed")],
    "the rest around backward and update": [
        (StepWatcher, "backward_began"),
        (StepWatcher, "backward_ended"),
        (StepWatcher, "before_update"),
        (StepWatcher, "after_update"),
    ],
}


class Clock:
    """Adds up the processor time within methods, of each without that of others within it."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._inner = [0.0]
        for part, methods in PARTS.items():
            for owner, name in methods:
                setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            self._inner.append(0.0)
            try:
                return method(*args, **kwargs)
            finally:
                spent = time.thread_time() - began
                self.seconds[part] += spent - self._inner.pop()
                self._inner[-1] += spent

        return timed


def measure_parts(name: str, steps: int, clock: Clock) -> list[list[str]]:
    """The parts of a step in microseconds. The plain steps come first: later ones would pass the
    monitor's hooks on optimizers.
    """
    plain, watched = Trainer(MODELS[name]), Trainer(MODELS[name])
    # The collector goes through what torch has made, and may fall into any part.
    gc.disable()
    without = [seconds_of(plain.step, index) for index in range(2 * steps)][steps:]
    monitor = fastcheck.install(watched.model)
    for index in range(2 * steps):
        if index == steps:
            clock.seconds = dict.fromkeys(PARTS, 0.0)
            began = time.thread_time()
        watched.step(index)
    total = (time.thread_time() - began) / steps
    gc.enable()
    monitor.remove()
    parts = {part: seconds / steps for part, seconds in clock.seconds.items()}
    extra = total - float(np.mean(without))
    parts |= {"hooks of modules and gradients": extra - sum(parts.values()), "together": extra}
    parts |= {"a plain step": total - extra}
    return [[name, part, f"{1e6 * seconds:,.0f}"] for part, seconds in parts.items()]


def keep_freed_memory() -> None:
    """Tells malloc, where it is glibc's, to give nothing back to the system."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_trim_threshold, 1 << 30)
        mallopt(m_mmap_threshold, 1 << 30)


def is_large(name: str) -> bool:
    """A step of these takes fifty times as long as one of the smallest."""
    return "512" in name or "10,000" in name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="models whose name has this text")
    parser.add_argument("--parts", action="store_true", help="where the time goes, and no ratios")
    parser.add_argument("--trim", action="store_true", help="let malloc give memory back")
    options = parser.parse_args()
    if not options.trim:
        keep_freed_memory()
    torch.set_num_threads(1)
    rows = []
    names = [name for name in MODELS if options.only in name]
    if options.parts:
        clock = Clock()
        steps = {name: harness.size(16 if is_large(name) else 128, 2) for name in names}
        table = [row for name in names for row in measure_parts(name, steps[name], clock)]
        print(harness.table(["model", "part", "us a step"], table))
        return
    for name in names[: harness.size(None, 3)]:
        gc.collect()
        is_slow = is_large(name)
        rows += measure(
            name, max(1, options.rounds // 5) if is_slow else options.rounds, 1 if is_slow else 5
        )
    header = ["model", "case", "ms a step", "times plain", "bar"]
    lines = [
        [
            row["model"],
            row["case"],
            f"{1e3 * row['seconds']['median']:.2f}",
            harness.with_spread(row["ratio"], 3),
            "" if row["bar"] is None else f"{row['bar']:g}",
        ]
        for row in rows
    ]
    print(harness.table(header, lines))
    harness.write_results("small_models", rows, threads=1)


if __name__ == "__main__":
    main()
