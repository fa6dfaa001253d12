"""Twenty-six healthy programs in the manner of PyTorch's examples, for invariants.py.

Each is a generator: it gives the models, with which fastcheck is installed, and then trains.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import nn

HEALTHY: list[Callable[[], Iterator[Any]]] = []
STEPS = 150


def healthy(program: Callable[[], Iterator[Any]]) -> Callable[[], Iterator[Any]]:
    HEALTHY.append(program)
    return program


def images(count: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(0, 10, (count,))
    x = torch.randn(count, 1, 8, 8) * 0.5
    x[torch.arange(count), 0, labels % 8, labels // 8 * 4] += 4.0
    return x, labels


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.25), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@healthy
def mnist() -> Iterator[Any]:
    model = cnn()
    yield model
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    for _ in range(5):
        model.train()
        for _ in range(30):
            x, y = images()
            step(optimizer, F.cross_entropy(model(x), y))
        model.eval()
        with torch.no_grad():
            for _ in range(5):
                model(images()[0])
        scheduler.step()


@healthy
def dcgan() -> Iterator[Any]:
    made = nn.Sequential(
        nn.ConvTranspose2d(8, 16, 4), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    judge = nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(256, 1), nn.Sigmoid()
    )
    yield made, judge
    of_judge = torch.optim.Adam(judge.parameters(), 2e-4, betas=(0.5, 0.999))
    of_made = torch.optim.Adam(made.parameters(), 2e-4, betas=(0.5, 0.999))
    fixed, criterion = torch.randn(16, 8, 1, 1), nn.BCELoss()
    for number in range(STEPS):
        judge.zero_grad()
        label = torch.full((16,), 1.0)
        criterion(judge(images()[0].tanh()).view(-1), label).backward()
        fake = made(torch.randn(16, 8, 1, 1))
        label.fill_(0.0)
        criterion(judge(fake.detach()).view(-1), label).backward()
        of_judge.step()
        made.zero_grad()
        label.fill_(1.0)
        criterion(judge(fake).view(-1), label).backward()
        of_made.step()
        if number % 50 == 0:
            with torch.no_grad():
                made(fixed)


@healthy
def wasserstein_gan() -> Iterator[Any]:
    made = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
    critic = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    yield made, critic
    of_critic = torch.optim.RMSprop(critic.parameters(), 5e-4)
    of_made = torch.optim.RMSprop(made.parameters(), 5e-4)
    for number in range(STEPS):
        of_critic.zero_grad()
        fake = made(torch.randn(32, 8)).detach()
        (critic(fake).mean() - critic(torch.randn(32, 16) + 1).mean()).backward()
        of_critic.step()
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.clamp_(-0.01, 0.01)
        if number % 5 == 4:
            of_made.zero_grad()
            (-critic(made(torch.randn(32, 8))).mean()).backward()
            of_made.step()


@healthy
def vae() -> Iterator[Any]:
    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.mean, self.log = nn.Linear(64, 32), nn.Linear(32, 4), nn.Linear(32, 4)
            self.hidden, self.decode = nn.Linear(4, 32), nn.Linear(32, 64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            hidden = F.relu(self.encode(x))
            mean, log = self.mean(hidden), self.log(hidden)
            z = mean + torch.randn_like(mean) * (0.5 * log).exp()
            return self.decode(F.relu(self.hidden(z))).sigmoid(), mean, log

    model = VAE()
    yield model
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        x = images()[0].flatten(1).sigmoid()
        made, mean, log = model(x)
        loss = F.binary_cross_entropy(made, x, reduction="sum")
        step(optimizer, loss - 0.5 * (1 + log - mean**2 - log.exp()).sum())


class _Language(nn.Module):
    def __init__(self, kind: str, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.drop = nn.Embedding(30, 32), nn.Dropout(0.2)
        self.kind, self.head = kind, nn.Linear(32, 30)
        if kind == "lstm":
            self.body: nn.Module = nn.LSTM(32, 32, batch_first=True)
        else:
            layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
            self.body = nn.TransformerEncoder(layer, 2)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
        x = self.drop(self.embedding(ids))
        if self.kind == "lstm":
            x, state = self.body(x, state)
        else:
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
            x = self.body(x, mask=mask, is_causal=True)
        return self.head(self.drop(x)), state


def words(count: int = 8, length: int = 13) -> torch.Tensor:
    start = torch.randint(0, 30, (count, 1))
    return (start + torch.arange(length) * torch.randint(1, 4, (count, 1))) % 30


@healthy
def word_language_model() -> Iterator[Any]:
    """Updates by hand, hidden states that go on, and a learning rate that is annealed."""
    model = _Language("lstm", is_tied=True)
    yield model
    rate, state = 5.0, None
    for number in range(STEPS):
        ids = words()
        model.zero_grad()
        logits, state = model(ids[:, :-1], state)
        state = tuple(part.detach() for part in state)
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-rate)
        if number % 50 == 49:
            rate /= 4


@healthy
def transformer() -> Iterator[Any]:
    model = _Language("transformer")
    yield model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
    for number in range(STEPS):
        ids = words()
        optimizer.zero_grad()
        logits, _ = model(ids[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if number % 50 == 49:
            model.eval()
            with torch.no_grad():
                for _ in range(4):
                    model(words())
            model.train()


@healthy
def siamese() -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    yield model
    optimizer = torch.optim.Adadelta(model.parameters(), 1.0)
    for _ in range(STEPS):
        x = torch.randn(16, 16)
        near, far = x + 0.1 * torch.randn(16, 16), torch.randn(16, 16)
        step(optimizer, F.triplet_margin_loss(model(x), model(near), model(far)))


@healthy
def regression() -> Iterator[Any]:
    model = nn.Linear(4, 1)
    yield model
    weights = torch.randn(4, 1) * 5
    for _ in range(STEPS):
        x = torch.randn(32).unsqueeze(1) ** torch.arange(1.0, 5.0)
        model.zero_grad()
        F.smooth_l1_loss(model(x), x @ weights + 1).backward()
        for parameter in model.parameters():
            parameter.data.add_(-0.01 * parameter.grad)


@healthy
def overfitting_one_batch() -> Iterator[Any]:
    """On purpose, to see whether a model can learn at all."""
    model = cnn()
    yield model
    x, y = images()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        step(optimizer, F.cross_entropy(model(x), y))


@healthy
def reinforce() -> Iterator[Any]:
    policy = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.6), nn.ReLU(), nn.Linear(32, 2))
    yield policy
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    for _ in range(40):
        chosen, rewards = [], []
        state = torch.randn(4)
        for _ in range(10):
            action = torch.distributions.Categorical(logits=policy(state))
            move = action.sample()
            chosen.append(action.log_prob(move))
            rewards.append(float(move == (state.sum() > 0)))
            state = torch.randn(4)
        returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        step(optimizer, -(torch.stack(chosen) * returns).sum())


@healthy
def ppo() -> Iterator[Any]:
    """Ten epochs over each rollout: the same batch comes ten times in a row."""
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
    yield model
    optimizer = torch.optim.Adam(model.parameters(), 3e-4, eps=1e-5)
    for _ in range(20):
        states = torch.randn(64, 4)
        with torch.no_grad():
            old = torch.distributions.Categorical(logits=model(states)[:, :2])
            moves = old.sample()
            before = old.log_prob(moves)
        gains = (moves == (states.sum(1) > 0)).float() - 0.5
        for _ in range(10):
            output = model(states)
            now = torch.distributions.Categorical(logits=output[:, :2])
            ratio = (now.log_prob(moves) - before).exp()
            surrogate = torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains)
            loss = -surrogate.mean() + 0.5 * (output[:, 2] - gains).square().mean()
            optimizer.zero_grad()
            (loss - 0.01 * now.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()


@healthy
def q_learning() -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    target = copy.deepcopy(model)
    yield model, target
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, amsgrad=True)
    for _ in range(STEPS):
        states, after, moves = torch.randn(32, 4), torch.randn(32, 4), torch.randint(0, 2, (32, 1))
        reward = (moves[:, 0] == (states.sum(1) > 0)).float()
        with torch.no_grad():
            wanted = reward + 0.5 * target(after).max(1).values
        optimizer.zero_grad()
        F.smooth_l1_loss(model(states).gather(1, moves)[:, 0], wanted).backward()
        nn.utils.clip_grad_value_(model.parameters(), 100)
        optimizer.step()
        with torch.no_grad():
            for mine, other in zip(target.parameters(), model.parameters()):
                mine.lerp_(other, 0.005)


@healthy
def super_resolution() -> Iterator[Any]:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, 1, 2), nn.ReLU(), nn.Conv2d(16, 4, 3, 1, 1), nn.PixelShuffle(2)
    )
    yield model
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        large = images()[0]
        step(optimizer, F.mse_loss(model(F.avg_pool2d(large, 2)), large))


@healthy
def time_sequence_prediction() -> Iterator[Any]:
    """LBFGS on all of the data, which is the same in each step."""
    model = nn.LSTM(1, 16, batch_first=True, proj_size=1).double()
    yield model
    waves = torch.sin(torch.arange(40).double() / 5 + torch.rand(8, 1).double() * 6)[..., None]
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(waves[:, :-1])[0], waves[:, 1:])
        loss.backward()
        return loss

    for _ in range(30):
        optimizer.step(closure)


@healthy
def graph_convolution() -> Iterator[Any]:
    """The whole graph in each step."""

    class GCN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
            hidden = F.dropout(F.relu(graph @ self.first(x)), 0.5, self.training)
            return (graph @ self.second(hidden)).log_softmax(1)

    model = GCN()
    yield model
    graph = torch.eye(50) + (torch.rand(50, 50) < 0.1)
    graph, x, y = (
        graph / graph.sum(1, keepdim=True),
        torch.randn(50, 16),
        torch.randint(0, 4, (50,)),
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=5e-4)
    for _ in range(STEPS):
        model.train()
        step(optimizer, F.nll_loss(model(x, graph)[:20], y[:20]))
        model.eval()
        with torch.no_grad():
            model(x, graph)


@healthy
def gradient_accumulation() -> Iterator[Any]:
    model = cnn()
    yield model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for number in range(STEPS):
        x, y = images()
        (F.cross_entropy(model(x), y) / 4).backward()
        if number % 4 == 3:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


@healthy
def frozen_backbone() -> Iterator[Any]:
    """The backbone in evaluation mode, as for detection; it is trained from half of the run on."""
    model = cnn()
    head = model[6]
    yield model
    for parameter in model[:6].parameters():
        parameter.requires_grad = False
    optimizer = torch.optim.SGD(head.parameters(), 0.01, momentum=0.9)
    for number in range(STEPS):
        if number == STEPS // 2:
            for parameter in model[:6].parameters():
                parameter.requires_grad = True
            optimizer.add_param_group({"params": list(model[:6].parameters()), "lr": 1e-3})
        model.train()
        model[1].eval()
        x, y = images()
        step(optimizer, F.cross_entropy(model(x), y))


class _Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False)
        self.drop = nn.Dropout(0.05)
        nn.init.zeros_(self.b.weight)
        base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(self.drop(x)))


@healthy
def lora() -> Iterator[Any]:
    model = nn.Sequential(
        *(nn.Sequential(_Adapted(nn.Linear(64, 64)), nn.ReLU()) for _ in range(3)),
        nn.Linear(64, 10),
    )
    model[3].requires_grad_(False)
    yield model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    for _ in range(STEPS):
        x, y = images()
        step(optimizer, F.cross_entropy(model(x.flatten(1)), y))


@healthy
def moving_average() -> Iterator[Any]:
    model = cnn()
    yield model
    mean = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True)
    for _ in range(STEPS):
        x, y = images()
        step(optimizer, F.cross_entropy(model(x), y))
        mean.update_parameters(model)


@healthy
def mixed_precision() -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 10))
    yield model
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-3), torch.amp.GradScaler("cpu")
    for _ in range(STEPS):
        x, y = images()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x.flatten(1)), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@healthy
def sharpness_aware() -> Iterator[Any]:
    """Two passes in each step, and weights that are put back between them."""
    model = cnn()
    yield model
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(STEPS):
        x, y = images()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        kept = [p.detach().clone() for p in model.parameters()]
        norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=0.05 / float(norm + 1e-12))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), kept):
                parameter.copy_(value)
        optimizer.step()


@healthy
def contrastive() -> Iterator[Any]:
    """Labels that are all 0, and a second network that follows the first, as in MoCo."""
    query = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    key = copy.deepcopy(query).requires_grad_(False)
    yield query, key
    optimizer = torch.optim.SGD(query.parameters(), 0.03, momentum=0.9)
    queue = F.normalize(torch.randn(64, 8), dim=1)
    for _ in range(STEPS):
        x = images()[0].flatten(1)
        mine = F.normalize(query(x + 0.1 * torch.randn_like(x)), dim=1)
        with torch.no_grad():
            other = F.normalize(key(x), dim=1)
            for one, two in zip(key.parameters(), query.parameters()):
                one.lerp_(two, 0.01)
        logits = torch.cat([(mine * other).sum(1, keepdim=True), mine @ queue.T], 1) / 0.2
        step(optimizer, F.cross_entropy(logits, torch.zeros(16, dtype=torch.long)))
        queue = torch.cat([queue[16:], other])


@healthy
def fast_neural_style() -> Iterator[Any]:
    """A loss network that is frozen, in evaluation mode, and has gradients run through it."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, 1, 1), nn.InstanceNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 3, 1, 1)
    )
    features = cnn().eval().requires_grad_(False)
    yield model, features
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        x, _ = images()
        step(optimizer, F.mse_loss(features[:3](model(x)), features[:3](x)) * 1e5)


