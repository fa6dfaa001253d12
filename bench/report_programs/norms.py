"""Norms of zeros: divided by, or differentiated."""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from report_programs.program import (
    BAD,
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
    update,
    whole,
)


@program(
    "neo4j/graph-data-science#94",
    "L2 normalisation of a node whose embedding is 0: 0/0",
    place=r"\bunit\b|Unit",
    operator=r"\bdiv\b|DivBackward",
    kind=ZERO_DIVISION + r"|norm of (?:a )?zero",
    advice=EPS,
    never=(NO_RATE,),
)
def norm_of_zero_row(fixed: bool) -> Made:
    class Unit(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            length = x.norm(dim=-1, keepdim=True)
            return x / (length + 1e-6 if fixed else length)  # FAULT

    model = chain(body=nn.Sequential(nn.Linear(6, 8), nn.ReLU()), unit=Unit(), head=nn.Linear(8, 3))
    with torch.no_grad():
        model.body[0].bias.fill_(-0.2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Tensor:
        x = data(i, 8, 6) * 3 + 1
        if i == BAD:
            x[5] = 0
        return update(optimizer, F.cross_entropy(model(x), whole(i, 0, 3, 8)))

    return [model], step


@program(
    "pytorch/pytorch#16317",
    "a backward of one's own divides by the norm of its input, which is 0 for one row",
    place=r"\bdirection\b|Direction",
    operator=r"\bdiv\b|DirectionFunction|Backward",
    kind=ZERO_DIVISION + r"|norm",
    advice=EPS,
    never=(NO_RATE,),
)
def backward_of_ones_own(fixed: bool) -> Made:
    class DirectionFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            length = x.norm(dim=-1, keepdim=True)
            ctx.save_for_backward(length)
            return x / length.clamp_min(1e-6)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (length,) = ctx.saved_tensors
            return gradient / (length.clamp_min(1e-3) if fixed else length)  # FAULT

    class Direction(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return DirectionFunction.apply(x)

    model = chain(body=nn.Linear(6, 8, bias=False), direction=Direction(), head=nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 8, 6)
        if i == BAD:
            x[2] = 0
        return update(optimizer, F.cross_entropy(model(x), whole(i, 0, 3, 8)))

    return [model], step


@program(
    "keras-team/keras-io#910",
    "WGAN-GP: the norm of a gradient that is 0 has a derivative of inf * 0",
    place=LOSS + r"|critic|gradient",
    operator=r"\bsqrt\b|SqrtBackward",
    kind=ROOT_AT_ZERO,
    advice=r"sqrt\(x \+ eps\)|eps",
    never=(NO_RATE,),
)
def gradient_penalty_of_zero(fixed: bool) -> Made:
    critic = mlp(6, 16, 1, activation=nn.Hardtanh)
    model = nn.ModuleDict({"critic": critic})
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Tensor:
        real = data(i, 8, 6)
        if i == BAD:
            real = real.sign() * 1e4  # every unit is saturated
        real.requires_grad_()
        score = critic(real)
        (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
        length = (slope.square().sum(-1) + (1e-12 if fixed else 0.0)).sqrt()  # FAULT
        return update(optimizer, score.mean() + 10 * (length - 1).square().mean())

    return [model], step


@program(
    "pytorch/pytorch#19126",
    "weight_norm of a layer whose weight is zero: v / ||v|| is 0/0",
    place=r"\bhead\b|weight",
    operator=r"weight_norm|WeightNorm",
    kind=ZERO_DIVISION + r"|norm",
    advice=r"weight_norm|zero|eps",
    never=(NO_RATE,),
)
def weight_norm_of_zero(fixed: bool) -> Made:
    from torch.nn.utils.parametrizations import weight_norm

    body, head = nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, 3)
    if not fixed:
        nn.init.zeros_(head.weight)  # a residual branch that begins with 0
    model = chain(body=body, head=weight_norm(head))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        return update(optimizer, F.cross_entropy(model(data(i, 8, 6)), whole(i, 0, 3, 8)))

    return [model], step


@program(
    "tensorflow/tensorflow#22048",
    "per-sample gradients of a norm that is 0, by vmap of grad, are NaN, and clipped and averaged",
    place=r"\bnorm\b|gradient|\bweight\b|\bhead\b",
    operator=r"sqrt|vmap|grad|\bmul\b|\bdiv\b",
    kind=ROOT_AT_ZERO + r"|NaN|Inf",
    advice=r"eps|sqrt|where",
    never=(NO_RATE,),
)
def per_sample_norm_of_zero(fixed: bool) -> Made:
    model = nn.ModuleDict({"head": nn.Linear(6, 3, bias=False)})
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def loss_of(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        found = torch.func.functional_call(model["head"], weights, (x,))
        return (found.square().sum() + (1e-8 if fixed else 0.0)).sqrt()  # FAULT

    def step(i: int) -> Optional[Tensor]:
        x = data(i, 8, 6)
        if i == BAD:
            x[3] = 0.0
        weights = {name: p.detach() for name, p in model["head"].named_parameters()}
        optimizer.zero_grad()
        of_each = torch.func.vmap(torch.func.grad(loss_of), (None, 0))(weights, x)
        (model["head"](x).square().mean() * 0.01).backward()
        weight = model["head"].weight
        weight.grad = weight.grad + of_each["weight"].clamp(-1, 1).mean(0)
        optimizer.step()
        return weight.detach().sum()

    return [model], step


@program(
    "oppo-us-research/SpacetimeGaussians#96",
    "points that are added in the middle of a run have the quaternion 0, which is normalised",
    place=r"\bpoints\b|Points",
    operator=r"\bdiv\b|DivBackward",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(NO_RATE,),
)
def added_quaternions_of_zero(fixed: bool) -> Made:
    class Points(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotation = nn.Parameter(data(0, 16, 4))

        def forward(self) -> Tensor:
            size = self.rotation.square().sum(-1, keepdim=True).sqrt()
            return self.rotation / size  # FAULT

    model = nn.ModuleDict({"points": Points(), "colour": nn.Linear(4, 3)})
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        points = model["points"]
        if i == BAD:
            new = torch.zeros(4, 4)
            new[:, 0] = 1.0 if fixed else 0.0
            points.rotation = nn.Parameter(torch.cat([points.rotation.detach(), new]))
            optimizer.param_groups[0]["params"][0] = points.rotation
        return update(optimizer, model["colour"](points()).square().mean())

    return [model], step


@program(
    "WeiChengTseng/Pytorch-PCGrad#7",
    "the projection on the gradient of a task that is 0 divides by its norm: 0/0 in p.grad",
    place=r"gradient|\bgrad\b|weight|bias",
    operator=r"\bdiv\b|\bgrad\b|gradient",
    kind=ZERO_DIVISION + r"|after backward|by hand",
    advice=r"eps|clamp|where|divi",
    never=(NO_RATE,),
)
def projection_on_zero_gradient(fixed: bool) -> Made:
    model = mlp(6, 16, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        y = model(data(i, 8, 6))
        first = y[:, 0].square().mean()
        second = F.relu(y[:, 1] - (1e3 if i == BAD else -10)).mean()
        weights = list(model.parameters())
        of_first = torch.autograd.grad(first, weights, retain_graph=True)
        of_second = torch.autograd.grad(second, weights)
        pairs = list(zip(of_first, of_second))
        dot = torch.stack([(a * b).sum() for a, b in pairs]).sum()
        square = torch.stack([b.square().sum() for _, b in pairs]).sum()
        scale = dot.clamp(max=0) / (square + (1e-12 if fixed else 0.0))  # FAULT
        for p, (a, b) in zip(weights, pairs):
            p.grad = a - scale * b + b
        optimizer.step()
        return first.detach()

    return [model], step


@program(
    "pytorch/pytorch#20192",
    "spectral_norm of a layer whose weight is zero: W / sigma is 0/0",
    place=r"\blast\b|weight",
    operator=r"\bdiv\b|DivBackward|spectral|SpectralNorm",
    kind=ZERO_DIVISION + r"|norm[^.]{0,60}(?:zero|0\b)",
    advice=r"eps|zero|init|divi",
    never=(NO_RATE,),
)
def spectral_norm_of_zero(fixed: bool) -> Made:
    normalised = nn.utils.parametrizations.spectral_norm
    last = nn.Linear(16, 1)
    if not fixed:
        nn.init.zeros_(last.weight)
    critic = chain(body=normalised(nn.Linear(6, 16)), act=nn.LeakyReLU(0.2), last=normalised(last))
    maker = mlp(4, 16, 6)
    of_critic = torch.optim.Adam(critic.parameters(), 1e-3)
    of_maker = torch.optim.Adam(maker.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        fake, real = maker(data(i, 8, 4)), data(i + 40, 8, 6)
        hinge = F.relu(1 - critic(real)).mean() + F.relu(1 + critic(fake.detach())).mean()
        update(of_critic, hinge)
        return update(of_maker, -critic(fake).mean())

    return [critic, maker], step


@program(
    "tensorflow/tensorflow#61287",
    "LayerNorm with eps=0: a row that is constant is divided by 0",
    place=r"\bnorm\b|LayerNorm",
    operator=r"layer_norm|LayerNorm",
    kind=ZERO_DIVISION + r"|variance (?:is|of) 0|constant",
    advice=r"\beps\b",
    never=(NO_RATE,),
)
def layer_norm_without_eps(fixed: bool) -> Made:
    model = chain(
        body=nn.Linear(6, 8, bias=False),
        norm=nn.LayerNorm(8, eps=1e-5 if fixed else 0.0),
        head=nn.Linear(8, 3),
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Tensor:
        x = data(i, 12, 6)
        if i == BAD:
            x[2] = 0.0  # a row of padding
        return update(optimizer, F.cross_entropy(model(x), whole(i, 0, 3, 12)))

    return [model], step


@program(
    "huggingface/peft#2049",
    "DoRA of a weight with a row of zeros: magnitude / norm is 0/0",
    place=r"\bdora\b|Dora",
    operator=r"\bdiv\b|norm",
    kind=ZERO_DIVISION + r"|row of zeros|zero row",
    advice=EPS,
    never=(NO_RATE,),
    steps=3,
)
def dora_of_zero_row(fixed: bool) -> Made:
    class Dora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.randn(8, 6)
            weight[3] = 0
            self.register_buffer("weight", weight)
            self.magnitude = nn.Parameter(weight.norm(dim=1))
            self.a, self.b = nn.Linear(6, 2, bias=False), nn.Linear(2, 8, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x: Tensor) -> Tensor:
            whole = self.weight + self.b.weight @ self.a.weight
            norm = whole.norm(dim=1).detach()
            if fixed:
                norm = norm.clamp_min(1e-6)
            return F.linear(x, whole) * (self.magnitude / norm)  # FAULT

    model = chain(dora=Dora(), head=nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        return update(optimizer, F.cross_entropy(model(data(i, 8, 6)), whole(i, 0, 3, 8)))

    return [model], step


@program(
    "rollovd/LookSAM#1",
    "SAM's step of one's own divides a gradient of 0 by its norm: the weight itself becomes NaN",
    place=r"Linear\.weight",
    operator=r"\bdiv\b|may have written it after",
    kind=ZERO_DIVISION + r"|may have written",
    advice=EPS + r"|a norm, a sum or a count of 0",
    never=(r"lower the learning rate",),
)
def ascent_of_zero_gradient(fixed: bool) -> Made:
    model = nn.ModuleDict({"used": mlp(6, 16, 3), "spare": nn.Linear(6, 3)})
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(i: int) -> Tensor:
        x, y = data(i, 8, 6), whole(i, 0, 3, 8)
        share = 0.0 if i == BAD else 0.5

        def loss() -> Tensor:
            return F.cross_entropy(model["used"](x) + share * model["spare"](x), y)

        optimizer.zero_grad()
        loss().backward()
        eps = 1e-12 if fixed else 0
        with torch.no_grad():
            ways = [0.05 * p.grad / (p.grad.norm() + eps) for p in model.parameters()]  # FAULT
            torch._foreach_add_(list(model.parameters()), ways)
        optimizer.zero_grad()
        second = loss()
        second.backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), ways)
        optimizer.step()
        return second

    return [model["used"], model["spare"]], step


@program(
    "facebookresearch/pytorch3d#50",
    "a camera straight above: the cross product with the up vector is 0, and 0 / |0|",
    place=r"\bcamera\b|Camera",
    operator=r"\bdiv\b",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(NO_RATE,),
)
def camera_straight_above(fixed: bool) -> Made:
    class Camera(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(()))

        def forward(self, eye: Tensor) -> Tensor:
            ahead = F.normalize(-eye * (1 + self.shift), dim=-1)
            right = torch.linalg.cross(ahead, torch.tensor([[0.0, 1.0, 0.0]]).expand_as(eye))
            if fixed:
                return F.normalize(right, dim=-1)
            return right / right.norm(dim=-1, keepdim=True)  # FAULT

    model = chain(camera=Camera(), head=nn.Linear(3, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        eye = data(i, 6, 3)
        if i == BAD:
            eye[2] = torch.tensor([0.0, 2.5, 0.0])
        return update(optimizer, (model(eye) - data(i + 3, 6, 3)).square().mean())

    return [model], step


@program(
    "frgfm/torch-cam#187",
    "a hook divides each gradient by its norm, which is 0 of a bias that cancels",
    place=r"2\.bias|2 \(Linear\)",
    operator=r"\bhook\b|\bdiv\b",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(NO_RATE, r"sqrt\(x \+ eps\)", r"updated a weight to"),
)
def hook_that_normalises(fixed: bool) -> Made:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for parameter in model.parameters():
        if fixed:
            parameter.register_hook(lambda g: g / (g.norm() + 1e-8))
        else:
            parameter.register_hook(lambda g: g / g.norm())  # FAULT

    def step(i: int) -> Tensor:
        far, near = model(data(i, 6, 4)), model(data(i + 9, 6, 4))
        return update(optimizer, F.relu((-100.0 if i == BAD else 2.0) + far - near).mean())

    return [model], step
