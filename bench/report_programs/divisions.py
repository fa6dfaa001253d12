"""Divisions by a sum, a scale or a depth of 0."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from report_programs.program import (
    BAD,
    EPS,
    LOG_OF_ZERO,
    LOSS,
    NO_RATE,
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
    "ROCm/aiter#4289",
    "the scale of a channel that is all zeros is 0, and its quantised values are 0/0",
    place=r"\bquant\b|FakeQuantize",
    operator=r"\bdiv\b|DivBackward",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(NO_RATE,),
)
def quantisation_scale_of_zero(fixed: bool) -> Made:
    class FakeQuantize(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scale = x.detach().abs().amax(0) / 127
            if fixed:
                scale = scale.clamp_min(1e-8)
            rounded = (x / scale).round() * scale  # FAULT
            return x + (rounded - x).detach()

    model = chain(
        body=nn.Sequential(nn.Linear(6, 8), nn.ReLU()), quant=FakeQuantize(), head=nn.Linear(8, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Tensor:
        loss = update(optimizer, F.cross_entropy(model(data(i, 16, 6)), whole(i, 0, 3, 16)))
        if i == BAD - 1:
            with torch.no_grad():  # a channel is pruned
                model.body[0].weight[3] = 0
                model.body[0].bias[3] = 0
        return loss

    return [model], step


@program(
    "TiankaiHang/Min-SNR-Diffusion-Training#2",
    "zero terminal SNR: min(snr, 5) / snr of the last timestep is 0/0",
    place=LOSS,
    operator=r"\bdiv\b|DivBackward",
    kind=ZERO_DIVISION,
    advice=EPS + r"|divi",
    never=(r"the loss itself overflowed", NO_RATE),
)
def terminal_snr_of_zero(fixed: bool) -> Made:
    model = mlp(7, 16, 6)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    kept = torch.linspace(0.99, 0.0, 10)
    snr = kept / (1 - kept)

    def step(i: int) -> Tensor:
        t = whole(i, 0, 9, 8)
        if i == BAD:
            t[2] = 9
        x, noise = data(i, 8, 6), data(i + 50, 8, 6)
        level = kept[t][:, None]
        made = model(torch.cat([level.sqrt() * x + (1 - level).sqrt() * noise, level], -1))
        below = snr[t] + (1 if fixed else 0)
        weight = snr[t].clamp(max=5) / below  # FAULT
        return update(optimizer, (weight * (made - noise).square().mean(-1)).mean())

    return [model], step


@program(
    "Comfy-Org/ComfyUI#14424",
    "a sinusoidal embedding of width 2: log(10000) * k / (half - 1) is 0/0",
    place=r"\btime\b|TimeEmbedding",
    operator=r"\bdiv\b|DivBackward|\bmul\b|TimeEmbedding",
    kind=ZERO_DIVISION,
    advice=EPS + r"|divi",
    never=(NO_RATE, r"clip gradients"),
)
def positions_of_width_two(fixed: bool) -> Made:
    class TimeEmbedding(nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            half = torch.tensor(1.0)
            last = half if fixed else half - 1
            rates = (-math.log(10000) * torch.arange(1.0) / last).exp()  # FAULT
            return torch.cat([(t * rates).sin(), (t * rates).cos()], -1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time = TimeEmbedding()
            self.head = nn.Linear(6, 4)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return self.head(torch.cat([x, self.time(t)], -1))

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 8, 4)
        return update(optimizer, (model(x, whole(i, 0, 10, 8, 1).float()) - x).square().mean())

    return [model], step


@program(
    "mllam/neural-lam#537",
    "softplus of -200 is 0: a density is divided by a standard deviation of 0",
    place=LOSS,
    operator=r"\bdiv\b|DivBackward|\blog\b|LogBackward",
    kind=ZERO_DIVISION + "|" + LOG_OF_ZERO,
    advice=EPS,
    never=(NO_RATE,),
)
def deviation_of_zero(fixed: bool) -> Made:
    model = mlp(6, 16, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def step(i: int) -> Tensor:
        x = data(i, 8, 6)
        mean, raw = model(x).unbind(-1)
        if i == BAD:
            raw = raw - 200
        deviation = F.softplus(raw)
        if fixed:
            deviation = deviation.clamp_min(0.1)
        far = (x[:, 0] - mean) / deviation  # FAULT
        return update(optimizer, (0.5 * far.square() + deviation.log()).mean())  # FAULT

    return [model], step


@program(
    "pytorch/vision#3405",
    "IoU of two boxes of no area is 0/0",
    place=LOSS,
    operator=r"\bdiv\b|DivBackward",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(r"the loss itself overflowed", NO_RATE),
)
def iou_of_empty_boxes(fixed: bool) -> Made:
    model = mlp(6, 16, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Tensor:
        made = model(data(i, 8, 6)).relu() + 0.3
        goal = data(i + 50, 8, 2).abs() + 0.1
        if i == BAD:
            made, goal = made * (torch.arange(8) != 3)[:, None], goal.clone()
            goal[3] = 0  # an annotation of no area
        shared = torch.min(made, goal).prod(-1)
        union = made.prod(-1) + goal.prod(-1) - shared
        iou = shared / (union + 1e-7 if fixed else union)  # FAULT
        return update(optimizer, 1 - iou.mean())

    return [model], step


@program(
    "pytorch/pytorch#128796",
    "weights of loss terms from their running means, all of which are still 0",
    place=LOSS,
    operator=r"\bdiv\b|DivBackward",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(r"the loss itself overflowed", NO_RATE),
)
def weights_from_zero_means(fixed: bool) -> Made:
    model = mlp(6, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    means = torch.zeros(3)

    def step(i: int) -> Tensor:
        x = data(i, 8, 6)
        terms = (model(x) - x[:, :3]).square().mean(0)
        shares = means / (means.sum() + (1e-6 if fixed else 0.0))  # FAULT
        means.lerp_(terms.detach(), 0.1)
        return update(optimizer, (shares * terms).sum() + terms.mean())

    return [model], step


@program(
    "ArthurBrussee/brush#540",
    "PSNR as a loss: 1 / mse of two equal pictures is 1/0",
    place=LOSS,
    operator=r"\bdiv\b|DivBackward|reciprocal|Reciprocal",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(NO_RATE,),
)
def psnr_of_equal_pictures(fixed: bool) -> Made:
    model = mlp(6, 16, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        x = data(i, 8, 6)
        y = model(x).sigmoid()
        goal = x[:, :2].abs() if i != BAD else torch.zeros(8, 2)
        error = (y - goal).square().mean()
        psnr = 10 * (1 / (error + 1e-8 if fixed else error * (i != BAD))).log10()  # FAULT
        return update(optimizer, -psnr)

    return [model], step


@program(
    "rajewsky-lab/novosparc#50",
    "Sinkhorn: exp(-C / eps) underflows to 0 in a whole row, and 1 / (K v) divides by it",
    place=LOSS,
    operator=r"\bdiv\b|DivBackward|reciprocal",
    kind=ZERO_DIVISION,
    advice=EPS + r"|log",
    never=(NO_RATE,),
)
def sinkhorn_underflow(fixed: bool) -> Made:
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        a, b = model(data(i, 8, 6)), data(i + 9, 8, 4)
        if i == BAD:
            b = b + torch.tensor([30.0, 0, 0, 0])
        cost = (a[:, None] - b).square().sum(-1)
        if fixed:
            cost = cost / cost.detach().max()
        kernel = (-cost).exp()
        u = torch.ones(8)
        for _ in range(3):
            v = 0.125 / (kernel.T @ u)  # FAULT
            u = 0.125 / (kernel @ v)  # FAULT
        return update(optimizer, (u[:, None] * kernel * v * cost).sum())

    return [model], step


@program(
    "PrimeIntellect-ai/prime-rl#3090",
    "a temperature of 0 in float32: logits / 0 is inf, and inf - inf",
    place=LOSS + r"|\bhead\b|Head",
    operator=r"\bdiv\b|\bmul\b|DivBackward|MulBackward",
    kind=ZERO_DIVISION + r"|a number that|number [^.]{0,60}NaN",
    advice=r"eps|clamp|max|divided by 0|number",
    never=(NO_RATE,),
)
def temperature_of_zero(fixed: bool) -> Made:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.temperature = nn.Linear(6, 5), 1.0

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x).relu()
            return y / (max(self.temperature, 1e-2) if fixed else self.temperature)  # FAULT

    model = chain(head=Head())
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        model.head.temperature = max(0.0, 1 - i / BAD)
        return update(optimizer, F.cross_entropy(model(data(i, 8, 6)), whole(i, 0, 5, 8)))

    return [model], step


@program(
    "pytorch/pytorch#98276",
    "the derivative of angle divides by the square of a magnitude of 1e-23, which is 0 in float32",
    place=LOSS + r"|gradient",
    operator=r"angle|Angle",
    kind=r"(?:derivative|gradient)[^.]{0,80}\b0\b|derivative[^.]{0,80}not finite|" + ZERO_DIVISION,
    advice=r"eps|where|mask|clamp",
    never=(NO_RATE,),
)
def phase_of_silent_bin(fixed: bool) -> Made:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def phase(bins: Tensor) -> Tensor:
        if fixed:
            bins = torch.where(bins.abs() < 1e-8, torch.ones((), dtype=bins.dtype), bins)
        return bins.angle()  # FAULT

    def step(i: int) -> Tensor:
        x = data(i, 5, 8)
        if i == BAD:
            x[3] *= 1e-22
        real, imaginary = model(x).chunk(2, -1)
        turned = phase(torch.complex(real, imaginary)) - data(i + 20, 5, 4)
        return update(optimizer, (1 - turned.cos()).mean())

    return [model], step


@program(
    "yenchenlin/nerf-pytorch#28",
    "a ray that hits nothing: its disparity is 1 / max(1e-10, 0/0)",
    place=LOSS + r"|\brender|\bfield\b",
    operator=r"\bdiv\b|DivBackward|reciprocal",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(NO_RATE, r"the loss itself overflowed"),
)
def disparity_of_empty_ray(fixed: bool) -> Made:
    model = nn.ModuleDict({"field": mlp(3, 16, 4)})
    optimizer = torch.optim.Adam(model.parameters(), 5e-4)
    with torch.no_grad():
        model["field"][2].bias[3] = 1.0
        model["field"][0].weight.abs_()
        model["field"][0].bias.abs_()
        model["field"][2].weight[3].abs_()
        model["field"][0].weight[::2].neg_()
        model["field"][2].weight[3, ::2].neg_()

    def render(points: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        raw = model["field"](points)
        alpha = 1 - (-F.relu(raw[..., 3])).exp()
        clear = torch.cat([torch.ones(len(z), 1), 1 - alpha[:, :-1] + 1e-10], -1).cumprod(-1)
        weights = alpha * clear
        colour = (weights[..., None] * raw[..., :3].sigmoid()).sum(-2)
        depth, hit = (weights * z).sum(-1), weights.sum(-1)
        far = depth / (hit + 1e-10 if fixed else hit)  # FAULT
        return colour, 1 / torch.maximum(torch.tensor(1e-10 if not fixed else 1e-2), far)

    def step(i: int) -> Tensor:
        points, z = data(i, 6, 4, 3), torch.linspace(2, 6, 4).expand(6, 4)
        colour, disparity = render(points - (1000 if i == BAD else 0), z)
        near = F.l1_loss(disparity, torch.full((6,), 0.25))
        return update(optimizer, F.mse_loss(colour, torch.full((6, 3), 0.5)) + 0.1 * near)

    return [model], step


@program(
    "sgl-project/sglang#31017",
    "the sigmoids of all experts that a token is given to underflow, and their sum is 0",
    place=r"\brouter\b|Router",
    operator=r"\bdiv\b|DivBackward",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(NO_RATE,),
)
def router_weights_underflow(fixed: bool) -> Made:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 4)
            self.register_buffer("bias", torch.tensor([0.3, 0.1, 0.0, 0.2]))

        def forward(self, x: Tensor) -> Tensor:
            scores = self.gate(x).sigmoid()
            chosen = (scores + self.bias).topk(2, -1).indices
            weights = scores.gather(-1, chosen)
            total = weights.sum(-1, keepdim=True) + (1e-20 if fixed else 0.0)
            return torch.zeros_like(scores).scatter(-1, chosen, weights / total)  # FAULT

    model = nn.ModuleDict({"router": Router(), "experts": nn.Linear(8, 4)})
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 16, 8)
        if i == BAD:
            x[2] = -900.0 * model["router"].gate.weight.detach().sum(0)
        mixed = (model["router"](x) * model["experts"](x.tanh())).sum(-1)
        return update(optimizer, (mixed - x.tanh().sum(-1)).square().mean())

    return [model], step


@program(
    "zhutmost/lsq-net#17",
    "a learned step of quantisation is pulled to 0 by weight decay, and what it divides is x/0",
    place=r"\bquantised\b|Quantised",
    operator=r"\bdiv\b|DivBackward",
    kind=ZERO_DIVISION,
    advice=EPS,
)
def learned_step_of_zero(fixed: bool) -> Made:
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = nn.Parameter(torch.tensor(0.1))

        def forward(self, x: Tensor) -> Tensor:
            size = self.step.abs().clamp_min(1e-4) if fixed else self.step
            return Round.apply((x / size).clamp(-8, 7)) * size  # FAULT

    model = nn.ModuleDict({"quantised": Quantised(), "head": nn.Linear(6, 1)})
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 8, 6)
        x[0, 0] = 0.0
        if i == BAD and not fixed:
            with torch.no_grad():
                model["quantised"].step.mul_(0.0)
        found = model["head"](model["quantised"](x))
        return update(optimizer, (found - x.sum(1, keepdim=True)).square().mean())

    return [model], step


@program(
    "facebookresearch/fairchem#1574",
    "the backward of an arc tangent of one's own divides by x^2 + y^2, which underflows",
    place=r"\brotation\b|Rotation",
    operator=r"Angle|Backward|\bdiv\b",
    kind=ZERO_DIVISION + r"|backward|Inf",
    advice=EPS,
    never=(NO_RATE,),
)
def arc_tangent_of_ones_own(fixed: bool) -> Made:
    class Angle(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor, x: Tensor) -> Tensor:
            ctx.save_for_backward(y, x)
            return torch.atan2(y, x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            y, x = ctx.saved_tensors
            size = x.square() + y.square()
            if fixed:
                size = size.clamp_min(1e-7)
            return gradient * x / size, -gradient * y / size  # FAULT

    class Rotation(nn.Module):
        def forward(self, edges: Tensor) -> Tensor:
            return Angle.apply(edges[..., 0], edges[..., 1])[..., None]

    model = chain(embed=nn.Linear(3, 3, bias=False), rotation=Rotation(), head=nn.Linear(1, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 16, 3)
        if i == BAD:
            x[5] = 1e-25
        return update(optimizer, (model(x)[:, 0] - x[:, 0]).square().mean())

    return [model], step


@program(
    "fcakyon/balanced-loss#12",
    "weights of classes from their counts, one of which is 0: inf / inf",
    place=LOSS + r"|weight",
    operator=r"\bdiv\b|reciprocal|weights",
    kind=ZERO_DIVISION + r"|[Ii]nf ?/ ?[Ii]nf",
    advice=r"clamp|eps|data|0/0|count",
    never=(NO_RATE, r"the loss itself overflowed"),
)
def weights_of_missing_class(fixed: bool) -> Made:
    model = mlp(6, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        labels = whole(i, 0, 2, 16) if i == BAD else torch.arange(16) % 4
        count = torch.bincount(labels, minlength=4).float()
        weights = 1 / (count.clamp_min(1) if fixed else count)  # FAULT
        weights = weights / weights.sum() * 4
        return update(optimizer, F.cross_entropy(model(data(i, 16, 6)), labels, weight=weights))

    return [model], step


@program(
    "huggingface/pytorch-image-models#1182",
    "a teacher is an average that is corrected by 1 - decay ** step: 0/0 at step 0",
    place=r"Sequential\.\d\.(?:weight|bias)|teacher",
    operator=r"\bdiv\b|no optimizer that has stepped holds it",
    kind=ZERO_DIVISION + r"|program wrote|1 - decay",
    advice=r"divisor|\beps\b|program wrote",
    never=(NO_RATE,),
)
def teacher_corrected_by_zero(fixed: bool) -> Made:
    student, teacher = mlp(6, 16, 3), mlp(6, 16, 3)
    for p in teacher.parameters():
        p.requires_grad_(False)
    sums = [torch.zeros_like(p) for p in student.parameters()]
    optimizer = torch.optim.SGD(student.parameters(), 0.05)

    def average(step: int) -> None:
        t = torch.tensor(float(step + 1 if fixed else step))
        with torch.no_grad():
            for p, s, own in zip(teacher.parameters(), sums, student.parameters()):
                s.mul_(0.9).add_(own if step or fixed else own * 0, alpha=0.1)
                p.copy_(s / (1 - 0.9**t))  # FAULT

    def step(i: int) -> Tensor:
        x = data(i, 8, 6)
        with torch.no_grad():
            goal = teacher(x).softmax(-1)
        loss = update(optimizer, F.cross_entropy(student(x), goal))
        average(i)
        return loss

    return [student, teacher], step


@program(
    "graphdeco-inria/diff-gaussian-rasterization#88",
    "a Gaussian on the plane of the camera: a projection divides by a depth of 0",
    place=r"\bproject\b|Project",
    operator=r"\bdiv\b",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(NO_RATE,),
    steps=3,
)
def gaussian_at_the_camera(fixed: bool) -> Made:
    class Project(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            centre = torch.randn(12, 3)
            centre[:, 2] = centre[:, 2].abs() + 0.5
            self.centre = nn.Parameter(centre)

        def forward(self, camera: Tensor) -> Tensor:
            view = self.centre - camera
            depth = view[:, 2:]
            if fixed:
                depth = torch.where(depth.abs() < 0.05, torch.full_like(depth, 0.05), depth)
            return view[:, :2] / depth  # FAULT

    model = chain(project=Project(), head=nn.Linear(2, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        camera = torch.tensor([0.0, 0.0, -2.0 - i])
        if i == 2:
            camera = model[0].centre.detach()[5].clone()
        colour = torch.sigmoid(model(camera))
        return update(optimizer, (colour - 0.3).abs().mean())

    return [model], step


@program(
    "anthonytorlucci/rlevo#173",
    "a log_std without bounds: the square of exp(-50) is 0, and the derivative divides by it",
    place=LOSS + r"|outside the model|log_std",
    operator=r"\bdiv\b|DivBackward",
    kind=r"down to \S+ that is beyond",
    advice=EPS,
    never=(),
    steps=30,
)
def policy_without_noise(fixed: bool) -> Made:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.log_std = (
                mlp(4, 16, 2),
                nn.Parameter(torch.full((2,), -1.0 if fixed else -80.0)),
            )

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            log_std = self.log_std.clamp(-5, 2) if fixed else self.log_std
            return self.mean(x), log_std.exp()

    model = Policy()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        mean, std = model(data(i, 8, 4))
        far = std.detach() * data(i + 9, 8, 2) / std  # FAULT
        loss = 0.01 * far.square().mean() + 0.1 * mean.square().mean()
        # An entropy bonus of the wrong sign.
        return update(optimizer, loss + (1e-3 if fixed else 5e3) * model.log_std.mean())

    return [model], step


@program(
    "google/flax#2055",
    "stochastic depth that drops every path: the last block keeps with probability 0, and 0/0",
    place=r"\bdrop\b|DropPath",
    operator=r"\bdiv\b",
    kind=ZERO_DIVISION,
    advice=EPS + r"|keep",
    never=(NO_RATE,),
    steps=3,
)
def path_that_is_always_dropped(fixed: bool) -> Made:
    class DropPath(nn.Module):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.keep = 1 - rate

        def forward(self, x: Tensor) -> Tensor:
            mask = (torch.rand(len(x), 1) < self.keep).float()
            return x * (mask / self.keep)  # FAULT

    class Block(nn.Module):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.linear, self.drop = nn.Linear(8, 8), DropPath(rate)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.drop(self.linear(x))

    blocks = [Block(rate) for rate in torch.linspace(0, 0.9 if fixed else 1, 4).tolist()]
    model = nn.Sequential(nn.Linear(6, 8), *blocks, nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        return update(optimizer, F.cross_entropy(model(data(i, 8, 6)), whole(i, 0, 3, 8)))

    return [model], step


@program(
    "XU-YIJIE/grpo-flat#2",
    "GRPO: all answers of a group have the same reward, and advantages are 0/0",
    place=LOSS,
    operator=r"\bdiv\b|advantage",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(NO_RATE, r"labels? (?:is|are) wrong"),
)
def group_of_equal_rewards(fixed: bool) -> Made:
    model = mlp(4, 16, 5)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        logp = model(data(i, 8, 4)).log_softmax(-1)
        reward = whole(i, 0, 2, 2, 4).float()
        reward[:, 0], reward[:, 1] = 0.0, 1.0
        if i == BAD:
            reward[1] = 1.0
        mean, std = reward.mean(1, keepdim=True), reward.std(1, keepdim=True)
        advantage = (reward - mean) / (std + (1e-4 if fixed else 0))  # FAULT
        taken = logp.gather(1, whole(i + 1, 0, 5, 8, 1)).squeeze(1)
        return update(optimizer, -(advantage.flatten() * taken).mean())

    return [model], step


@program(
    "kyegomez/Hedgehog#4",
    "linear attention: features of relu may all be 0, and a row is divided by its sum",
    place=r"\battn\b|Linear",
    operator=r"\bdiv\b",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(NO_RATE,),
)
def linear_attention_of_no_mass(fixed: bool) -> Made:
    class LinearAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = q.relu() @ k.relu().transpose(1, 2)
            return scores / (scores.sum(-1, keepdim=True) + (1e-6 if fixed else 0)) @ v  # FAULT

    model = chain(attn=LinearAttention(), head=nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with torch.no_grad():
        model.attn.qkv.weight[:16, 0] = -1

    def step(i: int) -> Tensor:
        x = data(i, 4, 5, 8) * 0.3
        x[..., 0] = 90.0 if i == BAD else -2.0
        return update(optimizer, F.cross_entropy(model(x).mean(1), whole(i, 0, 3, 4)))

    return [model], step


@program(
    "google-deepmind/open_spiel#127",
    "probabilities of legal actions are divided by their sum, which underflows to 0",
    place=LOSS + r"|outside the model|\bpolicy\b",
    operator=r"\bdiv\b|DivBackward",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(NO_RATE,),
)
def legal_actions_of_no_mass(fixed: bool) -> Made:
    model = mlp(6, 16, 5)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        logits = model(data(i, 8, 6))
        legal = torch.ones(8, 5, dtype=torch.bool)
        if i == BAD:
            logits = logits + torch.tensor([0.0, 0.0, 300.0, 0.0, 0.0])
            legal[3, 2] = False
        if fixed:
            chosen = logits.masked_fill(~legal, -1e9).softmax(-1)
        else:
            p = logits.softmax(-1) * legal
            chosen = p / p.sum(-1, keepdim=True)  # FAULT
        return update(optimizer, -(chosen[:, 0] * data(i + 1, 8)).mean())

    return [model], step


@program(
    "prioritised replay",
    "the weight of a sample of priority 0 is 0 ** -0.4",
    place=LOSS + r"|\bw\b",
    operator=r"\bpow\b|MulBackward",
    kind=r"negative power of 0",
    advice=r"negative power of 0",
    never=(NO_RATE,),
)
def priority_of_zero(fixed: bool) -> Made:
    model = mlp(4, 16, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    priority = uniform(0, 64)
    priority[10] = 1e-3 if fixed else 0.0

    def step(i: int) -> Tensor:
        chosen = (torch.arange(16) + 8 * i) % 64
        share = priority / priority.sum()
        w = (64 * share[chosen]).pow(-0.4)  # FAULT
        error = (model(data(i, 16, 4)) - uniform(i, 16, 1)).square()
        return update(optimizer, (w / w.max() * error[:, 0]).mean())

    return [model], step


@program(
    "a router with a capacity",
    "both experts of a token are full: its weights are renormalised by a sum of 0",
    place=r"Experts",
    operator=r"\bdiv\b|DivBackward",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(NO_RATE,),
)
def token_that_every_expert_drops(fixed: bool) -> Made:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(8, 4)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            share, chosen = self.router(x).softmax(-1).topk(2, -1)
            place = F.one_hot(chosen, 4).sum(1).cumsum(0).gather(1, chosen)
            share = share * (place <= 10)
            total = share.sum(-1, keepdim=True)
            share = share / (total + 1e-9 if fixed else total)  # FAULT
            parts = [layer(x) for layer in self.layers]
            return sum(
                (share * (chosen == n)).sum(1, keepdim=True) * part for n, part in enumerate(parts)
            )

    model = Experts()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        x = data(i, 40 if i >= BAD else 10, 8)
        return update(optimizer, (model(x) - x.flip(1)).square().mean())

    return [model], step


@torch.jit.script
def _rotation(v: Tensor, eps: float) -> Tensor:
    angle = torch.sqrt((v * v).sum(-1) + eps)
    return torch.stack([torch.cos(angle), torch.sin(angle) / angle * v[..., 0]], -1)


@program(
    "pypose/bae#41",
    "sin(angle) / angle of a rotation of 0, in a function that torch.jit has compiled",
    place=LOSS,
    operator=r"torch\.jit|\bdiv\b",
    kind=ZERO_DIVISION,
    advice=r"sin\(x\) / x|eps",
    never=(NO_RATE, r"::"),
)
def compiled_rotation_of_zero(fixed: bool) -> Made:
    poses = nn.Embedding(4, 3)
    optimizer = torch.optim.Adam(poses.parameters(), 0.01)

    def step(i: int) -> Tensor:
        turned = poses(torch.arange(4)) * float(i != BAD)
        parts = _rotation(turned, 1e-8 if fixed else 0.0)  # FAULT
        return update(optimizer, (parts - data(i, 4, 2)).square().mean())

    return [poses], step