@healthy
def checkpointed() -> Iterator[Any]:
    """Reentrant checkpoints: each part runs without gradients first."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.parts = nn.ModuleList(
                nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1)) for _ in range(4)
            )
            self.head = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for part in self.parts:
                x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=True)
            return self.head(x)

    model = Parts()
    yield model
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        x, y = images()
        step(optimizer, F.cross_entropy(model(x.flatten(1)), y))


@healthy
def discriminative_rates() -> Iterator[Any]:
    """Groups of which one is at a learning rate of 0 for a while, and warm restarts."""
    model = cnn()
    yield model
    groups = [{"params": model[:6].parameters(), "lr": 1e-3}, {"params": model[6].parameters()}]
    optimizer = torch.optim.AdamW(groups, 1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 50)
    for number in range(STEPS):
        x, y = images()
        rate = optimizer.param_groups[0]["lr"]
        if 40 <= number < 110:
            optimizer.param_groups[0]["lr"] = 0.0
        step(optimizer, F.cross_entropy(model(x), y))
        optimizer.param_groups[0]["lr"] = rate
        scheduler.step()


@healthy
def adversarial_examples() -> Iterator[Any]:
    """The gradient of the input, by a backward() that fills those of the weights too."""
    model = cnn()
    yield model
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        x, y = images()
        x.requires_grad_()
        F.cross_entropy(model(x), y).backward()
        attacked = (x + 0.1 * x.grad.sign()).detach()
        step(optimizer, F.cross_entropy(model(attacked), y))
