"""Losses that contradict what they are for (contrastive, variational, of preferences, of actor and
critic, of distillation), and terms and weights that train nothing, each beside its fixed version,
for invariants.py. A program is one as in ``invariants_programs.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Callable, Optional

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence

from accuracy.invariants_programs import Fault, Program, adam, batch, mlp

OBJECTIVES: list[Fault] = []
STEPS = 48


def objective(source: str, text: str) -> Any:
    def add(program: Program) -> Program:
        OBJECTIVES.append(Fault(program.__name__, source, text, program))
        return program

    return add


def train(
    model: nn.Module,
    loss_of: Callable[[int], torch.Tensor],
    optimizer: Optional[torch.optim.Optimizer] = None,
) -> None:
    optimizer = adam(model) if optimizer is None else optimizer
    for step in range(STEPS):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def net(*widths: int) -> nn.Sequential:
    first, middle, last = widths
    return nn.Sequential(nn.Linear(first, middle), nn.ReLU(), nn.Linear(middle, last))


# Contrastive


def _views() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 16)
    return x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)


def _fill(similarities: torch.Tensor) -> torch.Tensor:
    is_own = torch.eye(len(similarities), dtype=torch.bool)
    return similarities.masked_fill(is_own, -torch.inf)


@objective("SimCLR: the diagonal is not masked", "with its own transposition, and no target is on")
def similar_to_itself(is_faulty: bool) -> Iterator[Any]:
    model = net(16, 32, 16)
    yield model

    def loss(step: int) -> torch.Tensor:
        z = F.normalize(model(torch.cat(_views())), dim=1)
        similar = z @ z.t() / 0.2
        other = torch.arange(32).roll(16)
        return F.cross_entropy(similar if is_faulty else _fill(similar), other)

    train(model, loss)


@objective("InfoNCE: the negatives hold the positive", "before a product that holds it once more")
def negatives_with_the_positive(is_faulty: bool) -> Iterator[Any]:
    model = net(16, 32, 16)
    yield model

    def loss(step: int) -> torch.Tensor:
        one, other = (F.normalize(model(x), dim=1) for x in _views())
        positive, negatives = (one * other).sum(1, keepdim=True), one @ other.t()
        negatives = negatives if is_faulty else _fill(negatives)
        target = torch.zeros(16, dtype=torch.long)
        return F.cross_entropy(torch.cat([positive, negatives], 1) / 0.2, target)

    train(model, loss)


@objective("CLIP with the targets of MoCo", "each target is 0: all samples are to be like one")
def clip_with_targets_of_zeros(is_faulty: bool) -> Iterator[Any]:
    model = nn.ModuleList([net(16, 32, 16), net(16, 32, 16)])
    yield model
    target = torch.zeros(16, dtype=torch.long) if is_faulty else torch.arange(16)

    def loss(step: int) -> torch.Tensor:
        one, other = (F.normalize(part(x), dim=1) for part, x in zip(model, _views()))
        return F.cross_entropy(one @ other.t() / 0.1, target)

    train(model, loss)


@objective("BYOL without detach(), by mse_loss", "consists of cosine similarities whose sides both")
def squares_of_two_trained_sides(is_faulty: bool) -> Iterator[Any]:
    model = nn.ModuleList([net(16, 32, 16), net(16, 16, 16)])
    yield model

    def loss(step: int) -> torch.Tensor:
        one, other = map(model[0], _views())
        target = F.normalize(other if is_faulty else other.detach(), dim=1)
        return F.mse_loss(F.normalize(model[1](one), dim=1), target)

    train(model, loss)


# Variational


class _Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = net(16, 32, 8), net(4, 32, 16)


def _variational(source: str, text: str, draw: Any, sign: int = 1) -> None:
    """``draw``: what a faulty version draws from mean and log-variance."""

    def program(is_faulty: bool) -> Iterator[Any]:
        model = _Variational()
        yield model

        def loss(step: int) -> torch.Tensor:
            x = torch.randn(32, 16)
            mean, logvar = model.encoder(x).chunk(2, 1)
            made = (draw if is_faulty else _drawn)(mean, logvar)
            divergence = -0.5 * (1 + logvar - mean.pow(2) - logvar.exp()).sum(1).mean()
            weight = 0.1 * (sign if is_faulty else 1)
            return F.mse_loss(model.decoder(made), x) + weight * divergence

        train(model, loss)

    name = f"variational_{source.replace(' ', '_')}"
    OBJECTIVES.append(Fault(name, f"VAE: {source}", text, program))


def _drawn(mean: torch.Tensor, logvar: torch.Tensor) -> torch.Tensor:
    return mean + (0.5 * logvar).exp() * torch.randn_like(mean)


_variational(
    "exp of the log variance",
    r"noise is multiplied by exp\(1 \* logvar\), not by its root",
    lambda mean, logvar: mean + logvar.exp() * torch.randn_like(mean),
)
_variational(
    "the sign of the log variance",
    r"noise is multiplied by exp\(-0.5 \* logvar\), not by its root",
    lambda mean, logvar: mean + (-0.5 * logvar).exp() * torch.randn_like(mean),
)
_variational(
    "drawn under no_grad",
    "all that is made of that mean, and what is drawn has no gradient",
    lambda mean, logvar: _drawn(mean.detach(), logvar.detach()),
)
_variational("the sign of the divergence", "is subtracted, so that the loss is least", _drawn, -1)


@objective("VAE: sample() for rsample()", "all that is made of that mean, and what is drawn has no")
def sample_of_a_distribution(is_faulty: bool) -> Iterator[Any]:
    model = _Variational()
    yield model

    def loss(step: int) -> torch.Tensor:
        x = torch.randn(32, 16)
        mean, logvar = model.encoder(x).chunk(2, 1)
        posterior = Normal(mean, (0.5 * logvar).exp())
        made = posterior.sample() if is_faulty else posterior.rsample()
        divergence = kl_divergence(posterior, Normal(0.0, 1.0)).sum(1).mean()
        return F.mse_loss(model.decoder(made), x) + 0.1 * divergence

    train(model, loss)


# Preferences


class _Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(20, 24), nn.Linear(24, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logarithm of the probability of each row."""
        made = self.layer(self.embedding(tokens[:, :-1])).log_softmax(-1)
        return made.gather(2, tokens[:, 1:, None]).squeeze(2).sum(1)


