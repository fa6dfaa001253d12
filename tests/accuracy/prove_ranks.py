"""Faults of a step on two ranks, each beside its fixed version, for prove_faults.py."""

from __future__ import annotations

import contextlib
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accuracy.prove_model import ROWS, WIDTH, Batch, Mix, Model, Program, batch, loss_of
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
    loss.backward()  # type: ignore[no-untyped-call]
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
    "VERDICT 12, 13, TTrace 4: gradients that are not divided by the ranks",
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
with_ddp("no_sync() around all", "VERDICT 1: a missing all-reduce", _unsynchronised)
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
        return self.second(self.first(x).relu())  # type: ignore[no-any-return]


class _Split(nn.Module):
    """The same on ranks: the first layer by columns, the second by rows."""

    def __init__(self, fault: str, whole: _Whole) -> None:
        super().__init__()
        share = WIDTH // dist.get_world_size()
        part = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
        self.fault = fault
        self.up = nn.Parameter(whole.first.weight.detach()[part].clone())
        self.down = nn.Parameter(whole.second.weight.detach()[:, part].clone())
        self.bias = whole.second.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault != "backward":
            x = copied(x)
        y = (x @ self.up.t()).relu() @ self.down.t()
        if self.fault == "bias":
            y = y + self.bias
        if self.fault != "forward":
            y = reduced(y)
        return y if self.fault == "bias" else y + self.bias


def split(name: str, source: str, fault: str) -> None:
    def make(is_faulty: bool) -> Program:
        pair = _Whole()
        mix = Mix(lambda self, x, mask: self.pair(x), lambda self: self.add_module("pair", pair))

        def wrap(model: Any) -> Any:
            model.mix.pair = _Split(fault if is_faulty else "", model.mix.pair)
            return model

        return _program(Model(mix), _step, Ranks(wrap, shares_rows=False))

    _add(name, source, "mix.pair", make)


split("backward without all-reduce", "VERDICT 2: a missing f of tensor parallelism", "backward")
split("forward without all-reduce", "VERDICT 1: a missing g of tensor parallelism", "forward")
split("bias of every rank", "a bias that is added before the all-reduce", "bias")
