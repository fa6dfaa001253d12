"""Relations of padding at the left, packed rows, autocast and ranks: each holds on a healthy step,
and names a fault.
"""

from __future__ import annotations

import re
from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastcheck
from fastcheck.proving.result import Outcome

WORDS, WIDTH = 40, 16


class Model(nn.Module):
    """One layer of attention, with positions and segments that are given."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.mix = Mix(fault)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Any, mask: Any, positions: Any, segments: Any = None) -> Any:
        x = self.embed(ids) + self.place(positions)
        return self.head(x + self.mix(x, mask, positions, segments))


class Mix(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fault = fault

    def forward(self, x: Any, mask: Any, positions: Any, segments: Any) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if mask is not None:
            seen = seen & mask.bool()[:, None]
        if segments is not None and self.fault != "segments":
            seen = seen & (segments[:, None] == segments[:, :, None])
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        if self.fault == "left":  # right for padding at the right, where it adds nothing
            y = y + 0.1 * torch.arange(x.shape[1])[:, None] - 0.1 * positions[..., None]
        if self.fault == "cast":
            at = torch.arange(1000.0, 1000.0 + x.shape[1])[:, None]
            y = y * torch.sin(at @ torch.ones(1, WIDTH))
        return self.out(y)


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    ids = torch.randint(1, WORDS, (4, 7))
    mask = torch.ones_like(ids)
    mask[1, 4:] = mask[3, 2:] = 0
    return {
        "ids": ids * mask,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
        "positions": torch.arange(7).expand_as(ids) * mask,
        "segments": mask.clone(),
    }


def made(fault: str = "") -> tuple[Model, Callable[..., Any]]:
    torch.manual_seed(0)

    def step(model: Any, given: dict[str, torch.Tensor]) -> Any:
        names = ("ids", "attention_mask", "positions", "segments")
        logits = model(*(given[name] for name in names))[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, given["labels"][:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch has it untyped
        if fault == "reduced twice" and dist.is_initialized():
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        return loss

    return Model(fault), step


def proved(relation: Any, fault: str = "") -> Outcome:
    model, step = made(fault)
    if relation == "autocast":

        def cast(model: Any, given: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return step(model, given)

        (one,) = fastcheck.prove(cast, batch(), model=model, relations=[relation]).outcomes
    else:
        (one,) = fastcheck.prove(step, batch(), model=model, relations=[relation]).outcomes
    return one


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch's, of the output of nn.Linear
@pytest.mark.parametrize("relation", ["left_padded", "packed", "autocast", "ddp", "fsdp"])
def test_a_healthy_step_holds(relation: str) -> None:
    outcome = proved(relation)
    assert outcome.state == "holds" and outcome.score is not None and outcome.score < 5


@pytest.mark.parametrize(
    ("fault", "relation"), [("left", "left_padded"), ("segments", "packed"), ("cast", "autocast")]
)
def test_a_fault_is_named(fault: str, relation: str) -> None:
    outcome = proved(relation, fault)
    assert outcome.state == "differs" and outcome.first is not None
    assert outcome.first.module == "mix"


def test_a_reduction_that_is_made_twice_is_named() -> None:
    outcome = proved("ddp", "reduced twice")
    assert outcome.state == "differs" and outcome.first is not None
    assert outcome.first.kind == "reduction" and "compared before agrees" in str(outcome.first)


@pytest.mark.parametrize("without", ["positions", "attention_mask"])
def test_what_is_missing_is_said(without: str) -> None:
    model, step = made()
    given = batch()

    def short(one: dict[str, torch.Tensor]) -> Any:
        return step(model, {**given, **one})

    part = {name: tensor for name, tensor in given.items() if name != without}
    proof = fastcheck.prove(short, part, model=model, relations=["left_padded", "packed"])
    assert [one.state for one in proof.outcomes] == ["not asked"] * 2
    assert all("positions" in o.note or "mask" in o.note for o in proof.outcomes)


def test_a_step_without_its_model_has_no_ranks() -> None:
    model, step = made()
    proof = fastcheck.prove(lambda b: step(model, b), batch(), model=model, relations=["ddp"])
    assert proof.outcomes[0].note.startswith("the step takes no model")


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())  # type: ignore[no-any-return]  # a module's result is Any


def split(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    return parallel.parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def test_tensor_parallel_layers_agree_with_one_process() -> None:
    torch.manual_seed(0)
    model, x = Pair(), torch.randn(4, WIDTH)
    ranks = fastcheck.Ranks(split, shares_rows=False)
    (outcome,) = fastcheck.prove(
        lambda model, x: model(x).square().mean(), x, model=model, relations=[ranks]
    ).outcomes
    assert (outcome.state, outcome.relation) == ("holds", "2 ranks of split")


def test_a_rank_that_raises_is_told_and_leaves_the_model_as_it_was() -> None:
    torch.manual_seed(0)
    model, x = Pair(), torch.randn(4, WIDTH)
    before = [p.clone() for p in model.parameters()]

    def wrap(model: nn.Module) -> nn.Module:
        with torch.no_grad():
            model.up.weight.zero_()  # type: ignore[union-attr,operator]  # it is a Linear
        raise ValueError("no such plan")

    ranks = fastcheck.Ranks(wrap)
    (outcome,) = fastcheck.prove(
        lambda model, x: model(x).square().mean(), x, model=model, relations=[ranks]
    ).outcomes
    assert outcome.state == "failed"
    # Of one that meets the other no more it is that of the other.
    assert re.fullmatch("RuntimeError: rank [01]: ValueError: no such plan", outcome.note)
    assert all(map(torch.equal, before, model.parameters()))
    assert not dist.is_initialized()


class Routed(nn.Module):
    """Two experts, the second of which only a row with a positive first value reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.head = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for expert, rows in zip(self.experts, (x[:, 0] <= 0, x[:, 0] > 0)):
            if rows.any():
                y = y.index_add(0, rows.nonzero().flatten(), expert(x[rows]))
        return self.head(y)  # type: ignore[no-any-return]  # a module's result is Any


