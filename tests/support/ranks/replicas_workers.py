"""Functions that the ranks of test_replicas.py run, each in a process of its own."""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastcheck
from fastcheck.monitor.distributed.replica_groups import ReplicaGroup
from fastcheck.monitor.distributed.replicas import ReplicaCheck, ReplicaMismatch
from fastcheck.utils.torch.sharding import local


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.predicted(x)

    def predicted(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def flip_bit(tensor: torch.Tensor, index: int, bit: int) -> None:
    """As a fault of the memory would: one bit of one float32."""
    with torch.no_grad():
        tensor.detach().view(torch.int32).view(-1)[index] ^= 1 << bit


def told(found: Optional[ReplicaMismatch]) -> Any:
    return found and (
        found.step,
        found.parameter,
        found.is_gradient,
        found.differing_ranks,
        found.has_majority,
        len(set(found.checksums.values())),
        found.others,
    )


def train(
    rank: int,
    steps: int,
    check: Callable[[nn.Module], ReplicaCheck],
    before_boundary: Callable[[int, nn.Module], None] = lambda step, model: None,
    group: Optional[dist.ProcessGroup] = None,
) -> Any:
    """A loop with DDP; what the check found, with the step of the report."""
    torch.manual_seed(0)
    model = Model()
    wrapped = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checker = check(model)
    generator = torch.Generator().manual_seed(rank)
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            optimizer.zero_grad()
            wrapped(torch.randn(4, 8, generator=generator)).square().mean().backward()
            optimizer.step()
            before_boundary(step, model)
            one = checker.boundary(step)
            if one is not None:
                found.append((step, told(one), str(one)))
        last = checker.finish(steps)
        if last is not None:
            found.append((steps, told(last), str(last)))
    said = [str(w.message) for w in caught if "replicas" in str(w.message)]
    return found, said, tuple(checker._names)


def healthy(rank: int, every: int) -> Any:
    return train(rank, 12, lambda model: ReplicaCheck(model, every=every, gradients=True))


def bit_flips(rank: int, odd: int, bit: int) -> Any:
    def fault(step: int, model: nn.Module) -> None:
        if rank == odd and step == 5:
            flip_bit(model.get_parameter("second.weight"), 7, bit)

    # Not reported again while it stays the same; what spreads from it later is new.
    return train(rank, 8, lambda model: ReplicaCheck(model, every=5), fault)


def flip_in_a_gradient(rank: int, gradients: bool) -> Any:
    def fault(step: int, model: nn.Module) -> None:
        if rank == 2 and step == 3:
            gradient = model.get_parameter("first.bias").grad
            assert gradient is not None
            flip_bit(gradient, 0, 3)

    return train(rank, 6, lambda model: ReplicaCheck(model, every=1, gradients=gradients), fault)


def missing_gradient(rank: int) -> Any:
    def fault(step: int, model: nn.Module) -> None:
        if rank == 1 and step == 2:
            model.get_parameter("first.bias").grad = None

    return train(rank, 6, lambda model: ReplicaCheck(model, every=2, gradients=True), fault)


def in_pairs(rank: int) -> Any:
    """Two groups of two ranks: of two, it is unknown which is wrong."""
    low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
    group = low if rank < 2 else high

    def fault(step: int, model: nn.Module) -> None:
        if rank == 3 and step == 1:
            flip_bit(model.get_parameter("first.weight"), 0, 31)

    return train(rank, 4, lambda model: ReplicaCheck(model, group, every=1), fault, group)


def different_models(rank: int) -> Any:
    model = nn.Linear(4, 4, bias=rank != 1)
    check = ReplicaCheck(model, every=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [check.boundary(step) for step in range(3)]
    return found, [str(w.message) for w in caught]


def ahead_of_the_others(rank: int) -> Any:
    """An automatic check of which rank 0 goes on after the others have stopped. Whether it was off
    before and after its end, and what was said.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    names = frozenset(name for name, _ in model.named_parameters())
    whole: Any = dist.group.WORLD
    replicas = ReplicaGroup(whole, names, "all", is_data_parallel=False)
    check = ReplicaCheck(model, replicas=replicas)
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            check.boundary(step)
        dist.barrier()
        if rank == 0:
            check.timeout_seconds = 0.1
        for step in range(4, 1000 if rank == 0 else 4):
            check.boundary(step)
        has_given_up = check.is_off
        dist.barrier()  # until then all are there
        ended = check.finish(1000)
    return has_given_up, check.is_off, ended, [str(warning.message) for warning in caught]


def on_one_rank(rank: int) -> Any:
    said: list[str] = []
    if rank == 0:
        model = nn.Linear(4, 4)
        check = ReplicaCheck(model, every=1, timeout_seconds=0.5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert [check.boundary(step) for step in range(3)] == [None] * 3
        said = [str(w.message) for w in caught]
    dist.barrier()
    return said


def sharded(rank: int) -> Any:
    """FSDP2 over pairs, replicated across them: shards are compared with those that hold the
    same.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = Model()
    fully_shard(model, mesh=mesh)
    over_replicas = ReplicaCheck(model, mesh.get_group("replica"), every=1)
    over_all = ReplicaCheck(model, every=1)
    found = []
    for step in range(4):
        model(torch.ones(2, 8)).sum().backward()
        if rank == 3 and step == 1:
            shard: Any = model.get_parameter("second.weight")
            flip_bit(shard.to_local(), 0, 20)
        found.append((told(over_replicas.boundary(step)), told(over_all.boundary(step))))
    return found, tuple(over_replicas._names), over_all._names


def by_itself(rank: int, fault: str, steps: int = 24) -> Any:
    """install() of a model in DDP, and no other call; what is told of this fault."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    if fault == "local sgd":
        model._comm_hooks.append((_post_localSGD_hook, None))
    monitor = fastcheck.install(model, watch=fault != "not watched")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0 if fault == "one batch for all" else rank)
    is_bypassed = fault in ("bypassed", "local sgd", "not watched")
    is_method = fault == "bypassed by a method"
    same = torch.randn(4, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            optimizer.zero_grad()
            called = model.module if is_bypassed else model
            called = model.module.predicted if is_method else called
            x = torch.randn(4, 8, generator=generator)
            x = same if fault == "one batch again and again" else x
            loss = called(x).square().mean()
            if fault == "synchronised too late":  # the flag is that of the forward pass, too
                model.require_backward_grad_sync = False
                loss.backward()
                loss = called(torch.randn(4, 8, generator=generator)).square().mean()
                model.require_backward_grad_sync = True
            loss.backward()
            if fault == "clipped on one rank" and rank == 0 and step >= 5:
                nn.utils.clip_grad_norm_(model.module.second.parameters(), 1e-3)
            if fault == "reduced twice":
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            if fault == "divided twice":
                for parameter in model.parameters():
                    parameter.grad /= dist.get_world_size()
            if fault == "averaged twice":  # of equal numbers: the same
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
            if fault == "lost" and rank == 1 and step == 7:
                for parameter in model.module.second.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            if fault == "left out on one rank" and rank == 2 and step == 4:
                continue
            if fault == "another rate on one rank" and rank == 3:
                optimizer.param_groups[0]["lr"] = 0.02
            if fault == "added to on one rank" and rank == 0:
                model.module.first.bias.grad += 1e-3
            if fault == "a flipped bit" and rank == 1 and step == 6:
                flip_bit(model.module.first.weight, 3, 1)
            optimizer.step()
            if fault == "loaded on one rank" and rank == 0 and step == 0:
                with torch.no_grad():
                    model.module.second.weight.mul_(0.5)
        monitor.remove()
    return seen(monitor, caught, is_watched=fault != "not watched")


def seen(
    monitor: fastcheck.Monitor, caught: list[warnings.WarningMessage], is_watched: bool = True
) -> Any:
    """The mismatches, what warned, and the events that did not."""
    said = [str(warning.message) for warning in caught]
    known = monitor.watch.events if is_watched else ()
    events = [str(event) for event in known if not event.is_warning]
    return [told(one) for one in monitor.replica_mismatches], said, events


class Blocks(nn.Module):
    """A layer in columns, a norm, and a layer in rows, as tensor parallelism has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.out_norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out_norm(x + self.down(self.up(self.norm(x)).relu()))


def laid_out(rank: int, layout: str, fault: str, steps: int = 24) -> Any:
    """install() of a model that is divided over four ranks, and no other call."""
    torch.manual_seed(0)
    model, reads = _layouts[layout](rank)
    monitor = fastcheck.install(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0 if fault == "one batch for all" else reads)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 6, 8, generator=generator)).square().sum().backward()
            odd = rank == 1 and step == 5
            if fault == "clipped on one rank" and rank == 1 and step >= 5:
                for norm in (model.norm, model.out_norm):
                    norm.weight.grad, norm.bias.grad = norm.weight.grad * 0.1, norm.bias.grad * 0.1
            optimizer.step()
            if fault == "a flipped bit" and odd:
                flip_bit(local(model.get_parameter("up.weight")), 3, 20)
        monitor.remove()
    return seen(monitor, caught)


