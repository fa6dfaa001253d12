"""Runs a function as several gloo ranks, each a process of its own, and brings back what they
returned.

The processes come from a fork server that has torch imported already. A set of ranks that is not
done in time is killed, and the test fails with what each rank wrote: a guard against hanging, no
speed limit.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from typing import Any, Callable, NamedTuple, Optional

import pytest

GUARD_SECONDS = 600.0

_context = multiprocessing.get_context("forkserver")
# What is slow to import, and starts no thread.
_context.set_forkserver_preload(
    ["fastcheck", "pytest", "torch._dynamo", "torch.distributed.fsdp", "torch.nn.parallel"]
)


class Rank(NamedTuple):
    """How one rank ended. ``value``: what its function returned, None when it did not return."""

    exitcode: Optional[int]
    value: Any
    output: str


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 4,
    dead: tuple[int, ...] = (),
    store: str = "file",
) -> list[Rank]:
    """Calls ``function(rank, *args)`` in every rank, with the default process group initialised.

    Ranks in ``dead`` are expected to be killed; those that are still there when the others have
    ended are. Any other rank must end with exit code 0. ``store``: "file", or "tcp" (rank 0 serves
    it).
    """
    with tempfile.TemporaryDirectory() as directory:
        processes = [
            _context.Process(
                target=_child, args=(rank, world_size, directory, store, function, args)
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + GUARD_SECONDS
        living = [process for rank, process in enumerate(processes) if rank not in dead]
        for process in living:
            process.join(max(0.0, deadline - time.monotonic()))
        hanging = [rank for rank, process in enumerate(processes) if process in living]
        hanging = [rank for rank in hanging if processes[rank].is_alive()]
        for process in processes:
            process.kill()
            process.join()
        ranks = [
            Rank(process.exitcode, _value(directory, rank), _output(directory, rank))
            for rank, process in enumerate(processes)
        ]
    failed = [r for r in range(world_size) if r not in dead and ranks[r].exitcode != 0]
    if hanging or failed:
        told = "\n".join(f"--- rank {n}\n{rank.output}" for n, rank in enumerate(ranks))
        pytest.fail(f"ranks that hang: {hanging}; ranks that failed: {failed}\n{told}")
    return ranks


def values(ranks: list[Rank]) -> list[Any]:
    return [rank.value for rank in ranks]


def _child(
    rank: int,
    world_size: int,
    directory: str,
    store: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    gc.freeze()  # a collection would go through what the server has imported, and copy its pages
    # At the level of the process: what C++ writes is part of the story.
    out = os.open(os.path.join(directory, f"out{rank}"), os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    _wait_for_slow_ranks()
    try:
        dist.init_process_group(
            "gloo",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=GUARD_SECONDS),
            **_rendezvous(rank, world_size, directory, store),
        )
        value = function(rank, *args)
        with open(os.path.join(directory, f"value{rank}"), "wb") as file:
            pickle.dump(value, file)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # As a training script ends: no rank waits for another.
    os._exit(0)


def _wait_for_slow_ranks() -> None:
    """A rank that the machine holds up is not given up. Tests of ranks that do not answer say
    themselves how long they are waited for.
    """
    from fastcheck.monitor.distributed import agreement, join, replicas

    join._MEETING_SECONDS = replicas._PATIENCE_SECONDS = GUARD_SECONDS
    agreement._POST_SECONDS = GUARD_SECONDS
    for kind in (agreement.RankAgreement, replicas.ReplicaCheck):
        kind.__init__.__kwdefaults__["timeout_seconds"] = GUARD_SECONDS  # type: ignore[index]  # it has defaults


def _rendezvous(rank: int, world_size: int, directory: str, store: str) -> dict[str, Any]:
    if store == "file":
        return {"init_method": f"file://{directory}/store"}
    import torch.distributed as dist

    path = os.path.join(directory, "port")
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, world_size, True, wait_for_workers=False)
        with open(path + ".new", "w") as file:
            file.write(str(server.port))
        os.rename(path + ".new", path)
        return {"store": server}
    while not os.path.exists(path):
        time.sleep(0.01)
    with open(path) as file:
        return {"store": dist.TCPStore("127.0.0.1", int(file.read()), world_size, False)}


def _value(directory: str, rank: int) -> Any:
    try:
        with open(os.path.join(directory, f"value{rank}"), "rb") as file:
            return pickle.load(file)
    except FileNotFoundError:
        return None


def _output(directory: str, rank: int) -> str:
    try:
        with open(os.path.join(directory, f"out{rank}"), errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""
