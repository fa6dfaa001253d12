"""Masks, padding, and what has been ruled out with -inf."""

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
    MASKED_WHOLE,
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
