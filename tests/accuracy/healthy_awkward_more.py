"""A second set of healthy programs: those in parts (healthy_awkward_parts.py), and losses, metrics
and loops that make NaN and infinities and remove them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Callable

import torch
from torch import nn
from torch.nn import functional as F

from accuracy.healthy_awkward_parts import PARTS
from accuracy.healthy_awkward_runs import PROGRAMS, STEPS, Around, Tensor, Watch, fit

__all__ = ["PROGRAMS"]

INF, NAN = float("inf"), float("nan")
first_half = torch.arange(8) < 4


class Each(nn.Module):
    """A part: a function of what the part before it has returned."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class InParts(nn.Module):
    """Linear layers around parts."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.parts = nn.ModuleList(map(Each, functions))

    def forward(self, x: Tensor) -> Tensor:
        made: Any = (self.before(x),)
        for part in self.parts:
            made = part(*made) if type(made) is tuple else part(made)
        y: Tensor = self.after(made)
        return y


def of_parts(functions: tuple[Callable[..., Any], ...]) -> Callable[[Watch], Iterable[Tensor]]:
    return lambda watch: fit(InParts(*functions), watch)


PROGRAMS.update({f"parts: {name}": of_parts(one) for name, one in PARTS.items()})


def loss(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    name = f"loss 2: {function.__name__.replace('_', ' ')}"
    PROGRAMS[name] = lambda watch: fit(Around(), watch, function)
    return function


def program(function: Callable[[Watch], Iterable[Tensor]]) -> Any:
    PROGRAMS[f"run 2: {function.__name__.replace('_', ' ')}"] = function
    return function


# ---- Losses and metrics --------------------------------------------------------------------------


@loss
def a_discounted_return_with_masked_rewards(y: Tensor) -> Tensor:
    rewards = torch.where(first_half, torch.randn(4, 8), NAN)
    total, returns = torch.zeros(4), []
    for t in reversed(range(8)):
        total = 0.9 * total + rewards[:, t].nan_to_num(0.0)
        returns.append(total)
    return F.mse_loss(y, torch.stack(returns[::-1], 1))


@loss
def a_listwise_loss_with_an_empty_list(y: Tensor) -> Tensor:
    member = torch.tensor([[True] * 8, [False] * 8, [True] * 4 + [False] * 4, [True] * 8])
    log = y.masked_fill(~member, -INF).log_softmax(-1)
    usable = member.any(-1)
    return -log[usable][member[usable]].mean()


@loss
def pairs_of_a_ranking_without_pairs(y: Tensor) -> Tensor:
    relevance = torch.zeros(4, 8)
    better = relevance[:, :, None] > relevance[:, None]
    margin = F.relu(1 - (y[:, :, None] - y[:, None]))[better]
    mean = margin.mean()
    return y.square().mean() + (mean if len(margin) else 0.0)


@loss
def discounted_gains_without_relevance(y: Tensor) -> Tensor:
    with torch.no_grad():
        gain = torch.zeros(4, 8).gather(1, y.argsort(descending=True)).sum(-1)
        score = (gain / torch.zeros(4)).nan_to_num(1.0)
        float(score.mean())
    return y.square().mean()


@loss
def a_confusion_matrix_with_absent_classes(y: Tensor) -> Tensor:
    with torch.no_grad():
        t = torch.zeros(4, dtype=torch.long)
        table = torch.bincount(t * 8 + y.argmax(-1), minlength=64).view(8, 8).float()
        precision = table.diag() / table.sum(0)
        recall = table.diag() / table.sum(1)
        f1 = 2 * precision * recall / (precision + recall)
        float(f1.nan_to_num(0.0).mean())
        float(f1[~f1.isnan()].sum())
    return F.cross_entropy(y, t)


@loss
def overlap_of_absent_classes(y: Tensor) -> Tensor:
    p, t = y.softmax(-1), F.one_hot(torch.zeros(4, dtype=torch.long), 8).float()
    dice = 2 * (p * t).sum(0) / (p + t).sum(0)
    iou = (t * t).sum(0) / (t + t).sum(0)
    return 1 - dice.mean() + iou[~iou.isnan()].mean()


@loss
def an_area_under_a_curve_without_positives(y: Tensor) -> Tensor:
    with torch.no_grad():
        hits = torch.zeros(32)[y.flatten().argsort(descending=True)]
        rate = hits.cumsum(0) / hits.sum()
        area = torch.trapezoid(rate, dx=1 / 32)
        assert bool(area.isnan())
    return y.square().mean()


@loss
def a_percentage_error_of_zeros(y: Tensor) -> Tensor:
    t = torch.tensor([0.0, 1, 2, 0, 4, 0, 1, 1]).expand(4, 8)
    with torch.no_grad():
        error = ((y - t) / t).abs()
        float(error[error.isfinite()].mean())
    return F.l1_loss(y, t)


@loss
def a_likelihood_of_poisson_counts(y: Tensor) -> Tensor:
    counts = torch.randint(0, 3, (4, 8)).float()
    stirling = counts * counts.log() - counts + 0.5 * torch.log(2 * math.pi * counts)
    return (y.exp() - counts * y + torch.where(counts > 1, stirling, 0.0)).mean()


@loss
def a_variational_bound_with_clamped_variance(y: Tensor) -> Tensor:
    mean, log = y.chunk(2, -1)
    log = log.clamp(-20, 20)
    with torch.no_grad():
        assert (torch.zeros(4).log().exp() == 0).all()
    return -0.5 * (1 + log - mean.square() - log.exp()).mean()


@loss
def censored_survival_times(y: Tensor) -> Tensor:
    time = torch.tensor([1.0, INF, 2.0, INF])[:, None]
    seen = time.isfinite()
    t = torch.where(seen, time, 5.0)
    return (y.exp() * t - torch.where(seen, y, 0.0)).mean()


@loss
def risk_sets_of_a_cox_model(y: Tensor) -> Tensor:
    time = torch.tensor([3.0, 1.0, 2.0, 4.0])
    at_risk = time[:, None] <= time
    s = y.mean(-1)
    log = torch.where(at_risk, s, -INF).logsumexp(-1)
    return (log - s).mean()


@loss
def a_matching_with_an_infinite_cost(y: Tensor) -> Tensor:
    cost = (y[:, None] - y.detach()[None]).square().sum(-1)
    cost = cost + torch.eye(4).log() * -1
    return cost.diag().mean() + torch.where(cost.isinf(), 0.0, cost.detach()).mean()


@loss
def masked_token_prediction_without_masks(y: Tensor) -> Tensor:
    t = torch.full((4,), -100)
    value = F.cross_entropy(y, t)
    return y.square().mean() + torch.where(value.isnan(), 0.0, value.detach())


@loss
def perplexity_of_an_untrained_model(y: Tensor) -> Tensor:
    with torch.no_grad():
        float(torch.exp(y.square().sum() * 1e6).clamp(max=1e9))
    return y.square().mean()


@loss
def signal_to_noise_of_a_perfect_copy(y: Tensor) -> Tensor:
    with torch.no_grad():
        ratio = 10 * torch.log10(y.square().sum() / (y - y).square().sum())
        float(ratio.clamp(max=100))
    return y.square().mean()


# ---- Loops ---------------------------------------------------------------------------------------


@program
def a_learning_rate_finder(watch: Watch) -> Iterable[Tensor]:
    """The best loss begins at infinity, and the smoothed one at 0/0."""
    model = Around()
    watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    best, average, weight = torch.tensor(INF), torch.zeros(()), 0.0
    for _ in range(STEPS):
        smooth = average / weight if weight else average / torch.zeros(())
        optimizer.zero_grad()
        value = model(torch.randn(4, 8)).square().mean()
        value.backward()
        optimizer.step()
        average, weight = 0.9 * average + 0.1 * value.detach(), 0.9 * weight + 0.1
        if not bool(smooth.isnan()):
            best = torch.minimum(best, smooth)
    return [best, *(p.detach() for p in model.parameters())]


@program
def a_moving_average_with_its_first_step_divided(watch: Watch) -> Iterable[Tensor]:
    """Its correction divides 0 by 0 before the first step."""
    model = Around()
    watch(model)
    average, found = torch.zeros(8), []
    for step in range(STEPS):
        corrected = average / (1 - 0.9 ** torch.tensor(float(step)))
        y = model(torch.randn(4, 8))
        value = (y - corrected.nan_to_num(0.0)).square().mean()
        model.zero_grad()
        value.backward()
        average = 0.9 * average + 0.1 * y.detach().mean(0)
        found.append(value.detach())
    return found


@program
def early_stopping_on_a_split_that_is_empty(watch: Watch) -> Iterable[Tensor]:
    model = Around()
    found = fit(model, watch)
    model.eval()
    with torch.no_grad():
        value = model(torch.zeros(0, 8)).mean()  # of nothing
        improved = value < INF
    assert not bool(improved)
    return found


@program
def a_sampler_at_temperature_0(watch: Watch) -> Iterable[Tensor]:
    model = Around()
    found = fit(model, watch)
    model.eval()
    with torch.no_grad():
        for temperature in (1.0, 0.0):
            sharp = model(torch.randn(4, 8)) / temperature
            chosen = sharp.argmax(-1)
            assert chosen.shape == (4,)
    return found


@program
def decoding_with_forbidden_tokens(watch: Watch) -> Iterable[Tensor]:
    """Best, nucleus and beam search, while it trains."""
    model = Around()

    def value(y: Tensor) -> Tensor:
        with torch.no_grad():
            s = y.clone()
            s[:, 5:] = -INF
            s[s < s.topk(3).values[:, -1:]] = -INF
            torch.multinomial(s.softmax(-1), 1)
            total = torch.full((4,), -INF)
            total[0] = 0.0
            best = (total[:, None] + s.log_softmax(-1)).flatten().topk(4)
            assert bool(best.values.isfinite().any())
        return y.square().mean()

    return fit(model, watch, value)


@program
def a_model_that_returns_masked_scores(watch: Watch) -> Iterable[Tensor]:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.around = Around()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.around(x).masked_fill(first_half, -INF)
            return y

    return fit(Scores(), watch, lambda y: F.cross_entropy(y, torch.full((4,), 6)))


@program
def a_mask_of_plus_infinity_between_modules(watch: Watch) -> Iterable[Tensor]:
    return fit(
        InParts(
            lambda h: (torch.where(first_half, 0.0, INF).expand(4, 8), h),
            lambda mask, h: (mask * 1, h),
            lambda mask, h: h + torch.exp(-mask),
        ),
        watch,
    )


@program
def a_mask_of_both_infinities_between_modules(watch: Watch) -> Iterable[Tensor]:
    return fit(
        InParts(
            lambda h: (torch.where(first_half, -INF, INF).expand(4, 8), h),
            lambda bounds, h: (
                bounds,
                torch.minimum(torch.maximum(h, bounds.clamp(-1, 1)), -bounds),
            ),
            lambda bounds, h: torch.where(h.isinf(), 0.0, h) + bounds.sigmoid(),
        ),
        watch,
    )


@program
def bounds_of_plus_infinity_as_an_argument(watch: Watch) -> Iterable[Tensor]:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
            return torch.clamp(self.fc(x), low, high)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Clamped()

        def forward(self, x: Tensor) -> Tensor:
            high = torch.full((8,), INF)
            y: Tensor = self.inner(x, torch.where(first_half, -1.0, -INF), high)
            return y

    return fit(Outer(), watch)


@program
def a_cache_that_is_filled_step_by_step(watch: Watch) -> Iterable[Tensor]:
    """Places not written yet are NaN, and masked."""
    cache = torch.full((4, 4, 8), NAN)

    def remember(h: Tensor) -> Tensor:
        y = h
        for t in range(4):
            cache[:, t] = h.detach()
            known = torch.arange(4) <= t
            y = y + torch.where(known[:, None], cache, 0.0).mean(1)
        cache.fill_(NAN)
        return y

    return fit(Around(remember), watch)


@program
def priorities_of_a_replay_buffer(watch: Watch) -> Iterable[Tensor]:
    """New transitions have an infinite priority until they are drawn."""
    priority = torch.full((16,), INF)

    def value(y: Tensor) -> Tensor:
        with torch.no_grad():
            error = y.square().mean(-1)
            drawn = priority.topk(4).indices
            priority[drawn] = error
            torch.where(priority.isinf(), 1.0, priority)
        return y.square().mean()

    return fit(Around(), watch, value)


@program
def an_upper_confidence_bound_of_untried_arms(watch: Watch) -> Iterable[Tensor]:
    tries, wins = torch.zeros(8), torch.zeros(8)

    def value(y: Tensor) -> Tensor:
        with torch.no_grad():
            bound = wins / tries + torch.sqrt(2 * math.log(9) / tries)
            arm = bound.nan_to_num(INF).argmax()
            tries[arm] += 1
            wins[arm] += y[0, 0] > 0
        return y.square().mean()

    return fit(Around(), watch, value)
