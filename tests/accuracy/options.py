"""Options of install() at random, in trainings at random: losses and weights have to be as without
fastcheck, and nothing may raise but the stop at what the training is made to break.

    make accuracy SUITE="options [--runs 500] [--seed 0]"     writes bench/results/options.json

A training has one of five models (tied weights, checkpointing, outputs in a dictionary or a
dataclass, a convolution, a GRU), an optimizer and a form of its loop; at random steps it is copied,
loaded, frozen, called with an empty batch, in a thread, in inference mode or by functional_call(),
raises and goes on, or its monitor is removed and installed again. In two thirds of them a weight, a
result or a gradient becomes infinite or NaN. Exit status 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import pickle
import random
import sys
import tempfile
import threading
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastcheck
import harness

STEPS, CLASSES, WIDTH = 14, 20, 8


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = self.norm(x)
        x = x + self.attention(read, read, read, need_weights=False)[0]
        return x + self.relu(self.linear(x))


class Transformer(nn.Module):
    def __init__(self, returns: str, is_checkpointed: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head.weight = self.embedding.weight
        self.returns, self.is_checkpointed = returns, is_checkpointed

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        logits = self.head(x)
        if self.returns == "dataclass":
            return Output(logits, {"x": x})
        return {"logits": logits, "hidden": (x, None)} if self.returns == "dict" else logits


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(64, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = nn.functional.one_hot(tokens % 4, 4).float().unsqueeze(1)
        x = self.dropout(self.norm(self.convolution(x)).relu().flatten(1))
        logits: torch.Tensor = self.head(x).unsqueeze(1).expand(-1, tokens.shape[1], -1)
        return logits


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.gru, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.gru(self.embedding(tokens))[0])
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": partial(Transformer, "tensor", False),
    "checkpointed": partial(Transformer, "dict", True),
    "dataclass": partial(Transformer, "dataclass", False),
    "images": Images,
    "recurrent": Recurrent,
}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "LBFGS": partial(torch.optim.LBFGS, lr=0.01, max_iter=3),
}
LOOPS = ("plain", "accumulates", "clips", "scales", "two optimizers", "evaluates", "sets to 0")
FAULTS = (None, None, "weight", "result", "gradient", "infinite weight")
INCIDENTS = (
    "copied",
    "empty batch",
    "forward raises",
    "frozen",
    "functional_call",
    "gradients asked for",
    "inference mode",
    "installed again",
    "loaded",
    "thread",
)


class Case(NamedTuple):
    """A training, and the options that it is observed with."""

    model: str
    optimizer: str
    loop: str
    fault: Optional[str]
    at: int
    incidents: dict[int, str]
    options: dict[str, Any]


def options_at_random(draw: random.Random) -> dict[str, Any]:
    """Options that go together."""

    def is_given() -> bool:
        return draw.random() < 0.3

    options: dict[str, Any] = {"overflow_nums": draw.choice((1, 1, 2, -1))}
    options["sync"] = draw.choice(("never", "never", "step", "call"))
    if draw.random() < 0.4:
        options["level"] = "op"
    elif is_given():
        options["record"] = draw.choice(("health", "stats", "full", "range"))
    if is_given():
        options["every"] = draw.choice((2, 3))
    if is_given() and options.get("record") not in ("health", "range"):
        options["stats_every"] = 2 * options.get("every", 2)
    if is_given():
        options[draw.choice(("include", "exclude"))] = draw.choice(("head", "*norm"))
    if is_given() and options.get("record") != "health":
        options["watch"] = draw.choice((False, fastcheck.Watch(window=16, warm_up=8)))
    if draw.random() < 0.15:
        options["filter"] = fastcheck.Filter(steps=range(0, STEPS, 2))
    options["stop"] = fastcheck.Stop(
        count=draw.choice(("origin", "origin", "all", "calls")),
        within=draw.choice((None, 5)),
        action=draw.choice(("raise", "raise", "warn")),
        protect_weights=draw.choice(("auto", "auto", False)),
        style=draw.choice(("fastcheck", "fastcheck", "msprobe")),
        report=draw.random() < 0.1,
        find_operator=draw.random() < 0.8,
    )
    return options


def case_at_random(draw: random.Random) -> Case:
    incidents = {
        draw.randrange(1, STEPS): draw.choice(INCIDENTS) for _ in range(draw.choice((0, 2, 4)))
    }
    return Case(
        draw.choice(tuple(MODELS)),
        draw.choice(tuple(OPTIMIZERS)),
        draw.choice(LOOPS),
        draw.choice(FAULTS),
        draw.randrange(3, STEPS - 2),
        incidents,
        options_at_random(draw),
    )


class Training:
    """One run of a case; ``folder``: where it is observed, None: it is not."""

    def __init__(self, case: Case, folder: Optional[str]) -> None:
        torch.manual_seed(0)
        self.case = case
        self.folder = folder
        self.model, self.criterion = MODELS[case.model](), nn.CrossEntropyLoss()
        weights = list(self.model.parameters())
        is_parted = case.loop == "two optimizers" and case.optimizer != "LBFGS"
        parts = [weights[:2], weights[2:]] if is_parted else [weights]
        self.optimizers = [OPTIMIZERS[case.optimizer](part) for part in parts]
        is_scaled = case.loop == "scales" and case.optimizer != "LBFGS"
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=is_scaled)
        self.losses: list[float] = []
        self.raised = ""
        self.monitor: Optional[fastcheck.Monitor] = None

    def install(self) -> None:
        if self.folder is not None:
            self.monitor = fastcheck.install(
                self.model, self.criterion, log_dir=self.folder, **self.case.options
            )

    def run(self) -> None:
        """Trains, unless install() has no use for the options."""
        self.install()
        try:
            with contextlib.closing(self):
                for step in range(STEPS):
                    self.step(step)
        except Exception as error:
            self.raised = f"{type(error).__name__}: {str(error).splitlines()[0]}"

    def close(self) -> None:
        if self.monitor is not None:
            self.monitor.remove()

    def loss(self, step: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.scaler.is_enabled()):
            output = self.model(self.tokens)
        output = output["logits"] if isinstance(output, dict) else getattr(output, "logits", output)
        fault = self.case.fault if step == self.case.at else None
        if fault == "result":
            output = output * float("inf") * 0
        loss = self.criterion(output.float().reshape(-1, CLASSES), self.targets.reshape(-1))
        return loss * (loss * 0).sqrt() if fault == "gradient" else loss

    def step(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        self.tokens, self.targets = torch.randint(0, CLASSES, (2, 3, 4), generator=generator)
        if step in self.case.incidents:
            self.meet(self.case.incidents[step], step)
        if step == self.case.at and self.case.fault in ("weight", "infinite weight"):
            value = "nan" if self.case.fault == "weight" else "inf"
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[3] = float(value)
        if self.case.optimizer == "LBFGS":
            self.losses.append(float(self.optimizers[0].step(partial(self.closure, step))))
        else:
            self.update(step)
        if self.case.loop == "evaluates" and step % 4 == 2:
            self.model.eval()
            with torch.no_grad():
                self.model(self.tokens)
            self.model.train()

    def closure(self, step: int) -> torch.Tensor:
        self.optimizers[0].zero_grad()
        loss = self.loss(step)
        loss.backward()
        return loss

    def update(self, step: int) -> None:
        parts = 2 if self.case.loop == "accumulates" else 1
        for _ in range(parts):
            loss = self.loss(step) / parts
            self.losses.append(loss.item())
            self.scaler.scale(loss).backward()
        if self.case.loop == "clips":
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.case.loop != "sets to 0")

    def meet(self, incident: str, step: int) -> None:
        """Lets something happen between two steps."""
        model, tokens = self.model, self.tokens
        first = next(model.parameters())
        if incident == "copied":
            copy.deepcopy(model)(tokens)
            pickle.loads(pickle.dumps(model))
        elif incident == "empty batch":
            model(tokens[: 0 if self.case.model == "recurrent" else 3])
        elif incident == "forward raises":
            hook = [*model.children()][-1].register_forward_hook(lambda *_: 1 // 0)
            with contextlib.suppress(ZeroDivisionError):
                model(tokens)
            hook.remove()
        elif incident == "frozen":
            first.requires_grad_(not first.requires_grad)
        elif incident == "functional_call":
            weights = {name: w.detach() * 1.01 for name, w in model.named_parameters()}
            torch.func.functional_call(model, weights, (tokens,))
        elif incident == "gradients asked for":
            weights = [w for w in model.parameters() if w.requires_grad]
            torch.autograd.grad(self.loss(step), weights, allow_unused=True)
        elif incident == "inference mode":
            with torch.inference_mode():
                model(tokens)
        elif incident == "installed again" and self.monitor is not None:
            self.monitor.remove()
            self.install()
        elif incident == "loaded":
            model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
        elif incident == "thread":
            thread = threading.Thread(target=model, args=(tokens,))
            thread.start()
            thread.join()


def wrong_in(case: Case, plain: Training, found: Training, said: list[str]) -> list[str]:
    wrong = [text for text in said if "no longer observes" in text]
    is_stop = found.raised.startswith("OverflowDetected")
    has_grown = not all(abs(loss) < 1e10 for loss in plain.losses)
    if is_stop and case.fault is None and not has_grown:
        wrong.append(f"a stop without a fault: {found.raised}")
    if not is_stop and found.raised != plain.raised:
        wrong.append(f"it raised {found.raised!r}, not {plain.raised!r}")
    # repr: NaN equals NaN.
    if repr(found.losses) != repr(plain.losses[: len(found.losses)]):
        wrong.append("other losses")
    weights = zip(plain.model.parameters(), found.model.parameters())
    if not found.raised and not all(
        torch.equal(p.nan_to_num(), f.nan_to_num()) for p, f in weights
    ):
        wrong.append("other weights")
    return wrong


def run(seed: int) -> dict[str, Any]:
    case = case_at_random(random.Random(seed))
    plain = Training(case, None)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plain.run()
        said.clear()
        found = Training(case, folder)
        try:
            found.run()
        except fastcheck.ConfigError as error:
            return {"end": "ConfigError", "wrong": [], "case": f"{error}"}
    wrong = wrong_in(case, plain, found, [str(warning.message) for warning in said])
    end = found.raised.partition(":")[0] or "trained"
    return {"end": end, "wrong": wrong, "case": f"seed {seed}: {case}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = [run(options.seed + at) for at in range(options.runs)]
    ends = Counter(one["end"] for one in runs)
    print(harness.table(("end", "runs"), [[end, str(count)] for end, count in ends.items()]))
    wrong = [f"{one['case']}: {text}" for one in runs for text in one["wrong"]]
    print("\n".join(wrong))
    rows = [{"end": end, "runs": count} for end, count in ends.items()]
    print(Path(harness.write_results("options", rows, wrong=wrong)).name)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
