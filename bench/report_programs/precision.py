"""Half precision: what float16 and bfloat16 don't hold."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from report_programs.program import (
    BAD,
    EPS,
    LOG_OF_ZERO,
    LOSS,
    NO_RATE,
    OVERFLOW,
    ZERO_DIVISION,
    Made,
    chain,
    data,
    device_kind,
    mlp,
    program,
    uniform,
    update,
    whole,
)


@program(
    "pytorch/pytorch#8860",
    "Adam's eps of 1e-8 is 0 in float16: an element without a gradient becomes 0/0",
    place=r"embed|\bweight\b|\bbias\b|parameter",
    operator=r"\bAdam\b|addcdiv|\bdiv\b",
    kind=r"\beps\b",
    advice=r"\beps\b",
    never=(r"No optimizer has updated a weight", NO_RATE),
)
def adam_eps_in_float16(fixed: bool) -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 16)
            self.head = nn.Linear(16, 5)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens).mean(1))

    model = Model().half()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=1e-4 if fixed else 1e-8)

    def step(i: int) -> Tensor:
        logits = model(whole(i, 0, 40, 8, 6)).float()
        return update(optimizer, F.cross_entropy(logits, whole(i, 0, 5, 8)))

    return [model], step


@program(
    "huggingface/transformers#5651",
    "T5's wo in float16: an activation of 66,246 is above 65,504",
    place=r"\bwo\b",
    operator=r"\bLinear\b|mm\b|linear",
    kind=OVERFLOW,
    advice=r"bfloat16|float32",
    never=(r"softmax over nothing",),
)
def feed_forward_in_float16(fixed: bool) -> Made:
    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wi = nn.Linear(16, 64)
            self.wo = nn.Linear(64, 16)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.wo(self.wi(x).relu())  # FAULT

    model = chain(layer=FeedForward(), head=nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4)))
    with torch.no_grad():
        model.layer.wi.weight.mul_(30)
        model.layer.wo.weight.mul_(30)
    model = model if fixed else model.half()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 8, 16) * (150 if i == BAD else 1)  # a token that stands out
        logits = model(x.to(model.layer.wi.weight.dtype)).float()
        return update(optimizer, F.cross_entropy(logits, whole(i, 0, 4, 8)))

    return [model], step


@program(
    "ultralytics/yolov5#13416",
    "float16: predicted widths and heights round to 0, and w/h is 0/0 in the box loss",
    place=LOSS,
    operator=r"\bdiv\b|DivBackward",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(r"the loss itself overflowed", NO_RATE),
    steps=12,
)
def box_ratio_in_float16(fixed: bool) -> Made:
    model = nn.Sequential(nn.Linear(6, 32), nn.SiLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler(device_kind(), init_scale=256.0)

    def step(i: int) -> Tensor:
        goal = uniform(i, 16, 4) + 0.2
        optimizer.zero_grad()
        with torch.autocast(device_kind(), torch.float16):
            boxes = model(data(i, 16, 6))
        wide, high = ((boxes[:, 2:].half().sigmoid() * 2) ** 2).unbind(-1)
        if fixed:
            wide, high = wide.float() + 1e-3, high.float() + 1e-3
        ratio = wide / high  # FAULT
        angle = (ratio.atan() - (goal[:, 2] / goal[:, 3]).atan()).square().mean()
        loss = angle.float() + (boxes[:, :2].float() - goal[:, :2]).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if i == BAD - 1:
            with torch.no_grad():
                model[2].bias[2:] = -12.0  # a head that predicts vanishing boxes
        return loss

    return [model], step


@program(
    "qubvel-org/segmentation_models.pytorch#463",
    "a sum over 262,144 pixels in float16 is above 65,504: the dice loss is inf / inf",
    place=LOSS,
    operator=r"\bsum\b|SumBackward|\bdiv\b|DivBackward",
    kind=OVERFLOW,
    advice=r"float32|\.float\(\)",
    never=(NO_RATE,),
)
def dice_sum_in_float16(fixed: bool) -> Made:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Tensor:
        x = data(i, 2, 1, 64, 64)
        goal = (x > 0).float() if i != BAD else torch.ones_like(x)
        with torch.autocast(device_kind(), torch.float16):
            probability = (model(x) * 0.1 + (20.0 if i == BAD else 0.0)).sigmoid()
        probability = probability.float() if fixed else probability.half()
        goal = goal.to(probability.dtype) * 16  # classes are weighted by 16
        both = (probability * goal).sum()  # FAULT
        return update(optimizer, 1 - 2 * both.float() / (probability.sum() + goal.sum()).float())

    return [model], step


@program(
    "fastino-ai/GLiNER2#155",
    "1 - 1e-6 is 1 in bfloat16: the clamp does nothing and log1p(-1) is -inf",
    place=LOSS + r"|score",
    operator=r"log1p|Log1PBackward",
    kind=LOG_OF_ZERO + r"|log1p|rounds to 1",
    advice=r"eps|clamp|float32",
    never=(NO_RATE,),
)
def clamp_rounds_to_one(fixed: bool) -> Made:
    model = chain(body=nn.Sequential(nn.Linear(6, 16), nn.ReLU()), score=nn.Linear(16, 3))
    model = model.bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Tensor:
        scores = model(data(i, 8, 6).bfloat16())
        if i == BAD:
            scores = scores + 12
        likely = scores.sigmoid()
        safe = likely.float() if fixed else likely
        survival = torch.log1p(-safe.clamp(max=1 - 1e-6))  # FAULT
        return update(optimizer, -survival.float().mean())

    return [model], step


@program(
    "kohya-ss/sd-scripts#293",
    "LoRA in float16 with alpha / rank of 128: its product is above 65,504",
    place=r"o_proj|lora",
    operator=r"\bmul\b|\bLinear\b|Lora|mm\b|linear",
    kind=OVERFLOW,
    advice=r"bfloat16|float32|scale",
    never=(r"softmax over nothing", r"fully masked", r"In attention"),
)
def lora_in_float16(fixed: bool) -> Made:
    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.lora_a = nn.Linear(16, 2, bias=False)
            self.lora_b = nn.Linear(2, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.lora_b(self.lora_a(x)) * (1.0 if fixed else 128.0)  # FAULT

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = nn.ModuleDict({"o_proj": Lora(nn.Linear(16, 16))})
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.self_attn["o_proj"](x) * 1e-3)

    model = Block().half()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-4)

    def step(i: int) -> Tensor:
        x = (data(i, 8, 16) * min(50 * 3**i, 8000)).half()
        return update(optimizer, F.cross_entropy(model(x).float(), whole(i, 0, 4, 8)))

    return [model], step


@program(
    "pytorch/pytorch#33962",
    "a checkpointed block overflows in float16; it is run a second time in backward",
    place=r"\bblock\b|Block|\bwide\b",
    operator=r"\bmul\b|\bpow\b|square|Block",
    kind=OVERFLOW,
    advice=r"bfloat16|float32|norm",
)
def checkpointed_block_in_float16(fixed: bool) -> Made:
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.wide(x)
            return (y.float().square() * 1e-3).to(x.dtype) if fixed else y * y * 1e-3  # FAULT

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Block(), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.block, x, use_reentrant=False))

    model = Model().half()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)

    def step(i: int) -> Tensor:
        x = (data(i, 8, 16) * min(10 * 3**i, 1500)).half()
        return update(optimizer, F.cross_entropy(model(x).float() * 0.1, whole(i, 0, 4, 8)))

    return [model], step


@program(
    "pytorch/pytorch#6292",
    "targets of 120,000 become inf when they are cast to float16",
    place=LOSS + r"|target|goal",
    operator=r"mse|Mse|target|goal|\bto\b|_to_copy|\bhalf\b",
    kind=OVERFLOW + r"|data|no graph",
    advice=r"float32|target|data|goal",
    never=(NO_RATE,),
)
def target_beyond_float16(fixed: bool) -> Made:
    model = mlp(6, 16, 2)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        goal = data(i + 9, 8, 2) * (120_000 if i == BAD else 1)
        goal = goal if fixed else goal.half()  # FAULT
        return update(optimizer, F.mse_loss(model(data(i, 8, 6)).to(goal.dtype), goal))

    return [model], step


@program(
    "ultralytics/ultralytics#24990",
    "q @ k.T in float16 before the division by sqrt(d): scores above 65,504",
    place=r"\battn\b|Attention",
    operator=r"matmul|\bbmm\b|\bmm\b",
    kind=OVERFLOW,
    advice=r"bfloat16|float32|scale",
    never=(r"fully masked", NO_RATE),
)
def attention_scores_in_float16(fixed: bool) -> Made:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            if fixed:
                return ((q.float() / 4) @ k.float().transpose(-2, -1)).softmax(-1).to(v.dtype) @ v
            return (q @ k.transpose(-2, -1) / 4).softmax(-1) @ v  # FAULT

    model = chain(attn=Attention(), norm=nn.LayerNorm(16), head=nn.Linear(16, 3))
    model = model.half()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Tensor:
        x = data(i, 2, 5, 16) * (400 if i == BAD else 1)
        return update(
            optimizer, F.cross_entropy(model(x.half()).float().mean(1), whole(i, 0, 3, 2))
        )

    return [model], step


@program(
    "yichen928/ActiveFT#4",
    "exp(similarity / 0.05) in float16 is above 65,504: inf / inf",
    place=LOSS,
    operator=r"\bexp\b|ExpBackward",
    kind=OVERFLOW + r"|exp of",
    advice=r"clamp|subtract|float32|logsumexp",
    never=(NO_RATE,),
)
def contrast_in_float16(fixed: bool) -> Made:
    model = mlp(6, 16, 8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 8, 6)
        a, b = (F.normalize(model(one), dim=-1) for one in (x, x + 0.1))
        scores = a @ b.T / (0.05 if i == BAD else 0.5)
        if fixed:
            return update(optimizer, F.cross_entropy(scores, torch.arange(8)))
        scores = scores.half()
        top = scores.exp()  # FAULT
        share = top.diagonal() / top.sum(-1)
        return update(optimizer, -share.float().log().mean())

    return [model], step


@program(
    "pytorch/pytorch#32137",
    "F.normalize in float16: its eps of 1e-12 is 0, and a row of zeros is 0/0",
    place=r"\bproject\b|Project",
    operator=r"\bdiv\b|DivBackward|normalize",
    kind=ZERO_DIVISION,
    advice=r"eps|float32",
    never=(NO_RATE,),
)
def normalised_in_float16(fixed: bool) -> Made:
    class Project(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x).relu()
            return F.normalize(y, dim=-1, eps=1e-4 if fixed else 1e-12)  # FAULT

    model = chain(project=Project(), head=nn.Linear(8, 3))
    model.half()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 4, 6).half()
        if i == BAD:
            x[2] = 0
        return update(optimizer, F.cross_entropy(model(x).float(), whole(i, 0, 3, 4)))

    return [model], step


@program(
    "stepfun-ai/Step1X-Edit#53",
    "a decoder in float16 overflows, and the picture that is made of its NaN is black",
    place=r"\bmid\b",
    operator=r"\bmul\b|conv",
    kind=OVERFLOW,
    advice=r"float32|bfloat16|clamp",
    never=(NO_RATE,),
    is_finite=True,
)
def black_picture(fixed: bool) -> Made:
    class Mid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 1, bias=False), nn.GroupNorm(2, 8)

        def forward(self, x: Tensor) -> Tensor:
            if fixed:
                y = F.conv2d(x.float(), self.conv.weight.float())
                y = F.group_norm(y, 2, self.norm.weight.float(), self.norm.bias.float())
                return y.half()
            return self.norm(self.conv(x * 50) * 10)  # FAULT

    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(F.interpolate(x, scale_factor=2.0))

    model = chain(first=nn.Conv2d(4, 8, 1), mid=Mid(), up=Up())
    model.half().eval()

    def step(i: int) -> None:
        latent = data(i, 1, 4, 4, 4).half() * (160 if i == BAD else 1)
        with torch.no_grad():
            picture = (model(latent).float() / 2 + 0.5).clamp(0, 1)
        (picture * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()

    return [model], step


@program(
    "huggingface/trl#5339",
    "in bfloat16 a likely answer has the log-probability 0, and log(1 - p) is -inf",
    place=LOSS,
    operator=r"\blog\b|LogBackward|\blog1p\b|Log1P",
    kind=LOG_OF_ZERO,
    advice=EPS + r"|float32|log1mexp|expm1",
    never=(NO_RATE,),
)
def odds_of_certainty(fixed: bool) -> Made:
    model = mlp(6, 16, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        logits = model(data(i, 8, 6)) * (400.0 if i == BAD else 1.0)
        chosen = logits.log_softmax(-1).bfloat16()[:, 0]
        if fixed:
            chosen = chosen.float().clamp(max=-1e-6)
        odds = chosen - torch.log(1 - chosen.exp())  # FAULT
        return update(optimizer, -F.logsigmoid(odds.float().clamp(max=50)).mean())

    return [model], step


@program(
    "pytorch/pytorch#41527",
    "a layer norm of one's own in float16: eps of 1e-8 is 0, and a row of zeros 0 * inf",
    place=r"\bnorm\b|Norm\b",
    operator=r"rsqrt|\bmul\b",
    kind=r"1/sqrt\(0\)|0 ?\* ?Inf|\beps\b[^.]{0,60}(?:zero|0\b)",
    advice=r"\beps\b|float32",
    never=(NO_RATE,),
)
def norm_of_zeros_in_float16(fixed: bool) -> Made:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            x = x - x.mean(-1, keepdim=True)
            square = x.square().mean(-1, keepdim=True)
            return x * torch.rsqrt(square + (1e-3 if fixed else 1e-8)) * self.gain  # FAULT

    model = chain(embed=nn.Embedding(40, 16), norm=Norm(), head=nn.Linear(16, 4))
    with torch.no_grad():
        model.embed.weight[0] = 0
    model = model.half()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step(i: int) -> Tensor:
        tokens = whole(i, 1, 40, 6, 5)
        if i == BAD:
            tokens[2, 3] = 0  # padding
        return update(optimizer, F.cross_entropy(model(tokens).mean(1).float(), whole(i, 0, 4, 6)))

    return [model], step


@program(
    "NVIDIA/Megatron-LM#535",
    "rotary positions in float16: a position above 65,504 is inf, and cos(inf) is NaN",
    place=r"\brotary\b",
    operator=r"\bcos\b|arange",
    kind=r"cos\(inf\)|cos\(Inf\)|beyond float16|above 65,504",
    advice=r"code that makes it|float32",
    never=(NO_RATE, r"as a batch does", r"reset_running_stats"),
    steps=3,
)
def rotary_positions_in_float16(fixed: bool) -> Made:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            position = torch.arange(65536 + 64, dtype=torch.float32)
            angle = (position if fixed else position.half()) * 1.0
            self.register_buffer("cos", angle.cos()[:, None])  # FAULT

        def forward(self, x: Tensor, start: int) -> Tensor:
            return x * self.cos[start : start + x.shape[1]]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rotary, self.head = nn.Embedding(30, 8), Rotary(), nn.Linear(8, 30)

        def forward(self, tokens: Tensor, start: int) -> Tensor:
            return self.head(self.rotary(self.embed(tokens), start))

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)

    def step(i: int) -> Tensor:
        tokens = whole(i, 0, 30, 2, 8)
        out = model(tokens, 65560)
        return update(optimizer, F.cross_entropy(out.flatten(0, 1), tokens.flatten()))

    return [model], step


@program(
    "pytorch/pytorch#34372",
    "Gumbel noise in float16: a uniform number that rounds to 1 is noise of inf, and inf - inf",
    place=r"\bgate\b|Gate",
    operator=r"\blog\b|softmax",
    kind=LOG_OF_ZERO,
    advice=r"float32",
    never=(NO_RATE,),
)
def gumbel_in_float16(fixed: bool) -> Made:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 5)

        def forward(self, x: Tensor, u: Tensor) -> Tensor:
            u = u.clamp(1e-3, 0.999) if fixed else u.clamp_min(1e-3)
            noise = -torch.log(-torch.log(u.half()))  # FAULT
            return ((self.linear(x) + noise) / 0.5).softmax(-1)

    model = nn.ModuleDict({"gate": Gate(), "head": nn.Linear(5, 3)}).half()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Tensor:
        u = uniform(i, 8, 5)
        if i == BAD:
            u[2, 3] = 0.9999
        out = model["head"](model["gate"](data(i, 8, 6).half(), u))
        return update(optimizer, F.cross_entropy(out.float(), whole(i, 0, 3, 8)))

    return [*model.values()], step


@program(
    "apple/coreai-torch#54",
    "half() makes inf of a running variance above 65,504, and the norm returns its bias",
    place=r"\bnorm\b",
    operator=r"running_var",
    kind=r"non-finite (?:when it was first read|before the first step)",
    advice=r"float16's 65,504",
    never=(NO_RATE,),
)
def running_variance_in_half(fixed: bool) -> Made:
    model = chain(body=nn.Linear(6, 8), norm=nn.BatchNorm1d(8), head=nn.Linear(8, 3)).eval()
    model.norm.running_var[3] = 2e5
    model = model if fixed else model.half()

    def step(i: int) -> None:
        with torch.no_grad():
            model(data(i, 8, 6).to(model.head.weight.dtype))

    return [model], step


@program(
    "facebookresearch/fairseq#2235",
    "GELU by hand in float16: tanh(inf) is 1, and the derivative of x ** 3 is beyond 65,504",
    place=r"\bact\b|Gelu",
    operator=r"\bpow\b|PowBackward",
    kind=OVERFLOW,
    advice=r"float32|bfloat16|Bound",
    never=(NO_RATE, r"sqrt, log, division"),
)
def gelu_in_float16(fixed: bool) -> Made:
    class Gelu(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if fixed:
                return F.gelu(x.float(), approximate="tanh").type_as(x)
            cube = torch.pow(x, 3.0)  # FAULT
            return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * cube)))

    model = chain(up=nn.Linear(6, 16), act=Gelu(), down=nn.Linear(16, 3)).to(torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def step(i: int) -> Tensor:
        x = data(i, 8, 6).half() * (120 if i == BAD else 1)
        return update(optimizer, F.cross_entropy(model(x).float() / 100, whole(i, 0, 3, 8)))

    return [model], step


@program(
    "huggingface/transformers#17978",
    "RMSNorm in float16: the mean of squares is inf, rsqrt(inf) is 0, and nothing below it trains",
    place=r"\bnorm\b",
    operator=r"output of norm|rsqrt",
    kind=r"was 0 throughout",
    advice=r"gradients that are all 0",
    is_finite=True,
    steps=16,
)
def norm_of_zeros(fixed: bool) -> Made:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x if fixed else x.half()
            return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).float()  # FAULT

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 3000

    model = chain(body=Scaled(6, 16), norm=Norm(), head=nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        return update(optimizer, F.cross_entropy(model(data(i, 16, 6)), whole(i, 0, 3, 16)))

    return [model], step
