"""Small architectures that train without a fault, with the infinities of healthy models: masks,
padding, log-sum-exps, guarded logarithms. Each returns its loss on a batch of its own. Those with
attention are in healthy_transformers.py.
"""

from __future__ import annotations

import math
from typing import Any, Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

INF = float("inf")
Tensor = torch.Tensor


class Healthy(nn.Module):
    """A model with its data and its loss, called with nothing."""

    def batch(self, *shape: int) -> Tensor:
        return torch.randn(*shape)

    def forward(self) -> Tensor:
        raise NotImplementedError


class Mlp(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 4)
        )

    def forward(self) -> Tensor:
        return F.cross_entropy(self.net(self.batch(8, 16)), torch.randint(4, (8,)))


class Cnn(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * 16, 4),
        )

    def forward(self) -> Tensor:
        return F.cross_entropy(self.net(self.batch(4, 3, 8, 8)), torch.randint(4, (4,)))


class ResNet(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.a, self.b = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norm_a, self.norm_b = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self) -> Tensor:
        x = self.stem(self.batch(4, 3, 8, 8))
        y = F.relu(self.norm_a(self.a(x)), inplace=True)
        x = F.relu(x + self.norm_b(self.b(y)))
        return F.cross_entropy(self.head(x.mean((2, 3))), torch.randint(4, (4,)))


class Recurrent(Healthy):
    def __init__(self, kind: Any = nn.LSTM) -> None:
        super().__init__()
        self.rnn, self.head = kind(8, 16, num_layers=2, batch_first=True), nn.Linear(16, 2)

    def forward(self) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.batch(3, 5, 8), torch.tensor([5, 4, 2]), batch_first=True
        )
        out, _ = self.rnn(packed)
        y, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True, padding_value=-INF)
        # The maximum over time; padding is -inf, so it is never the maximum.
        return F.cross_entropy(self.head(y.amax(1)), torch.randint(2, (3,)))


class Gru(Recurrent):
    def __init__(self) -> None:
        super().__init__(nn.GRU)


class Vae(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 8), nn.Linear(4, 16)

    def forward(self) -> Tensor:
        x = self.batch(8, 16).sigmoid()
        mean, log_var = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (log_var / 2).exp()
        kl = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(-1).mean()
        return F.binary_cross_entropy_with_logits(self.decode(z), x.to(z.dtype)) + 0.01 * kl


class Gan(Healthy):
    """Both losses in one step, the generator's through the discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 8), nn.Tanh())
        self.judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self) -> Tensor:
        made = self.make(self.batch(8, 4))
        real, fake = self.judge(self.batch(8, 8)), self.judge(made.detach())
        return (
            F.softplus(-real).mean()
            + F.softplus(fake).mean()
            - F.logsigmoid(self.judge(made)).mean()
        )


class Contrastive(Healthy):
    """Two views, cosine similarities, the diagonal of each with itself masked with -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self) -> Tensor:
        x = self.batch(6, 16)
        views = torch.cat([x + 0.1 * self.batch(6, 16), x + 0.1 * self.batch(6, 16)])
        z = F.normalize(self.net(views), dim=-1)
        scores = (z @ z.T / 0.1).masked_fill(torch.eye(12).bool(), -INF)
        targets = torch.arange(12).roll(6)
        margin = F.relu(F.pairwise_distance(z[:6], z[6:]) - 0.5).mean()
        cosine = 1 - F.cosine_similarity(z[:6], z[6:]).mean()
        return -scores.log_softmax(-1)[torch.arange(12), targets].mean() + margin + cosine


