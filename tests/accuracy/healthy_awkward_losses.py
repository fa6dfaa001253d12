"""Healthy programs whose labels, losses or metrics hold NaN and infinities. Each computes the loss
of ``y``, 4 rows of 8 that the model returned.
"""

from __future__ import annotations

from typing import Callable

import torch
from torch.nn import functional as F

__all__ = ["LOSSES"]

INF, NAN = float("inf"), float("nan")
Tensor = torch.Tensor
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {}


def loss(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    LOSSES[function.__name__.replace("_", " ")] = function
    return function


def labels() -> Tensor:
    """With values that are missing."""
    t = torch.randn(4, 8)
    t[0, 2] = t[2, 5] = NAN
    return t


@loss
def missing_labels_masked(y: Tensor) -> Tensor:
    t = labels()
    known = ~torch.isnan(t)
    return ((y - t.nan_to_num(0)).square() * known).sum() / known.sum()


@loss
def missing_labels_left_out_by_an_index(y: Tensor) -> Tensor:
    t = labels()
    known = ~t.isnan()
    return F.mse_loss(y[known], t[known])


@loss
def missing_labels_replaced(y: Tensor) -> Tensor:
    t = labels()
    return F.smooth_l1_loss(y, torch.where(t.isnan(), y.detach(), t))


@loss
def missing_labels_normalised_first(y: Tensor) -> Tensor:
    t = labels()
    known = ~t.isnan()
    t = (t - t[known].mean()) / t[known].std()
    return F.mse_loss(y[known], t[known])


@loss
def missing_labels_by_nanmean(y: Tensor) -> Tensor:
    t = labels()
    t = torch.where(t.isnan(), t.nanmean(0, keepdim=True), t)
    return F.mse_loss(y, t)


@loss
def a_column_without_any_label(y: Tensor) -> Tensor:
    t = labels()
    t[:, 0] = NAN
    mean = t.nanmean(0)
    t = torch.where(t.isnan(), mean, t)
    known = ~mean.isnan()
    return F.mse_loss(y[:, known], t[:, known])


@loss
def missing_labels_by_a_metric(y: Tensor) -> Tensor:
    with torch.no_grad():
        error = (y - labels()).abs()
        float(error.nanmean())
        float(torch.nansum(error))
        float(torch.nanmedian(error))
    return y.square().mean()


@loss
def labels_shifted_in_time(y: Tensor) -> Tensor:
    t = torch.cat([torch.full((1, 8), NAN), torch.randn(3, 8)])
    change = t - t.roll(1, 0)
    return F.mse_loss(y[2:], change[2:])


@loss
def ratios_of_labels(y: Tensor) -> Tensor:
    t = torch.randn(4, 8).relu()
    ratio = t / t.roll(1, 0)
    usable = torch.isfinite(ratio)
    return F.huber_loss(y[usable], ratio[usable].clamp(-2, 2))


@loss
def logarithms_of_counts(y: Tensor) -> Tensor:
    counts = torch.randint(0, 3, (4, 8)).float()
    target = torch.where(counts > 0, counts.log(), torch.zeros(()))
    return F.mse_loss(y, target)


@loss
def classes_that_never_occur(y: Tensor) -> Tensor:
    t = torch.randint(4, (4,))
    weight = 1 / torch.bincount(t, minlength=8).float()
    weight[weight == INF] = 0
    return F.cross_entropy(y, t, weight=weight)


@loss
def per_class_accuracy(y: Tensor) -> Tensor:
    t = torch.randint(4, (4,))
    with torch.no_grad():
        hit = F.one_hot(t, 8) * (y.argmax(-1) == t)[:, None]
        float((hit.sum(0) / F.one_hot(t, 8).sum(0)).nanmean())
    return F.cross_entropy(y, t)


@loss
def a_metric_of_an_empty_selection(y: Tensor) -> Tensor:
    with torch.no_grad():
        chosen = y[y > 1e9].mean()
        float(torch.where(chosen.isnan(), torch.zeros(()), chosen))
    return y.square().mean()


@loss
def an_empty_part_of_the_batch(y: Tensor) -> Tensor:
    part = F.cross_entropy(y, torch.full((4,), -100))
    if torch.isnan(part):
        part = y.sum() * 0
    return part + y.square().mean()


@loss
def a_correlation_without_variance(y: Tensor) -> Tensor:
    with torch.no_grad():
        x = torch.cat([torch.zeros(1, 8), y[1:]])
        float(torch.corrcoef(x).nan_to_num(0).mean())
    return y.square().mean()


@loss
def explained_variance_of_a_constant(y: Tensor) -> Tensor:
    with torch.no_grad():
        t = torch.ones(4)
        score = 1 - (t - y[:, 0]).var() / t.var()
        float(score.nan_to_num(0, 0, 0))
    return y.square().mean()


@loss
def masked_classes(y: Tensor) -> Tensor:
    masked = y.masked_fill(torch.arange(8) > 5, -INF)
    return F.cross_entropy(masked, torch.randint(6, (4,)))


@loss
def masked_actions_and_their_entropy(y: Tensor) -> Tensor:
    allowed = torch.arange(8) < 5
    log_p = y.masked_fill(~allowed, -INF).log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * torch.where(allowed, log_p, torch.zeros(()))).sum(-1)
    return (-log_p[:, 0] - 0.01 * entropy).mean()


