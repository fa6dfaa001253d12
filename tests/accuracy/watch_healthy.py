"""Healthy training programs for watch.py whose loops are their own: experts, reinforcement
learning, two optimizers that take turns, weights in bfloat16, learning rates that drop, gradients
that are summed and clipped, batches of changing lengths.

Each is a function of the number of steps that returns the models to observe, and what runs one
iteration.
"""

from __future__ import annotations

import math
from typing import Callable

import torch
from torch import nn
from torch.nn import functional as F

from accuracy.watch_programs import Block, Gpt, Program, RoutedGpt, cnn, rate_at

__all__ = ["LOOPS", "Loop"]

Tensor = torch.Tensor
#: The models, and one iteration, called with its number.
Loop = tuple[list[nn.Module], Callable[[int], None]]


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def routed_experts(steps: int) -> Loop:
    data, model = Program("gpt", 0), RoutedGpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def iterate(step: int) -> None:
        _set_rate(optimizer, 3e-3 * rate_at(step, steps))
        x, y = data.batch()
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten()) + 0.01 * model.second.balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return [model], iterate


class Walk:
    """32 walkers on a line that are paid for being near 0, and pushed by -1, 0 or 1."""

    def __init__(self) -> None:
        self.state = torch.randn(32, 2)

    def act(self, action: Tensor) -> tuple[Tensor, Tensor]:
        place, speed = self.state.unbind(-1)
        speed = 0.9 * speed + 0.2 * (action - 1) + 0.05 * torch.randn(32)
        place = (place + 0.2 * speed).clamp(-3, 3)
        is_over = torch.rand(32) < 0.02
        self.state = torch.where(
            is_over[:, None], torch.randn(32, 2), torch.stack([place, speed], -1)
        )
        return self.state, -0.1 * place.square()


def actor_critic(steps: int) -> Loop:
    body = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    model = nn.ModuleDict({"body": body, "policy": nn.Linear(64, 3), "value": nn.Linear(64, 1)})
    optimizer = torch.optim.Adam(model.parameters(), lr=7e-4)
    world = Walk()

    def iterate(step: int) -> None:
        _set_rate(optimizer, 7e-4 * (1 - step / steps))
        states, actions, gains = [world.state], [], []
        with torch.no_grad():
            for _ in range(8):
                logits = model["policy"](model["body"](states[-1]))
                actions.append(torch.distributions.Categorical(logits=logits).sample())
                state, gain = world.act(actions[-1])
                states.append(state)
                gains.append(gain)
            total = model["value"](model["body"](states[-1])).squeeze(-1)
        returns = []
        for gain in reversed(gains):
            total = gain + 0.95 * total
            returns.insert(0, total)
        hidden = model["body"](torch.stack(states[:-1]))
        policy = torch.distributions.Categorical(logits=model["policy"](hidden))
        missing = torch.stack(returns) - model["value"](hidden).squeeze(-1)
        actor = -(policy.log_prob(torch.stack(actions)) * missing.detach()).mean()
        loss = actor + 0.5 * missing.square().mean() - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    return [model], iterate


def q_learning(steps: int) -> Loop:
    """With a memory of past moves, and a second network that follows every hundred steps."""

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 3))

    model, target, world = network(), network(), Walk()
    target.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    memory: list[tuple[Tensor, ...]] = []

    def iterate(step: int) -> None:
        state = world.state
        with torch.no_grad():
            action = model(state).argmax(-1)
        is_random = torch.rand(32) < max(0.05, 1 - 2 * step / steps)
        action = torch.where(is_random, torch.randint(3, (32,)), action)
        following, gain = world.act(action)
        memory.append((state, action, gain, following))
        del memory[:-500]
        chosen = [memory[i] for i in torch.randint(len(memory), (4,)).tolist()]
        state, action, gain, following = (torch.cat(part) for part in zip(*chosen))
        with torch.no_grad():
            wanted = gain + 0.95 * target(following).amax(-1)
        found = model(state).gather(-1, action[:, None]).squeeze(-1)
        optimizer.zero_grad()
        F.smooth_l1_loss(found, wanted).backward()
        optimizer.step()
        if step % 100 == 99:
            target.load_state_dict(model.state_dict())

    return [model], iterate


