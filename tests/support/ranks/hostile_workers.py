"""Trainings whose store somebody else writes to as well."""

from __future__ import annotations

import contextlib
import os
import pickle
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore

import fastcheck
from fastcheck.monitor.distributed import agreement
from fastcheck.monitor.distributed.channel import _store_of


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def _write(key: str, value: bytes) -> None:
    group = dist.group.WORLD
    assert group is not None
    PrefixStore("fastcheck/0", _store_of(group)).set(key, value.decode("latin-1"))


def entry(kind: str, path: str) -> bytes:
    run = pickle.dumps(Evil(path), protocol=0).hex().encode()
    return {
        "a pickle": b"3 1 " + run,
        "of no rank": b"3 77 " + run,
        "no words": b"\x80\x04\x95",
        "huge numbers": b"9" * 5000 + b" 0 00",
        "deep": b"0 0 " + (b"[" * 50_000).hex().encode(),
        "large": b"0 0 " + b"00" * (17 << 20),
    }[kind]


def trains(rank: int, kind: str, path: str) -> Any:
    """Steps that ended, whether the file was made, and what was warned of."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = fastcheck.install(model)
        done = 0
        for step in range(8):
            if step == 3:
                dist.barrier()
                if rank == 0:
                    _write("broken", b"\x80\xff")
                    _write("post/0", entry(kind, path))
                dist.barrier()
                # What a rank that waits would have seen.
                monitor._boundary._stop_handler.agreement._lose(RuntimeError("cut"))  # type: ignore[union-attr]  # there are several ranks
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
        monitor.remove()
    return done, os.path.exists(path), sorted({str(one.message) for one in caught})


def meets(rank: int, options: str) -> Any:
    """Options of a rank that are something else, where no rank waits long for another."""
    agreement._IDLE_SECONDS = 0.1
    agreement.RankAgreement.__init__.__kwdefaults__["timeout_seconds"] = 1.0  # type: ignore[index]  # it has defaults
    if rank == 0:
        _write("here/1", options.encode("latin-1"))
    dist.barrier()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(), contextlib.suppress(fastcheck.ConfigError):
        warnings.simplefilter("ignore")
        monitor = fastcheck.install(model)
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        monitor.remove()
    return "ended"


def gathers(rank: int, path: str) -> Any:
    """One rank sends a pickle in the place of what of_all_ranks() sends."""
    from fastcheck.utils.torch import rank as ranks

    if rank == 1:
        ranks.json.dumps = lambda value: pickle.dumps(Evil(path), protocol=0).decode()  # type: ignore[attr-defined]  # a module that is imported there
    try:
        return ranks.of_all_ranks({"rank": rank})
    except ValueError as error:
        return type(error).__name__, os.path.exists(path)


def gathers_all(rank: int) -> Any:
    from fastcheck.utils.torch.rank import of_all_ranks

    values = [None, True, {"a": [rank, "b" * rank * 1000, float("inf")]}, 2**63 + rank]
    return [of_all_ranks(value) for value in values]
