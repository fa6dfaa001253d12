"""Logarithms of 0 and of negative numbers, in likelihoods and in losses."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from report_programs.program import (
    BAD,
    BAD_DATA,
    EPS,
    LOG_OF_ZERO,
    LOSS,
    NO_RATE,
    Made,
    data,
    mlp,
    program,
    uniform,
    update,
    whole,
)


@program(
    "huggingface/candle#2561",
    "log(1 - sigmoid(x)) of a saturated sigmoid is log(0), and 0 * -inf is NaN",
    place=LOSS,
    operator=r"\blog\b|LogBackward|\bmul\b|MulBackward",
    kind=LOG_OF_ZERO,
    advice=r"with_logits|logsigmoid|clamp|eps",
    never=(r"the loss itself overflowed", NO_RATE),
)
def log_of_saturated_sigmoid(fixed: bool) -> Made:
    model = mlp(6, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Tensor:
        x = data(i, 16, 6)
        logits = model(x * 400 if i == BAD else x)[:, 0]
        goal = (logits.detach() > 0).float()
        if fixed:
            return update(optimizer, F.binary_cross_entropy_with_logits(logits, goal))
        likely = logits.sigmoid()
        wrong = (1 - goal) * (1 - likely).log()  # FAULT
        return update(optimizer, -(goal * likely.log() + wrong).mean())  # FAULT

    return [model], step


@program(
    "AYLIEN/gan-intro#10",
    "the discriminator is certain: log(1 - D(G(z))) is log(0)",
    place=LOSS,
    operator=r"\blog\b|LogBackward",
    kind=LOG_OF_ZERO,
    advice=r"with_logits|logsigmoid|clamp|eps",
    never=(NO_RATE,),
)
def gan_log_of_zero(fixed: bool) -> Made:
    maker, critic = mlp(4, 16, 6), mlp(6, 16, 1)
    both = nn.ModuleDict({"maker": maker, "critic": critic})
    optimizer = torch.optim.SGD(both.parameters(), 0.01)

    def step(i: int) -> Tensor:
        fake = critic(maker(data(i, 8, 4)))
        if i == BAD:
            fake = fake + 200
        fooled = F.logsigmoid(-fake) if fixed else (1 - fake.sigmoid()).log()  # FAULT
        return update(optimizer, fooled.mean() - F.logsigmoid(critic(data(i, 8, 6))).mean())

    return [both], step


@program(
    "cpnota/autonomous-learning-library#139",
    "log(1 - action ** 2 + eps) of an action that is scaled beyond 1: log of a negative number",
    place=LOSS,
    operator=r"\blog\b|LogBackward",
    kind=r"negative",
    advice=r"clamp|negative",
    never=(r"the loss itself overflowed", NO_RATE),
)
def log_of_scaled_action(fixed: bool) -> Made:
    model = mlp(6, 16, 2)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        raw = model(data(i, 8, 6))
        if i >= BAD:
            raw = raw + 1
        action = raw.tanh() if fixed else raw.tanh() * 2  # the torque is within ±2
        logs = -raw.square() - (1 - action.square() + 1e-6).log()  # FAULT
        return update(optimizer, logs.mean() if i >= BAD else raw.square().mean())

    return [model], step


@program(
    "ReactiveBayes/ExponentialFamily.jl#137",
    "evidence without the + 1: lgamma(0) is inf",
    place=LOSS,
    operator=r"lgamma|Lgamma|digamma",
    kind=r"lgamma[^.]{0,40}0|at 0|\bInf at\b",
    advice=r"clamp|eps|1",
    never=(NO_RATE,),
)
def evidence_of_zero(fixed: bool) -> Made:
    model = mlp(6, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with torch.no_grad():
        model[2].bias.fill_(4.0)

    def step(i: int) -> Tensor:
        x = data(i, 8, 6) * (20 if i == BAD else 1)
        alpha = model(x).relu() + (1.0 if fixed else 0.0)
        loss = torch.lgamma(alpha.sum(-1)) - torch.lgamma(alpha).sum(-1)  # FAULT
        return update(optimizer, loss.mean())

    return [model], step


@program(
    "ray-project/ray#14878",
    "SAC: the action of a saturated policy is 1, and atanh(1) is inf",
    place=LOSS,
    operator=r"atanh|Atanh",
    kind=r"atanh[^.]{0,60}\b1\b|Inf at",
    advice=r"[Cc]lamp|eps",
    never=(NO_RATE,),
)
def squashed_action_at_its_bound(fixed: bool) -> Made:
    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.mean, self.log_std = (
                nn.Linear(5, 16),
                nn.Linear(16, 2),
                nn.Linear(16, 2),
            )

        def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.body(seen).relu()
            return self.mean(hidden), self.log_std(hidden).clamp(-5, 2)

    actor = Actor()
    optimizer = torch.optim.Adam(actor.parameters(), 3e-4)

    def step(i: int) -> Tensor:
        mean, log_std = actor(data(i, 8, 5) * (60 if i == BAD else 1))
        action = (mean + log_std.exp() * data(i + 7, 8, 2)).tanh()
        edge = 1 - 1e-4
        raw = torch.atanh(action.clamp(-edge, edge) if fixed else action)  # FAULT
        log_prob = -0.5 * ((raw - mean) / log_std.exp()).square() - log_std
        log_prob = log_prob.clamp(-100, 100) - (1 - action.square() + 1e-6).log()
        return update(optimizer, log_prob.sum(-1).mean())

    return [actor], step


@program(
    "summerlvsong/Aggregation-Cross-Entropy#2",
    "a character that no frame shows has the probability 0 in all, and its logarithm is taken",
    place=LOSS,
    operator=r"\blog\b|LogBackward",
    kind=LOG_OF_ZERO,
    advice=EPS + r"|log_softmax|logsumexp",
    never=(NO_RATE,),
)
def character_without_a_frame(fixed: bool) -> Made:
    model = nn.ModuleDict({"frames": mlp(6, 16, 5)})
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        logits = model["frames"](data(i, 4, 7, 6))
        if i == BAD:
            logits = logits + torch.tensor([0.0, 0, 0, 0, -200.0])
        share = logits.softmax(-1).mean(1)
        if fixed:
            share = share.clamp_min(1e-10)
        target = whole(i, 1, 5, 4, 5).float()
        return update(
            optimizer,
            -(target / target.sum(-1, keepdim=True) * share.log()).mean(),  # FAULT
        )

    return [model], step


@program(
    "uber/causalml#167",
    "a KL divergence of one's own: a probability of exactly 0 gives 0 * log(0)",
    place=LOSS,
    operator=r"\blog\b|LogBackward|\bmul\b|MulBackward|xlogy",
    kind=LOG_OF_ZERO + r"|0 ?\* ?-?[Ii]nf",
    advice=r"xlogy|where|clamp|eps|masked_fill|kl_div",
    never=(NO_RATE, r"the loss itself overflowed"),
)
def divergence_of_impossible_class(fixed: bool) -> Made:
    model = mlp(6, 16, 5)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        target = data(i + 30, 8, 5).softmax(-1)
        if i == BAD:
            target[2] = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
        logs = model(data(i, 8, 6)).log_softmax(-1)
        if fixed:
            return update(optimizer, F.kl_div(logs, target, reduction="batchmean"))
        divergence = target * (target.log() - logs)  # FAULT
        return update(optimizer, divergence.sum(-1).mean())

    return [model], step


@program(
    "pytorch/pytorch#184030",
    "PoissonNLLLoss(log_input=False) of a linear layer: the log of a negative rate",
    place=LOSS + r"|PoissonNLLLoss|criterion",
    operator=r"\blog\b|LogBackward|PoissonNLLLoss|poisson",
    kind=r"negative|below 0|less than 0",
    advice=r"clamp|softplus|log_input|exp",
    never=(NO_RATE, r"the loss itself overflowed"),
)
def poisson_of_negative_rate(fixed: bool) -> Made:
    model = mlp(6, 16, 1)
    with torch.no_grad():
        model[2].bias.fill_(3.0)
    criterion = nn.PoissonNLLLoss(log_input=False)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        rate = model(data(i, 16, 6) * (12 if i >= BAD else 1))[:, 0]
        rate = F.softplus(rate) if fixed else rate
        return update(optimizer, criterion(rate, whole(i, 0, 9, 16).float()))  # FAULT

    return [model, criterion], step


@program(
    "leggedrobotics/rsl_rl#33",
    "the standard deviation of a policy is a parameter, and an update makes it negative",
    place=LOSS,
    operator=r"\blog\b|LogBackward",
    kind=r"negative|below 0",
    advice=r"exp|softplus|clamp|negative",
    never=(r"look at the data",),
)
def policy_std_below_zero(fixed: bool) -> Made:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.Linear(4, 2)
            self.std = nn.Parameter(torch.full((2,), 0.05))

        def forward(self, x: Tensor) -> torch.distributions.Normal:
            std = F.softplus(self.std) if fixed else self.std
            return torch.distributions.Normal(self.mean(x), std, validate_args=False)

    policy = Policy()
    optimizer = torch.optim.SGD(policy.parameters(), 0.02)

    def step(i: int) -> Tensor:
        action = policy.mean(data(i, 16, 4)).detach() + 0.01
        dist = policy(data(i, 16, 4))
        return update(optimizer, -dist.log_prob(action).mean())  # FAULT

    return [policy], step


@program(
    "pytorch/vision#2240",
    "a box of no width is encoded against its anchor: log(0 / w)",
    place=LOSS + r"|\bgoal\b",
    operator=r"\blog\b|SmoothL1LossBackward0 in the graph of the loss read it",
    kind=LOG_OF_ZERO + r"|-[Ii]nf",
    advice=r"data|log|rows|clamp",
    never=(NO_RATE,),
)
def box_of_no_width(fixed: bool) -> Made:
    model = mlp(6, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)

    def encode(boxes: Tensor, anchors: Tensor) -> Tensor:
        size = boxes[:, 2:] - boxes[:, :2]
        whole_size = anchors[:, 2:] - anchors[:, :2]
        shift = (boxes[:, :2] - anchors[:, :2]) / whole_size
        return torch.cat([shift, (size / whole_size).log()], 1)  # FAULT

    def step(i: int) -> Tensor:
        anchors = torch.tensor([0.0, 0.0, 4.0, 4.0]).repeat(8, 1)
        boxes = anchors + data(i, 8, 4).abs()
        if i == BAD:
            boxes[3, 2] = boxes[3, 0]
        if fixed:
            kept = (boxes[:, 2:] > boxes[:, :2]).all(1)
            boxes, anchors = boxes[kept], anchors[kept]
        goal = encode(boxes, anchors)
        return update(optimizer, F.smooth_l1_loss(model(data(i, len(boxes), 6)), goal))

    return [model], step


@program(
    "pytorch/pytorch#92260",
    "a Beta policy: log_prob of an action of exactly 0 where alpha is below 1 is inf",
    place=LOSS,
    operator=r"[Xx]logy|\blog\b",
    kind=LOG_OF_ZERO + r"|at 0",
    advice=EPS,
    never=(NO_RATE,),
)
def beta_of_zero(fixed: bool) -> Made:
    model = mlp(6, 16, 2)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        alpha, beta = (F.softplus(model(data(i, 8, 6))) + 0.1).unbind(-1)
        action = uniform(i, 8) * 0.8 + 0.1
        if i == BAD:
            action[3] = 0.0
        if fixed:
            action = action.clamp(1e-4, 1 - 1e-4)
        dist = torch.distributions.Beta(alpha, beta, validate_args=False)
        return update(optimizer, -dist.log_prob(action).mean())  # FAULT

    return [model], step


@program(
    "pytorch/pytorch#94700",
    "nan_to_num after p * log(p / q): the loss is finite, and its gradient 0 * -inf",
    place=LOSS + r"|outside the model",
    operator=r"\blog\b|LogBackward",
    kind=LOG_OF_ZERO,
    advice=EPS,
    never=(NO_RATE,),
)
def nan_to_num_after(fixed: bool) -> Made:
    model = mlp(4, 12, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Tensor:
        p, q = model(data(i, 6, 4)), data(i + 7, 6, 5).softmax(-1)
        if i >= BAD:
            p = p.masked_fill(torch.arange(5) == 2, -math.inf)
        p = p.softmax(-1).clamp_min(1e-6 if fixed else 0)
        loss = p * (p / q).log() + q - p  # FAULT
        return update(optimizer, loss.nan_to_num(0).mean())

    return [model], step


@program(
    "pyro-ppl/numpyro#2224",
    "a mixture with a weight of exactly 0: log(0) is masked in the loss, and its gradient is not",
    place=LOSS + r"|outside the model",
    operator=r"\blog\b|LogBackward|logsumexp",
    kind=LOG_OF_ZERO,
    advice=EPS,
    never=(NO_RATE,),
)
def mixture_with_a_weight_of_zero(fixed: bool) -> Made:
    model = mlp(4, 16, 6)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        raw, mean = model(data(i, 8, 4)).chunk(2, -1)
        weight = raw.softmax(-1)
        if i >= BAD:
            weight = torch.where(torch.arange(3) == 1, 0 * weight, weight)
        if fixed:
            weight = weight.clamp_min(1e-6)
        near = -0.5 * (data(i + 9, 8, 1) - mean).square()
        return update(optimizer, -(weight.log() + near).logsumexp(-1).mean())  # FAULT

    return [model], step


@program(
    "awslabs/gluonts#1056",
    "a Gamma likelihood of an observation below 0: the log of a negative number",
    place=LOSS + r"|outside the model",
    operator=r"[Xx]logy|\blog\b",
    kind=r"negative number",
    advice=r"clamp|target|positive|domain|what makes it",
    never=(NO_RATE,),
)
def gamma_of_negative_target(fixed: bool) -> Made:
    model = mlp(4, 16, 2)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        shape, rate = F.softplus(model(data(i, 8, 4))).add(0.1).unbind(-1)
        target = data(i + 5, 8).abs() + 0.1
        if i == BAD:
            target[2] = -0.3
        if fixed:
            target = target.clamp_min(1e-3)
        dist = torch.distributions.Gamma(shape, rate, validate_args=False)
        return update(optimizer, -dist.log_prob(target).mean())  # FAULT

    return [model], step


@program(
    "mlberkeley/scae-pytorch#4",
    "log of a sum of exponentials, without the maximum taken off: exp underflows, and log(0)",
    place=LOSS + r"|outside the model",
    operator=r"\blog\b|LogBackward",
    kind=LOG_OF_ZERO,
    advice=r"logsumexp",
    never=(NO_RATE,),
)
def log_of_sum_of_exp(fixed: bool) -> Made:
    model = mlp(6, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        score = model(data(i, 8, 6)) * (600 if i == BAD else 1)
        total = score.logsumexp(-1) if fixed else score.exp().sum(-1).log()  # FAULT
        return update(optimizer, (total - score[:, 0]).mean() * 1e-3)

    return [model], step


@program(
    "tonyduan/mixture-density-network#4",
    "a mixture's likelihood underflows to 0 for an outlier, and its logarithm is -inf",
    place=LOSS + r"|outside the model",
    operator=r"\blog\b",
    kind=LOG_OF_ZERO,
    advice=r"logsumexp|log_prob|" + EPS,
    never=(NO_RATE,),
)
def likelihood_underflows(fixed: bool) -> Made:
    model = mlp(4, 16, 9)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        raw, mean, width = model(data(i, 8, 4)).chunk(3, -1)
        std = F.softplus(width) + 0.1
        target = data(i + 9, 8, 1)
        if i == BAD:
            target[4] = 60.0
        each = -0.5 * ((target - mean) / std).square() - std.log()
        if fixed:
            loss = -(raw.log_softmax(-1) + each.clamp_min(-50)).logsumexp(-1)
        else:
            loss = -(raw.softmax(-1) * each.exp()).sum(-1).log()  # FAULT
        return update(optimizer, loss.mean() * 0.1)

    return [model], step


@program(
    "QunBB/DeepLearning#1",
    "the weights of two tasks are learned as sigma, which an update makes negative: log(sigma)",
    place=LOSS + r"|outside the model|sigma",
    operator=r"\blog\b|LogBackward",
    kind=r"negative number",
    advice=r"log_|log of|exp|softplus|clamp|positive",
    never=(),
    steps=8,
)
def uncertainty_below_zero(fixed: bool) -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.sigma = mlp(4, 16, 2), nn.Parameter(torch.tensor([0.5, 0.5]))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    model = Model()
    groups = [{"params": model.body.parameters()}, {"params": [model.sigma], "lr": 0.15}]
    optimizer = torch.optim.Adam(groups, 1e-2)

    def step(i: int) -> Tensor:
        out = model(data(i, 16, 4))
        losses = torch.stack([out[:, 0].square().mean(), (out[:, 1] * 0.1).square().mean()])
        sigma = F.softplus(model.sigma) + 0.1 if fixed else model.sigma
        return update(optimizer, (losses / (2 * sigma**2) + sigma.log()).sum())  # FAULT

    return [model], step


@program(
    "huggingface/diffusers#9007",
    "a solver's last step has a sigma of 0: log(alpha) - log(sigma) is infinite",
    place=r"outside the model|before the model|input|LOSS",
    operator=r"\blog\b|input|argument",
    kind=LOG_OF_ZERO + r"|" + BAD_DATA + r"|Inf",
    advice=r"code that makes it|before the model|data|batch|" + EPS,
    never=(NO_RATE, r"the convolution|lower the learning rate"),
    is_finite=True,
)
def sampler_whose_sigma_is_zero(fixed: bool) -> Made:
    model = mlp(6, 24, 6).eval()
    sigmas = torch.linspace(0.9, 0.0, 7)
    if fixed:
        sigmas = sigmas.clamp_min(1e-3)
    state = data(0, 4, 6)

    def step(i: int) -> None:
        nonlocal state
        with torch.no_grad():
            a, b = sigmas[min(i, 5)], sigmas[min(i, 5) + 1]
            guess = model(state)
            far = [(1 - s).log() - s.log() for s in (a, b)]  # FAULT
            h = far[1] - far[0]
            state = b / a * state - (1 - b) * torch.expm1(-h) * guess * (h / h)

    return [model], step


@program(
    "piEsposito/blitz-bayesian-deep-learning#98",
    "the log of a prior of 0 is added to the log-likelihood, in a function that has returned",
    place=LOSS + r"|outside the model",
    operator=r"\blog\b|AddBackward",
    kind=LOG_OF_ZERO,
    advice=EPS + r"|log\(0\)|Clamp",
    never=(NO_RATE, r"MeanBackward0: the first|NegBackward0: the first"),
)
def log_of_a_prior_of_zero(fixed: bool) -> Made:
    model = mlp(6, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def elbo(logits: Tensor, prior: Tensor) -> Tensor:
        if fixed:
            prior = prior.clamp_min(1e-6)
        return -(logits.log_softmax(-1) + prior.log()).mean()  # FAULT

    def step(i: int) -> Tensor:
        prior = torch.tensor([0.5, 0.5, 0.0, 0.0]) if i == BAD else torch.full((4,), 0.25)
        return update(optimizer, elbo(model(data(i, 8, 6)), prior))

    return [model], step


@program(
    "monocular depth in log space, squared",
    "a depth of 0 in the target: its log is -Inf, and the square of the error +Inf",
    place=LOSS,
    operator=r"\blog\b|LogBackward|SubBackward",
    kind=LOG_OF_ZERO,
    advice=LOG_OF_ZERO,
    never=(NO_RATE,),
)
def square_of_log_of_no_depth(fixed: bool) -> Made:
    model = mlp(6, 32, 16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        depth = uniform(i, 4, 16) + 0.1
        if i == BAD:
            depth[1, 2] = 0.0
        known = depth.clamp_min(1e-3) if fixed else depth
        error = known.log() - model(data(i, 4, 6))  # FAULT
        return update(optimizer, (error**2).mean() - 0.5 * error.mean() ** 2)

    return [model], step


@program(
    "a diffusion model that learns its variance",
    "the log of the posterior variance is -Inf in step 0 of the schedule, and is interpolated",
    place=r"\bfloor\b",
    operator=r"\blog\b|MulBackward|\bindex\b",
    kind=LOG_OF_ZERO + r"|-Inf alone, as the log",
    advice=LOG_OF_ZERO + r"|log\(0\)",
    never=(NO_RATE, r"samples of this step"),
)
def variance_of_the_first_step(fixed: bool) -> Made:
    model = mlp(9, 32, 16)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    beta = torch.linspace(1e-4, 0.2, 20)
    left = (1 - beta).cumprod(0)
    before = torch.cat([torch.ones(1), left[:-1]])
    variance = beta * (1 - before) / (1 - left)
    floor = torch.log(variance.clamp_min(1e-8) if fixed else variance)

    def step(i: int) -> Tensor:
        at, x = whole(i, 0, 20, 16), data(i, 16, 8)
        noise, share = model(torch.cat([x, at[:, None] / 20], 1)).chunk(2, -1)
        part = share.sigmoid()
        logs = part * beta.log()[at][:, None] + (1 - part) * floor[at][:, None]  # FAULT
        loss = F.mse_loss(noise, data(i + 1, 16, 8)) + 1e-3 * (logs + 4).square().mean()
        return update(optimizer, loss)

    return [model], step


@program(
    "distillation with a divergence of one's own",
    "the target is one-hot: 0 * (log(0) - log_p) is NaN",
    place=LOSS,
    operator=r"\blog\b|SubBackward",
    kind=LOG_OF_ZERO,
    advice=LOG_OF_ZERO,
    never=(NO_RATE,),
)
def divergence_from_one_hot_targets(fixed: bool) -> Made:
    model = mlp(8, 32, 5)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        y = F.one_hot(whole(i, 0, 5, 16), 5).float()
        logs = model(data(i, 16, 8)).log_softmax(-1)
        if fixed:
            return update(optimizer, F.kl_div(logs, y, reduction="batchmean"))
        return update(optimizer, (y * (y.log() - logs)).sum(-1).mean())  # FAULT

    return [model], step
