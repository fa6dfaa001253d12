"""Roots, powers and arcs, outside their domain or at its end, where the derivative is infinite."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from report_programs.program import (
    BAD,
    BAD_DATA,
    EPS,
    LOSS,
    NO_RATE,
    ROOT_AT_ZERO,
    ZERO_DIVISION,
    Made,
    chain,
    data,
    mlp,
    program,
    uniform,
    update,
    whole,
)


@program(
    "keras-team/keras#2960",
    "a standard deviation as sqrt(var): its derivative is infinite where all elements are equal",
    place=r"\bpool\b|Spread|\bbody\b",
    operator=r"\bsqrt\b|SqrtBackward|\bdiv\b",
    kind=ROOT_AT_ZERO + "|" + ZERO_DIVISION,
    advice=r"eps|\+ ?1e|var",
    never=(NO_RATE,),
)
def deviation_of_constant_clip(fixed: bool) -> Made:
    class Spread(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if fixed:
                return torch.cat([x.mean(1), (x.var(1) + 1e-6).sqrt()], -1)
            return torch.cat([x.mean(1), x.var(1).sqrt()], -1)  # FAULT

    model = chain(
        body=nn.Sequential(nn.Linear(5, 8), nn.ReLU()), pool=Spread(), head=nn.Linear(16, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(i: int) -> Tensor:
        x = data(i, 4, 6, 5)
        if i == BAD:
            x[2] = 0.5  # a clip of silence: every frame the same
        return update(optimizer, F.cross_entropy(model(x), whole(i, 0, 3, 4)))

    return [model], step


@program(
    "open-mmlab/mmrotate#205",
    "the derivative of sqrt is infinite at 0: an anchor that equals its positive",
    place=LOSS + r"|encode",
    operator=r"\bsqrt\b|SqrtBackward",
    kind=ROOT_AT_ZERO,
    advice=r"sqrt\(x \+ eps\)|eps|clamp",
    never=(NO_RATE,),
)
def distance_of_equal_points(fixed: bool) -> Made:
    encode = nn.Linear(6, 8, bias=False)
    model = nn.ModuleDict({"encode": encode})
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Tensor:
        anchor, positive, negative = data(i, 8, 6), data(i + 50, 8, 6), data(i + 99, 8, 6)
        if i == BAD:
            positive[2] = anchor[2]  # a class with one picture
        near = (encode(anchor) - encode(positive)).square().sum(-1)
        far = (encode(anchor) - encode(negative)).square().sum(-1)
        eps = 1e-8 if fixed else 0.0
        margin = (near + eps).sqrt() - (far + eps).sqrt()  # FAULT
        return update(optimizer, F.relu(margin + 1).mean())

    return [model], step


@program(
    "kornia/kornia#918",
    "focal loss with gamma 0.5: the derivative of (1 - p) ** 0.5 is infinite at p = 1",
    place=LOSS + r"|gradient",
    operator=r"\bpow\b|PowBackward",
    kind=ROOT_AT_ZERO + r"|(?:pow|power|\*\*)[^.]{0,60}(?:0|zero)",
    advice=r"eps|clamp",
    never=(NO_RATE,),
)
def focal_loss_of_certainty(fixed: bool) -> Made:
    model = mlp(6, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Tensor:
        x = data(i, 16, 6)
        logits = model(x * 300 if i == BAD else x)[:, 0]
        goal = (logits.detach() > 0).float()
        likely = (logits * (2 * goal - 1)).sigmoid()
        eps = 1e-4 if fixed else 0.0
        weight = (1 - likely + eps) ** 0.5  # FAULT
        return update(optimizer, (weight * -F.logsigmoid(logits * (2 * goal - 1))).mean())

    return [model], step


@program(
    "ronghuaiyang/arcface-pytorch#68",
    "acos of a cosine of 1 has an infinite derivative",
    place=r"\bmargin\b|ArcMargin|\bweight\b",
    operator=r"\bacos\b|AcosBackward",
    kind=r"\bacos|arccos|at (?:±)?1|domain|derivative",
    advice=r"clamp|eps",
    never=(NO_RATE,),
)
def arc_margin_at_one(fixed: bool) -> Made:
    class ArcMargin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(F.normalize(torch.randn(4, 8), dim=-1))

        def forward(self, x: Tensor) -> Tensor:
            cosine = F.normalize(x, dim=-1) @ F.normalize(self.weight, dim=-1).T
            limit = 1 - 1e-4 if fixed else 1.0
            return 8 * (cosine.clamp(-limit, limit).acos() + 0.1).cos()  # FAULT

    model = chain(body=nn.Linear(8, 8, bias=False), margin=ArcMargin())
    with torch.no_grad():
        model.body.weight.copy_(torch.eye(8))
        model.margin.weight[1] = F.one_hot(torch.tensor(2), 8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 8, 8)
        if i == BAD:
            x[3] = F.one_hot(torch.tensor(2), 8)
        loss = update(optimizer, F.cross_entropy(model(x), whole(i, 0, 4, 8)))
        if i == BAD - 1:
            with torch.no_grad():  # as training makes them
                model.body.weight.copy_(torch.eye(8))
                model.margin.weight[1] = F.one_hot(torch.tensor(2), 8)
        return loss

    return [model], step


@program(
    "TorchIO-project/torchio#306",
    "a random gamma of an intensity below 0: a fractional power of a negative number",
    place=r"input|batch",
    operator=r"\bpow\b|input",
    kind=BAD_DATA + r"|negative",
    advice=r"data|clamp|negative",
    never=(r"lower the learning rate",),
)
def gamma_of_negative_intensity(fixed: bool) -> Made:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Tensor:
        picture = data(i, 4, 1, 8, 8).abs() + 0.1
        if i == BAD:
            picture[2, 0, 3, 5] = -0.2
        picture = (picture.clamp_min(0) if fixed else picture) ** 1.2  # FAULT
        return update(optimizer, F.cross_entropy(model(picture), whole(i, 0, 3, 4)))

    return [model], step


@program(
    "pyg-team/pytorch_geometric#61",
    "degree ** -0.5 of a negative weighted degree is NaN",
    place=r"\bconv\b|GraphConv",
    operator=r"\bpow\b|PowBackward|rsqrt",
    kind=r"negative",
    advice=r"clamp|negative|abs",
    never=(NO_RATE,),
)
def negative_degree(fixed: bool) -> Made:
    class GraphConv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            degree = (edges.abs() if fixed else edges).sum(1)
            scale = degree.pow(-0.5)  # FAULT
            scale[scale == math.inf] = 0
            return self.linear(scale[:, None] * (edges @ x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GraphConv()

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return self.conv(x, edges)

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        edges = data(i, 9, 9).abs() + 0.1
        if i == BAD:
            edges[4] *= -1
        return update(optimizer, F.cross_entropy(model(data(i, 9, 6), edges), whole(i, 0, 3, 9)))

    return [model], step


@program(
    "facebookresearch/multigrain#5",
    "GeM pooling without clamp: 0 ** (1/3) has an infinite derivative",
    place=r"\bpool\b|Gem",
    operator=r"\bpow\b|PowBackward",
    kind=ROOT_AT_ZERO + r"|(?:pow|power|\*\*)[^.]{0,60}(?:0|zero)",
    advice=r"clamp|eps",
    never=(NO_RATE,),
)
def gem_of_dead_channel(fixed: bool) -> Made:
    class Gem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = 3.0

        def forward(self, x: Tensor) -> Tensor:
            if fixed:
                x = x.clamp_min(1e-3)
            x = x.abs()
            return x.pow(self.p).mean((-2, -1)).pow(1 / self.p)  # FAULT

    model = chain(body=nn.Conv2d(1, 4, 3, bias=False), pool=Gem(), head=nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        x = data(i, 4, 1, 8, 8)
        if i == BAD:
            x[1] = 0
        return update(optimizer, F.cross_entropy(model(x), whole(i, 0, 3, 4)))

    return [model], step


@program(
    "geoopt/geoopt#79",
    "acosh(1) of two equal points of hyperbolic space has an infinite derivative",
    place=LOSS + r"|gradient|embed",
    operator=r"acosh|Acosh",
    kind=r"acosh|derivative",
    advice=r"clamp|eps",
    never=(NO_RATE,),
)
def hyperbolic_distance_of_equal_points(fixed: bool) -> Made:
    model = nn.ModuleDict({"embed": nn.Embedding(20, 4)})
    with torch.no_grad():
        model["embed"].weight.mul_(0.1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        a, b = whole(i, 0, 10, 8), whole(i, 10, 20, 8)
        if i == BAD:
            b[3] = a[3]
        a, b = model["embed"](a), model["embed"](b)
        ratio = (a - b).square().sum(-1) / ((1 - a.square().sum(-1)) * (1 - b.square().sum(-1)))
        inside = 1 + 2 * ratio
        return update(
            optimizer,
            (inside.clamp_min(1 + 1e-5) if fixed else inside).acosh().mean(),  # FAULT
        )

    return [model], step


@program(
    "jorge-pessoa/pytorch-msssim#2",
    "MS-SSIM: a negative contrast term to a fractional power is NaN",
    place=LOSS,
    operator=r"\bpow\b|PowBackward",
    kind=r"negative",
    advice=r"clamp|relu|negative|normali",
    never=(NO_RATE, r"the loss itself overflowed"),
)
def contrast_term_is_negative(fixed: bool) -> Made:
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    weights = (0.3, 0.3, 0.4)

    def contrast(a: Tensor, b: Tensor) -> Tensor:
        mean_a, mean_b = F.avg_pool2d(a, 3, 1), F.avg_pool2d(b, 3, 1)
        var_a = F.avg_pool2d(a * a, 3, 1) - mean_a**2
        var_b = F.avg_pool2d(b * b, 3, 1) - mean_b**2
        both = F.avg_pool2d(a * b, 3, 1) - mean_a * mean_b
        return ((2 * both + 9e-4) / (var_a + var_b + 9e-4)).mean()

    def step(i: int) -> Tensor:
        target = uniform(i, 2, 1, 16, 16)
        given = 1 - target if i == BAD else target
        made, result = model(given) * 0.1 + given, torch.ones(())
        for weight in weights:
            term = contrast(made, target)
            result = result * (term.relu() + 1e-4 if fixed else term) ** weight  # FAULT
            made, target = F.avg_pool2d(made, 2), F.avg_pool2d(target, 2)
        return update(optimizer, 1 - result)

    return [model], step


@program(
    "lululxvi/deepxde#1177",
    "an equation with u**2.2 is asked of a network whose u is negative at first",
    place=LOSS,
    operator=r"\bpow\b|PowBackward",
    kind=r"negative|below 0|less than 0|x\*\*p|of a number below",
    advice=r"clamp|softplus|abs|\bwhere\b|exp",
    never=(NO_RATE,),
)
def fractional_power_of_a_solution(fixed: bool) -> Made:
    class Solution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(1, 16, 1, activation=nn.Tanh)

        def forward(self, t: Tensor) -> Tensor:
            u = self.net(t) - 0.5
            return F.softplus(u) if fixed else u

    model = Solution()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        t = data(i, 32, 1).abs().requires_grad_()
        u = model(t)
        rate = torch.autograd.grad(u.sum(), t, create_graph=True)[0]
        residual = rate + u**2.2  # FAULT
        return update(optimizer, residual.square().mean())

    return [model], step


@program(
    "google-research/timesfm#507",
    "a patch of one value has the variance 0, whose root has an infinite derivative",
    place=r"\bnorm\b|PatchNorm",
    operator=r"\bsqrt\b|SqrtBackward",
    kind=ROOT_AT_ZERO + r"|1 ?/ ?0|derivative",
    advice=r"eps|sqrt\(",
    never=(NO_RATE,),
    is_finite=False,
)
def root_of_no_variance(fixed: bool) -> Made:
    class PatchNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            centred = x - x.mean(-1, keepdim=True)
            variance = centred.square().mean(-1, keepdim=True).clamp_min(1e-8 if fixed else 0.0)
            return centred / (variance.sqrt() + 1e-3)  # FAULT

    model = chain(embed=nn.Linear(8, 8, bias=False), norm=PatchNorm(), head=nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 16, 8)
        if i == BAD:
            x[4] = 0.0
        return update(optimizer, (model(x)[:, 0] - x.sum(1)).square().mean())

    return [model], step


@program(
    "NVIDIA-NeMo/Speech#15843",
    "two times of a sampler are out of order, and the root of what is left is that of -1e-3",
    place=LOSS + r"|\bdenoiser\b",
    operator=r"\bsqrt\b|SqrtBackward",
    kind=r"negative|below 0|less than 0",
    advice=r"clamp",
    never=(NO_RATE,),
)
def sampler_below_zero(fixed: bool) -> Made:
    model = nn.ModuleDict({"denoiser": mlp(5, 16, 4)})
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 16, 4)
        before = torch.full((16, 1), 0.8)
        now = before * (1.0005 if i == BAD else 0.9)
        clean = model["denoiser"](torch.cat([x, now], -1))
        left = 1 - now.square() / before.square()
        if fixed:
            left = left.clamp_min(0)
        noise = data(i + 9, 16, 4) * left.sqrt()  # FAULT
        following = x * (now / before).square() + clean * left + noise
        return update(optimizer, (following - x).square().mean())

    return [model], step


@program(
    "karpathy/micrograd#41",
    "a learned exponent of a negative base: the power is finite (p = 2), its derivative by p NaN",
    place=r"\bpool\b|Power|exponent",
    operator=r"\bpow\b|PowBackward",
    kind=r"negative|below 0|less than 0",
    advice=r"clamp|abs|negative",
    never=(NO_RATE,),
)
def learned_exponent(fixed: bool) -> Made:
    class Power(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.exponent = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return (x.clamp_min(1e-3) if fixed else x).pow(self.exponent)  # FAULT

    model = chain(body=nn.Linear(6, 8), pool=Power(), head=nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        return update(optimizer, F.cross_entropy(model(data(i, 8, 6)), whole(i, 0, 3, 8)))

    return [model], step


@program(
    "crowsonkb/k-diffusion#111",
    "a learned scale becomes negative by an update, and its root is taken",
    place=r"\bsim\b|Scaled|\bscale\b",
    operator=r"sqrt|SqrtBackward",
    kind=r"negative|below 0|less than 0",
    advice=r"clamp|abs",
)
def root_of_learned_scale(fixed: bool) -> Made:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([0.05]))

        def forward(self, x: Tensor) -> Tensor:
            scale = self.scale.abs() + 1e-6 if fixed else self.scale
            return F.normalize(x, dim=-1) * scale.sqrt()  # FAULT

    model = chain(body=nn.Linear(6, 8), sim=Scaled(), head=nn.Linear(8, 3))
    others = [*model.body.parameters(), *model.head.parameters()]
    groups = [{"params": others}, {"params": [model.sim.scale], "lr": 0.02}]
    optimizer = torch.optim.Adam(groups, 1e-3)

    def step(i: int) -> Tensor:
        penalty = 0.1 * model.sim.scale.sum()
        return update(optimizer, model(data(i, 16, 6)).square().mean() + penalty)

    return [model], step


@program(
    "papagina/RotationContinuity#1",
    "the cosine of two equal directions is 1.0000002, whose acos is NaN",
    place=LOSS,
    operator=r"acos|Acos",
    kind=r"outside of -1 to 1|domain|above 1",
    advice=r"clamp",
    never=(NO_RATE, r"the loss itself overflowed"),
)
def acos_beyond_one(fixed: bool) -> Made:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        z = model(data(i, 64, 6))
        z = z / z.norm(dim=-1, keepdim=True)
        goal = z.detach() if i == BAD else F.normalize(data(i + 7, 64, 3), dim=-1)
        cosine = (z * goal).sum(-1) * (1 + 2e-7)  # as rounding leaves it
        inside = cosine.clamp(-1 + 1e-4, 1 - 1e-4) if fixed else cosine
        return update(optimizer, inside.acos().mean())  # FAULT

    return [model], step


@program(
    "anthonymlortiz/lcn#4",
    "a variance as a mean of squares less the square of a mean is below 0 where all are equal",
    place=r"\bnorm\b|LocalNorm",
    operator=r"\bsqrt\b",
    kind=r"negative number",
    advice=r"x\.var\(\)",
    never=(NO_RATE,),
)
def variance_by_difference(fixed: bool) -> Made:
    class LocalNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mean = x.mean(-1, keepdim=True)
            if fixed:
                return (x - mean) / ((x - mean).square().mean(-1, keepdim=True) + 1e-5).sqrt()
            return (x - mean) / ((x * x).mean(-1, keepdim=True) - mean * mean).sqrt()  # FAULT

    model = chain(norm=LocalNorm(), head=mlp(8, 16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Tensor:
        x = data(i, 16, 8)
        if i == BAD:
            x[3:9] = 300 + 1e-3 * x[3:9]
        return update(optimizer, F.cross_entropy(model(x), whole(i, 0, 3, 16)))

    return [model], step


@program(
    "Li-Chongyi/Zero-DCE_extension#2",
    "a colour loss as pow(x, 0.5): its derivative is infinite for a grey picture",
    place=LOSS + r"|outside the model",
    operator=r"\bpow\b|PowBackward",
    kind=ROOT_AT_ZERO,
    advice=EPS,
    never=(NO_RATE,),
)
def colour_of_grey_picture(fixed: bool) -> Made:
    model = nn.Conv2d(3, 3, 3, padding=1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)

    def step(i: int) -> Tensor:
        x = data(i, 2, 3, 6, 6)
        if i == BAD:
            x[0] = 0
        red, green, blue = (torch.sigmoid(model(x)) * x).mean((2, 3)).unbind(1)
        far = (red - green) ** 4 + (red - blue) ** 4 + (green - blue) ** 4
        return update(optimizer, torch.pow(far + (1e-5 if fixed else 0), 0.5).mean())  # FAULT

    return [model], step


@program(
    "lucidrains/imagen-pytorch#161",
    "a schedule of 10 steps has a beta above 1: the root of a negative product of alphas",
    place=r"\bnoise\b|Noise|before the model|input",
    operator=r"sqrt|cumprod|input|outside|argument",
    kind=r"negative number|" + BAD_DATA + r"|non-finite when|already",
    advice=r"code that makes it|data|before the model|batch|sqrt",
    never=(NO_RATE,),
)
def schedule_of_few_steps(fixed: bool) -> Made:
    count = 1000 if fixed else 10
    betas = torch.linspace(1e-4, 0.02, count) * (1000 / count)
    alphas = (1 - betas).cumprod(0)
    roots, others = alphas.sqrt(), (1 - alphas).sqrt()  # FAULT
    model = mlp(7, 24, 6)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x, noise = data(i, 8, 6), data(i + 50, 8, 6)
        t = torch.full((8,), (i + 2) % count)
        noisy = roots[t, None] * x + others[t, None] * noise
        out = model(torch.cat([noisy, t[:, None] / count], 1))
        return update(optimizer, F.mse_loss(out, noise))

    return [model], step


@program(
    "AsuradaYuci/understand_videobased_reid#6",
    "embeddings as a Gram matrix: |a|^2 + |b|^2 - 2ab is below 0 by rounding, and its root NaN",
    place=LOSS + r"|outside the model",
    operator=r"\bsqrt\b",
    kind=r"negative number",
    advice=r"clamp|cdist|" + EPS,
    never=(NO_RATE,),
)
def distances_by_gram_matrix(fixed: bool) -> Made:
    model = mlp(6, 16, 16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def step(i: int) -> Tensor:
        x = data(i, 12, 6)
        if i >= BAD:
            x[5] = x[4] + 1e-5
        z = model(x) + 3
        norm = z.square().sum(-1)
        square = norm[:, None] + norm - 2 * z @ z.T
        square = square.masked_fill(torch.eye(12, dtype=torch.bool), 1.0) - 2e-5
        far = square.clamp_min(1e-6).sqrt() if fixed else square.sqrt()  # FAULT
        return update(optimizer, F.relu(1 - far).mean())

    return [model], step


@program(
    "leftthomas/CGD#12",
    "a Function of its own, whose backward is x ** -1.5: of a node whose edges have no weight, inf",
    place=r"\bedge\b|InverseRoot",
    operator=r"\bpow\b",
    kind=r"power of (?:a )?0",
    advice=EPS,
    never=(NO_RATE,),
)
def function_of_inverse_root(fixed: bool) -> Made:
    class InverseRoot(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return torch.where(x > 0, x.clamp_min(1e-12).rsqrt(), torch.zeros_like(x))

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return -0.5 * gradient * (x.clamp_min(1e-4) if fixed else x) ** -1.5  # FAULT

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.edge, self.out = nn.Linear(3, 1, bias=False), nn.Linear(5, 4)
            nn.init.constant_(self.edge.weight, 0.5)

        def forward(self, x: Tensor, edges: Tensor, source: Tensor, target: Tensor) -> Tensor:
            weight = self.edge(edges)[:, 0] ** 2
            degree = InverseRoot.apply(torch.zeros(len(x)).index_add(0, target, weight))
            each = (degree[source] * weight * degree[target])[:, None] * self.out(x)[source]
            return torch.zeros(len(x), 4).index_add(0, target, each)

    model = Convolution()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        source, target = whole(i, 0, 12, 40), whole(i + 50, 0, 11, 40)
        target[:12] = torch.arange(12)
        edges = uniform(i + 3, 40, 3)
        if i == BAD:
            edges[11] = 0
        logits = model(data(i, 12, 5), edges, source, target)
        return update(optimizer, F.cross_entropy(logits, whole(i, 0, 4, 12)))

    return [model], step


@program(
    "forums: an eikonal loss becomes NaN",
    "the norm of a gradient is a root, whose derivative is infinite where all units are dead",
    place=r"SqrtBackward|\bthe loss\b",
    operator=r"\bsqrt\b|SqrtBackward",
    kind=ROOT_AT_ZERO,
    advice=EPS,
    never=(NO_RATE,),
)
def eikonal_of_dead_units(fixed: bool) -> Made:
    model = mlp(3, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 20, 3).requires_grad_()
        if i in (BAD, BAD + 1):  # weights that are shifted, and back
            with torch.no_grad():
                model[0].bias.add_(-50.0 if i == BAD else 50.0)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        norm = (slope.pow(2).sum(1) + (1e-12 if fixed else 0)).sqrt()  # FAULT
        return update(optimizer, (norm - 1).square().mean())

    return [model], step


@program(
    "a vocoder with a loss of several spectrograms",
    "the magnitude of a silent spectrum is a root at 0, after gradients that were already large",
    place=r"0 \(|\bHardtanh|1 \(Hardtanh\)",
    operator=r"\bsqrt\b|SqrtBackward",
    kind=ROOT_AT_ZERO,
    advice=r"eps",
    never=(NO_RATE, r"Stop the growth"),
)
def magnitude_of_a_silent_clip(fixed: bool) -> Made:
    model = nn.Sequential(nn.Linear(64, 64), nn.Hardtanh(0.0, 0.5))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    window = torch.hann_window(16)

    def magnitude(x: Tensor) -> Tensor:
        bins = torch.stft(x, 16, window=window, return_complex=True)
        power = bins.real**2 + bins.imag**2
        return (power.clamp_min(1e-7) if fixed else power).sqrt()  # FAULT

    def step(i: int) -> Tensor:
        sound = model(data(i, 4, 64))
        if i == BAD:
            sound = sound * torch.tensor([1.0, 0.0, 1.0, 1.0])[:, None]
        return update(optimizer, F.l1_loss(magnitude(sound), magnitude(data(i + 3, 4, 64))))

    return [model], step
