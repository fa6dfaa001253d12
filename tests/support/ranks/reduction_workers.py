"""Training runs under DistributedDataParallel, of which the reduction of gradients is watched."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastcheck

# The watched parameters have their turns in steps 1 to 12, and then in one of eight.
STEPS, SPOILT = 50, 48


def trains(rank: int, kind: str, watch: bool = True) -> Any:
    """``kind``: ``own`` batches, the ``same`` on all ranks, ``spoilt`` (rank 1 has a batch that is
    too large in one step), ``accumulated`` over two, ``clipped``, ``unreduced`` (in no_sync()).

    The ratios that were read and those computed beside them, the events of the kind, the warnings,
    and the weights.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    local: dict[str, torch.Tensor] = {}
    for name, parameter in net.named_parameters():

        def keep(p: torch.Tensor, name: str = name) -> None:
            assert p.grad is not None
            local[name] = p.grad.detach().clone()

        parameter.register_post_accumulate_grad_hook(keep)
    model = DistributedDataParallel(net, gradient_as_bucket_view=kind == "clipped")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(0 if kind == "same" else rank)
    expected = []
    options = fastcheck.Watch(window=32, warm_up=16) if watch else False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = fastcheck.install(model, watch=options)
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(2 if kind == "accumulated" else 1):
                x = torch.randn(64, 8) * (1e3 if (kind, rank, step) == ("spoilt", 1, SPOILT) else 1)
                is_last = part == 1 or kind not in ("accumulated", "unreduced")
                with contextlib.nullcontext() if is_last else model.no_sync():
                    model(x).square().mean().backward()
            expected.append(
                {
                    f"module.{name}": float(local[name].norm() / p.grad.norm())
                    for name, p in net.named_parameters()
                    if p.grad is not None
                }
            )
            if kind == "clipped":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
        hooks = [len(p._post_accumulate_grad_hooks or ()) for p in net.parameters()]
        monitor.remove()
    left = [len(p._post_accumulate_grad_hooks or ()) for p in net.parameters()]
    read = []
    for record in monitor.records():
        site = monitor._session.sites[int(record["site"])]
        if site.role == "reduction":
            read.append((int(record["step"]), site.key, float(record["sum"])))
    events = [e for e in monitor.watch.events if e.kind == "reduction"] if watch else []
    return {
        "read": [(step, key, value, expected[step][key]) for step, key, value in read],
        "events": [(e.step, e.value, e.is_warning, e.text) for e in events],
        "warned": [str(one.message) for one in caught if "reduction" in str(one.message)],
        "hooks": (sum(hooks), sum(left)),
        "weights": [p.tolist() for p in net.parameters()],
    }


def gradients_without_a_group(rank: int) -> Any:
    """A model that no DistributedDataParallel holds is read no more than by one rank."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = fastcheck.install(model, watch=True)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    monitor.remove()
    return {site.role for site in monitor._session.sites} & {"reduction"}