def optimizer_of_the_whole(rank: int) -> list[str]:
    """What warned of an optimizer that holds what the parameters were before fully_shard()."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fully_shard(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with fastcheck.install(model):
            generator = torch.Generator().manual_seed(rank)
            for _ in range(12):
                model.zero_grad()
                model(torch.randn(4, 8, generator=generator)).square().mean().backward()
                optimizer.step()
    return [str(warning.message) for warning in caught]


def _hsdp(rank: int) -> tuple[Any, int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Blocks()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))
    return model, rank


def _hybrid(rank: int) -> tuple[Any, int]:
    """FSDP1 with hybrid shards of all but two layers: a norm is each rank's own, and a layer is
    divided over all ranks.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    cpu = torch.device("cpu")
    hybrid: dict[str, Any] = {
        "process_group": (shards[rank // 2], replicas[rank % 2]),
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        "use_orig_params": True,
        "device_id": cpu,
    }
    model: Any = Blocks()
    with torch.no_grad():
        model.out_norm.weight.add_(rank)
    model.up = FullyShardedDataParallel(model.up, **hybrid)
    model.down = FullyShardedDataParallel(model.down, use_orig_params=True, device_id=cpu)
    return FullyShardedDataParallel(model, ignored_modules=[model.out_norm], **hybrid), rank


def _own_norm(rank: int) -> tuple[Any, int]:
    """Tensor parallelism over pairs of ranks, with a plain norm of the channels that a rank holds,
    which differs from that of the other rank once it is trained. All ranks have one batch.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel as tp

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = Blocks()
    plan = {"up.0": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
    model.up = nn.Sequential(model.up, nn.LayerNorm(8))
    tp.parallelize_module(model, mesh["tp"], plan)
    return model, 0


def _fsdp(rank: int) -> tuple[Any, int]:
    from torch.distributed.fsdp import fully_shard

    model = Blocks()
    fully_shard(model)
    return model, rank


def _tensor_parallel(rank: int) -> tuple[Any, int]:
    """Over two ranks, and FSDP2 over the other dimension."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Blocks()
    plan = {
        "": tp.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "norm": tp.SequenceParallel(),
        "up": tp.ColwiseParallel(input_layouts=Shard(1)),
        "down": tp.RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "out_norm": tp.SequenceParallel(),
    }
    tp.parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    return model, rank // 2


def _megatron(rank: int) -> tuple[Any, int]:
    """Two ranks hold half of a layer each; what Megatron Core's parallel state would say."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    state: Any = types.ModuleType("megatron.core.parallel_state")
    state.model_parallel_is_initialized = lambda: True
    state.get_tensor_model_parallel_group = lambda: pairs[rank // 2]
    sys.modules["megatron.core.parallel_state"] = state
    model = Blocks()
    half = slice(rank % 2 * 8, rank % 2 * 8 + 8)
    up, down = model.up, model.down
    with torch.no_grad():
        up.weight, up.bias = nn.Parameter(up.weight[half]), nn.Parameter(up.bias[half])
        down.weight = nn.Parameter(down.weight[:, half])
    for parameter in (up.weight, up.bias, down.weight):
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]  # as Megatron does

    def sum_over_pair(tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=pairs[rank // 2])
        return tensor

    up.register_full_backward_hook(lambda module, grads, _: (sum_over_pair(grads[0].clone()),))
    summed: Any = Summed.apply

    def in_rows(x: torch.Tensor) -> Any:
        return down.bias + summed(x @ down.weight.T, sum_over_pair)

    down.forward = in_rows  # type: ignore[method-assign]  # a forward of its own, as users set one
    return model, rank // 2


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, total: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return total(x.detach().clone())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


_layouts: dict[str, Callable[[int], tuple[Any, int]]] = {
    "hsdp": _hsdp, "fsdp": _fsdp, "tensor parallel": _tensor_parallel, "megatron": _megatron,
    "hybrid": _hybrid, "own norm": _own_norm,
}  # fmt: skip


def _post_localSGD_hook(state: Any, bucket: Any) -> Any:  # noqa: N802  # torch's name
    raise AssertionError("only its name is looked at")


def through_the_monitor(rank: int) -> Any:
    """monitor.check_replicas() in a training loop; a bit flips on rank 2."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    monitor = fastcheck.install(model)
    monitor.check_replicas(every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(10):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            if rank == 2 and step == 5:
                flip_bit(model.module.second.bias, 1, 3)
            optimizer.step()
        monitor.remove()
    said = [str(warning.message).splitlines()[0] for warning in caught]
    return [told(one) for one in monitor.replica_mismatches], said, monitor.summary()