def _pairs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 10, (16, 9)), torch.randint(0, 20, (16, 9))


@objective("DPO: reference = model", "logsigmoid is given 0 in all 16 elements")
def reference_is_the_policy(is_faulty: bool) -> Iterator[Any]:
    model = _Tokens()
    reference = model if is_faulty else copy.deepcopy(model).requires_grad_(False)
    yield model

    def loss(step: int) -> torch.Tensor:
        chosen, rejected = _pairs()
        with torch.no_grad():
            before = reference(chosen) - reference(rejected)
        return -F.logsigmoid(0.1 * (model(chosen) - model(rejected) - before)).mean()

    train(model, loss)


@objective("DPO: the optimizer holds the reference", "of two models are compared, and optimizers")
def reference_that_trains(is_faulty: bool) -> Iterator[Any]:
    model = _Tokens()
    reference = copy.deepcopy(model)
    yield model
    weights = [*model.parameters(), *(reference.parameters() if is_faulty else ())]

    def loss(step: int) -> torch.Tensor:
        chosen, rejected = _pairs()
        of_chosen = model(chosen) - reference(chosen)
        return -F.logsigmoid(0.1 * (of_chosen - (model(rejected) - reference(rejected)))).mean()

    train(model, loss, torch.optim.Adam(weights, 1e-3))


# Actor and critic


class _Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
        self.policy, self.value = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.body(state)
        return self.policy(made), self.value(made).squeeze(-1)


