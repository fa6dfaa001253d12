"""Training runs that the ranks of the tests execute, each rank in a process of its own."""

from __future__ import annotations

import functools
import os
import tempfile
import warnings
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastcheck
from fastcheck.callbacks.seals import CheckpointSeals
from fastcheck.cli.main import main
from fastcheck.monitor.distributed import agreement, join
from fastcheck.monitor.hooks import protection
from fastcheck.monitor.hooks.state_reader import StateReader
from fastcheck.monitor.session import stop_handler
from fastcheck.report.render import render
from fastcheck.utils.torch.sharding import local
from support.programs.training import Apply, Net, poison, where
from support.ranks.ranks_workers import in_step


def trains(rank: int, kind: str, faulty: int, log_dir: Optional[str], options: Any) -> Any:
    """A whole training with fastcheck.install(); one rank has a fault in its forward pass."""
    torch.manual_seed(0)
    fault = Apply()
    net = nn.Sequential(Net(), fault, nn.Linear(4, 4))
    model: nn.Module = net
    if kind == "ddp":
        model = DistributedDataParallel(net)
    else:
        fully_shard(net, mesh=init_device_mesh("cpu", (4,)))
    monitor = fastcheck.install(model, log_dir=log_dir, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    try:
        for step in range(20):
            fault.function = poison if rank == faulty and step == 7 else Apply().function
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    except fastcheck.OverflowDetected as stop:
        is_intact = all(bool(local(p).isfinite().all()) for p in model.parameters())
        gradients = [e for e in monitor.events if e.site.role == "param_grad"]
        said = (
            step,
            render(stop.report),
            stop.step,
            where(stop.culprit),
            stop.report.rank,
            is_intact,
        )
        return said, {(e.verdict.name, e.reason[-90:]) for e in gradients[:1]}
    return None


def trains_with_closures(rank: int, options: Any, kind: str, bad: int) -> Any:
    """Under DDP; in one evaluation (the second of each step is LBFGS's) one rank's batch is bad.
    The stop, the number of evaluations, whether the bad one has changed no weight, the weights.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    fastcheck.install(model, **options)
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
        "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2, tolerance_grad=0.0),
    }
    optimizer = makers[kind](model.parameters())
    before: list[Any] = []

    def closure() -> torch.Tensor:
        x = torch.randn(4, 8)
        before.append([p.tolist() for p in model.parameters()])
        optimizer.zero_grad()
        loss = model(poison(x) if (rank, len(before)) == (1, bad) else x).square().mean()
        loss.backward()
        return loss

    try:
        for _ in range(8):
            optimizer.step(closure)
    except fastcheck.OverflowDetected as stop:
        weights = [p.tolist() for p in model.parameters()]
        count = len(before)
        is_intact = [*before, weights][bad] == before[bad - 1]
        return stop.step, stop.report.rank, where(stop.culprit)[1], count, is_intact, weights
    return None


def goes_on(rank: int) -> Any:
    """Whoever catches the stop trains on, and is stopped again; the last event comes at the end."""
    fault = Apply()
    model = nn.Sequential(nn.Linear(8, 4), fault)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []

    def told_of(stop: fastcheck.OverflowDetected) -> Any:
        return stop.step, stop.report.rank, where(stop.culprit)[0]

    try:
        with fastcheck.install(model):
            for step in range(12):
                faulty = {3: 1, 7: 2, 11: 3}.get(step)
                fault.function = poison if faulty == rank else Apply().function
                optimizer.zero_grad()
                in_step()
                try:
                    model(torch.ones(4, 8)).sum().backward()
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter.grad.nan_to_num_()
                    optimizer.step()
                except fastcheck.OverflowDetected as stop:
                    found.append((step, told_of(stop)))
    except fastcheck.OverflowDetected as stop:
        found.append(("end", told_of(stop)))
    return found


def leaves_by_an_exception(rank: int) -> Any:
    """Rank 0 has an event and an error of its own: it does not wait, keeps its error, and the
    others are not stopped for what it leaves behind.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    fault = Apply()
    model = nn.Sequential(nn.Linear(8, 4), fault)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    try:
        with fastcheck.install(model), torch.no_grad():
            for step in range(6):
                if rank != 0 and step == 3:
                    store.wait(["left"])
                model(torch.ones(4, 8))
                optimizer.step()
                if rank == 0 and step == 2:
                    fault.function = poison
                    model(torch.ones(4, 8))
                    raise KeyError(step)
    except KeyError as error:
        store.set("left", "1")
        return repr(error)
    return "all steps"


def a_shard_goes_bad(rank: int, odd: int) -> Any:
    """A gradient is damaged after its reduction, in the shard of one rank alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    fastcheck.install(model)
    before = after = None
    try:
        for step in range(8):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            if rank == odd and step == 3:
                gradient = next(iter(model.parameters())).grad
                assert gradient is not None
                shard = local(gradient)
                shard.view(-1)[0] = float("nan")
            before = [local(p).detach().clone() for p in model.parameters()]
            optimizer.step()
            if step == 3:
                pairs = zip(before, model.parameters())
                after = [bool((old == local(new)).all()) for old, new in pairs]
    except fastcheck.OverflowDetected as stop:
        return step, stop.step, stop.report.rank, stop.culprit.site.label, after
    return None


def shards_that_one_rank_leaves(rank: int, why: str) -> Any:
    """Rank 1 takes no part in what the ranks decide on an update of shards: nothing is observed
    there, or no longer. The losses without fastcheck and with it, and what warned.
    """
    join._MEETING_SECONDS = 0.1
    is_here = why != "not installed"
    if not is_here:
        agreement.RankAgreement.__init__.__kwdefaults__["timeout_seconds"] = 0.1  # type: ignore[index]  # it has defaults
    step = functools.partial(_step_of_shards, has_closure=why == "at an evaluation")
    losses: list[list[float]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for is_watched in (False, is_here or rank == 0):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
            monitor = fastcheck.install(model) if is_watched else None
            losses.append([step(model, optimizer) for _ in range(3)])
            if monitor is not None and is_here and rank == 1:
                StateReader.read_for_update = None  # type: ignore[assignment,method-assign]  # an error of its own
                StateReader.read_gradients = None  # type: ignore[assignment,method-assign]  # another
            losses[-1] += [step(model, optimizer) for _ in range(3)]
            if monitor is not None:
                monitor.remove()
            dist.barrier()
    return losses, [str(warning.message) for warning in caught if "fastcheck" in str(warning)]


def fails_to_decide(rank: int, is_after: bool) -> list[str]:
    """The reduction before an update of shards fails, as where a rank has ended, or something does
    after it; what warned.
    """

    def fail(*args: object) -> None:
        raise RuntimeError("Connection closed by peer")

    if is_after:
        protection.UpdateGuard.before_update = _then(protection.UpdateGuard.before_update, fail)  # type: ignore[method-assign]  # it raises now
    else:
        protection.reduce_found_inf = fail
    model = nn.Linear(8, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    fastcheck.install(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
    return [str(warning.message) for warning in caught if "fastcheck" in str(warning)]


def _then(first: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any) -> Any:
        first(*args)
        return other(*args)

    return both


def stops_in_spite_of_an_error(rank: int, part: str) -> Any:
    """The text of the stop on each rank, where a part of the stop of rank 1 fails there."""
    torch.manual_seed(0)
    fault = Apply()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 4), fault))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fastcheck.install(model)
    if rank == 1:
        setattr(stop_handler, part, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for step in range(6):
                fault.function = poison if (rank, step) == (1, 2) else Apply().function
                optimizer.zero_grad()
                model(torch.ones(2, 8)).square().mean().backward()
                optimizer.step()
        except fastcheck.OverflowDetected as stop:
            return " ".join(str(stop).split())
    return None


def _step_of_shards(model: nn.Module, optimizer: torch.optim.Optimizer, has_closure: bool) -> float:
    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        return loss.item()

    if has_closure:
        loss = optimizer.step(closure)
        assert loss is not None
        return loss
    loss = closure()
    optimizer.step()
    return loss


def fsdp1_clips(rank: int, odd: int, keeps_parameters: bool) -> Any:
    """FullyShardedDataParallel.clip_grad_norm_(), with a NaN in a shard of one rank alone."""
    torch.manual_seed(0)
    device = torch.device("cpu")
    layers = [
        FullyShardedDataParallel(
            nn.Linear(8, 8), device_id=device, use_orig_params=keeps_parameters
        )
        for _ in range(3)
    ]
    model = FullyShardedDataParallel(
        nn.Sequential(*layers), device_id=device, use_orig_params=keeps_parameters
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    monitor = fastcheck.install(model, sync="step")
    try:
        for step in range(6):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            if rank == odd and step == 3:
                held = [p.grad for p in layers[1].parameters() if p.grad is not None]
                next(g for g in held if g.numel()).data.view(-1)[0] = float("nan")
            model.clip_grad_norm_(1.0)
            optimizer.step()
    except fastcheck.OverflowDetected as stop:
        roles = [monitor.sites[r["site"]].role for r in monitor.records() if r["step"] == 2]
        events = [(e.site.role, e.verdict.name) for e in monitor.events]
        read = roles.count("param_grad"), roles.count("grad_norm")
        found = stop.culprit.site.module, stop.culprit.site.role
        return stop.step, stop.report.rank, found, read, events
    return None


def in_a_subgroup(rank: int) -> Any:
    """Ranks 0 and 1 stop together; 2 and 3 are another job of the same world."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    fault = Apply()
    model = nn.Sequential(nn.Linear(8, 4), fault)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = fastcheck.install(model, training=fastcheck.Training(process_group=groups[rank // 2]))
    try:
        for step in range(8):
            fault.function = poison if (rank, step) == (1, 3) else Apply().function
            model(torch.ones(4, 8)).sum().backward()
            dist.all_reduce(torch.ones(1), group=groups[rank // 2])
            optimizer.step()
        monitor.remove()
    except fastcheck.OverflowDetected as stop:
        return step, stop.step, stop.report.rank, stop.report.world_size
    return None


def on_a_fake_device(rank: int, sync: str) -> Any:
    """Each rank trains on an accelerator that is behind its host; nothing else joins them."""
    from fakes import fake_device

    fake: Any = fake_device.load()
    fake.set_delay(50)
    fault = Apply()
    model = nn.Sequential(nn.Linear(8, 8), fault, nn.Linear(8, 4)).to(fake.name())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    fastcheck.install(model, record="health", sync=sync)
    try:
        for step in range(60):
            fault.function = poison if (rank, step) == (2, 7) else Apply().function
            optimizer.zero_grad()
            model(torch.ones(4, 8).to(fake.name())).sum().backward()
            optimizer.step()
    except fastcheck.OverflowDetected as stop:
        is_intact = all(bool(p.isfinite().all()) for p in model.parameters())
        return (
            step,
            stop.step,
            stop.report.rank,
            where(stop.culprit),
            render(stop.report),
            is_intact,
        )
    return None


def a_nan_through_a_collective(rank: int) -> Any:
    """At op level: rank 1 sends a NaN in its own all-reduce; the others receive it."""
    model = nn.Linear(4, 4)
    monitor = fastcheck.install(model, level="op", record="stats", overflow_nums=-1)
    with torch.no_grad():
        y = model(torch.ones(2, 4))
        if rank == 1:
            y = y / 0 * 0
        dist.all_reduce(y)
        model(y)
    monitor.remove()
    return [
        (e.site.op, e.verdict.name, e.reason.split(":")[0]) for e in monitor.events if e.counted
    ]


def norms_under_fsdp(rank: int) -> Any:
    """What is recorded of gradient norms, where each rank holds shards; and the norm itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fastcheck.install(model) as monitor:
        model(torch.ones(2, 8)).sum().backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
    sites = [monitor.sites[number] for number in monitor.records()["site"]]
    gradients = [(site.key, str(site)) for site in sites if site.role == "param_grad"]
    rows = [row.gradient_norm for row in monitor.step_table()]
    return (
        rows,
        [str(site) for site in sites if site.role == "grad_norm"],
        gradients,
        float(norm.full_tensor()),
    )


def saves_shards(rank: int, folder: str) -> Any:
    """A checkpoint of FSDP2's shards; returns the whole weights."""
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3))
    whole = {key: value.clone() for key, value in model.state_dict().items()}
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    dcp.save(model.state_dict(), checkpoint_id=folder)
    return whole


def seals_shards(rank: int, folder: str) -> Any:
    """A sealed checkpoint of FSDP2's shards, whose first dimension is not a multiple of the ranks',
    and what seal() does when a shard of the last rank is not finite.
    """
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 1), nn.BatchNorm1d(1))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    sealed = fastcheck.seal(folder, model, step=3, together=True)
    alone = fastcheck.seal(folder + "-alone", model) if rank == 0 else None
    with torch.no_grad():
        if rank == 1:
            local(model[0].weight)[0, 0] = float("nan")
    try:
        fastcheck.seal(folder + "-bad", model, nonfinite="refuse", together=True)
    except fastcheck.NonFiniteWeightsError as error:
        refused = str(error).splitlines()[0]
    return {
        "keys": sorted(sealed.tensors),
        "unsealed": sealed.unsealed,
        "refused": refused,
        "alone": alone and sorted(alone.unsealed),
    }


def saves_in_parts(rank: int, kind: str) -> Any:
    """As an adapter: each rank checks, and rank 0 writes. At the third checkpoint a weight of rank
    1 is not finite.
    """
    torch.manual_seed(0)
    model: Any = nn.Linear(8, 6)
    if kind == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    seals = CheckpointSeals("refuse")
    refused = ""
    with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", fastcheck.UnsealedCheckpointWarning)
        os.chdir(folder)
        for name in ("first", "second", "third"):
            if (name, rank) == ("third", 1):
                with torch.no_grad():
                    local(next(model.parameters())).view(-1)[0] = float("nan")
            try:
                seals.check(model, name, "load the one before")
            except fastcheck.NonFiniteWeightsError as error:
                refused = str(error).splitlines()[0]
                break
            if rank == 0:
                seals.write(name, model, 1)
        sealed = os.listdir()
    texts = [str(one.message) for one in caught]
    return {"warnings": texts, "refused": refused, "sealed": sealed}


def runs_a_program(rank: int, path: str) -> Any:
    """``fastcheck run path``: its exit code."""
    return main(["run", path])