@loss
def a_policy_with_masked_logits(y: Tensor) -> Tensor:
    logits = torch.where(torch.arange(8) < 5, y, torch.tensor(-INF))
    policy = torch.distributions.Categorical(logits=logits, validate_args=False)
    action = policy.sample()
    return -policy.log_prob(action).mean()


@loss
def importance_ratios_of_masked_actions(y: Tensor) -> Tensor:
    masked = torch.arange(8) > 5
    with torch.no_grad():
        old = y.masked_fill(masked, -INF).log_softmax(-1)
        ratio = (old - old.clone()).exp().masked_fill(masked, 0)
    return (ratio * y).square().mean()


@loss
def advantages_of_one_sample(y: Tensor) -> Tensor:
    with torch.no_grad():
        returns = y[:1, 0]
        deviation = returns.var(correction=0) / 0  # as the unbiased one of a single sample
        advantage = ((returns - returns.mean()) / deviation.sqrt()).nan_to_num(0)
    return (y[0] * (1 + advantage)).square().mean() + y.square().mean()


@loss
def hard_triplets(y: Tensor) -> Tensor:
    t = torch.tensor([0, 0, 1, 1])
    same = t[:, None] == t[None]
    distance = ((y[:, None] - y[None]) ** 2).sum(-1)
    positive = distance.masked_fill(~same, -INF).amax(-1)
    negative = distance.masked_fill(same, INF).amin(-1)
    return (positive - negative + 1).relu().mean()


@loss
def contrast_without_oneself(y: Tensor) -> Tensor:
    z = F.normalize(y, dim=-1)
    scores = (z @ z.t() / 0.5).fill_diagonal_(-INF)
    return F.cross_entropy(scores, torch.tensor([1, 0, 3, 2]))


@loss
def divergence_from_a_one_hot(y: Tensor) -> Tensor:
    target = F.one_hot(torch.randint(8, (4,)), 8).float()
    return F.kl_div(y.log_softmax(-1), target, reduction="batchmean")


@loss
def cross_entropy_of_certain_probabilities(y: Tensor) -> Tensor:
    p = torch.cat([torch.ones(4, 1), y.sigmoid()[:, 1:]], 1)
    return F.binary_cross_entropy(p, torch.ones(4, 8))


@loss
def ctc(y: Tensor) -> Tensor:
    log_p = y[:, None].expand(4, 2, 8).log_softmax(-1)
    target = torch.tensor([[1, 2], [3, 3]])
    return F.ctc_loss(log_p, target, torch.tensor([4, 4]), torch.tensor([2, 2]))


@loss
def ctc_of_a_target_that_is_too_long(y: Tensor) -> Tensor:
    log_p = y[:, None].expand(4, 2, 8).log_softmax(-1)
    target = torch.tensor([[1, 2, 1], [3, 3, 3]])
    lengths = torch.tensor([4, 4]), torch.tensor([3, 3])
    return F.ctc_loss(log_p, target, *lengths, zero_infinity=True)


@loss
def a_cost_matrix_with_forbidden_pairs(y: Tensor) -> Tensor:
    cost = torch.cdist(y.detach(), torch.randn(4, 8)).masked_fill(torch.eye(4).bool(), INF)
    chosen = cost.argmin(-1)
    return F.mse_loss(y, torch.randn(4, 8)[chosen])


@loss
def anchors_without_a_box(y: Tensor) -> Tensor:
    boxes = torch.tensor([[0.0], [1], [2], [0]]).expand(4, 8)
    target = torch.log(boxes / 2)
    return F.l1_loss(y[1:3], target[1:3])


@loss
def time_warping(y: Tensor) -> Tensor:
    cost = torch.cdist(y, torch.randn(4, 8))
    rows = [[torch.tensor(0.0), *[torch.tensor(INF)] * 4]]
    for i in range(4):
        row = [torch.tensor(INF)]
        for j in range(4):
            before = torch.stack([rows[i][j], rows[i][j + 1], row[j]])
            row.append(cost[i, j] + before.amin())
        rows.append(row)
    return rows[-1][-1]


@loss
def beam_search_beside_training(y: Tensor) -> Tensor:
    with torch.no_grad():
        scores = torch.full((4,), -INF)
        scores[0] = 0
        for row in y.log_softmax(-1):
            total = (scores[:, None] + row).flatten()
            scores = total.topk(4).values
        scores.exp().sum().item()
    return y.square().mean()


@loss
def quantiles_with_missing_values(y: Tensor) -> Tensor:
    with torch.no_grad():
        low = torch.nanquantile(labels(), 0.1)
    return (y - low).square().mean()


@loss
def a_gradient_penalty_at_zero(y: Tensor) -> Tensor:
    x = torch.zeros(4, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad((x * y * 0).sum(), x, create_graph=True)
    return (gradient.norm(2, dim=-1) - 1).square().mean() + y.square().mean()


@loss
def weights_by_distance(y: Tensor) -> Tensor:
    distance = torch.tensor([0.0, 1, 2, 4])
    weight = 1 / distance
    weight = torch.where(weight.isinf().any(), weight.isinf().float(), weight)
    return (weight[:, None] * y).square().mean()


@loss
def dates_that_are_missing(y: Tensor) -> Tensor:
    t = labels()
    age = (t - t.nanmean()) / t[~t.isnan()].std()
    feature = torch.stack([age.nan_to_num(0), age.isnan().float()])
    return (y * feature.sum(0)).square().mean()