class Experts(Healthy):
    """Of four experts the best two; the gates of the others are -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 8) for _ in range(4))

    def forward(self) -> Tensor:
        x = self.batch(8, 16)
        logits = self.gate(x)
        best = logits.topk(2, -1)
        gates = torch.full_like(logits, -INF).scatter(-1, best.indices, best.values).softmax(-1)
        y = sum(gates[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        load = gates.mean(0)
        z = logits.float().logsumexp(-1).square().mean()
        assert isinstance(y, Tensor)
        return y.float().square().mean() + (load * load.clamp_min(1e-6).log()).sum() + 1e-3 * z


class Graph(Healthy):
    """Messages along edges: sums, maxima over -inf, a softmax over neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.head = nn.Linear(8, 8), nn.Linear(16, 3)
        self.score = nn.Linear(8, 1)

    def forward(self) -> Tensor:
        x, (source, target) = self.batch(10, 8), torch.randint(10, (2, 30))
        target[:10] = torch.arange(10)
        m = self.message(x)[source]
        score = self.score(m).squeeze(-1)
        peak = torch.full((10,), -INF, dtype=score.dtype).scatter_reduce(0, target, score, "amax")
        weight = (score - peak[target]).exp()
        total = torch.zeros(10, dtype=weight.dtype).index_add(0, target, weight)
        added = torch.zeros(10, 8, dtype=m.dtype).index_add(
            0, target, m * (weight / total[target])[:, None].to(m.dtype)
        )
        most = torch.full((10, 8), -INF, dtype=m.dtype).scatter_reduce(
            0, target[:, None].expand(-1, 8), m, "amax"
        )
        return F.cross_entropy(self.head(torch.cat([added, most], -1)), torch.randint(3, (10,)))


class UNet(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.norm, self.out = nn.GroupNorm(2, 8), nn.Conv2d(8, 1, 1)

    def forward(self) -> Tensor:
        x = self.batch(2, 1, 8, 8)
        a = F.silu(self.down(x))
        b = F.silu(self.middle(F.avg_pool2d(a, 2)))
        y = self.out(self.norm(torch.cat([a, self.up(b)], 1)))
        mask = (x > 0).to(y.dtype)
        overlap = (y.sigmoid() * mask).sum()
        dice = 1 - (2 * overlap + 1) / (y.sigmoid().sum() + mask.sum() + 1)
        return F.binary_cross_entropy_with_logits(y, mask) + dice


class Mixture(Healthy):
    """Mixture density: a log-sum-exp of weighted Gaussians."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 9))

    def forward(self) -> Tensor:
        x = self.batch(16, 4)
        weight, mean, log_std = self.net(x).float().chunk(3, -1)
        log_std = log_std.clamp(-5, 5)
        away = (x[:, :1] - mean) * (-log_std).exp()
        density = -0.5 * away**2 - log_std - 0.5 * math.log(2 * math.pi)
        return -(weight.log_softmax(-1) + density).logsumexp(-1).mean()


class Ctc(Healthy):
    """Its dynamic programme runs over -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 6)

    def forward(self) -> Tensor:
        y, _ = self.rnn(self.batch(3, 12, 8))
        steps = self.head(y).float().log_softmax(-1).transpose(0, 1)
        sizes = torch.tensor([3, 2, 4])
        targets = torch.randint(1, 6, (3, 4))
        return F.ctc_loss(steps, targets, torch.tensor([12, 10, 11]), sizes, zero_infinity=True)


class Diffusion(Healthy):
    """Noise at a random time; the schedule's signal-to-noise ratio is clamped."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16 + 8, 32), nn.SiLU(), nn.Linear(32, 16))
        self.register_buffer("kept", torch.linspace(1, 0.01, 50).cumprod(0))

    def forward(self) -> Tensor:
        kept = self.get_buffer("kept")
        time = torch.randint(50, (8,))
        level = kept[time][:, None]
        x, noise = self.batch(8, 16), self.batch(8, 16)
        angle = time[:, None] * torch.logspace(0, -3, 4)
        noisy = level.sqrt() * x + (1 - level).sqrt() * noise
        out = self.net(torch.cat([noisy, angle.sin(), angle.cos()], -1))
        weight = (level / (1 - level).clamp_min(1e-4)).clamp(max=5)
        return (weight * (out.float() - noise) ** 2).mean()


class Recommender(Healthy):
    """Bags of items, some of them empty."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(50, 8, mode="mean")
        self.users = nn.Embedding(20, 8, padding_idx=0)
        self.head = nn.Bilinear(8, 8, 1)

    def forward(self) -> Tensor:
        ids, starts = torch.randint(50, (20,)), torch.tensor([0, 5, 5, 11])
        y = self.head(self.items(ids, starts), self.users(torch.randint(20, (4,))))
        return F.binary_cross_entropy_with_logits(y.squeeze(-1), torch.rand(4).to(y.dtype))


