"""Exponentials, squares and states beyond float32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from report_programs.program import (
    BAD,
    LOSS,
    NO_RATE,
    OVERFLOW,
    Made,
    chain,
    data,
    mlp,
    program,
    update,
    whole,
)


@program(
    "vanderschaarlab/synthcity#331",
    "exp(logvar) of an encoder without bounds is above 3.4e38",
    place=LOSS + r"|encod",
    operator=r"\bexp\b|ExpBackward",
    kind=OVERFLOW + r"|exp of a large",
    advice=r"clamp|bound|softplus|subtract",
)
def vae_variance_overflows(fixed: bool) -> Made:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Linear(6, 8)
            self.decode = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, logvar = self.encode(x).chunk(2, -1)
            if fixed:
                logvar = logvar.clamp(-30, 20)
            noise = data(1, *mean.shape)
            return self.decode(mean + noise * (logvar / 2).exp()), mean, logvar

    model = Vae()
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)

    def step(i: int) -> Tensor:
        x = data(i, 8, 6)
        if i == BAD:
            x[2] = 300.0
        again, mean, logvar = model(x)
        kl = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(-1)  # FAULT
        return update(optimizer, (again - x).square().mean().clamp(max=1e6) + kl.mean())

    return [model], step


@program(
    "PrimeIntellect-ai/prime-rl#2972",
    "exp(new - old) of a log probability that is stale by 89 is above 3.4e38",
    place=LOSS,
    operator=r"\bexp\b|ExpBackward",
    kind=OVERFLOW + r"|exp of a large",
    advice=r"clamp|subtract|clip",
    never=(NO_RATE,),
)
def importance_ratio_overflows(fixed: bool) -> Made:
    model = mlp(6, 16, 5)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        logs = model(data(i, 8, 6)).log_softmax(-1)[:, 0]
        old = logs.detach() + 0.1 * data(i + 50, 8)
        if i == BAD:
            old[3] = -95.0
        difference = (logs - old).clamp(-20, 20) if fixed else logs - old
        return update(optimizer, -(difference.exp() * data(i + 9, 8)).mean())  # FAULT

    return [model], step


@program(
    "Marcovaldong/lstmp.pytorch#2",
    "a recurrent layer whose weights multiply a state 60 times: it explodes",
    place=r"\brnn\b|Recurrent|\bcell\b",
    operator=r"\bmm\b|linear|\bLinear\b|Recurrent|\brnn\b",
    kind=OVERFLOW + r"|grew|explod|growth|products",
    advice=r"clip|norm|learning rate|initialis|products|range",
)
def recurrent_state_explodes(fixed: bool) -> Made:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            state = torch.zeros(len(x), 8)
            for one in x.unbind(1):
                state = self.cell(state) + one
                state = state.tanh() if fixed else state
            return state

    model = chain(rnn=Recurrent(), head=nn.Linear(8, 2))
    with torch.no_grad():
        model.rnn.cell.weight.copy_(torch.eye(8) * 1.5)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def step(i: int) -> Tensor:
        length = 40 if i < BAD else 400  # the curriculum goes on to long sequences
        logits = model(data(i, 4, length, 8)) * (1.0 if fixed else 1e-9)
        return update(optimizer, F.cross_entropy(logits, whole(i, 0, 2, 4)))

    return [model], step


@program(
    "open-mmlab/mmdetection#1606",
    "FCOS: exp of a distance that is predicted without bounds is above 3.4e38",
    place=r"\bscale\b|Scale|\bhead\b|Head",
    operator=r"\bexp\b|ExpBackward",
    kind=OVERFLOW + r"|exp of",
    advice=r"clamp|softplus|relu",
    never=(r"input\[0\] was non-finite",),
)
def distance_without_bounds(fixed: bool) -> Made:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
            self.classes, self.boxes = nn.Conv2d(8, 2, 1), nn.Conv2d(8, 4, 1)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            seen = self.tower(x)
            raw = self.scale * self.boxes(seen)
            boxes = raw.clamp(max=10).exp() if fixed else raw.exp()  # FAULT
            return self.classes(seen), boxes

    model = nn.ModuleDict({"head": Head()})
    optimizer = torch.optim.SGD(model.parameters(), 1e-5)

    def step(i: int) -> Tensor:
        scores, boxes = model["head"](data(i, 2, 3, 6, 6) * (400 if i == BAD else 1))
        target = data(i + 30, 2, 4, 6, 6).abs() + 1
        shared = torch.min(boxes, target).prod(1)
        union = boxes.prod(1) + target.prod(1) - shared
        box = -(shared / union).clamp_min(1e-6).log().mean()
        return update(optimizer, box + F.cross_entropy(scores, whole(i, 0, 2, 2, 6, 6)))

    return [model], step


@program(
    "VincentStimper/normalizing-flows#47",
    "the scale of an affine coupling is the exponential of what a network says of an outlier",
    place=r"\bcoupling\b|Coupling",
    operator=r"\bexp\b|ExpBackward",
    kind=OVERFLOW + r"|exp of",
    advice=r"clamp|tanh|logsumexp|log_softmax|subtract",
    never=(NO_RATE,),
)
def coupling_scale_overflows(fixed: bool) -> Made:
    class Coupling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(2, 16, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            kept, moved = x.chunk(2, -1)
            shift, scale = self.net(kept).chunk(2, -1)
            if fixed:
                scale = 2 * torch.tanh(scale / 2)
            moved = moved * scale.exp() + shift  # FAULT
            return torch.cat([kept, moved], -1), scale.sum(-1)

    model = nn.ModuleDict({"coupling": Coupling()})
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)

    def step(i: int) -> Tensor:
        x = data(i, 16, 4)
        if i == BAD:
            x[3, :2] = torch.tensor([4000.0, -4000.0])
        z, volume = model["coupling"](x)
        return update(optimizer, (0.5 * z.tanh().square().sum(-1) - volume.tanh()).mean())

    return [model], step


@program(
    "scverse/scvi-tools#441",
    "the library size of a cell is an exponential that overflows, and the rate is infinite",
    place=r"\blibrary\b|Library|" + LOSS,
    operator=r"\bexp\b|ExpBackward",
    kind=OVERFLOW + r"|exp of",
    advice=r"clamp|tanh|softplus|log",
    never=(NO_RATE,),
)
def library_size_overflows(fixed: bool) -> Made:
    model = nn.ModuleDict({"library": nn.Linear(8, 1), "genes": mlp(8, 16, 8)})
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        counts = whole(i, 0, 9, 16, 8).float()
        if i == BAD:
            counts[3] = 900.0
        size = model["library"](counts)
        share = model["genes"](counts.log1p()).softmax(-1)
        if fixed:
            size = 8 * torch.tanh(size / 8)
        rate = (size if fixed else size * size.sign()).exp() * share  # FAULT
        return update(optimizer, (rate - counts * (rate + 1e-8).log()).mean())

    return [model], step


@program(
    "pyg-team/pytorch_geometric#783",
    "a softmax over neighbours without the maximum taken off: exp overflows, and inf/inf is NaN",
    place=r"\bconv\b|Attend",
    operator=r"\bexp\b",
    kind=OVERFLOW,
    advice=r"maximum|clamp|subtract",
    never=(),
)
def scatter_softmax_overflows(fixed: bool) -> Made:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Linear(6, 8)
            self.score = nn.Linear(12, 1)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            source, target = edges
            score = self.score(torch.cat([x[source], x[target]], -1))[:, 0]
            if fixed:
                score = score - score.detach().max()
            weight = score.exp()  # FAULT
            total = torch.zeros(len(x)).index_add(0, target, weight)
            weight = weight / total[target].clamp_min(1e-12)
            return torch.zeros(len(x), 8).index_add(
                0, target, weight[:, None] * self.value(x[source])
            )

    model = nn.ModuleDict({"conv": Attend(), "head": nn.Linear(8, 3)})
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 20, 6) * (600.0 if i == BAD and not fixed else 40.0 if i == BAD else 1.0)
        edges = whole(i, 0, 20, 2, 60)
        out = model["head"](model["conv"](x, edges))
        return update(optimizer, F.cross_entropy(out, whole(i + 1, 0, 3, 20)))

    return [model["conv"], model["head"]], step


@program(
    "rtqichen/torchdiffeq#149",
    "Euler steps of x' = x ** 2: the state blows up within the solver",
    place=r"\bode\b|Solver",
    operator=r"\bmul\b|\bpow\b|square|\badd\b",
    kind=OVERFLOW,
    advice=r"clamp|normalis|tanh|smaller step",
    never=(),
)
def state_of_a_solver_blows_up(fixed: bool) -> Made:
    class Solver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(20):
                slope = self.rate * x * x
                x = x + 0.1 * (slope.clamp(-5, 5) if fixed else slope)  # FAULT
            return x

    model = chain(lift=nn.Linear(6, 4), ode=Solver(), head=nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 8, 6) * (20 if i == BAD else 0.1)
        return update(optimizer, F.cross_entropy(model(x), whole(i, 0, 3, 8)))

    return [model], step


@program(
    "cornellius-gp/gpytorch#775",
    "a raw parameter is log(exp(x) - 1), which is inf for a length scale of 100",
    place=r"kernel\.raw",
    operator=r"parameter kernel\.raw",
    kind=r"non-finite (?:when it was first read|before the first step)",
    advice=r"log\(exp\(x\) - 1\)",
    never=(r"learning rate", r"load a checkpoint from before"),
)
def inverse_softplus(fixed: bool) -> Made:
    class Kernel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            scale = torch.tensor([1.0, 100.0, 3.0])
            raw = scale + (-(-scale).expm1()).log() if fixed else (scale.exp() - 1).log()
            self.raw = nn.Parameter(raw)

        def forward(self, x: Tensor) -> Tensor:
            x = x / F.softplus(self.raw)
            return (-(x[:, None] - x).square().sum(-1)).exp()

    model = chain(kernel=Kernel())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Tensor:
        return update(optimizer, (model(data(i, 8, 3)) - torch.eye(8)).square().mean())

    return [model], step


@program(
    "megvii-model/YOLOF#51",
    "exp is clamped after it has overflowed: the loss is finite, and its gradient 0 * inf",
    place=LOSS + r"|outside the model",
    operator=r"\bexp\b|ExpBackward|\bclamp",
    kind=OVERFLOW + r"|holds Inf",
    advice=r"[Cc]lamp it before|before it, or a clamp|logsumexp",
    never=(NO_RATE,),
)
def clamp_after_exp(fixed: bool) -> Made:
    model = mlp(6, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 8, 6)
        score = model(x) * (2000 if i == BAD else 1)
        odds = score.clamp(max=18).exp() if fixed else score.exp().clamp(max=1e8)  # FAULT
        return update(optimizer, (score - torch.log(1 + odds)).square().mean() * 1e-4)

    return [model], step


@program(
    "pytorch/pytorch#178123",
    "features of 1e25: a batch norm's variance is above 3.4e38, and it returns zeros",
    place=r"\bnorm\b",
    operator=r"running_var|batch_norm|BatchNorm",
    kind=OVERFLOW + r"|Inf\b",
    advice=r"scale|normalise|input|divide|units",
    never=(NO_RATE,),
)
def variance_beyond_float32(fixed: bool) -> Made:
    model = chain(norm=nn.BatchNorm1d(6), body=mlp(6, 16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 8, 6)
        if i >= BAD:
            x[:, 2] *= 1.0 if fixed else 1e25  # FAULT
        return update(optimizer, F.cross_entropy(model(x), whole(i, 0, 3, 8)))

    return [model], step


@program(
    "openai/CLIP#530",
    "a learned temperature as exp(logit_scale) without a limit: it overflows",
    place=r"logit_scale|Clip\b|the model itself|clip",
    operator=r"\bexp\b",
    kind=OVERFLOW + r"|abs max grew",
    advice=r"clamp|lower the learning rate \(.*Adam: 30\)",
    never=(),
    steps=12,
)
def temperature_without_limit(fixed: bool) -> Made:
    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = nn.Linear(6, 4), nn.Linear(6, 4)
            self.text.load_state_dict(self.image.state_dict())
            self.logit_scale = nn.Parameter(torch.tensor(2.66))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            a, b = F.normalize(self.image(x), dim=-1), F.normalize(self.text(y), dim=-1)
            scale = self.logit_scale.clamp(max=4.6) if fixed else self.logit_scale
            return scale.exp() * a @ b.T  # FAULT

    model = Clip()
    groups = [
        {"params": [*model.image.parameters(), *model.text.parameters()]},
        {"params": [model.logit_scale], "lr": 1e-3 if fixed else 30.0},
    ]
    optimizer = torch.optim.Adam(groups, 1e-4)

    def step(i: int) -> Tensor:
        x = data(i, 4, 6)
        return update(optimizer, F.cross_entropy(model(x, x), torch.arange(4)))

    return [model], step


@program(
    "tracel-ai/burn#5373",
    "a softplus of one's own, log(1 + exp(beta * x)), is inf above 17 with a beta of 5",
    place=r"\bsoft\b|Softplus5",
    operator=r"\bexp\b",
    kind=OVERFLOW,
    advice=r"[Cc]lamp|softplus",
    never=(NO_RATE,),
)
def softplus_of_ones_own(fixed: bool) -> Made:
    class Softplus5(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.softplus(x, 5) if fixed else (1 + (5 * x).exp()).log() / 5  # FAULT

    model = chain(lift=nn.Linear(6, 16), soft=Softplus5(), head=nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 8, 6) * (30 if i == BAD else 1)
        return update(optimizer, F.cross_entropy(model(x), whole(i, 0, 3, 8)))

    return [model], step


@program(
    "tenstorrent/tt-metal#56397",
    "a derivative that is written out with exp(-x): inf / inf for a large negative input",
    place=r"\bact\b|Swish",
    operator=r"\bexp\b",
    kind=OVERFLOW,
    advice=r"exp of more than|clamp|sigmoid",
    never=(NO_RATE, r"derivative of|backward of sqrt"),
)
def swish_of_ones_own(fixed: bool) -> Made:
    class SwishFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x.sigmoid()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            if fixed:
                s = x.sigmoid()
                return gradient * (s + x * s * (1 - s))
            e = torch.exp(-x)  # FAULT
            return gradient * (1 / (1 + e) + x * e / (1 + e) ** 2)

    class Swish(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return SwishFunction.apply(x)

    model = chain(body=nn.Linear(6, 16), act=Swish(), head=nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 16, 6) * (300 if i == BAD and not fixed else 1)
        return update(optimizer, F.cross_entropy(model(x), whole(i, 0, 3, 16)))

    return [model], step


@program(
    "forums: a log-cosh loss with a backward of its own",
    "the backward of a loss is written out as sinh(x) / cosh(x): inf / inf for errors above 89",
    place=r"LogCosh",
    operator=r"\bsinh\b|LogCosh",
    kind=OVERFLOW + r"|has a backward of its own",
    advice=r"backward|clamp",
    never=(NO_RATE,),
)
def log_cosh_of_ones_own(fixed: bool) -> Made:
    class LogCosh(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.abs() + F.softplus(-2 * x.abs())

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            if fixed:
                return gradient * x.tanh()
            return gradient * x.sinh() / x.cosh()  # FAULT

    model = mlp(6, 16, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 16, 6)
        y = x.sum(1, keepdim=True) * (100 if i == BAD else 1)
        return update(optimizer, LogCosh.apply(model(x) - y).mean())

    return [model], step


@program(
    "pytorch/pytorch#90342",
    "exp of a feature overflows before a batch norm, which takes the infinity into its mean",
    place=r"\bfeature\b|Exp\b",
    operator=r"\bexp\b",
    kind=OVERFLOW,
    advice=r"exp of more than|clamp",
    never=(NO_RATE,),
)
def feature_before_batch_norm(fixed: bool) -> Made:
    class Exp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(x.clamp(max=20) if fixed else x)  # FAULT

    model = chain(feature=Exp(), norm=nn.BatchNorm1d(6), head=nn.Linear(6, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 16, 6)
        if i == BAD:
            x[5, 2] = 95
        return update(optimizer, F.cross_entropy(model(x), whole(i, 0, 3, 16)))

    return [model], step


@program(
    "pymc-devs/pymc#2832",
    "log(i0(kappa)) of a von Mises distribution: i0 is beyond float32 above 89",
    place=LOSS,
    operator=r"\bi0\b|I0",
    kind=OVERFLOW + r"|beyond 3",
    advice=r"i0e",
    never=(NO_RATE,),
)
def bessel_of_large_kappa(fixed: bool) -> Made:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-5)

    def step(i: int) -> Tensor:
        mean, raw = model(data(i, 6, 3)).unbind(1)
        kappa = F.softplus(raw) * (200 if i == BAD else 1)
        scaled = torch.special.i0e(kappa).log() + kappa
        norm = scaled if fixed else torch.special.i0(kappa).log()  # FAULT
        angle = data(i + 9, 6)
        return update(optimizer, (norm - kappa * torch.cos(angle - mean)).mean())

    return [model], step
