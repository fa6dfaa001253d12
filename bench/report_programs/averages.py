"""Means, deviations, maxima and codes over no element, or over one."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from report_programs.program import (
    BAD,
    EMPTY_MEAN,
    EPS,
    LOSS,
    NO_RATE,
    ONE_ELEMENT,
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
        overlap = uniform(i, 2, 1, 16)
        overlap = overlap * 0.5 if i == BAD else overlap
        return update(optimizer, balanced(model(data(i, 2, 4, 16)).sigmoid(), overlap))

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
            optimizer,
            (far * same).sum() / (count.clamp_min(1) if fixed else count),  # FAULT
        )

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
    "pytorch/pytorch#16045",
    "values of shape (N, 1) against returns of shape (N): the mean of N x N squares",
    place=r"graph of the loss",
    operator=r"difference of a result",
    kind=r"broadcast to \[16, 16\]",
    advice=r"same shape",
    is_finite=True,
    steps=40,
)
def values_against_all_returns(fixed: bool) -> Made:
    model = mlp(6, 16, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        states = data(i, 16, 6)
        returns = states.sum(1)
        values = model(states)
        return update(optimizer, ((values[:, 0] if fixed else values) - returns).pow(2).mean())

    return [model], step


@program(
    "segmentation with class weights",
    "all pixels that count have a class of weight 0",
    place=LOSS,
    operator=r"nll_loss",
    kind=EMPTY_MEAN,
    advice=r"no targets|weight 0",
    never=(NO_RATE,),
)
def pixels_of_weight_zero(fixed: bool) -> Made:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    weight = torch.tensor([1.0, 2.0, 1.0, 0.1 if fixed else 0.0])
    criterion = nn.CrossEntropyLoss(weight=weight, ignore_index=255)

    def step(i: int) -> Tensor:
        y = whole(i, 0, 3, 2, 6, 6)
        if i == BAD:
            y = torch.full_like(y, 255)
            y[0, 0, 0] = 3
        return update(optimizer, criterion(model(data(i, 2, 3, 6, 6)), y))  # FAULT

    return [model], step


@program(
    "pytorch/pytorch#53727",
    "segment_reduce takes the mean of a segment of length 0",
    place=r"\bpool\b|Pool",
    operator=r"segment_reduce",
    kind=EMPTY_MEAN + r"|segment of no elements",
    advice=r"initial|leave such segments out",
    never=(NO_RATE,),
)
def segment_of_nothing(fixed: bool) -> Made:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Linear(3, 4)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            first = 0 if fixed else None
            rows = self.rows(x)
            return torch.segment_reduce(rows, "mean", lengths=lengths, initial=first)  # FAULT

    model = nn.ModuleDict({"pool": Pool(), "head": nn.Linear(4, 2)})
    optimizer = torch.optim.Adam(model.parameters())

    def step(i: int) -> Tensor:
        lengths = torch.tensor([3, 0, 5] if i == BAD else [3, 2, 3])
        scores = model["head"](model["pool"](data(i, 8, 3), lengths))
        return update(optimizer, F.cross_entropy(scores, whole(i, 0, 2, 3)))

    return [model], step