def _act(model: nn.Module) -> tuple[Categorical, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A policy, an action, its return, and the value of the state."""
    state = torch.randn(64, 8)
    logits, value = model(state)
    policy = Categorical(logits=logits)
    action = policy.sample()
    return policy, action, state[:, :4].gather(1, action[:, None]).squeeze(1), value


@objective("actor-critic without detach()", "multiplied by an advantage that has a gradient")
def advantage_with_a_gradient(is_faulty: bool) -> Iterator[Any]:
    model = _Actor()
    yield model

    def loss(step: int) -> torch.Tensor:
        policy, action, returns, value = _act(model)
        advantage = returns - value
        weight = advantage if is_faulty else advantage.detach()
        return -(policy.log_prob(action) * weight).mean() + 0.5 * advantage.pow(2).mean()

    train(model, loss)


@objective("A2C: the sign of the entropy", "adds the entropy of probabilities to that of a policy")
def entropy_that_is_added(is_faulty: bool) -> Iterator[Any]:
    model = _Actor()
    yield model

    def loss(step: int) -> torch.Tensor:
        policy, action, returns, value = _act(model)
        weight, bonus = (returns - value).detach(), 0.01 * policy.entropy().mean()
        loss = -(policy.log_prob(action) * weight).mean() + F.mse_loss(value, returns)
        return loss + bonus if is_faulty else loss - bonus

    train(model, loss)


@objective("DQN without no_grad()", r"has a target with a gradient, which holds the max\(\) of")
def value_of_the_next_state_with_a_gradient(is_faulty: bool) -> Iterator[Any]:
    model = net(8, 32, 4)
    yield model

    def loss(step: int) -> torch.Tensor:
        action, reward = torch.randint(0, 4, (64, 1)), torch.randn(64)
        following = model(torch.randn(64, 8)).max(1).values
        following = following if is_faulty else following.detach()
        value = model(torch.randn(64, 8)).gather(1, action).squeeze(1)
        return F.smooth_l1_loss(value, reward + 0.95 * following * (torch.rand(64) < 0.9))

    train(model, loss)


@objective("log_prob() of N x 1 and N", "was broadcast to .32, 32., and the square")
def likelihood_that_is_broadcast(is_faulty: bool) -> Iterator[Any]:
    model = net(8, 32, 1)
    yield model

    def loss(step: int) -> torch.Tensor:
        x = torch.randn(32, 8)
        action = x[:, 0].sin() if is_faulty else x[:, :1].sin()
        return -Normal(model(x), 0.5).log_prob(action).mean()

    train(model, loss)


@objective("poisson_nll_loss of N x 1 and N", "product of a result .* was broadcast to .32, 32.")
def counts_that_are_broadcast(is_faulty: bool) -> Iterator[Any]:
    model = net(8, 32, 1)
    yield model

    def loss(step: int) -> torch.Tensor:
        x = torch.randn(32, 8)
        counts = torch.poisson(x[:, :1].exp())
        return F.poisson_nll_loss(model(x), counts.squeeze(1) if is_faulty else counts)

    train(model, loss)


# Distillation


@objective("kl_div of logits", "kl_div is given the result of a linear layer as input")
def divergence_of_logits(is_faulty: bool) -> Iterator[Any]:
    model, teacher = mlp(), mlp().requires_grad_(False)
    yield model

    def loss(step: int) -> torch.Tensor:
        x, y = batch()
        logits = model(x) / 2
        given = logits if is_faulty else logits.log_softmax(1)
        target = (teacher(x) / 2).softmax(1)
        return F.kl_div(given, target, reduction="batchmean") + F.cross_entropy(model(x), y)

    train(model, loss)


@objective("log_target=True of probabilities", "log_target=True is given probabilities as target")
def divergence_from_probabilities(is_faulty: bool) -> Iterator[Any]:
    model, teacher = mlp(), mlp().requires_grad_(False)
    yield model

    def loss(step: int) -> torch.Tensor:
        x, _ = batch()
        target = teacher(x).softmax(1) if is_faulty else teacher(x).log_softmax(1)
        given = model(x).log_softmax(1)
        return F.kl_div(given, target, reduction="batchmean", log_target=True)

    train(model, loss)


# Terms, weights and targets


@objective("a log-likelihood that is minimized", "is a cross entropy times a number below 0")
def likelihood_that_is_minimized(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model

    def loss(step: int) -> torch.Tensor:
        x, y = batch()
        mean = (model(x).log_softmax(1) * F.one_hot(y, 10)).sum(1).mean()
        return mean if is_faulty else -mean

    train(model, loss)


@objective("a penalty of .data", "a term of the loss has no graph, and its value has changed")
def penalty_of_data(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model

    def loss(step: int) -> torch.Tensor:
        x, y = batch()
        weights = [p.data if is_faulty else p for p in model.parameters()]
        return F.cross_entropy(model(x), y) + 1e-3 * sum(p.abs().sum() for p in weights)

    train(model, loss)


@objective("Dice of a mask", "a term of the loss has no graph, and its value has changed")
def dice_of_a_comparison(is_faulty: bool) -> Iterator[Any]:
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
    yield model

    def loss(step: int) -> torch.Tensor:
        x = torch.randn(4, 1, 8, 8)
        y, logits = (x > 0.3).float(), model(x)
        share = logits.sigmoid()
        share = (share > 0.5).float() if is_faulty else share
        dice = (2 * (share * y).sum() + 1) / (share.sum() + y.sum() + 1)
        return F.binary_cross_entropy_with_logits(logits, y) + 1 - dice

    train(model, loss)


class _Heads(nn.Module):
    def __init__(self, is_faulty: bool) -> None:
        super().__init__()
        self.body = nn.Linear(16, 32)
        heads = {"classes": nn.Linear(32, 10), "sum": nn.Linear(32, 1)}
        self.heads: Any = heads if is_faulty else nn.ModuleDict(heads)


@objective("heads in a dict", "4 weights in heads get gradients that nothing uses")
def heads_in_a_dictionary(is_faulty: bool) -> Iterator[Any]:
    model = _Heads(is_faulty)
    yield model

    def loss(step: int) -> torch.Tensor:
        x, y = batch()
        made = model.body(x).relu()
        total = F.mse_loss(model.heads["sum"](made), x.sum(1, keepdim=True))
        return F.cross_entropy(model.heads["classes"](made), y) + total

    train(model, loss)


@objective("PoissonNLLLoss of exp()", "poisson_nll_loss is given the result of exp as input")
def rate_in_the_place_of_its_logarithm(is_faulty: bool) -> Iterator[Any]:
    model = net(16, 32, 1)
    yield model

    def loss(step: int) -> torch.Tensor:
        x = torch.randn(32, 16)
        made, counts = model(x), torch.poisson(x[:, :1].sigmoid())
        return F.poisson_nll_loss(made.exp() if is_faulty else made, counts)

    train(model, loss)


@objective("cross_entropy() of squeezed logits", "more than 1, in 1 of 1 rows of 32 classes")
def softmax_over_the_samples(is_faulty: bool) -> Iterator[Any]:
    model = net(16, 32, 1)
    yield model

    def loss(step: int) -> torch.Tensor:
        x = torch.randn(32, 16)
        of = F.cross_entropy if is_faulty else F.binary_cross_entropy_with_logits
        return of(model(x).squeeze(1), (x[:, 0] > 0).float())

    train(model, loss)


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(20, 16), layer, nn.Linear(16, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.layer(self.embed(tokens))[0])
        return made


@objective("char-rnn: targets that are the input", "a recurrent layer reads at each place that")
def targets_that_a_recurrent_layer_reads(is_faulty: bool) -> Iterator[Any]:
    model = Recurrent(nn.GRU(16, 16, batch_first=True))
    yield model

    def loss(step: int) -> torch.Tensor:
        tokens = torch.randint(0, 20, (8, 9))
        given = tokens[:, :-1]
        target = given if is_faulty else tokens[:, 1:]
        return F.cross_entropy(model(given).flatten(0, 1), target.flatten())

    train(model, loss)


class Scaled(nn.Module):
    def __init__(self, is_faulty: bool) -> None:
        super().__init__()
        self.body = nn.Linear(16, 10)
        scale = torch.ones(10, requires_grad=True)
        self.scale = scale if is_faulty else nn.Parameter(scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.body(x) * self.scale
        return made


@objective("forums: a tensor is no nn.Parameter", "1 weight in scale gets gradients that nothing")
def scale_that_is_no_parameter(is_faulty: bool) -> Iterator[Any]:
    model = Scaled(is_faulty)
    yield model

    def loss(step: int) -> torch.Tensor:
        x, y = batch()
        return F.cross_entropy(model(x), y)

    train(model, loss)


class _Centers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(10, 10))

    def forward(self, made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(made, self.centers[y])


@objective("forums: center loss", "1 weight in distance.centers gets gradients that nothing uses")
def centers_without_an_optimizer(is_faulty: bool) -> Iterator[Any]:
    model, distance = net(16, 32, 10), _Centers()
    yield model

    def loss(step: int) -> torch.Tensor:
        x, y = batch()
        made = model(x)
        return F.cross_entropy(made, y) + 0.1 * distance(made, y)

    own = [*model.parameters(), *(() if is_faulty else distance.parameters())]
    train(model, loss, torch.optim.Adam(own, 1e-3))


@objective("labels of 0 to 1 that are made integers", "32 targets of 4 classes: all are 0")
def labels_that_are_cut_off(is_faulty: bool) -> Iterator[Any]:
    model = net(16, 32, 4)
    yield model

    def loss(step: int) -> torch.Tensor:
        x = torch.randn(32, 16)
        share = x[:, 0].sigmoid()
        return F.cross_entropy(model(x), (share if is_faulty else 4 * share).long())

    train(model, loss)


@objective("a window that holds its target", "are the last column of 12 of what a layer is given")
def target_within_the_window(is_faulty: bool) -> Iterator[Any]:
    model = net(12, 32, 1)
    yield model

    def loss(step: int) -> torch.Tensor:
        series = torch.randn(32, 14).cumsum(1)
        return F.mse_loss(
            model(series[:, :12]), series[:, 11:12] if is_faulty else series[:, 12:13]
        )

    train(model, loss)


@objective("manual_seed() in the loop", r"dropout \(p=0.5\) drops the same elements")
def seed_in_each_step(is_faulty: bool) -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10))
    yield model
    x = torch.randn(32 * STEPS, 16)

    def loss(step: int) -> torch.Tensor:
        if is_faulty:
            torch.manual_seed(0)
        rows = x[32 * step : 32 * step + 32]
        return F.cross_entropy(model(rows), rows[:, :10].argmax(1))

    train(model, loss)
