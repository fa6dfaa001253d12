"""Training runs under FullyShardedDataParallel (FSDP1), of which the reduction of gradients is
watched.

Beside each run, plain copies of the model compute what the ratios are to be.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

import fastcheck
from support.ranks.sharded_reduction_workers import WRAPPED, net_of, outcome, steps_of


class Run(NamedTuple):
    """``originals``: the optimizer has the parameters of the modules, not the flat ones.
    ``batches``: each rank has its ``own``, or the ``same``.
    """

    originals: bool = True
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    batches: str = "own"
    parameters: Optional[torch.dtype] = None
    passes: int = 1
    # In no_sync() in all but the last of the passes.
    syncs_last: bool = False
    keeps_gradients: bool = False
    watch: bool = True


def trains(rank: int, run: Run) -> Any:
    """outcome(), the hooks before and after, the losses and the weights."""
    net = net_of()
    plain = [copy.deepcopy(net).to(run.parameters) for _ in range(dist.get_world_size())]
    precision = MixedPrecision(run.parameters, torch.float32) if run.parameters else None
    options: dict[str, Any] = {
        "device_id": torch.device("cpu"),
        "use_orig_params": run.originals,
        "sharding_strategy": run.strategy,
        "mixed_precision": precision,
    }
    if run.strategy is ShardingStrategy.HYBRID_SHARD:
        options["device_mesh"] = init_device_mesh("cpu", (2, 2))
    net[2] = FullyShardedDataParallel(net[2], **options)
    model = FullyShardedDataParallel(net, **options)
    hooks = _hooks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    expected, losses = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = fastcheck.install(model, watch=run.watch)
        for step in range(steps_of(run.batches)):
            optimizer.zero_grad(set_to_none=not run.keeps_gradients)
            _copy_weights(model, plain)
            for part in range(run.passes):
                is_last = part == run.passes - 1 or not run.syncs_last
                for other, one in enumerate(plain):
                    x = _batch(run, other, step, part)
                    one(x.to(run.parameters)).float().square().mean().backward()
                with contextlib.nullcontext() if is_last else model.no_sync():
                    loss = model(_batch(run, rank, step, part)).float().square().mean()
                    loss.backward()
                losses.append(float(loss.detach()))
            expected.append(_ratios(model, plain, rank, run))
            optimizer.step()
        monitor.remove()
    found = outcome(monitor, caught, expected, run.watch)
    weights = [p.tolist() for p in net.parameters()]
    return {**found, "hooks": (hooks, _hooks(model)), "losses": losses, "weights": weights}


def _batch(run: Run, rank: int, step: int, part: int) -> torch.Tensor:
    number = 7 * step + part + (0 if run.batches == "same" else 1000 * rank)
    return torch.randn(64, 16, generator=torch.Generator().manual_seed(number))


def _copy_weights(model: FullyShardedDataParallel, plain: list[nn.Sequential]) -> None:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        for name, parameter in model.named_parameters():
            for one in plain:
                target = one.get_parameter(name.replace(WRAPPED, ""))
                target.data.copy_(parameter)
                target.grad = None


def _ratios(
    model: FullyShardedDataParallel, plain: list[nn.Sequential], rank: int, run: Run
) -> dict[str, float]:
    """By the layout that torch itself has noted."""
    ratios = {}
    for module in FullyShardedDataParallel.fsdp_modules(model):
        flat: Any = module._handle.flat_param  # type: ignore[union-attr]
        names = [name.replace(WRAPPED, "") for name in flat._fqns]
        prefix = "2." if module is not model else ""
        whole = []
        for one in plain:
            gradients = [one.get_parameter(prefix + name).grad for name in names]
            whole.append([g.double().flatten() for g in gradients if g is not None])
        if not run.originals:
            pieces = [torch.cat(parts).chunk(len(plain))[rank] for parts in whole]
            ratios[f"{prefix}_flat_param"] = _ratio(pieces, rank)
            continue
        for at, (name, info) in enumerate(zip(names, flat._shard_param_infos)):
            if info.in_shard:
                held = slice(
                    info.intra_param_start_idx,
                    info.intra_param_end_idx + 1,
                )
                ratios[prefix + name] = _ratio([parts[at][held] for parts in whole], rank)
    return ratios


def _ratio(pieces: list[torch.Tensor], rank: int) -> float:
    mean = sum(pieces) / len(pieces)
    return float(pieces[rank].norm() / mean.norm())


def _hooks(model: nn.Module) -> list[int]:
    modules = [len(module._forward_pre_hooks) for module in model.modules()]
    return [*modules, *(len(p._backward_hooks or ()) for p in model.parameters())]
