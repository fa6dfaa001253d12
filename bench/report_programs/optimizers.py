"""Optimizers, learning rates, clipping and loss scaling."""

from __future__ import annotations

import math
from typing import Any, Optional

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from report_programs.program import (
    BAD,
    EPS,
    LOSS,
    NO_RATE,
    OVERFLOW,
    ZERO_DIVISION,
    Made,
    chain,
    data,
    device_kind,
    here,
    mlp,
    program,
    update,
    whole,
)


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
    scaler = torch.amp.GradScaler(device_kind(), init_scale=4096.0)

    def step(i: int) -> Tensor:
        x = data(i, 32, 8)
        optimizer.zero_grad()
        with torch.autocast(device_kind(), torch.float16):
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
    "mlcommons/hpc#27",
    "a schedule that divides 0 by 0 gives a learning rate of NaN, which breaks every weight",
    place=r"\d\.weight|\d\.bias|parameter",
    operator=r"SGD|Adam|update|add_|learning rate",
    kind=r"(?:lr|learning rate)[^.]{0,40}nan",
    advice=r"learning rate|schedule|lr",
    never=(NO_RATE, r"lr 0\.001", r"0/0, where a second moment"),
)
def learning_rate_of_nan(fixed: bool) -> Made:

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
    count = here(torch.poisson(x.cpu().sum(1).exp(), torch.Generator("cpu").manual_seed(0)))

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
    scaler = torch.amp.GradScaler(device_kind(), init_scale=2.0**16)

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
    scaler = torch.amp.GradScaler(device_kind(), init_scale=2.0**10)

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
    "a typo in a configuration: 3e9 for 3e-4",
    "one update of Adam makes weights of 3e9, and the loss of the next step overflows",
    place=LOSS,
    operator=r"\bpow\b|PowBackward",
    kind=r"lower the learning rate \(it is now Adam: 3\.00e\+09\)|beyond the range of float32",
    advice=r"lower the learning rate|what made it so large",
)
def weights_of_one_update(fixed: bool) -> Made:
    model = mlp(6, 16, 16, 1)
    optimizer = torch.optim.Adam(model.parameters(), 3e-4 if fixed else 3e9)

    def step(i: int) -> Tensor:
        return update(optimizer, (model(data(i, 16, 6)) - 1).pow(4).mean())  # FAULT

    return [model], step


@program(
    "sensor data with a value of an error code",
    "one batch is 1e9 times as large: its loss is finite, and its update blows up the weights",
    place=r"input\[0\]",
    operator=r"\bpow\b|PowBackward|step 12",
    kind=r"times as large in step 12|Stop the growth",
    advice=r"look at the data of that step",
    steps=20,
)
def update_of_one_large_batch(fixed: bool) -> Made:
    model = mlp(6, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        x = data(i, 16, 6)
        target = x[:, :1]
        if i == 12 and not fixed:
            x[3] *= 1e9  # FAULT
        return update(optimizer, (model(x) - target).square().mean())

    return [model], step


@program(
    "microsoft/dion#24",
    "an update of the loop's own divides a gradient that is 0 by its norm",
    place=r"\bb\.weight|\bb \(Linear\)|outside the model",
    operator=r"\bdiv\b|writes to tensors",
    kind=ZERO_DIVISION + r"|0/0",
    advice=EPS + r"|norm of a gradient",
    never=(NO_RATE, r"in the forward pass", r"optimizer has updated"),
)
def orthogonal_update_of_zero(fixed: bool) -> Made:
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "ab"})

    def orthogonal(x: Tensor) -> Tensor:
        x = x / (x.norm() + 1e-7) if fixed else x / x.norm()  # FAULT
        for _ in range(3):
            square = x @ x.T
            x = 3.4445 * x + (2.0315 * square @ square - 4.775 * square) @ x
        return x

    def step(i: int) -> Tensor:
        x = data(i, 5, 4)
        loss = (model["a"](x) + model["b"](x) * float(i != BAD)).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(orthogonal(weight.grad), alpha=-0.01)  # FAULT
        return loss

    return [model], step