@pytest.mark.parametrize("is_faulty", [False, True])
def test_a_gradient_that_one_part_alone_has_is_compared(is_faulty: bool) -> None:
    torch.manual_seed(0)
    model, x = Routed(), torch.randn(4, 4)
    x[:, 0] = torch.tensor([-1.0, -1.0, 1.0, 1.0])  # each half of the rows has its own expert

    def reduced(model: Any) -> Any:
        if is_faulty:
            model.experts[1].weight.register_hook(lambda grad: 2 * grad)
        return DistributedDataParallel(model, find_unused_parameters=True)

    proof = fastcheck.prove(
        lambda model, x: model(x).square().mean(),
        x,
        model=model,
        relations=["micro_batches", fastcheck.Ranks(reduced)],
    )
    parts, ranks = proof.outcomes
    assert (parts.state, parts.note) == ("holds", "weights 0.500 and 0.500: by rows")
    assert ranks.state == ("differs" if is_faulty else "holds")
    assert not is_faulty or ranks.worst == "gradient experts.1.weight"


class Decoder(nn.Module):
    """Attends to ``ahead`` tokens that come later, in a list of layers."""

    def __init__(self, ahead: int) -> None:
        super().__init__()
        self.embed, self.ahead = nn.Embedding(WORDS, WIDTH), ahead
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)])

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        seen = torch.ones(len(x[0]), len(x[0])).tril(self.ahead).bool() & mask[:, None].bool()
        for layer in self.layers:
            x = layer(F.scaled_dot_product_attention(x, x, x, attn_mask=seen))
        return x


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_causal_mask_that_is_off_by_one_is_named(ahead: int) -> None:
    torch.manual_seed(0)
    model, given = Decoder(ahead), batch()

    def step(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(given["ids"], given["attention_mask"]).square().mean()

    (one,) = fastcheck.prove(step, given, model=model, relations="causal").outcomes
    if not ahead:
        assert one.state == "holds" and one.score == 0
        return
    assert one.state == "differs" and one.first is not None
    # A list calls nothing: the model does.
    assert (one.first.module, one.first.what) == ("", "what layers.0 is given (input[0])")
    assert one.first.operator == "scaled_dot_product_attention"
    without = {name: t.float() for name, t in given.items() if name != "ids"}
    linear = nn.Linear(7, 1)
    proof = fastcheck.prove(
        lambda b: linear(b["labels"]).mean(), without, model=linear, relations="causal"
    )
    assert proof.outcomes[0].note == "the batch has no integers [rows, tokens]"
