"""Programs in the manner of public bug reports, for reports.py: each with its source, its cause,
what an answer has to hold, and its fixed version.

A program is a function of ``fixed`` that gives the modules to install and a step. The line at fault
bears the comment ``# FAULT``; a text that names it has named the place and the operator. What an
answer has to hold is written from the cause, not from what the text says today.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[int], Optional[Tensor]]
Made = tuple[Sequence[nn.Module], Step]

#: The step in which a bad batch comes, in the programs that have one.
BAD = 4


class Program(NamedTuple):
    """``place``, ``operator`` and ``kind``: patterns of an answer. ``advice``: that of the remedy,
    within the first items to try. ``never``: what would be false. ``is_finite``: losses and weights
    stay finite, so that without fastcheck nothing shows. ``steps``: iterations of the faulty
    version.
    """

    name: str
    make: Callable[[bool], Made]
    source: str
    cause: str
    place: str
    operator: str
    kind: str
    advice: str
    never: tuple[str, ...]
    is_finite: bool
    steps: int
    lines: tuple[int, ...]


PROGRAMS: list[Program] = []

# What is said of a cause, in any of these words.
ONE_ELEMENT = r"one (?:element|value|number|sample|row)|single (?:element|value|sample)|unbiased"
ZERO_DIVISION = (
    r"0 ?/ ?0|x ?/ ?0|1 ?/ ?0|divi\w+ by (?:a |an exact )?(?:zero|0)\b"
    r"|(?:denominator|divisor)[^.]{0,60}\b(?:zeros?|0)\b"
)
OVERFLOW = (
    r"\boverflow(?:s|ed)?\b|out of (?:the )?range|left the range|beyond|ends at|holds up to|"
    r"above 88"
)
LOG_OF_ZERO = (
    r"log\(0\)|log(?:arithm)? of (?:a |an exact )?(?:zero|0)\b|log [^.]{0,40}\b(?:zeros?|0)\b"
)
MASKED_WHOLE = (
    r"mask\w* (?:whole|out whole)|(?:fully|wholly|completely) masked|every key|all -?inf"
    r"|nothing but -inf"
)
ROOT_AT_ZERO = (
    r"(?:sqrt|root|norm|std|pow|x ?\*\* ?p)[^.]{0,80}\b(?:at|of) (?:a )?(?:0|zero)\b|Inf at 0"
)
EMPTY_MEAN = (
    r"(?:mean|average|std|var)\w* (?:over|of) (?:nothing|no (?:element|target|token)|an empty)"
    r"|no elements?\b|empty|ignore_index|count of (?:zero|0)"
)
BAD_DATA = r"before the model|the data\b|bad batch|batch (?:was|is|held|holds)"
EPS = r"\beps\b|clamp|\bmax\(|where"
LOSS = r"\bthe loss\b"
#: The first thing to try, of what did not grow.
NO_RATE = r"\btry 1\. (?:(?! 2\. ).)*lower the learning rate"


def program(
    source: str,
    cause: str,
    *,
    place: str,
    operator: str,
    kind: str,
    advice: str,
    never: tuple[str, ...] = (),
    is_finite: bool = False,
    steps: int = 8,
) -> Callable[[Callable[[bool], Made]], Callable[[bool], Made]]:
    """Adds the function that follows to PROGRAMS."""

    def add(make: Callable[[bool], Made]) -> Callable[[bool], Made]:
        text, first = inspect.getsourcelines(make)
        lines = tuple(first + n for n, line in enumerate(text) if "# FAULT" in line)
        patterns = (place, operator, kind, advice, never)
        PROGRAMS.append(
            Program(make.__name__, make, source, cause, *patterns, is_finite, steps, lines)
        )
        return make

    return add


def data(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def whole(step: int, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(step))


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def chain(**parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(parts))


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide, narrow in zip(widths, widths[1:]):
        layers += [nn.Linear(wide, narrow), activation()]
    return nn.Sequential(*layers[:-1])


# Statistics of too few elements.


@program(
    "DLR-RM/stable-baselines3#440",
    "the last minibatch of a rollout of 17 has one sample, whose advantages have no std",
    place=LOSS,
    operator=r"\bstd\b|StdBackward",
    kind=ONE_ELEMENT,
    advice=ONE_ELEMENT,
    never=(r"the loss itself overflowed", NO_RATE),
)
def advantage_std_of_one(fixed: bool) -> Made:
    model = nn.ModuleDict({"body": nn.Linear(4, 16), "pi": nn.Linear(16, 2), "v": nn.Linear(16, 1)})
    optimizer = torch.optim.Adam(model.parameters(), 3e-4)

    def step(i: int) -> Tensor:
        seen, action, returned = data(i, 17, 4), whole(i, 0, 2, 17), data(i + 100, 17)
        loss = torch.zeros(())
        for begin in (0, 16):
            part = slice(begin, begin + 16)
            hidden = model["body"](seen[part]).tanh()
            value = model["v"](hidden)[:, 0]
            advantage = returned[part] - value.detach()
            if not fixed or len(advantage) > 1:
                scale = advantage.std() + 1e-8  # FAULT
                advantage = (advantage - advantage.mean()) / scale
            logs = model["pi"](hidden).log_softmax(-1).gather(1, action[part, None])[:, 0]
            ratio = (logs - logs.detach()).exp()
            policy = -torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
            loss = update(optimizer, policy + 0.5 * (returned[part] - value).square().mean())
        return loss

    return [model], step


@program(
    "facebookresearch/SparseConvNet#190",
    "a batch norm of one's own: the unbiased variance of a batch of one row is NaN in running_var",
    place=r"running_var",
    operator=r"\bvar\b|lerp",
    kind=ONE_ELEMENT,
    advice=ONE_ELEMENT,
    never=(r"came from outside",),
    steps=12,
)
def running_var_of_one(fixed: bool) -> Made:
    class Norm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(width))
            self.register_buffer("running_var", torch.ones(width))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                mean, var = x.mean(0), x.var(0, unbiased=False)
                if not fixed or len(x) > 1:
                    with torch.no_grad():
                        self.running_var.lerp_(x.var(0), 0.1)  # FAULT
            else:
                mean, var = torch.zeros(()), self.running_var
            return (x - mean) / (var + 1e-5).sqrt() * self.gain

    model = nn.Sequential(nn.Linear(6, 16), Norm(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        x = data(i, 1 if i == BAD else 12, 6)
        loss = update(optimizer, F.cross_entropy(model(x), x[:, :3].argmax(1)))
        if i == 8:
            model.eval()
            with torch.no_grad():
                model(data(i, 20, 6))
            model.train()
        return loss

    return [model], step


@program(
    "digantamisra98/EvoNorm#5",
    "instance std of one pixel: the last feature map is 1 x 1",
    place=r"\bnorm\b|Norm\b",
    operator=r"\bvar\b|\bstd\b|VarBackward|StdBackward",
    kind=ONE_ELEMENT,
    advice=ONE_ELEMENT,
    never=(NO_RATE,),
)
def instance_std_of_one_pixel(fixed: bool) -> Made:
    class InstanceNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if fixed and x.shape[-1] == 1:
                return x
            return x / (x.var((2, 3), keepdim=True) + 1e-5).sqrt()  # FAULT

    model = chain(
        conv=nn.Conv2d(3, 8, 3, stride=2),
        norm=InstanceNorm(),
        head=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(i: int) -> Tensor:
        size = 3 if i == BAD else 9  # progressive resizing
        return update(
            optimizer, F.cross_entropy(model(data(i, 4, 3, size, size)), whole(i, 0, 4, 4))
        )

    return [model], step


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


# Masks.


@program(
    "huggingface/transformers#25065",
    "float16: finfo.min of two masks added is -inf, and a padded row is masked whole",
    place=r"attn|Attention|layers\.0",
    operator=r"\badd\b|softmax",
    kind=MASKED_WHOLE,
    advice=r"masked_fill|clamp|finfo",
)
def masks_added_in_float16(fixed: bool) -> Made:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)
            self.out = nn.Linear(16, 16)
            with torch.no_grad():  # scores of about -64, as those of a trained model
                self.qkv.bias[:32] = torch.tensor([4.0, -4.0]).repeat_interleave(16)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = q @ k.transpose(-2, -1) / 4
            lowest = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(mask < 0, lowest) if fixed else scores + mask
            weights = scores.float().softmax(-1).to(x.dtype)
            return self.out(weights @ v)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(40, 16)
            self.attn = Attention()
            self.head = nn.Linear(16, 40)

        def forward(self, tokens: Tensor, keep: Tensor) -> Tensor:
            x = self.embed(tokens)
            lowest = torch.finfo(x.dtype).min
            causal = torch.full((8, 8), lowest, dtype=x.dtype).triu(1)
            padding = (1 - keep[:, None, :].to(x.dtype)) * lowest
            mask = causal + padding  # FAULT
            return self.head(x + self.attn(x, mask))

    model = Model().half()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        tokens, keep = whole(i, 1, 40, 3, 8), torch.ones(3, 8, dtype=torch.long)
        if i >= BAD:
            keep[1, :3] = 0  # left padding
        goal = tokens.masked_fill(keep == 0, -100)
        logits = model(tokens, keep)[:, :-1].float()
        return update(optimizer, F.cross_entropy(logits.flatten(0, 1), goal[:, 1:].flatten()))

    return [model], step


@program(
    "pytorch/pytorch#41508",
    "a sample that is padding alone: MultiheadAttention's softmax has a row of -inf",
    place=r"\battention\b|MultiheadAttention",
    operator=r"softmax|MultiheadAttention",
    kind=MASKED_WHOLE,
    advice=MASKED_WHOLE,
    never=(NO_RATE,),
)
def sample_of_padding(fixed: bool) -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            x, _ = self.attention(x, x, x, key_padding_mask=padding)  # FAULT
            return self.head(x.mean(1))

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        padding = torch.zeros(4, 6, dtype=torch.bool)
        if i == BAD:
            padding[2, 1 if fixed else 0 :] = True
        return update(
            optimizer, F.cross_entropy(model(data(i, 4, 6, 16), padding), whole(i, 0, 4, 4))
        )

    return [model], step


@program(
    "allenai/allennlp#890",
    "log(mask) is -inf for every class of a row that is masked whole; log_softmax gives NaN",
    place=LOSS,
    operator=r"log_softmax|LogSoftmaxBackward|\blog\b|LogBackward",
    kind=MASKED_WHOLE + "|" + LOG_OF_ZERO,
    advice=MASKED_WHOLE + r"|eps|clamp|masked_fill",
    never=(NO_RATE,),
)
def log_of_mask(fixed: bool) -> Made:
    model = mlp(6, 16, 5)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        allowed = torch.ones(8, 5)
        allowed[:, 4] = 0
        if i == BAD:
            allowed[3] = 0
        logits = model(data(i, 8, 6)) + (allowed + (1e-13 if fixed else 0.0)).log()  # FAULT
        return update(optimizer, -logits.log_softmax(-1)[:, :4].mean())  # FAULT

    return [model], step


@program(
    "huggingface/trl#7221",
    "entropy as exp(logp) * logp: 0 * -inf is NaN for a class that is ruled out",
    place=LOSS,
    operator=r"\bmul\b|MulBackward",
    kind=r"0 ?\* ?-?[Ii]nf|-?[Ii]nf ?\* ?0|infinit\w+ times (?:zero|0)|product of 0",
    advice=r"xlogy|where|masked_fill|entropy",
    never=(r"the loss itself overflowed", NO_RATE),
)
def entropy_of_impossible_class(fixed: bool) -> Made:
    model = mlp(6, 16, 5)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        logits = model(data(i, 8, 6))
        if i >= BAD:  # an action that the environment does not allow here
            logits = logits.masked_fill(torch.arange(5) == 2, -math.inf)
        logs = logits.log_softmax(-1)
        chosen = logs[:, 0].mean()
        if fixed:
            logs = logs.clamp_min(-1e4)
        entropy = -(logs.exp() * logs).sum(-1).mean()  # FAULT
        return update(optimizer, -chosen - 0.01 * entropy)

    return [model], step


@program(
    "OpenRLHF/OpenRLHF#1314",
    "a ratio that overflowed is masked by multiplication: inf * 0 is NaN",
    place=LOSS,
    operator=r"\bexp\b|\bmul\b|ExpBackward|MulBackward",
    kind=OVERFLOW + r"|0 ?\* ?-?[Ii]nf|[Ii]nf ?\* ?0",
    advice=r"clamp|where",
    never=(NO_RATE,),
)
def ratio_masked_by_product(fixed: bool) -> Made:
    model = mlp(6, 16, 5)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        logs = model(data(i, 8, 6)).log_softmax(-1)[:, 0]
        old = logs.detach() + 0.1 * data(i + 50, 8)
        if i == BAD:
            old[3] = -200.0  # a token of a stale rollout
        difference = logs - old
        ratio = (difference.clamp(-20, 20) if fixed else difference).exp()  # FAULT
        keep = (difference.detach().abs() < 2).float()
        return update(optimizer, -(ratio * keep * data(i + 9, 8)).sum() / 8)

    return [model], step


@program(
    "NVIDIA-NeMo/Automodel#3850",
    "padded negatives are -inf before the division by a learned temperature, whose gradient is NaN",
    place=r"temperature",
    operator=r"\bdiv\b|DivBackward",
    kind=r"-?[Ii]nf",
    advice=r"mask|where|after",
)
def infinite_logits_over_temperature(fixed: bool) -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Linear(6, 8)
            self.temperature = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor, padded: Tensor) -> Tensor:
            z = F.normalize(self.encode(x), dim=-1)
            logits = z @ z.T
            if fixed:
                return (logits / self.temperature).masked_fill(padded, -math.inf)
            return logits.masked_fill(padded, -math.inf) / self.temperature  # FAULT

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        padded = torch.zeros(8, 8, dtype=torch.bool)
        if i >= BAD:
            padded[:4, 6:] = True
        return update(optimizer, F.cross_entropy(model(data(i, 8, 6), padded), torch.arange(8)))

    return [model], step


# Half precision.


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
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def step(i: int) -> Tensor:
        goal = torch.rand(16, 4, generator=torch.Generator().manual_seed(i)) + 0.2
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
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
        with torch.autocast("cpu", torch.float16):
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
    "pytorch/pytorch#40907",
    "clip_grad_norm_ before unscale_: the updates are as many times too small as the scale is",
    place=r"clip|gradient norm|grad_norm|optimizer",
    operator=r"clip_grad_norm_|unscale_",
    kind=r"unscale|still scaled|scaled gradients",
    advice=r"unscale_",
    is_finite=True,
    steps=60,
)
def clipping_before_unscale(fixed: bool) -> Made:
    model = mlp(8, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)

    def step(i: int) -> Tensor:
        x = data(i, 32, 8)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            y = model(x)
        loss = F.mse_loss(y.float(), x.sum(1, keepdim=True))
        scaler.scale(loss).backward()
        if fixed:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # FAULT
        scaler.step(optimizer)
        scaler.update()
        return loss

    return [model], step


# Logarithms, roots, powers, exponentials.


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
    "zhengqili/MegaDepth#38",
    "log of a ground truth with missing depths (0) is -inf: the target, not the model",
    place=LOSS + r"|target|label",
    operator=r"\blog\b|target|\bsub\b|SubBackward",
    kind=LOG_OF_ZERO + r"|target\w* (?:hold|held|is|was|are|were)|before the (?:loss|model)",
    advice=r"clamp|mask|target|eps|data",
    never=(r"the loss itself overflowed", NO_RATE),
)
def log_of_missing_depth(fixed: bool) -> Made:
    model = mlp(6, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        depth = data(i, 8, 4).abs() + 0.5
        if i == BAD:
            depth[3, 1:] = 0.0
        goal = (depth.clamp_min(1e-3) if fixed else depth).log()  # FAULT
        return update(optimizer, (model(data(i + 9, 8, 6)) - goal).square().mean())

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
    "pytorch/pytorch#187297",
    "torch.where does not keep the NaN of the branch not taken out of the gradient",
    place=r"\bact\b|Activation|\bbody\b",
    operator=r"\bsqrt\b|SqrtBackward",
    kind=r"negative|sqrt of|where",
    advice=r"where|clamp",
    never=(NO_RATE,),
)
def where_hides_a_root(fixed: bool) -> Made:
    class Activation(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if fixed:
                return torch.where(x > 0.01, x.clamp_min(0.01).sqrt(), x)
            return torch.where(x > 0, x.sqrt(), x)  # FAULT

    model = chain(body=nn.Linear(6, 16), act=Activation(), head=nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Tensor:
        return update(optimizer, F.cross_entropy(model(data(i, 8, 6)), whole(i, 0, 3, 8)))

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


# Divisions.


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
    "MrLeeeee/GCN-GAT-and-Graphsage#3",
    "messages over the degree of a node: an isolated node is 0/0",
    place=r"\bconv\b|GraphConv",
    operator=r"\bdiv\b|DivBackward",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(NO_RATE,),
)
def isolated_node(fixed: bool) -> Made:
    class GraphConv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 8)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            degree = edges.sum(1, keepdim=True)
            near = edges @ self.linear(x)
            return near / (degree.clamp_min(1) if fixed else degree)  # FAULT

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GraphConv()
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return self.head(self.conv(x, edges).relu())

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        edges = (whole(i, 0, 3, 9, 9) == 0).float() + torch.eye(9)
        if i == BAD:
            edges[4] = 0
        return update(optimizer, F.cross_entropy(model(data(i, 9, 6), edges), whole(i, 0, 3, 9)))

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
    "espnet/espnet#3283",
    "weights of an utterance without frames are 0/0; the update is skipped, the gradients stay",
    place=LOSS + r"|gradient",
    operator=r"\bdiv\b|DivBackward",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(r"the loss itself overflowed",),
)
def utterance_without_frames(fixed: bool) -> Made:
    model = mlp(8, 16, 2, activation=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        total = torch.zeros(())
        for part in range(4):
            x = data(4 * i + part, 8, 8)
            weight = data(4 * i + part + 999, 8).abs()
            if i == BAD and part == 2:
                weight = weight * 0
            below = weight.sum().clamp_min(1e-6) if fixed else weight.sum()
            error = (model(x) - x[:, :2]).square().mean(1) * weight
            loss = error.sum() / below / 4  # FAULT
            loss.backward()
            total += loss.detach()
        if torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
            optimizer.step()
            optimizer.zero_grad()
        elif fixed:
            optimizer.zero_grad()
        return total

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
    "microsoft/LLM2CLIP#64",
    "an Adafactor of one's own without eps: a parameter whose gradient is 0 gets 0/0",
    place=r"\brare\b",
    operator=r"Adafactor|\bdiv\b|rsqrt|\bmul\b",
    kind=ZERO_DIVISION,
    advice=r"\beps\b",
    never=(r"No optimizer has updated a weight", NO_RATE),
)
def adafactor_of_zero_gradient(fixed: bool) -> Made:
    class Adafactor(torch.optim.Optimizer):
        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    square = p.grad.square() + (1e-30 if fixed else 0.0)
                    if p.dim() == 2:
                        row = square.mean(1)
                        share = row / row.mean()  # FAULT
                        move = p.grad * share.rsqrt()[:, None] * square.mean(0).rsqrt()
                    else:
                        move = p.grad * (square + 1e-30).rsqrt()
                    p.add_(move.clamp(-1, 1), alpha=-group["lr"])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.rare = nn.Linear(8, 16), nn.Linear(16, 4), nn.Embedding(5, 16)

        def forward(self, x: Tensor, kinds: Optional[Tensor]) -> Tensor:
            rare = self.rare(kinds) if kinds is not None else 0 * self.rare.weight.sum()
            return self.b(self.a(x).tanh() + rare)

    model = Model()
    optimizer = Adafactor(model.parameters(), 1e-3)
    kinds = torch.arange(16) % 5

    def step(i: int) -> Tensor:
        x = data(i, 16, 8)
        # A batch without kinds: their table has a gradient of 0.
        return update(optimizer, (model(x, None if i == BAD else kinds) - x[:, :4]).square().mean())

    return [model], step


# Labels and batches.


@program(
    "pytorch/pytorch#70348",
    "cross entropy over targets that are all ignore_index is 0/0",
    place=LOSS + r"|CrossEntropyLoss",
    operator=r"nll_loss|NllLossBackward|CrossEntropyLoss|cross_entropy",
    kind=EMPTY_MEAN,
    advice=r"ignore_index|clamp_min|skip|sum",
    never=(r"the loss itself overflowed", NO_RATE),
)
def all_targets_ignored(fixed: bool) -> Made:
    model, criterion = mlp(6, 16, 4), nn.CrossEntropyLoss(reduction="sum" if fixed else "mean")
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        goal = whole(i, 0, 4, 8)
        if i == BAD:
            goal[:] = -100
        loss = criterion(model(data(i, 8, 6)), goal)  # FAULT
        return update(optimizer, loss / (goal >= 0).sum().clamp_min(1) if fixed else loss)

    return [model, criterion], step


@program(
    "nvidia-cosmos/cosmos-rl#155",
    "a Hugging Face model whose labels are all -100 in one batch: every sample was truncated",
    place=LOSS + r"|GPT2|Llama|\bmodel\b",
    operator=r"nll_loss|NllLossBackward|cross_entropy",
    kind=EMPTY_MEAN,
    advice=r"ignore_index|clamp_min|skip|-100",
    never=(NO_RATE, r"softmax over nothing"),
)
def language_model_without_labels(fixed: bool) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 50}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        tokens = whole(i, 3, 50, 2, 8)
        labels = tokens.clone()
        labels[:, :4] = -100
        if i == BAD:
            labels[:, : 7 if fixed else 8] = -100
        return update(optimizer, model(input_ids=tokens, labels=labels).loss)

    return [model], step


@program(
    "wenet-e2e/wenet#2299",
    "CTC: a transcript that is longer than the frames has no alignment: inf, and NaN gradients",
    place=LOSS + r"|ctc|CTC",
    operator=r"ctc|Ctc",
    kind=r"longer|target length|frames|alignment|zero_infinity",
    advice=r"zero_infinity|longer|length",
    never=(NO_RATE,),
)
def transcript_longer_than_frames(fixed: bool) -> Made:
    model = nn.Sequential(nn.Conv1d(4, 16, 3, stride=2), nn.ReLU(), nn.Conv1d(16, 9, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        logs = model(data(i, 2, 4, 25)).log_softmax(1).permute(2, 0, 1)
        size = 30 if i == BAD else 5
        lengths = torch.tensor([size, 5]), torch.full((2,), len(logs))
        goal = whole(i, 1, 9, 2, 30)
        loss = F.ctc_loss(logs, goal, lengths[1], lengths[0], zero_infinity=fixed)  # FAULT
        return update(optimizer, loss)

    return [model], step


@program(
    "zhouhaoyi/Informer2020#402",
    "a missing value in one row of the data",
    place=r"input|batch",
    operator=r"input\[0\]|\binput\b|\bbatch\b",
    kind=BAD_DATA + r"|from outside",
    advice=r"data",
    never=(r"lower the learning rate", NO_RATE),
)
def missing_value_in_batch(fixed: bool) -> Made:
    model = mlp(6, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 8, 6)
        if i == BAD and not fixed:
            x[5, 2] = math.nan  # FAULT: row 5, element 32
        return update(optimizer, F.cross_entropy(model(x), whole(i, 0, 3, 8)))

    return [model], step


@program(
    "mllam/neural-lam#136",
    "features are divided by their standard deviation, which is 0 for one that never changes",
    place=r"input|batch",
    operator=r"\bdiv\b|input",
    kind=ZERO_DIVISION + "|" + BAD_DATA,
    advice=r"standard deviation|data|eps",
    never=(r"lower the learning rate", NO_RATE),
)
def constant_feature_standardised(fixed: bool) -> Made:
    model = mlp(6, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 16, 6)
        if i == BAD:
            x[:, 3] = 0  # no rain
        spread = x.std(0)
        x = (x - x.mean(0)) / (spread + 1e-6 if fixed else spread)  # FAULT
        return update(optimizer, F.cross_entropy(model(x), whole(i, 0, 3, 16)))

    return [model], step


@program(
    "huggingface/transformers#30953",
    "a head that is not in the checkpoint is left as torch.empty made it",
    place=r"head\.weight",
    operator=r"parameter|head\.weight",
    kind=r"checkpoint|initiali[sz]ed|before the first",
    advice=r"checkpoint|initiali[sz]ed|torch\.empty",
    never=(NO_RATE,),
)
def head_is_not_initialised(fixed: bool) -> Made:
    model = chain(body=nn.Linear(6, 16), head=nn.Linear(16, 3))
    if not fixed:
        with torch.no_grad():  # as memory that held other things may look
            model.head.weight.view(torch.int32).fill_(0x7FC01234)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        return update(optimizer, F.cross_entropy(model(data(i, 8, 6)), whole(i, 0, 3, 8)))

    return [model], step


# Linear algebra.


@program(
    "pytorch/pytorch#49886",
    "the derivative of svd divides by the difference of singular values, two of which are 0",
    place=r"\bwhiten\b|Low|\bbody\b",
    operator=r"\bsvd|Svd",
    kind=r"singular values|equal|repeated|degenerate",
    advice=r"singular values|svdvals|equal|noise|eps",
    never=(NO_RATE,),
)
def svd_of_equal_singular_values(fixed: bool) -> Made:
    class Low(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if fixed:
                x = x + 1e-3 * data(5, *x.shape)
            u, s, v = torch.linalg.svd(x, full_matrices=False)  # FAULT
            return u[:, :3] * s[:3] @ v[:3]

    model = chain(body=nn.Linear(6, 5, bias=False), whiten=Low(), head=nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 8, 6)
        if i == BAD:
            x = torch.zeros(8, 6)
            x[0, 0] = 1  # one sample left: rank 1
        return update(optimizer, F.cross_entropy(model(x), whole(i, 0, 2, 8)))

    return [model], step


@program(
    "jax-ml/jax#8732",
    "the derivative of eigh divides by the difference of eigenvalues, which are equal",
    place=r"\bwhiten\b|Whiten|covariance",
    operator=r"eigh",
    kind=r"eigenvalues|equal|repeated|degenerate",
    advice=r"eigenvalues|eigvalsh|equal|noise|eps",
    never=(NO_RATE,),
)
def eigh_of_equal_eigenvalues(fixed: bool) -> Made:
    class Whiten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.covariance = nn.Parameter(torch.eye(4))

        def forward(self, x: Tensor) -> Tensor:
            tilt = torch.diag(torch.tensor([0.0, 0.1, 0.2, 0.3])) if fixed else 0.0
            values, vectors = torch.linalg.eigh(self.covariance + tilt)  # FAULT
            return x @ vectors / values.sqrt()

    model = chain(whiten=Whiten(), head=nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        return update(optimizer, F.cross_entropy(model(data(i, 8, 4)), whole(i, 0, 2, 8)))

    return [model], step


# Divergence.


@program(
    "facebookresearch/maskrcnn-benchmark#295",
    "the learning rate of eight GPUs on one: SGD diverges",
    place=r"\d\.weight|\d\.bias|parameter|\bmodule\b|gradient|Linear",
    operator=r"update|learning rate|\bLinear\b|mm\b|linear",
    kind=r"grew|diverge|times (?:larger|as large)|took the largest|growth",
    advice=r"learning rate",
    never=(r"look for\s+0/0", r"softmax over nothing"),
    steps=200,
)
def learning_rate_too_high(fixed: bool) -> Made:
    model = mlp(8, 32, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.02 if fixed else 2.0, momentum=0.9)

    def step(i: int) -> Tensor:
        x = data(i, 32, 8)
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        return update(optimizer, loss)

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
    "pytorch/pytorch#46849",
    "finite gradients of 1e20 have an infinite norm: clipping by it sets them to 0",
    place=r"norm",
    operator=r"clip|norm of the gradients",
    kind=OVERFLOW + r"|infinite norm|squares?",
    advice=r"infinite norm|scale|divide|learning rate|loss",
    is_finite=True,
)
def gradient_norm_overflows(fixed: bool) -> Made:
    model = mlp(6, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 8, 6)
        loss = model(x).square().mean()
        if i == BAD and not fixed:
            loss = loss * 1e30  # a term in other units
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # FAULT
        optimizer.step()
        return loss

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
    "YangSun22/TC-MoA#6",
    "the mean over the tokens of an expert that got none is 0/0",
    place=LOSS + r"|\bmoe\b|Router|expert",
    operator=r"\bmean\b|MeanBackward|\bdiv\b",
    kind=EMPTY_MEAN + "|" + ZERO_DIVISION,
    advice=r"clamp_min|empty|count|skip",
    never=(r"the loss itself overflowed", NO_RATE),
)
def expert_without_tokens(fixed: bool) -> Made:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(6, 3)
            self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            share = self.gate(x).softmax(-1)
            chosen = share.argmax(-1)
            made, balance = x.new_zeros(len(x), 4), x.new_zeros(())
            for n, expert in enumerate(self.experts):
                mine = chosen == n
                if fixed and not mine.any():
                    continue
                made = made.masked_scatter(mine[:, None], expert(x[mine]))
                balance = balance + share[mine, n].mean()  # FAULT
            return made, balance

    model = nn.ModuleDict({"moe": Router()})
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        x = data(i, 24, 6)
        if i == BAD:
            x = x[:1].expand(24, 6)  # a batch of one prompt
        made, balance = model["moe"](x)
        return update(optimizer, (made - x[:, :4]).square().mean() + 0.01 * balance)

    return [model], step


@program(
    "pytorch/pytorch#26799",
    "a batch is split over replicas by hand, and one gets no sample with a target",
    place=LOSS,
    operator=r"\bdiv\b|DivBackward|\bmean\b|MeanBackward",
    kind=EMPTY_MEAN + "|" + ZERO_DIVISION,
    advice=r"clamp_min|empty|count|skip|eps",
    never=(r"the loss itself overflowed", NO_RATE),
)
def replica_without_targets(fixed: bool) -> Made:
    model = mlp(6, 16, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        x, has_target = data(i, 16, 6), whole(i, 0, 4, 16) > 0
        if i == BAD:
            has_target[8:] = False
        losses = []
        for part in (slice(0, 8), slice(8, 16)):
            error = (model(x[part]) - x[part, :2]).square().mean(-1) * has_target[part]
            count = has_target[part].sum().float()
            losses.append(error.sum() / (count.clamp_min(1) if fixed else count))  # FAULT
        return update(optimizer, torch.stack(losses).mean())

    return [model], step


# Kinds that were found unanswered after those above.


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
    "zhang-tao-whu/e2ec#7",
    "smooth L1 over the positives of an image without objects: a mean over nothing",
    place=LOSS,
    operator=r"smooth_l1|SmoothL1|\bmean\b",
    kind=EMPTY_MEAN,
    advice=r"empty|skip|count|max\(|clamp_min|Leave",
    never=(NO_RATE, r"the loss itself overflowed"),
)
def boxes_without_positives(fixed: bool) -> Made:
    model = nn.ModuleDict(
        {"body": nn.Linear(6, 16), "cls": nn.Linear(16, 1), "box": nn.Linear(16, 4)}
    )
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        x, goal = data(i, 16, 6), data(i + 9, 16, 4)
        positive = whole(i, 0, 3, 16) == 0
        if i == BAD:
            positive[:] = False
        hidden = model["body"](x).relu()
        score, box = model["cls"](hidden)[:, 0], model["box"](hidden)
        kind = F.binary_cross_entropy_with_logits(score, positive.float())
        if fixed:
            where = F.smooth_l1_loss(
                box[positive], goal[positive], reduction="sum"
            ) / positive.sum().clamp_min(1)
        else:
            where = F.smooth_l1_loss(box[positive], goal[positive])  # FAULT
        return update(optimizer, kind + where)

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
    "pytorch/pytorch#31829",
    "logsumexp over transitions that are all -inf: its derivative is exp(-inf + inf)",
    place=LOSS + r"|crf|gradient|transitions",
    operator=r"logsumexp|Logsumexp",
    kind=MASKED_WHOLE,
    advice=r"mask|finite|-1e4|-inf",
    never=(NO_RATE,),
)
def crf_without_a_path(fixed: bool) -> Made:
    class Crf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transitions = nn.Parameter(0.1 * torch.randn(4, 4))

        def forward(self, scores: Tensor, banned: Tensor) -> Tensor:
            moves = self.transitions.masked_fill(banned, -1e4 if fixed else -math.inf)
            alpha = scores[:, 0]
            for n in range(1, scores.shape[1]):
                alpha = torch.logsumexp(alpha[:, :, None] + moves, 1) + scores[:, n]  # FAULT
            return alpha.logsumexp(-1).mean()

    model = nn.ModuleDict({"emit": nn.Linear(6, 4), "crf": Crf()})
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        banned = torch.zeros(4, 4, dtype=torch.bool)
        banned[0, 1] = True
        if i == BAD:
            banned[:, 2] = True  # a tag that nothing leads to
        scores = model["emit"](data(i, 3, 5, 6))
        return update(optimizer, model["crf"](scores, banned) - scores[..., 0].sum(1).mean())

    return [model], step


@program(
    "candle-org/MindAct#1633",
    "mixup with lam = 0 of a class that is ruled out: 0 * inf",
    place=LOSS,
    operator=r"\bmul\b|MulBackward|nll|cross_entropy|NllLoss",
    kind=r"0 ?\* ?-?[Ii]nf|\b-?[Ii]nf",
    advice=r"where|mask|Inf",
    never=(NO_RATE,),
)
def mixup_of_ruled_out_class(fixed: bool) -> Made:
    model = mlp(6, 16, 5)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        logits = model(data(i, 8, 6))
        if i == BAD:
            logits = logits.masked_fill(torch.arange(5) == 4, -1e4 if fixed else -math.inf)
        one, other = whole(i, 0, 4, 8), torch.full((8,), 4) if i == BAD else whole(i + 1, 0, 5, 8)
        lam = 0.0 if i == BAD else 0.5
        loss = lam * F.cross_entropy(logits, other) + (1 - lam) * F.cross_entropy(
            logits, one
        )  # FAULT
        return update(optimizer, loss)

    return [model], step


@program(
    "mlcommons/hpc#27",
    "a schedule that divides 0 by 0 gives a learning rate of NaN, which breaks every weight",
    place=r"\d\.weight|\d\.bias|parameter",
    operator=r"SGD|Adam|update|add_|learning rate",
    kind=r"(?:lr|learning rate)[^.]{0,40}nan",
    advice=r"learning rate|schedule|lr",
    never=(NO_RATE, r"lr 0\.001", r"0/0, where a second moment"),
)
def learning_rate_of_nan(fixed: bool) -> Made:
    import numpy as np

    model = mlp(6, 16, 5)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def factor(n: int) -> float:
        with np.errstate(all="ignore"):
            left = np.float64(BAD - n) / np.float64(BAD - n)  # 0/0 at the end of the decay
        return float(np.nan_to_num(left)) if fixed else float(left)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def step(i: int) -> Tensor:
        loss = update(optimizer, F.cross_entropy(model(data(i, 8, 6)), whole(i, 0, 5, 8)))
        schedule.step()
        return loss

    return [model], step


@program(
    "Nixtla/neuralforecast#186",
    "a target that is missing (NaN) in one row",
    place=LOSS + r"|target",
    operator=r"mse|Mse|target|goal",
    kind=r"data|target|no graph",
    advice=r"data|target|goal",
    never=(NO_RATE, r"the loss itself overflowed"),
)
def target_that_is_missing(fixed: bool) -> Made:
    model = mlp(6, 16, 2)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        goal = data(i + 9, 8, 2)
        if i == BAD and not fixed:
            goal[5, 1] = math.nan  # FAULT
        return update(optimizer, F.mse_loss(model(data(i, 8, 6)), goal))

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
            optimizer, (inside.clamp_min(1 + 1e-5) if fixed else inside).acosh().mean()
        )  # FAULT

    return [model], step


@program(
    "pytorch/pytorch#23473",
    "logdet of a 1x1 convolution whose determinant became negative is NaN",
    place=r"\bmix\b|Mix|\bflow\b",
    operator=r"logdet|\blog\b|LogBackward|slogdet",
    kind=r"negative|determinant",
    advice=r"slogdet|abs|negative|determinant",
    never=(NO_RATE,),
)
def logdet_of_negative(fixed: bool) -> Made:
    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            size = torch.slogdet(self.weight)[1] if fixed else torch.logdet(self.weight)  # FAULT
            return x @ self.weight, size

    model = nn.ModuleDict({"mix": Mix()})
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        y, size = model["mix"](data(i, 8, 4))
        loss = update(optimizer, y.square().mean() - size)
        if i == BAD - 1:
            with torch.no_grad():
                model["mix"].weight[0, 0] = -0.1
        return loss

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


# Programs written after all of the above were answered, nothing having been tuned on them.


@program(
    "raoyongming/DynamicViT#6",
    "a policy that keeps no token: the mean over kept tokens is 0/0",
    place=r"\bpredictor\b|Predictor",
    operator=r"\bdiv\b|DivBackward",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(NO_RATE,),
)
def policy_that_keeps_no_token(fixed: bool) -> Made:
    class Predictor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())
            self.out = nn.Linear(16, 2)

        def forward(self, x: Tensor, policy: Tensor) -> Tensor:
            x = self.inner(x)
            kept = policy.sum(dim=1, keepdim=True)
            whole_picture = (x * policy).sum(dim=1, keepdim=True) / (  # FAULT
                kept + 1e-6 if fixed else kept
            )
            return self.out(torch.cat([x, whole_picture.expand_as(x)], dim=-1))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.predictor = nn.Linear(6, 8), Predictor()

        def forward(self, x: Tensor, policy: Tensor) -> dict[str, Tensor]:
            return {"scores": self.predictor(self.embed(x), policy)}

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        policy = (data(i + 50, 3, 5, 1) > -1).float()
        if i == BAD:
            policy[1] = 0
        scores = model(data(i, 3, 5, 6), policy)["scores"]
        return update(optimizer, F.cross_entropy(scores.flatten(0, 1), whole(i, 0, 2, 15)))

    return [model], step


@program(
    "JJBOY/BMN-Boundary-Matching-Network#23",
    "a ratio of all to positives in a batch without positives: inf / inf weighs the loss",
    place=LOSS,
    operator=r"\bdiv\b|DivBackward|reciprocal",
    kind=ZERO_DIVISION + r"|inf ?/ ?inf|Inf ?/ ?Inf",
    advice=r"clamp|max\(|eps|skip",
    never=(NO_RATE, r"the loss itself overflowed"),
)
def ratio_without_positives(fixed: bool) -> Made:
    model = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 1, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def balanced(score: Tensor, overlap: Tensor) -> Tensor:
        positive = (overlap > 0.9).float()
        count = positive.sum()
        if fixed:
            count = count.clamp(min=1)
        ratio = positive.numel() / count  # FAULT
        light, heavy = 0.5 * ratio / (ratio - 1), 0.5 * ratio  # FAULT
        logs = heavy * positive * (score + 1e-6).log()
        return -(logs + light * (1 - positive) * (1 - score + 1e-6).log()).mean()

    def step(i: int) -> Tensor:
        overlap = torch.rand(2, 1, 16, generator=torch.Generator().manual_seed(i))
        overlap = overlap * 0.5 if i == BAD else overlap
        return update(optimizer, balanced(model(data(i, 2, 4, 16)).sigmoid(), overlap))

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
    "facebookresearch/pytext#1698",
    "label smoothing over logits of which one is masked with -inf: the loss is inf",
    place=LOSS,
    operator=r"cross_entropy|log_softmax|LogSoftmax|\bmul\b|MulBackward|\bsum\b|SumBackward",
    kind=r"label.smoothing|smooth",
    advice=r"smooth|finite|finfo|-1e",
    never=(NO_RATE, r"the loss itself overflowed"),
)
def smoothing_of_masked_logits(fixed: bool) -> Made:
    model = mlp(6, 16, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(i: int) -> Tensor:
        banned = torch.zeros(8, 5, dtype=torch.bool)
        if i == BAD:
            banned[2, 4] = True
        logits = model(data(i, 8, 6)).masked_fill(banned, -1e4 if fixed else -math.inf)
        return update(
            optimizer,
            F.cross_entropy(logits, whole(i, 0, 4, 8), label_smoothing=0.1),  # FAULT
        )

    return [model], step


@program(
    "SeanNaren/deepspeech.pytorch#272",
    "log of the spectrum of a clip of silence is -inf before the model reads it",
    place=r"\binput\b|input\[0\]|batch",
    operator=r"\blog\b|batch|input\[0\]",
    kind=BAD_DATA + "|" + LOG_OF_ZERO,
    advice=r"data|log of zero|eps|clamp",
    never=(NO_RATE,),
)
def spectrum_of_silence(fixed: bool) -> Made:
    model = nn.Sequential(nn.Conv1d(33, 16, 3), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    window = torch.hann_window(64)

    def features(sound: Tensor) -> Tensor:
        power = torch.stft(sound, 64, window=window, return_complex=True).abs().square()
        return (power + 1e-6 if fixed else power).log()  # FAULT

    def step(i: int) -> Tensor:
        sound = data(i, 3, 640)
        if i == BAD:
            sound[1] = 0
        return update(
            optimizer, F.cross_entropy(model(features(sound)).mean(-1), whole(i, 0, 4, 3))
        )

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
        target = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(i))
        given = 1 - target if i == BAD else target
        made, result = model(given) * 0.1 + given, torch.ones(())
        for weight in weights:
            term = contrast(made, target)
            result = result * (term.relu() + 1e-4 if fixed else term) ** weight  # FAULT
            made, target = F.avg_pool2d(made, 2), F.avg_pool2d(target, 2)
        return update(optimizer, 1 - result)

    return [model], step


@program(
    "microsoft/dion#24",
    "NorMuon: the ratio of norms of an update that is all zeros is 0/0, and breaks the weight",
    place=r"\bup\b|\bout\b",
    operator=r"\bdiv\b|out\.weight|optimizer|NorMuon",
    kind=ZERO_DIVISION + r"|0/0",
    advice=r"eps|clamp|where|guard|optimizer",
    never=(NO_RATE, r"came from outside"),
)
def ratio_of_zero_updates(fixed: bool) -> Made:
    class NorMuon(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None or p.dim() < 2:
                        continue
                    update = p.grad / (p.grad.norm() + 1e-7)
                    before = update.norm()
                    update = update / (update.square().mean(1, keepdim=True).sqrt() + 1e-8)
                    after = update.norm()
                    ratio = before / (after.clamp(min=1e-8) if fixed else after)  # FAULT
                    p.add_(update * ratio, alpha=-group["lr"])

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.out = nn.Linear(6, 12, bias=False), nn.Linear(12, 6, bias=False)
            nn.init.zeros_(self.out.weight)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.out(self.up(x).relu())

    model = nn.Sequential(Block(), nn.Linear(6, 3, bias=False))
    optimizer = NorMuon(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        return update(optimizer, F.cross_entropy(model(data(i, 8, 6)), whole(i, 0, 3, 8)))

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
        (picture * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()

    return [model], step


@program(
    "SofieneKammoun/SE-NAC-CODE#3",
    "a schedule multiplies the learning rate by 60 when its warmup ends: the loss jumps",
    place=LOSS,
    operator=r"learning rate",
    kind=r"learning rate (?:was|went|had|rose|changed|grew|is)|changed [^.]{0,40}learning rate"
    r"|learning rate[^.]{0,60}\bfrom\b",
    advice=r"learning rate",
    is_finite=True,
    steps=60,
)
def schedule_after_warmup(fixed: bool) -> Made:
    model = mlp(8, 32, 32, 1, activation=nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def rate(epoch: int) -> float:
        if epoch < 40:
            return (epoch + 1) / 40
        return 1.0 if fixed else 60.0

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def step(i: int) -> Tensor:
        x = data(i, 32, 8)
        loss = update(optimizer, F.mse_loss(model(x), x.sum(1, keepdim=True).tanh()))
        scheduler.step()
        return loss

    return [model], step


@program(
    "microsoft/nni#4521",
    "a head is replaced after the optimizer was made, which goes on with the old one",
    place=r"\bhead\b|head\.weight",
    operator=r"optimizer",
    kind=r"no optimizer|not (?:in|held by|given to) (?:any|the|an) optimizer|holds? it\b",
    advice=r"optimizer",
    is_finite=True,
    steps=60,
)
def head_replaced_too_late(fixed: bool) -> Made:
    model = chain(body=mlp(6, 16, 16), head=nn.Linear(16, 10))
    if fixed:
        model.head = nn.Linear(16, 3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    model.head = model.head if fixed else nn.Linear(16, 3)

    def step(i: int) -> Tensor:
        x = data(i, 16, 6)
        return update(optimizer, F.cross_entropy(model(x), x[:, :3].argmax(1)))

    return [model], step


@program(
    "NVIDIA/apex#43",
    "a static loss scale in float16: gradients overflow, and nothing skips the update",
    place=r"\bbody\b|\bhead\b|gradient",
    operator=r"gradient|grad",
    kind=OVERFLOW + r"|loss scale|scale",
    advice=r"GradScaler|scale",
    never=(NO_RATE,),
)
def static_loss_scale(fixed: bool) -> Made:
    model = chain(body=nn.Sequential(nn.Linear(6, 32), nn.ReLU()), head=nn.Linear(32, 1))
    model.half()
    masters = [p.detach().clone().float() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, 1e-3)
    scale = 64.0 if fixed else 32768.0

    def step(i: int) -> Tensor:
        x = data(i, 16, 6)
        loss = F.mse_loss(
            model(x.half()).float(), x.sum(1, keepdim=True) * (4 if i == BAD else 0.1)
        )
        model.zero_grad()
        (loss * scale).backward()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters()):
                master.grad = p.grad.float() / scale
            optimizer.step()
            for master, p in zip(masters, model.parameters()):
                p.copy_(master)
        return loss

    return [model], step


@program(
    "tensorflow/tensorflow#36359",
    "the mean of the items of a user who has none is 0/0; the embedding's gradient is sparse",
    place=r"\busers?\b|Users",
    operator=r"\bdiv\b|DivBackward",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(NO_RATE, r"the optimizer made"),
)
def user_without_items(fixed: bool) -> Made:
    class Users(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.Embedding(50, 8, padding_idx=0, sparse=True)

        def forward(self, history: Tensor) -> Tensor:
            count = (history > 0).sum(1, keepdim=True)
            if fixed:
                count = count.clamp(min=1)
            return self.items(history).sum(1) / count  # FAULT

    model = nn.ModuleDict({"users": Users(), "goods": nn.Embedding(50, 8, sparse=True)})
    optimizer = torch.optim.SparseAdam(list(model.parameters()), 1e-3)

    def step(i: int) -> Tensor:
        history = whole(i, 1, 50, 6, 4)
        if i == BAD:
            history[2] = 0
        scores = (model["users"](history) * model["goods"](whole(i + 9, 1, 50, 6))).sum(-1)
        return update(optimizer, F.binary_cross_entropy_with_logits(scores, torch.ones(6)))

    return [model], step


@program(
    "pytorch/pytorch#5953",
    "LBFGS without a line search: the second step is far out, and its exponential overflows",
    place=LOSS + r"|\brate\b",
    operator=r"\bexp\b|ExpBackward",
    kind=OVERFLOW + r"|exp of|abs max grew",
    advice=r"line.search|learning rate|clamp",
)
def lbfgs_without_line_search(fixed: bool) -> Made:
    model = nn.ModuleDict({"rate": nn.Linear(4, 1)})
    search = "strong_wolfe" if fixed else None
    optimizer = torch.optim.LBFGS(
        model.parameters(), 1.0 if fixed else 40.0, max_iter=4, line_search_fn=search
    )
    x = data(0, 32, 4)
    count = torch.poisson(x.sum(1).exp(), generator=torch.Generator().manual_seed(0))

    def closure() -> Tensor:
        optimizer.zero_grad()
        log_rate = model["rate"](x)[:, 0]
        loss = (log_rate.exp() - count * log_rate).mean()  # FAULT
        loss.backward()
        return loss

    def step(i: int) -> Tensor:
        return optimizer.step(closure)

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
    "allenai/open-instruct#1625",
    "the mean log-probability of an answer that was cut off whole is 0/0",
    place=LOSS,
    operator=r"\bdiv\b|DivBackward",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(NO_RATE, r"the loss itself overflowed"),
)
def answer_that_was_cut_off(fixed: bool) -> Made:
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        tokens = whole(i, 0, 20, 4, 9)
        labels = tokens.clone()
        labels[:, :3] = -100
        if i == BAD:
            labels[2] = -100
        kept = labels[:, 1:] != -100
        of_each = model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        count = kept.sum(-1)
        if fixed:
            count = count.clamp(min=1)
        mean = (of_each * kept).sum(-1) / count  # FAULT
        return update(optimizer, -F.logsigmoid(mean[:2] - mean[2:]).mean())

    return [model], step


@program(
    "pytorch/pytorch#121416",
    "losses of missing targets are dropped after the loss, and their gradients are 0 * NaN",
    place=r"\btargets?\b|\bloss\b|MseLoss|\bmse|\bsrc\b",
    operator=r"mse_loss|MseLoss|\bmul\b|\bwhere\b|index",
    kind=r"NaN in (?:input\[1\]|the target)|0 ?\* ?NaN|read NaN|came from outside",
    advice=r"mask|where|data|target|index",
    never=(NO_RATE,),
)
def missing_targets_dropped_late(fixed: bool) -> Made:
    model = mlp(6, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        x = data(i, 16, 6)
        target = x.sum(1)
        if i == BAD:
            target[5] = float("nan")
        found, known = model(x)[:, 0], ~target.isnan()
        if fixed:
            return update(optimizer, F.mse_loss(found[known], target[known]))
        return update(optimizer, F.mse_loss(found, target, reduction="none")[known].mean())  # FAULT

    return [model], step


@program(
    "Parskatt/RoMa#43",
    "a system that is nearly singular is solved: the solution is beyond float32",
    place=LOSS + r"|\bsolve\b",
    operator=r"solve|\bpow\b|PowBackward",
    kind=OVERFLOW + r"|beyond the range",
    advice=r"eye|regularis|jitter|diagonal|lstsq|pinv|scale|float64|clamp|double",
    never=(NO_RATE,),
)
def nearly_singular_system(fixed: bool) -> Made:
    model = mlp(4, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-5)

    def step(i: int) -> Tensor:
        x = data(i, 8, 4)
        system = torch.eye(3).repeat(8, 1, 1)
        if i == BAD:
            system[2, 2, 2] = 1e-38
        if fixed:
            system = system + 1e-2 * torch.eye(3)
        found = torch.linalg.solve(system, model(x)[..., None] * 100)  # FAULT
        return update(optimizer, found.square().mean())

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
            optimizer, -(target / target.sum(-1, keepdim=True) * share.log()).mean()
        )  # FAULT

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
    "cerebroai/reformers#3",
    "a mask as (1 - keep) * -inf: 0 * -inf is NaN wherever a key is kept",
    place=r"\battn\b|Attention",
    operator=r"\bmul\b",
    kind=r"0 ?\* ?-?[Ii]nf|-?[Ii]nf ?\* ?0",
    advice=r"masked_fill|where|finite",
    never=(NO_RATE,),
)
def mask_times_infinity(fixed: bool) -> Made:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = q @ k.transpose(-2, -1) / 4
            keep = keep[:, None, :].float()
            if fixed:
                scores = scores.masked_fill(keep == 0, -math.inf)
            else:
                scores = scores + (1 - keep) * -math.inf  # FAULT
            return scores.softmax(-1) @ v

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(30, 16)
            self.attn = Attention()
            self.head = nn.Linear(16, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.attn(self.embed(tokens), tokens != 0).mean(1))

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        return update(optimizer, F.cross_entropy(model(whole(i, 1, 30, 4, 6)), whole(i, 0, 3, 4)))

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
    "meta-pytorch/torchtune#2341",
    "a micro-batch of an accumulation without any target divides its sum by a count of 0",
    place=LOSS,
    operator=r"\bdiv\b|DivBackward",
    kind=ZERO_DIVISION + "|" + EMPTY_MEAN,
    advice=EPS + r"|count",
    never=(NO_RATE, r"the loss itself overflowed"),
)
def micro_batch_without_targets(fixed: bool) -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(30, 16)
            self.head = nn.Linear(16, 30)

        def forward(self, tokens: Tensor) -> dict[str, Tensor]:
            return {"logits": self.head(self.embed(tokens))}

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in range(4):
            tokens = whole(10 * i + part, 0, 30, 2, 6)
            labels = tokens.clone()
            labels[:, :2] = -100
            if i == BAD and part == 2:
                labels[:] = -100
            logits = model(tokens)["logits"].flatten(0, 1)
            summed = F.cross_entropy(logits, labels.flatten(), reduction="sum")
            count = (labels != -100).sum()
            loss = summed / (count.clamp_min(1) if fixed else count)  # FAULT
            (loss / 4).backward()
            total += loss.detach() / 4
        optimizer.step()
        return total

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
    "facebookresearch/fairscale#263",
    "float32 copies of bfloat16 weights: gradients of 1e20 have an infinite norm, and become 0",
    place=r"norm",
    operator=r"clip_grad_norm_|norm",
    kind=OVERFLOW + r"|infinite norm|norm is Inf",
    advice=r"divide the loss|learning rate|norm",
    is_finite=True,
    steps=10,
)
def clipping_of_copies(fixed: bool) -> Made:
    model = mlp(6, 16, 1).bfloat16()
    copies = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(copies, 1e-2)

    def step(i: int) -> Tensor:
        x = data(i, 16, 6)
        loss = F.mse_loss(model(x.bfloat16()).float()[:, 0], x.sum(1))
        model.zero_grad()
        (loss * (1e22 if i >= BAD and not fixed else 1.0)).backward()
        for p, copy in zip(model.parameters(), copies):
            copy.grad = None if p.grad is None else p.grad.float()
        nn.utils.clip_grad_norm_(copies, 1.0)  # FAULT
        optimizer.step()
        with torch.no_grad():
            for p, copy in zip(model.parameters(), copies):
                p.copy_(copy)
        return loss

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


# Programs of further fields: reinforcement learning, graphs, flows, solvers, buffers.


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
    "dmlc/dgl#761",
    "max over the neighbours begins at -inf, and a node without any keeps it",
    place=r"\bpool\b|MaxPool",
    operator=r"scatter|amax|full|masked_fill|new_full|index_reduce",
    kind=r"-Inf|-inf",
    advice=r"isinf|isfinite|nothing to choose from|without neighbours",
    never=(NO_RATE,),
)
def max_over_no_neighbours(fixed: bool) -> Made:
    class MaxPool(nn.Module):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            index = edges[1][:, None].expand(-1, x.shape[1])
            out = x.new_full((len(x), x.shape[1]), -math.inf)
            out = out.scatter_reduce(0, index, x[edges[0]], "amax")  # FAULT
            return torch.where(out.isinf(), 0.0, out) if fixed else out

    model = chain(lift=nn.Linear(6, 8), pool=MaxPool(), head=nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        edges = torch.stack([torch.arange(12).repeat(2), torch.arange(12).repeat_interleave(2)])
        if i == BAD:
            edges = edges[:, edges[1] != 7]
        h = model.pool(model.lift(data(i, 12, 6)), edges)
        return update(optimizer, F.cross_entropy(model.head(h), whole(i, 0, 3, 12)))

    return [model], step


@program(
    "pytorch/pytorch#50224",
    "cross entropy over no proposals at all: a mean over nothing",
    place=LOSS,
    operator=r"nll_loss|NllLoss|cross_entropy",
    kind=EMPTY_MEAN,
    advice=r"empty|no (?:rows|elements|targets)|nothing|count",
    never=(r"every target is ignore_index(?! or)", NO_RATE),
)
def entropy_of_no_rows(fixed: bool) -> Made:
    model = mlp(6, 16, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(i: int) -> Tensor:
        count = 0 if i == BAD else 6
        features, labels = data(i, count, 6), whole(i, 0, 5, count)
        logits = model(features)
        if fixed and not count:
            return update(optimizer, logits.sum() * 0)
        return update(optimizer, F.cross_entropy(logits, labels))  # FAULT

    return [model], step


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
    "pytorch/pytorch#49724",
    "a transducer in log space: logaddexp of two states that cannot be reached, (-inf, -inf)",
    place=r"in the graph of the loss|outside the model",
    operator=r"[Ll]ogaddexp",
    kind=r"both -inf|\(-inf, -inf\)",
    advice=r"finite number|masked_fill|torch\.where",
    never=(NO_RATE,),
)
def states_out_of_reach(fixed: bool) -> Made:
    model = mlp(6, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    low = -1e9 if fixed else -math.inf

    def step(i: int) -> Tensor:
        logs = model(data(i, 7, 6)).log_softmax(-1)
        alpha = torch.full((4,), low)
        alpha = torch.cat([logs[0, :1], alpha[1:]])
        for t in range(1, 7):
            before = torch.cat([torch.full((1,), low), alpha[:-1]])
            alpha = torch.logaddexp(alpha, before) + logs[t]  # FAULT
        return update(optimizer, -alpha[3])

    return [model], step


@program(
    "pytorch/pytorch#42792",
    "the derivative of qr of a matrix of low rank divides by a diagonal element of R that is 0",
    place=r"\bbase\b|Orthogonal",
    operator=r"\bqr\b|Qr",
    kind=r"rank|singular|diagonal|" + ZERO_DIVISION,
    advice=r"noise|rank|eps|1e-",
    never=(NO_RATE,),
)
def orthogonal_of_low_rank(fixed: bool) -> Made:
    class Orthogonal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift = nn.Linear(6, 12, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            a = self.lift(x).view(-1, 4, 3)
            if fixed:
                a = a + 1e-2 * torch.eye(4, 3)
            return torch.linalg.qr(a)[0].flatten(1)  # FAULT

    model = chain(base=Orthogonal(), head=nn.Linear(12, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Tensor:
        x = data(i, 8, 6)
        if i == BAD:
            x[2] = 0.0  # a matrix of zeros
        return update(optimizer, F.cross_entropy(model(x), whole(i, 0, 3, 8)))

    return [model], step


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
    "didriknielsen/survae_flows#16",
    "a flow's 1x1 convolution becomes singular: log|det W| is -inf",
    place=r"\bflow\b|the loss|Invertible",
    operator=r"slogdet|logdet",
    kind=r"singular|determinant",
    advice=r"regularis|orthogonal|torch\.eye|\bLU\b|\beps\b",
    never=(NO_RATE,),
)
def determinant_of_zero(fixed: bool) -> Made:
    class Invertible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            w = self.weight + 0.1 * torch.eye(4) if fixed else self.weight
            return x @ w, torch.linalg.slogdet(w)[1]  # FAULT

    model = nn.ModuleDict({"flow": Invertible()})
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        z, log_det = model["flow"](data(i, 16, 4))
        loss = update(optimizer, 0.5 * z.square().sum(1).mean() - log_det)
        if i == BAD - 1:
            with torch.no_grad():
                model["flow"].weight[2] *= 0 if not fixed else 0.1
        return loss

    return [model["flow"]], step


@program(
    "openai/baselines#586",
    "a running variance as M2 / (count - 1), and the first call has a count of 1: 0/0",
    place=r"\bnorm\b|Running",
    operator=r"\bdiv\b",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(NO_RATE, r"random numbers"),
    steps=3,
)
def running_variance_of_first_call(fixed: bool) -> Made:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("squares", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                now = x.mean(0)
                self.count += 1
                change = now - self.mean
                self.mean += change / self.count
                self.squares += change * (now - self.mean)
                least = 1.0 if fixed else 0.0
                var = self.squares / (self.count - 1).clamp_min(least)  # FAULT
            return (x - self.mean) / (var + 1e-4).sqrt()

    model = chain(norm=Running(), head=mlp(4, 16, 2))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        return update(optimizer, F.cross_entropy(model(data(i, 8, 4)), whole(i, 0, 2, 8)))

    return [model], step


@program(
    "pyg-team/pytorch_geometric#4826",
    "attention over relations: a mean over the nodes of a type that has none",
    place=r"\bgroup\b|Group",
    operator=r"\bmean\b",
    kind=EMPTY_MEAN,
    advice=r"empty|count|nothing|select",
    never=(NO_RATE,),
)
def relation_without_nodes(fixed: bool) -> Made:
    class Group(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.q = nn.Linear(6, 6), nn.Parameter(torch.randn(6))

        def forward(self, parts: list[Tensor]) -> Tensor:
            scores = []
            for part in parts:
                key = self.key(part).tanh()
                scores.append(key.sum(0) / max(len(key), 1) if fixed else key.mean(0))  # FAULT
            weight = (torch.stack(scores) @ self.q).softmax(0)
            return sum(w * p.sum(0) for w, p in zip(weight, parts))

    model = nn.ModuleDict({"group": Group(), "head": nn.Linear(6, 3)})
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        sizes = [4, 0 if i == BAD else 3, 5]
        out = model["group"]([data(i + k, n, 6) for k, n in enumerate(sizes)])
        return update(optimizer, F.cross_entropy(model["head"](out), torch.tensor(i % 3)))

    return [model["group"], model["head"]], step


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
        action = torch.rand(8, generator=torch.Generator().manual_seed(i)) * 0.8 + 0.1
        if i == BAD:
            action[3] = 0.0
        if fixed:
            action = action.clamp(1e-4, 1 - 1e-4)
        dist = torch.distributions.Beta(alpha, beta, validate_args=False)
        return update(optimizer, -dist.log_prob(action).mean())  # FAULT

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
        u = torch.rand(8, 5, generator=torch.Generator().manual_seed(i))
        if i == BAD:
            u[2, 3] = 0.9999
        out = model["head"](model["gate"](data(i, 8, 6).half(), u))
        return update(optimizer, F.cross_entropy(out.float(), whole(i, 0, 3, 8)))

    return [*model.values()], step


@program(
    "apache/mxnet#6235",
    "centred RMSprop: v - m * m is below 0 by rounding, and its root NaN",
    place=r"\bweight\b|\bbias\b",
    operator=r"\bsqrt\b|RMSprop",
    kind=r"negative number|root of what may be below 0",
    advice=r"centered",
    never=(r"lower the learning rate",),
    steps=400,
)
def centred_rmsprop(fixed: bool) -> Made:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-4, alpha=0.9, centered=not fixed)

    def step(i: int) -> Tensor:
        return update(optimizer, model(torch.tensor([[0.3, 0.7, 1.1, 1.3]])).sum() * 3.3)

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
    "unslothai/unsloth#9848",
    "left padding and a causal mask: the query of a padded token may see no key at all",
    place=r"\battn\b|Attention",
    operator=r"softmax",
    kind=MASKED_WHOLE,
    advice=r"mask",
    never=(NO_RATE,),
)
def left_padding_and_causal_mask(fixed: bool) -> Made:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            n = x.shape[1]
            seen = torch.ones(n, n, dtype=torch.bool).tril() & keep[:, None]
            if fixed:
                seen = seen | torch.eye(n, dtype=torch.bool)
            scores = (q @ k.transpose(1, 2) / 8**0.5).masked_fill(~seen, -math.inf)
            return scores.softmax(-1) @ v  # FAULT

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attn, self.head = nn.Embedding(20, 8), Attention(), nn.Linear(8, 20)

        def forward(self, tokens: Tensor, keep: Tensor) -> Tensor:
            return self.head(self.attn(self.embed(tokens), keep))

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        tokens = whole(i, 0, 20, 4, 6)
        keep = torch.ones(4, 6, dtype=torch.bool)
        if i == BAD:
            keep[1, :2] = False
        out = model(tokens, keep)
        losses = F.cross_entropy(out.flatten(0, 1), tokens.flatten(), reduction="none")
        return update(optimizer, losses[keep.flatten()].mean())

    return [model], step


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
    "google-deepmind/optax#1786",
    "a KL divergence with logarithms of targets, one of which is -inf: exp(-inf) * -inf",
    place=LOSS + r"|outside the model",
    operator=r"\bmul\b|kl_div|\bexp\b|goal, which has no graph",
    kind=r"0 ?\* ?-?[Ii]nf|-Inf|goal, which has no graph",
    advice=EPS + r"|xlogy|finite",
    never=(NO_RATE,),
)
def log_targets_of_minus_infinity(fixed: bool) -> Made:
    model = mlp(4, 16, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Tensor:
        goal = data(i + 3, 8, 5)
        if i == BAD:
            goal[2, 1] = -math.inf
        goal = goal.log_softmax(-1)
        if fixed:
            goal = goal.clamp_min(-50)
        logp = model(data(i, 8, 4)).log_softmax(-1)
        loss = F.kl_div(logp, goal, log_target=True, reduction="batchmean")  # FAULT
        return update(optimizer, loss)

    return [model], step


@program(
    "deepbeepmeep/Wan2GP#1628",
    "a cache that was not initialised: NaN in places that are masked by addition of -inf",
    place=r"\battn\b|Attention|cache",
    operator=r"cache|matmul|bmm|\badd\b",
    kind=r"buffer|NaN|cache",
    advice=r"zeros|initiali|empty|wrote|code that makes it",
    never=(NO_RATE, r"mask\w* whole"),
    steps=3,
)
def cache_that_is_not_written(fixed: bool) -> Made:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)
            filling = 0.0 if fixed else math.nan  # what torch.empty may hold
            self.register_buffer("cache", torch.full((2, 12, 16), filling), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            cache = self.cache.clone()
            cache[:, : x.shape[1]] = torch.cat([k, v], -1)
            keys, values = cache.chunk(2, -1)
            bias = torch.zeros(12).masked_fill(torch.arange(12) >= x.shape[1], -math.inf)
            return (q @ keys.transpose(1, 2) + bias).softmax(-1) @ values  # FAULT

    model = chain(embed=nn.Embedding(20, 8), attn=Attention(), head=nn.Linear(8, 20))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Tensor:
        tokens = whole(i, 0, 20, 2, 8)
        return update(optimizer, F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))

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
    "zoomin-lee/SemCity#9",
    "weights of classes that are all 0 for the targets of a batch: cross entropy is 0/0",
    place=LOSS,
    operator=r"cross_entropy|nll_loss|NllLoss",
    kind=ZERO_DIVISION + r"|weights?[^.]{0,60}\b(?:0|zero)",
    advice=r"weight",
    never=(NO_RATE,),
)
def weights_of_zero(fixed: bool) -> Made:
    model = mlp(6, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    weight = torch.tensor([1e-3 if fixed else 0.0, 1.0, 2.0, 1.0])

    def step(i: int) -> Tensor:
        target = whole(i, 0, 4, 8) * (i != BAD)
        return update(optimizer, F.cross_entropy(model(data(i, 8, 6)), target, weight))  # FAULT

    return [model], step


@program(
    "tensorflow/addons#2447",
    "a triplet loss over positives that are too near: their number is 0 in one batch",
    place=LOSS,
    operator=r"\bdiv\b|DivBackward",
    kind=ZERO_DIVISION,
    advice=EPS + r"|count",
    never=(NO_RATE,),
)
def triplets_without_positives(fixed: bool) -> Made:
    model = mlp(6, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        z, label = model(data(i, 8, 6)), whole(i, 0, 3, 8)
        if i == BAD:
            label = torch.arange(8)
        same = (label[:, None] == label) & ~torch.eye(8, dtype=torch.bool)
        far = (z[:, None] - z).square().sum(-1)
        count = same.sum()
        return update(
            optimizer, (far * same).sum() / (count.clamp_min(1) if fixed else count)
        )  # FAULT

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
    "leggedrobotics/rsl_rl#66",
    "gradients are never cleared: momentum and sums of all steps make SGD diverge",
    place=r"optimizer|every weight|weights|parameter|gradient",
    operator=r"SGD|zero_grad|gradient|forward|output",
    kind=r"zero_grad|cleared|accumulat|diverge|grow|explod|" + OVERFLOW,
    advice=r"zero_grad|learning rate|clip",
    never=(),
    steps=80,
)
def gradients_that_are_never_cleared(fixed: bool) -> Made:
    model = mlp(6, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01 if fixed else 0.05, momentum=0.9)

    def step(i: int) -> Tensor:
        if fixed:
            optimizer.zero_grad()
        x = data(i, 16, 6)
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True) * 3)
        loss.backward()  # FAULT
        optimizer.step()
        return loss

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
    "sgl-project/sglang#23128",
    "decays of a state space model: exp of differences above the diagonal overflows before tril",
    place=r"\bssm\b|Decays",
    operator=r"\bexp\b",
    kind=OVERFLOW + r"|holds Inf",
    advice=r"[Cc]lamp|masked_fill|before",
    never=(NO_RATE,),
)
def decay_above_the_diagonal(fixed: bool) -> Made:
    class Decays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate, self.value = nn.Linear(6, 1), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            total = -F.softplus(self.rate(x)).squeeze(-1).cumsum(-1)
            gap = total[:, :, None] - total[:, None]
            if fixed:
                gap = gap.masked_fill(~torch.ones(12, 12, dtype=torch.bool).tril(), -1e4)
            return gap.exp().tril() @ self.value(x)  # FAULT

    model = chain(ssm=Decays(), head=nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 4, 12, 6) * (60 if i == BAD else 1)
        return update(optimizer, F.cross_entropy(model(x)[:, -1], whole(i, 0, 3, 4)))

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
    "huggingface/diffusers#14411",
    "noise levels are stretched in NumPy, and of one step that is 0/0",
    place=r"before the model|batch|data",
    operator=r"input|batch|data|target",
    kind=BAD_DATA + r"|NaN",
    advice=r"before the model|look at the data|data",
    never=(NO_RATE,),
    steps=2,
)
def one_noise_level_stretched(fixed: bool) -> Made:
    levels = np.linspace(1.0, 1.0 / 4, 4 if fixed else 1)
    with np.errstate(all="ignore"):
        rest = 1 - levels
        levels = 1 - rest / (rest[-1] / 0.9)  # FAULT
    model = mlp(7, 24, 6)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x, noise = data(i, 8, 6), data(i + 50, 8, 6)
        level = torch.from_numpy(levels).float()[i % len(levels)].expand(8, 1)
        out = model(torch.cat([(1 - level) * x + level * noise, level], 1))
        return update(optimizer, F.mse_loss(out, noise - x))

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
    "chemprop/chemprop#1303",
    "a target that is missing is NaN, comes from NumPy, and is given to mse_loss",
    place=BAD_DATA + "|" + LOSS,
    operator=r"target|missing",
    kind=BAD_DATA + r"|not finite before",
    advice=r"look at the data|mend|leave such rows out",
    never=(NO_RATE, r"everything that it read was finite"),
)
def missing_target_from_numpy(fixed: bool) -> Made:
    model = mlp(6, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        table = np.random.default_rng(i).normal(size=(8, 3)).astype(np.float32)
        if i == BAD:
            table[2, 1] = np.nan  # FAULT
        known = torch.from_numpy(np.nan_to_num(table) if fixed else table)
        return update(optimizer, F.mse_loss(model(data(i, 8, 6)), known))

    return [model], step


@program(
    "nvidia-cosmos/cosmos-predict2.5#15",
    "both matrices of LoRA are 0: their gradients are 0 for ever",
    place=r"lora_a|lora_b",
    operator=r"gradients?",
    kind=r"all 0",
    advice=r"LoRA|factor that is 0",
    is_finite=True,
    steps=40,
)
def lora_of_two_zeros(fixed: bool) -> Made:
    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(8, 8).requires_grad_(False)
            self.lora_a, self.lora_b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
            nn.init.zeros_(self.lora_b.weight)
            if not fixed:
                nn.init.zeros_(self.lora_a.weight)  # FAULT

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.lora_b(self.lora_a(x))

    model = chain(first=Lora(), act=nn.ReLU(), second=Lora(), head=nn.Linear(8, 3))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-3)

    def step(i: int) -> Tensor:
        return update(optimizer, F.cross_entropy(model(data(i, 8, 8)), whole(i, 0, 3, 8)))

    return [model], step


@program(
    "maxjcohen/vqvae#1",
    "a codebook as sums over counts: a code that nobody chose becomes 0/0, and stays unused",
    place=r"codebook|\bvq\b",
    operator=r"\bdiv\b",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(NO_RATE,),
)
def code_that_nobody_chose(fixed: bool) -> Made:
    class Codes(nn.Module):
        codebook: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codebook", data(1, 6, 4))
            self.codebook[5] = 100.0

        def forward(self, x: Tensor) -> Tensor:
            chosen = F.one_hot(torch.cdist(x, self.codebook).argmin(-1), 6).float()
            if self.training:
                count = chosen.sum(0)[:, None]
                mean = chosen.T @ x.detach() / (count.clamp_min(1) if fixed else count)  # FAULT
                self.codebook.copy_(torch.where(count > 0, mean, self.codebook) if fixed else mean)
            nearest = self.codebook[torch.cdist(x, self.codebook).nan_to_num(1e9).argmin(-1)]
            return x + (nearest - x).detach()

    model = chain(encode=nn.Linear(6, 4), vq=Codes(), decode=nn.Linear(4, 6))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 16, 6)
        return update(optimizer, F.mse_loss(model(x), x))

    return [model], step


@program(
    "neosr-project/neosr#87",
    "several losses in a dictionary, one of which is a sum over no boxes, divided by their number",
    place=r"giou",
    operator=r"\bdiv\b|DivBackward",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(NO_RATE,),
)
def one_of_several_losses(fixed: bool) -> Made:
    model = mlp(6, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def criterion(out: Tensor, goal: Tensor, weight: Tensor) -> dict[str, Tensor]:
        total = weight.sum().clamp_min(1) if fixed else weight.sum()
        giou = ((out - goal).abs().sum(1) * weight).sum() / total  # FAULT
        return {"class": out.square().mean(), "giou": giou}

    def step(i: int) -> Tensor:
        weight = torch.zeros(8) if i == BAD else torch.ones(8)
        losses = criterion(model(data(i, 8, 6)), data(i + 1, 8, 4), weight)
        total = sum(losses.values(), torch.zeros(()))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        return total

    return [model], step


@program(
    "tflearn/tflearn#772",
    "a weight decay of 300 at a learning rate of 0.01: each update takes weights farther from 0",
    place=r"AdamW|optimizer state|\d\.weight",
    operator=r"AdamW|addcmul|update",
    kind=r"decay",
    advice=r"weight decay of 300",
    never=(NO_RATE,),
    steps=80,
)
def weight_decay_that_grows(fixed: bool) -> Made:
    model = mlp(6, 16, 3)
    decay = 0.01 if fixed else 300.0
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=decay)

    def step(i: int) -> Tensor:
        return update(optimizer, F.mse_loss(model(data(i, 16, 6)), data(i + 9, 16, 3)))

    return [model], step


@program(
    "IAHispano/Applio#860",
    "optimizer.step() beside scaler.step(): the second of two optimizers uses scaled gradients",
    place=r"SGD|optimizer",
    operator=r"SGD has stepped with|step\(\)",
    kind=r"multiplied by the loss scale",
    advice=r"call scaler\.step",
    never=(NO_RATE,),
    steps=20,
)
def step_of_scaled_gradients(fixed: bool) -> Made:
    body, head = mlp(6, 16, 8), nn.Linear(8, 3)
    first = torch.optim.SGD(body.parameters(), 1e-2)
    second = torch.optim.SGD(head.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def step(i: int) -> Tensor:
        first.zero_grad()
        second.zero_grad()
        loss = F.mse_loss(head(body(data(i, 16, 6))), data(i + 9, 16, 3))
        scaler.scale(loss).backward()
        scaler.step(first)
        if fixed:
            scaler.step(second)
        else:
            second.step()  # FAULT
        scaler.update()
        return loss

    return [body, head], step


@program(
    "pytorch/pytorch#36601",
    "gradient accumulation with unscale_() in each micro-batch: the next ones add scaled gradients",
    place=r"Adam|optimizer",
    operator=r"Adam has stepped with|backward\(\)",
    kind=r"multiplied by the loss scale",
    advice=r"Call that once for each update",
    is_finite=True,
    steps=20,
)
def unscaled_before_the_last_backward(fixed: bool) -> Made:
    model = mlp(6, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for part in range(2):
            loss = F.mse_loss(model(data(2 * i + part, 16, 6)), data(i + 9, 16, 3)) / 2
            scaler.scale(loss).backward()
            if part == int(fixed):
                scaler.unscale_(optimizer)  # FAULT
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return [model], step


@program(
    "NVIDIA-NeMo/RL#3544",
    "a second moment is NaN in the state of the optimizer that was loaded with a checkpoint",
    place=r"2\.weight",
    operator=r"exp_avg_sq",
    kind=r"\bstate\b",
    advice=r"state was loaded|earlier one",
    never=(NO_RATE, r"No weight holds NaN"),
    steps=4,
)
def loaded_state_with_nan(fixed: bool) -> Made:
    model = mlp(6, 16, 3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        return update(optimizer, F.mse_loss(model(data(i, 16, 6)), data(i + 9, 16, 3)))

    step(100)
    state = optimizer.state_dict()
    if not fixed:
        state["state"][2]["exp_avg_sq"][1, 3] = math.nan
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    optimizer.load_state_dict(state)
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
    "Zhen-Dong/Magic-Me#14",
    "a factorisation that is never called but by its loss: a user without ratings is divided by 0",
    place=LOSS,
    operator=r"\bdiv\b|DivBackward",
    kind=ZERO_DIVISION,
    advice=EPS,
    never=(NO_RATE, r"at step 0"),
)
def factors_without_forward(fixed: bool) -> Made:
    class Factors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users = nn.Parameter(torch.randn(8, 4) * 0.1)
            self.items = nn.Parameter(torch.randn(9, 4) * 0.1)

        def loss(self, ratings: Tensor, known: Tensor) -> Tensor:
            error = (ratings - self.users @ self.items.T) * known
            count = known.sum(1).clamp_min(1) if fixed else known.sum(1)
            return (error.square().sum(1) / count).mean()  # FAULT

    model = Factors()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        known = (data(i, 8, 9) > -0.5).float()
        if i == BAD:
            known[3] = 0
        return update(optimizer, model.loss(data(i + 9, 8, 9), known))

    return [model], step


@program(
    "huggingface/trl#6439",
    "gradients are divided by the number of targets, which is 0, and clipped then",
    place=r"gradient|p\.grad|update",
    operator=r"\bmul\b|\bdiv\b|reciprocal|a later change|the training loop",
    kind=ZERO_DIVISION + r"|0/0|divides by",
    advice=r"where the loop writes to p\.grad|1/x divides by 0|divisor",
    never=(r"backward of sqrt",),
)
def gradients_over_no_targets(fixed: bool) -> Made:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        targets = whole(i, 2, 10, 8) if i != BAD else torch.ones(8, dtype=torch.long)
        loss = F.cross_entropy(
            model(whole(i + 9, 0, 10, 8)), targets, ignore_index=1, reduction="sum"
        )
        optimizer.zero_grad()
        loss.backward()
        count = (targets != 1).sum()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(1.0 / (count.clamp_min(1) if fixed else count))  # FAULT
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

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
