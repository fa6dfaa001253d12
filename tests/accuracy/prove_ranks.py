"""Faults of a step on two ranks, each beside its fixed version, for prove_faults.py. The 14 plans
of VERDICT (SOSP 2025, section 8.3) have an analogue each.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accuracy.prove_model import (
    ROWS,
    WIDTH,
    Batch,
    Mix,
    Mixing,
    Model,
    Program,
    batch,
    loss_of,
)
from accuracy.prove_programs import REDUCTION, Fault
from accuracy.sides_layouts import copied, reduced
from fastcheck import Ranks

RANK_FAULTS: list[Fault] = []
Reducing = Callable[[nn.Module], None]


def _nothing(model: nn.Module) -> None:
    pass


def _add(name: str, source: str, place: str, make: Callable[[bool], Program]) -> None:
    RANK_FAULTS.append(Fault(name, source, place, make))


def _program(model: nn.Module, step: Callable[..., Any], ranks: Ranks) -> Program:
    given = {name: tensor[: ROWS // 2 * 2] for name, tensor in batch().items()}
    return Program(model, step, given, relations=[ranks])


def _step(model: Any, given: Batch, reduce: Reducing = _nothing) -> torch.Tensor:
    loss = loss_of(model(given["ids"], given["attention_mask"]), given)
    loss.backward()  # type: ignore[no-untyped-call]  # torch has it untyped
    if dist.is_initialized():
        reduce(model)
    return loss.detach()


def by_hand(name: str, source: str, wrong: Reducing) -> None:
    """A step that reduces gradients itself."""

    def make(is_faulty: bool) -> Program:
        reduce = wrong if is_faulty else lambda model: _reduced(model.parameters())
        return _program(
            Model(), lambda model, given: _step(model, given, reduce), Ranks(lambda model: model)
        )

    _add(name, source, REDUCTION, make)


def _reduced(parameters: Any, scale: float = 0.5, group: Any = None) -> None:
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad *= scale


def _groups_of_one() -> Any:
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


by_hand(
    "summed over ranks",
    "TTrace 4: gradients that are not divided by the ranks",
    lambda model: _reduced(model.parameters(), 1.0),
)
by_hand(
    "divided twice",
    "OPT.06, DeepSpeed#7837: a scale that was not multiplied",
    lambda model: _reduced(model.parameters(), 0.25),
)
by_hand(
    "another group",
    "Megatron-LM#7452: an explicit process group ignored",
    lambda model: _reduced(model.parameters(), 1.0, _groups_of_one()),
)
by_hand(
    "last norm not reduced",
    "TTrace 11, Megatron-LM#1446",
    lambda model: _reduced(p for name, p in model.named_parameters() if name[:4] != "norm"),
)
by_hand(
    "a parameter that comes too late",
    "VERDICT 14: a reduction before the last gradient is there",
    lambda model: _reduced(list(model.parameters())[1:]),
)


def with_ddp(name: str, source: str, wrong: Callable[[Any, Batch], Any]) -> None:
    """A step under DistributedDataParallel."""

    def make(is_faulty: bool) -> Program:
        return _program(Model(), wrong if is_faulty else _step, Ranks(DistributedDataParallel))

    _add(name, source, REDUCTION, make)


def _unsynchronised(model: Any, given: Batch) -> torch.Tensor:
    with getattr(model, "no_sync", contextlib.nullcontext)():
        return _step(model, given)


with_ddp(
    "DDP bypassed",
    "pytorch-104336, x-jxmnop-ddp, trl#7245",
    lambda model, given: _step(getattr(model, "module", model), given),
)
with_ddp("no_sync() around all", "a missing all-reduce of gradients", _unsynchronised)
with_ddp(
    "reduced twice",
    "gradients that are reduced twice, on all ranks alike",
    lambda model, given: _step(model, given, lambda model: _reduced(model.parameters(), 1.0)),
)


class _Whole(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())  # type: ignore[no-any-return]  # a module's result is Any


class _Gathered(torch.autograd.Function):
    """What ``join`` makes of the shares of all ranks; the gradient is cut by ``cut``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, join: Any, cut: Any) -> torch.Tensor:
        ctx.cut = cut
        shares = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(shares, x.contiguous())
        return join(shares)  # type: ignore[no-any-return]  # a module's result is Any

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]  # torch's takes any arguments
        return ctx.cut(grad), None, None


