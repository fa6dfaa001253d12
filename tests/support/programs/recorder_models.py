"""Models that call their modules in many ways, and the outcome of training one under a monitor."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Optional

import torch
from torch import nn

import fastcheck
from support.programs.training import Apply

NAN, INF = float("nan"), float("inf")


class Poison(nn.Module):
    """Multiplies by ``value``, in forward or in backward alone, in one call of its step."""

    def __init__(self, value: float, *, backward: bool = False) -> None:
        super().__init__()
        self.value = value
        self.backward = backward
        self.is_on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_on:
            return x * 1
        if self.backward:
            y = x * 1
            y.register_hook(lambda gradient: gradient * self.value)
            return y
        return x * self.value


class Block(nn.Module):
    """Residual sums between its parts: inputs that no module has made."""

    def __init__(self, poison: Optional[Poison] = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.first = nn.Linear(8, 8)
        self.poison = poison or Poison(1.0)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: Optional[torch.Tensor] = None) -> torch.Tensor:
        y = self.second(self.poison(torch.relu(self.first(self.norm(x)))))
        return x + (y if scale is None else y * scale)


class Containers(nn.Module):
    """Hands tensors to its parts, and gets them back, in all shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Apply(lambda x, n, flag: (x * 2, None, x.long(), n))
        self.nested = Apply(lambda pair, *, mask: [pair[0] + mask, (pair[1], [pair[0]])])
        self.mapping = Apply(lambda x: {"value": x + 1, "none": None})
        self.same = Apply(lambda x: x)
        self.nothing = Apply(lambda x: None)
        self.weight = nn.Parameter(torch.ones(8))
        self.own = Apply(lambda x: self.weight)
        self.strings = Apply(lambda x, name=None, more=None: x.t())
        self.detached = Apply(lambda x: x.detach().requires_grad_())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _, whole, _ = self.pair(x, 3, True)
        total, (again, [last]) = self.nested((first, whole), mask=x)
        value = self.mapping(total)["value"]
        self.nothing(value)
        leaf = self.detached(value)
        out: torch.Tensor = self.same(value) + last + again + self.own(leaf)
        return self.strings(out, "name", more=[leaf, None, "text"]).t() + leaf


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y if depth == 0 else self(y, depth - 1)


class Raising(nn.Module):
    """A part of it raises, and it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.bad = Apply(lambda x: x / [])
        self.after = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        with contextlib.suppress(TypeError):
            self.bad(y)
        out: torch.Tensor = self.after(y)
        return out


class Checkpointed(nn.Module):
    def __init__(self, poison: Optional[Poison] = None) -> None:
        super().__init__()
        self.block = Block(poison)
        self.end = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        out: torch.Tensor = self.end(checkpoint(self.block, x, use_reentrant=False))
        return out


def shared() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Sequential(layer))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": lambda: nn.Sequential(Block(), Block(Poison(NAN)), Block()),
    "infinite": lambda: nn.Sequential(Block(), Block(Poison(-INF)), nn.Softmax(-1), Block()),
    "backward": lambda: nn.Sequential(Block(), Block(Poison(NAN, backward=True)), Block()),
    "containers": Containers,
    "recursive": lambda: nn.Sequential(nn.Linear(8, 8), Recursive()),
    "raising": lambda: nn.Sequential(nn.Linear(8, 8), Raising()),
    "checkpointed": lambda: nn.Sequential(nn.Linear(8, 8), Checkpointed()),
    "checkpointed, bad": lambda: nn.Sequential(nn.Linear(8, 8), Checkpointed(Poison(NAN))),
    "shared": shared,
}


def outcome(
    build: Callable[[], nn.Module], device: str, *, steps: int = 4, bad: int = 2, **options: Any
) -> tuple[Any, ...]:
    """The results of a monitor of some training steps, one of them bad."""
    torch.manual_seed(11)
    model = build().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    monitor = fastcheck.install(model, overflow_nums=-1, **options)
    losses = []
    for step in range(steps):
        for module in model.modules():
            if isinstance(module, Poison):
                module.is_on = step == bad
        x = torch.randn(8, 8).to(device)
        for _ in range(2):  # two backward passes in a step
            loss = model(x).square().mean()
            loss.backward()
        losses.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    monitor.flush()
    records = monitor.records()
    events = [
        (str(event.site), event.step, event.verdict, event.reason, int(event.record["seq"]))
        for event in monitor.events
    ]
    sites = [str(monitor._session.sites[int(number)]) for number in records["site"]]
    monitor.remove()
    return sites, records.tobytes(), events, torch.stack(losses).numpy().tobytes()
