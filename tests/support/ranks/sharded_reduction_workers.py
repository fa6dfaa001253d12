"""Training runs under fully_shard, of which the reduction of gradients is watched.

Beside each run, plain copies of the model compute what the ratios are to be, on whole gradients.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from typing import Any, NamedTuple, Optional

import torch
import torch._dynamo.utils
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import fastcheck
from fastcheck.errors import FastcheckWarning
from fastcheck.utils.torch.sharding import local, shard_of

# The watched parameters have their turns in steps 1 to 12, and then in one of eight.
SPOILT = 72
# Those with 64 elements for each of two ranks, and those with fewer.
WATCHED = ("0.weight", "2.0.weight", "2.0.bias", "2.2.weight")
# What FullyShardedDataParallel puts into the names of modules.
WRAPPED = "_fsdp_wrapped_module."
_READINGS = "fastcheck.monitor.hooks.stored"


class Run(NamedTuple):
    """How a run is sharded, and what is special about it.

    ``batches``: each rank has its ``own``, the ``same``, or its own and in one step rank 1 a loss
    that is ``large`` or ``small``.
    """

    batches: str = "own"
    reshard: Optional[bool] = None
    nested: bool = True
    parameters: Optional[torch.dtype] = None
    reduces: Optional[torch.dtype] = None
    passes: int = 1
    # Gradients are reduced in the last of the passes alone.
    syncs_last: bool = False
    # Gradients are set to 0 in each second step alone.
    keeps_gradients: bool = False
    clips: bool = False
    sums: bool = False
    mesh: tuple[int, ...] = ()
    watch: bool = True
    # The function of this name in the module of the readings raises.
    fails_in: str = ""


def steps_of(batches: str) -> int:
    """Until the fault is judged; without one, until each parameter has had its turns."""
    return SPOILT + 2 if batches != "own" else 30


def net_of() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 9))
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), inner, nn.Linear(9, 2))


def shards(net: nn.Module, run: Run) -> FSDPModule:
    mesh = run.mesh or (dist.get_world_size(),)
    names = ("replicate", "shard")[-len(mesh) :]
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", mesh, mesh_dim_names=names),
        "reshard_after_forward": run.reshard,
        "mp_policy": MixedPrecisionPolicy(run.parameters, run.reduces),
    }
    if run.nested:
        fully_shard(net[2], **options)
    model = fully_shard(net, **options)
    if run.sums:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    return model


def trains(rank: int, run: Run) -> Any:
    """outcome(), the hooks before and after, the losses and the weights."""
    net = net_of()
    plain = [copy.deepcopy(net).to(run.parameters) for _ in range(dist.get_world_size())]
    model: Any = shards(net, run)
    hooks = _hooks(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    expected, losses = [], []
    options = fastcheck.Watch(window=32, warm_up=16) if run.watch else False
    if run.fails_in:
        module, _, name = run.fails_in.rpartition(".")
        setattr(importlib.import_module(f"{_READINGS}.{module}"), name, _fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = fastcheck.install(model, watch=options)
        for step in range(steps_of(run.batches)):
            is_new = not run.keeps_gradients or step % 2 == 0
            if is_new:
                optimizer.zero_grad(set_to_none=not run.keeps_gradients)
            _copy_weights(net, plain, is_new)
            for part in range(run.passes):
                model.set_requires_gradient_sync(part == run.passes - 1 or not run.syncs_last)
                model.set_is_last_backward(part == run.passes - 1)
                for other, one in enumerate(plain):
                    x = _batch(run, other, step, part)
                    _loss(run, other, step, one(x.to(run.parameters))).backward()
                loss = _loss(run, rank, step, model(_batch(run, rank, step, part)))
                loss.backward()
                losses.append(float(loss.detach()))
            expected.append(_ratios(net, plain, rank, 1 if run.sums else len(plain)))
            if run.clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
        monitor.remove()
    found = outcome(monitor, caught, expected, run.watch)
    weights = [local(p).tolist() for p in net.parameters()]
    return {**found, "hooks": (hooks, _hooks(net)), "losses": losses, "weights": weights}


def outcome(
    monitor: Any,
    caught: list[warnings.WarningMessage],
    expected: list[dict[str, float]],
    watch: bool,
) -> dict[str, Any]:
    """The ratios that were read and those computed beside them, the events of the kind, and the
    warnings of it and of anything else.
    """
    read = []
    for record in monitor.records():
        site = monitor._session.sites[int(record["site"])]
        if site.role == "reduction":
            step, key = int(record["step"]), site.key.replace(WRAPPED, "")
            read.append((step, key, float(record["sum"]), expected[step][key]))
    events = [e for e in monitor.watch.events if e.kind == "reduction"] if watch else []
    own = [str(one.message) for one in caught if issubclass(one.category, FastcheckWarning)]
    return {
        "read": read,
        "events": [(e.step, e.value, e.is_warning, e.text) for e in events],
        "warned": [text for text in own if "reduction" in text],
        "others": [text for text in own if "reduction" not in text],
    }


def _fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("as if torch had changed")


def _batch(run: Run, rank: int, step: int, part: int) -> torch.Tensor:
    seed = 0 if run.batches == "same" else rank
    number = 7 * step + part + 1000 * seed
    return torch.randn(64, 16, generator=torch.Generator().manual_seed(number))


def _loss(run: Run, rank: int, step: int, output: torch.Tensor) -> torch.Tensor:
    is_spoilt = rank == 1 and step == SPOILT
    scale = {"large": 1e3, "small": 1e-3}.get(run.batches, 1.0) if is_spoilt else 1.0
    return output.float().square().mean() * scale


def _copy_weights(net: nn.Module, plain: list[nn.Sequential], is_new: bool) -> None:
    """``is_new``: gradients are 0; else they are the means of the step before."""
    for name, parameter in net.named_parameters():
        whole = parameter.full_tensor()
        copies = [one.get_parameter(name) for one in plain]
        means = torch.stack([p.grad for p in copies if p.grad is not None] or [whole]).mean(0)
        for target in copies:
            target.data.copy_(whole)
            target.grad = None if is_new else means.clone()


def _ratios(
    net: nn.Module, plain: list[nn.Sequential], rank: int, divisor: int
) -> dict[str, float]:
    ratios = {}
    for name, parameter in net.named_parameters():
        shard = shard_of(parameter)
        assert shard is not None
        gradients = [one.get_parameter(name).grad for one in plain]
        parts = [
            g.double().narrow(shard.dim, shard.start, shard.length)
            for g in gradients
            if g is not None
        ]
        mean = sum(parts) / divisor
        ratios[name] = float(parts[rank].norm() / mean.norm())
    return ratios


def _hooks(net: nn.Module) -> list[int]:
    """Of the modules, and of the leaves that they run with."""
    held = [len(module._forward_pre_hooks) for module in net.modules()]
    leaves: list[int] = []
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            parameters = module._parameters if isinstance(module, nn.Module) else {}
            leaves += [len(p._backward_hooks or ()) for p in parameters.values() if p is not None]
    for parameter in net.parameters():
        leaves.append(len(parameter._backward_hooks or ()))
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return [*held, *leaves]


def trains_compiled(rank: int, kind: str, watch: bool) -> Any:
    """``kind``: blocks are ``wrapped`` in compiled modules before they are sharded, or the
    ``whole`` model is. The number of ratios that were read, the number of graphs and the losses.
    """
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2)]
    if kind == "wrapped":
        blocks = [torch.compile(block, backend="aot_eager") for block in blocks]
    for block in blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
    net = fully_shard(nn.Sequential(*blocks), mesh=init_device_mesh("cpu", (2,)))
    model: Any = torch.compile(net, backend="aot_eager") if kind == "whole" else net
    monitor = fastcheck.install(model, watch=watch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 32) * (rank + 1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    monitor.remove()
    sites = [monitor._session.sites[int(record["site"])] for record in monitor.records()]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return sum(site.role == "reduction" for site in sites), graphs, losses