class Guarded(Healthy):
    """Quantiles, and logarithms and roots that a where has made safe before they are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self) -> Tensor:
        y = self.net(self.batch(8, 8)).float()
        away = self.batch(8, 1) - y
        quantile = torch.tensor([0.1, 0.5, 0.9])
        pinball = torch.maximum(quantile * away, (quantile - 1) * away).mean()
        safe = torch.where(y > 0, y, torch.ones_like(y))
        logs = torch.where(y > 0, safe.log1p(), torch.zeros_like(y)).mean()
        # 1 / 0 gives an inf that torch.where replaces; there is no gradient.
        with torch.no_grad():
            inverse = torch.where(away == 0, 0.0, 1 / away.trunc())
            inverse = torch.where(inverse.isinf(), torch.zeros_like(inverse), inverse)
        return pinball + logs + 0.01 * (y * inverse.clamp(-1, 1)).mean()


class Policy(Healthy):
    """A policy gradient with actions that are forbidden."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.value = nn.Linear(8, 5), nn.Linear(8, 1)

    def forward(self) -> Tensor:
        x = self.batch(16, 8)
        forbidden = torch.rand(16, 5) < 0.3
        forbidden[:, 0] = False
        logits = self.net(x).float().masked_fill(forbidden, torch.finfo(torch.float32).min)
        policy = torch.distributions.Categorical(logits=logits, validate_args=False)
        action = policy.sample()
        gain = self.batch(16) - self.value(x).squeeze(-1)
        actor = -(policy.log_prob(action) * gain.detach()).mean()
        return actor + gain.square().mean() - 0.01 * policy.entropy().mean()


class Spectral(Healthy):
    """Weight and spectral norm, gradients of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a = parametrizations.weight_norm(nn.Linear(8, 16))
        self.b = parametrizations.spectral_norm(nn.Linear(16, 1))

    def forward(self) -> Tensor:
        x = self.batch(8, 8).requires_grad_()
        y = self.b(F.softplus(self.a(x)))
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.float().mean() + 0.1 * (slope.norm(dim=-1) - 1).square().mean()


class Scan(Healthy):
    """A state space as Mamba has it: decays are exponentials of cumulated sums, masked with
    -inf above the diagonal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.inside, self.outside = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self) -> Tensor:
        x = self.batch(2, 6, 8)
        step = F.softplus(self.rate(x)).float()
        total = (-step).cumsum(1)
        decay = total[:, :, None] - total[:, None]
        causal = torch.ones(6, 6).tril().bool()[None, :, :, None]
        kernel = decay.masked_fill(~causal, -INF).exp()
        y = torch.einsum("bijd,bjd->bid", kernel, (self.inside(x) * step))
        return F.mse_loss(self.outside(y * F.silu(y)).float(), x)


class Frozen(Healthy):
    """A part that is frozen and in evaluation, and a mean over a mask that may be empty."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).requires_grad_(False)
        self.head = nn.Linear(8, 4)

    def forward(self) -> Tensor:
        self.body.eval()
        x = self.batch(8, 8)
        with torch.no_grad():
            kept = torch.rand(8) < 0.1
        y = F.cross_entropy(
            self.head(self.body(x)).float(), torch.randint(4, (8,)), reduction="none"
        )
        return (y * kept).sum() / kept.sum().clamp_min(1) + y.mean()


MODELS: dict[str, Callable[[], Healthy]] = {
    "mlp": Mlp,
    "cnn with batch norm": Cnn,
    "resnet block": ResNet,
    "lstm, padded with -inf": Recurrent,
    "gru": Gru,
    "vae": Vae,
    "gan": Gan,
    "contrastive": Contrastive,
    "mixture of experts": Experts,
    "graph, scatter": Graph,
    "u-net": UNet,
    "mixture density": Mixture,
    "ctc": Ctc,
    "diffusion": Diffusion,
    "recommender": Recommender,
    "quantiles, where": Guarded,
    "policy gradient": Policy,
    "weight and spectral norm": Spectral,
    "state space scan": Scan,
    "frozen body": Frozen,
}