def _gathered(x: torch.Tensor, join: Any, cut: Any = lambda grad: grad) -> torch.Tensor:
    apply: Any = _Gathered.apply
    y: torch.Tensor = apply(x, join, cut)
    return y


class _Split(nn.Module):
    """The same on ranks: the first layer by columns, the second by rows."""

    def __init__(self, fault: str, whole: _Whole) -> None:
        super().__init__()
        share = WIDTH // dist.get_world_size()
        self.part = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
        self.fault = fault
        self.up = nn.Parameter(whole.first.weight.detach()[self.part].clone())
        self.down = nn.Parameter(whole.second.weight.detach()[:, self.part].clone())
        self.bias = whole.second.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault != "backward":
            x = copied(x)
        y = (x @ self.up.t()).relu() @ self.down.t()
        if self.fault == "bias":
            y = y + self.bias
        if self.fault == "gather":
            y = _gathered(y, lambda shares: torch.cat(shares)[: len(x)])
        elif self.fault == "nothing":
            y = torch.zeros_like(y)
        elif self.fault != "forward":
            y = reduced(y)
        return y if self.fault == "bias" else y + self.bias


class _Columns(_Split):
    """The same on ranks: both layers by columns, whose shares are gathered."""

    def __init__(self, fault: str, whole: _Whole) -> None:
        super().__init__(fault, whole)
        self.down = nn.Parameter(whole.second.weight.detach()[self.part].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in (self.up, self.down):
            x = _gathered(
                copied(x) @ weight.t(),
                self._joined,
                lambda grad: grad[..., self.part],
            )
            x = x.relu() if weight is self.up else x
        return x + self.bias

    def _joined(self, shares: list[torch.Tensor]) -> torch.Tensor:
        if self.fault:
            shares = [torch.stack(shares).sum(0)] * len(shares)
        return torch.cat(shares, -1)


def split(name: str, source: str, fault: str, kind: type[_Split] = _Split) -> None:
    def make(is_faulty: bool) -> Program:
        pair = _Whole()
        mix = Mix(lambda self, x, mask: self.pair(x), lambda self: self.add_module("pair", pair))

        def wrap(model: Any) -> Any:
            model.mix.pair = kind(fault if is_faulty else "", model.mix.pair)
            return model

        return _program(Model(mix), _step, Ranks(wrap, shares_rows=False))

    _add(name, source, "mix.pair", make)


split("forward without all-reduce", "VERDICT 1: a missing g of tensor parallelism", "forward")
split("reduced into nothing", "VERDICT 2: what an all-reduce was to fill is read", "nothing")
split("gathered for reduced", "VERDICT 3: an all-gather in the place of an all-reduce", "gather")
split("reduced for gathered", "VERDICT 4: an all-reduce for an all-gather", "reduce", _Columns)
split("backward without all-reduce", "VERDICT 5: a missing f of tensor parallelism", "backward")
split("bias of every rank", "a bias that is added before the all-reduce", "bias")


def _moved(x: torch.Tensor, is_faulty: bool) -> torch.Tensor:
    """The output of a pipeline's stage, sent to its own replica or to the other one."""
    if not dist.is_initialized():
        return x
    rank, count = dist.get_rank(), dist.get_world_size()
    source = (rank + 1) % count if is_faulty else rank
    return _gathered(x, lambda shares: shares[source].clone())


def mutant(
    name: str,
    source: str,
    wrong: Mixing,
    right: Mixing,
    on: tuple[int, ...],
    wrap: Callable[[Any], Any] = lambda model: model,
    **kind: Any,
) -> None:
    """A layer that is another one on some ranks."""

    def make(is_faulty: bool) -> Program:
        def mixing(self: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            is_wrong = is_faulty and dist.is_initialized() and dist.get_rank() in on
            return (wrong if is_wrong else right)(self, x, mask)

        return _program(Model(Mix(mixing)), _step, Ranks(wrap, **kind))

    _add(name, source, "mix", make)


def _standard(x: torch.Tensor, small: float = 1e-5, power: float = 2.0) -> torch.Tensor:
    return x * (x.abs().pow(power).mean(-1, keepdim=True) + small).rsqrt()


class _Twice(torch.autograd.Function):
    """A tensor for two readers, and what backward makes of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, is_faulty: bool) -> Any:
        ctx.is_faulty = is_faulty
        return x.clone(), x.clone()

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> Any:  # type: ignore[override]  # torch's takes any arguments
        return first + (first if ctx.is_faulty else second), None


class _Rotated(torch.autograd.Function):
    """Queries and keys, scaled as a rotation by angle 0.5 would the first of a pair."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, is_faulty: bool) -> Any:
        ctx.is_faulty = is_faulty
        return q * 0.88, k * 0.88

    @staticmethod
    def backward(ctx: Any, q: torch.Tensor, k: torch.Tensor) -> Any:  # type: ignore[override]  # torch's takes any arguments
        return (k * 0.88, q * 0.88, None) if ctx.is_faulty else (q * 0.88, k * 0.88, None)


def _read_twice(x: torch.Tensor, is_faulty: bool) -> torch.Tensor:
    apply: Any = _Twice.apply
    first, second = apply(x, is_faulty)
    return first.tanh() * second.sigmoid()  # type: ignore[no-any-return]  # a module's result is Any


def _rotated(x: torch.Tensor, is_faulty: bool) -> torch.Tensor:
    apply: Any = _Rotated.apply
    q, k = apply(*x.chunk(2, -1), is_faulty)
    return torch.cat([q.tanh(), k.sigmoid()], -1)


mutant(
    "sent to another replica",
    "VERDICT 6: wrong ranks of a move between the stages of a pipeline",
    lambda self, x, mask: _moved(x, True),
    lambda self, x, mask: _moved(x, False),
    (0, 1),
    DistributedDataParallel,
)
for _name, _source, _wrong, _right, _on in (
    (
        "another constant on one rank",
        "VERDICT 7: one rank adds another epsilon",
        lambda self, x, mask: _standard(x, 2.0),
        lambda self, x, mask: _standard(x),
        (1,),
    ),
    (
        "another power on one rank",
        "VERDICT 8: one rank computes pow(x, 1) for pow(x, 2)",
        lambda self, x, mask: _standard(x, power=1.0),
        lambda self, x, mask: _standard(x),
        (1,),
    ),
    (
        "another constant on all ranks",
        "VERDICT 9: all ranks add another epsilon than one process",
        lambda self, x, mask: _standard(x, 2.0),
        lambda self, x, mask: _standard(x),
        (0, 1),
    ),
    (
        "backward of another reader",
        "VERDICT 10: backward of a tensor with two readers takes one of them twice",
        lambda self, x, mask: _read_twice(x, True),
        lambda self, x, mask: _read_twice(x, False),
        (1,),
    ),
    (
        "rotary backward reversed",
        "VERDICT 11: gradients of queries and keys exchanged",
        lambda self, x, mask: _rotated(x, True),
        lambda self, x, mask: _rotated(x, False),
        (1,),
    ),
    (
        "scaled on one rank",
        "VERDICT 12: one rank scales twice",
        lambda self, x, mask: x / 2,
        lambda self, x, mask: x,
        (1,),
    ),
    (
        "scaled on all ranks",
        "VERDICT 13: all ranks scale twice",
        lambda self, x, mask: x / 2,
        lambda self, x, mask: x,
        (0, 1),
    ),
):
    mutant(_name, _source, _wrong, _right, _on, shares_rows=False)