def two_players(steps: int) -> Loop:
    """A GAN whose players have an optimizer each: eight points on a circle."""
    make = nn.Sequential(
        nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )
    judge = nn.Sequential(
        nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
    )
    first = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.99))
    second = torch.optim.Adam(make.parameters(), lr=1e-3, betas=(0.5, 0.99))

    def iterate(step: int) -> None:
        angle = torch.randint(8, (64,)) * (math.pi / 4)
        real = torch.stack([angle.cos(), angle.sin()], -1) + 0.05 * torch.randn(64, 2)
        made = make(torch.randn(64, 4))
        first.zero_grad()
        (F.softplus(-judge(real)) + F.softplus(judge(made.detach()))).mean().backward()
        first.step()
        second.zero_grad()
        F.softplus(-judge(made)).mean().backward()
        second.step()

    return [judge, make], iterate


def bfloat16_weights(steps: int) -> Loop:
    """An autoencoder, all of it in bfloat16: most updates are smaller than the weights' spacing."""
    model = nn.Sequential(
        nn.Linear(32, 64),
        nn.GELU(),
        nn.Linear(64, 8),
        nn.Linear(8, 64),
        nn.GELU(),
        nn.Linear(64, 32),
    ).bfloat16()
    mixing = torch.randn(8, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def iterate(step: int) -> None:
        _set_rate(optimizer, 1e-3 * rate_at(step, steps))
        x = (torch.randn(64, 8) @ mixing).bfloat16()
        optimizer.zero_grad()
        (model(x) - x).float().square().mean().backward()
        optimizer.step()

    return [model], iterate


def dropping_rate(steps: int) -> Loop:
    """SGD with momentum, and a learning rate that falls to a tenth twice."""
    data, model = Program("cnn", 1), cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def iterate(step: int) -> None:
        _set_rate(optimizer, 0.05 * 0.1 ** (int(step > steps // 2) + int(step > 3 * steps // 4)))
        x, y = data.batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, label_smoothing=0.1).backward()
        optimizer.step()

    return [model], iterate


def summed_and_clipped(steps: int) -> Loop:
    """Four backward passes for each update, whose gradients are clipped."""
    data, model = Program("gpt", 2), Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def iterate(step: int) -> None:
        _set_rate(optimizer, 3e-3 * rate_at(step, steps))
        optimizer.zero_grad()
        for _ in range(4):
            x, y = data.batch()
            (F.cross_entropy(model(x).flatten(0, -2), y.flatten()) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return [model], iterate


class Pixels(nn.Module):
    """Patches of a picture, a token for the class, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, 32))
        self.places = nn.Parameter(0.02 * torch.randn(1, 17, 32))
        self.blocks = nn.Sequential(Block(32), nn.Dropout(0.1), Block(32))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


def vision_transformer(steps: int) -> Loop:
    data, model = Program("cnn", 3), Pixels()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)

    def iterate(step: int) -> None:
        _set_rate(optimizer, 1e-3 * rate_at(step, steps))
        x, y = data.batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return [model], iterate


def changing_lengths(steps: int) -> Loop:
    """Sequences of 4 to 24 elements, in batches of 8 to 40, whose sum is asked for."""
    model = nn.ModuleDict({"rnn": nn.GRU(4, 32, batch_first=True), "head": nn.Linear(32, 4)})
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def iterate(step: int) -> None:
        _set_rate(optimizer, 2e-3 * rate_at(step, steps))
        length, count = (int(torch.randint(low, high, ())) for low, high in ((4, 25), (8, 41)))
        x = torch.randn(count, length, 4)
        found = model["head"](model["rnn"](x)[0][:, -1])
        optimizer.zero_grad()
        F.mse_loss(found, x.sum(1) / length**0.5).backward()
        optimizer.step()

    return [model], iterate


LOOPS: dict[str, Callable[[int], Loop]] = {
    "routed experts": routed_experts,
    "actor and critic": actor_critic,
    "q-learning": q_learning,
    "gan, two optimizers": two_players,
    "bfloat16 weights": bfloat16_weights,
    "sgd, dropping rate": dropping_rate,
    "summed and clipped": summed_and_clipped,
    "vision transformer": vision_transformer,
    "changing lengths": changing_lengths,
}
