"""The functions that the ranks of the tests run, each in a process of its own."""

from __future__ import annotations

import os
import signal
import time
import warnings
import weakref
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fastcheck.monitor.distributed.agreement import RankAgreement
from fastcheck.monitor.distributed.channel import Agreed
from fastcheck.monitor.distributed.join import join_listeners
from fastcheck.utils.torch.sharding import is_sharded, local, reduce_found_inf

# rank -> step of its event
Faults = dict[int, int]


def in_step() -> None:
    """What keeps the ranks of a training together: a collective of the training's own."""
    dist.all_reduce(torch.ones(1))


def told(agreed: Optional[Agreed]) -> Any:
    return agreed and (agreed.step, agreed.rank, agreed.message.decode()[:40], agreed.together)


def steps(
    agreement: RankAgreement,
    count: int,
    faults: Faults,
    *,
    first: int = 0,
    collective: Callable[[], None] = in_step,
    before: Callable[[int], None] = lambda step: None,
) -> Any:
    """A training loop: where it was stopped, and the report; None when it was not."""
    for step in range(first, first + count):
        before(step)
        collective()
        if faults.get(agreement.rank) == step:
            text = f"report of rank {agreement.rank}, step {step}" + "." * 5000
            agreement.propose(step, text.encode())
        agreed = agreement.boundary()
        if agreed is not None:
            return step, told(agreed)
    return None


def stops(rank: int, faults: Faults, lag: int) -> Any:
    return steps(RankAgreement(lag=lag), 20, faults)


def stops_where_it_began(rank: int, began: int) -> Any:
    """As a gradient does through DDP's reduction: every rank has an event of the same step."""
    agreement = RankAgreement()
    for step in range(10):
        in_step()
        if step == 4:
            own = (b"began", 0) if rank == began else (b"arrived", 1)
            agreement.propose(step, *own)
        agreed = agreement.boundary()
        if agreed is not None:
            return step, told(agreed)
    return None


def stops_twice(rank: int) -> Any:
    agreement = RankAgreement()
    first = steps(agreement, 20, {1: 4})
    second = steps(agreement, 20, {2: 31, 3: 31}, first=30)
    return first, second, agreement.finish()


def stops_without_a_collective(rank: int) -> Any:
    """Ranks that nothing but the agreement keeps together, at different speeds."""
    agreement = RankAgreement()
    return steps(
        agreement,
        40,
        {2: 7},
        collective=lambda: None,
        before=lambda step: time.sleep(0.002 * rank),
    )


def ends_early(rank: int, closes: bool) -> Any:
    """Rank 3 has only 3 steps, and then waits for the others at a barrier, as scripts do."""
    agreement = RankAgreement()
    own = steps(agreement, 3 if rank == 3 else 20, {1: 8}, collective=lambda: None)
    if closes and rank == 3:
        agreement.close()
    dist.barrier()
    late = None if closes and rank == 3 else told(agreement.boundary())
    return own, late, agreement.is_alone


def is_busy(rank: int) -> Any:
    """Rank 2 takes its time between two boundaries, twice, and the others go ahead by some steps;
    later it has an event.
    """
    agreement = RankAgreement()

    def before(step: int) -> None:
        if rank == 2 and step in (3, 6):
            time.sleep(1.5)
        if step >= 9:
            in_step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = steps(agreement, 30, {2: 12}, collective=lambda: None, before=before)
        again = steps(agreement, 30, {0: 45}, first=40)
    return found, again, agreement.is_alone, len(caught)


def dies(rank: int, victim: int, how: str) -> Any:
    """The victim dies at step 3, by a signal; rank 1 has an event at step 12."""
    agreement = RankAgreement()

    def before(step: int) -> None:
        # The others must not be past their last step before they can notice.
        time.sleep(0.02)
        if how == "stopped" and step == 3:  # its sockets stay open
            agreement.timeout_seconds = 3.0
        if rank == victim and step == 3:
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = steps(agreement, 20_000, {1: 12}, collective=lambda: None, before=before)
    return found, [str(warning.message) for warning in caught], agreement.is_alone


def installed_on_one(rank: int) -> Any:
    """Only rank 0 watches; what the others do with process groups has to go on as ever."""
    caught: list[Any] = []
    found = None
    if rank == 0:
        agreement = RankAgreement(timeout_seconds=0.5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = steps(agreement, 5, {0: 3}, collective=lambda: None)
    group = dist.new_group([0, 1, 2, 3])
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=group)
    return found, [str(warning.message) for warning in caught], float(total)


def in_subgroups(rank: int) -> Any:
    low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
    group = low if rank < 2 else high
    agreement = RankAgreement(group)
    mine = steps(
        agreement, 10, {3: 4}, collective=lambda: dist.all_reduce(torch.ones(1), group=group)
    )
    return agreement.world_size, mine, told(agreement.finish())


def two_agreements(rank: int) -> Any:
    """One process, two monitors: each has a channel of its own."""
    one, other = RankAgreement(), RankAgreement()
    found = []
    for step in range(10):
        in_step()
        if rank == 2 and step == 5:
            other.propose(step, b"other")
        found.append((told(one.boundary()), told(other.boundary())))
    return found


def event_in_the_last_step(rank: int) -> Any:
    agreement = RankAgreement()
    during = steps(agreement, 5, {2: 4})
    return during, told(agreement.finish()), told(agreement.boundary())


def ends_one_step_before_the_others(rank: int) -> Any:
    """Rank 0 is done, and reads at its end what the others read at their next boundary."""
    agreement = RankAgreement()
    during = steps(agreement, 5, {2: 4})
    if rank == 0:
        found = told(agreement.finish())
    else:
        found = steps(agreement, 1, {}, first=5, collective=lambda: None)
    dist.barrier()
    return during, found, agreement.is_alone


def event_after_the_last_boundary(rank: int) -> Any:
    agreement = RankAgreement()
    steps(agreement, 5, {})
    if rank == 1:
        agreement.propose(5, b"late")
    found = told(agreement.finish())
    dist.barrier()
    return found, agreement.is_alone


def closes(rank: int) -> Any:
    agreement = RankAgreement()
    steps(agreement, 5, {})
    agreement.finish()
    agreement.close()
    proxy = agreement._proxy
    assert proxy is not None
    while proxy._thread.is_alive():
        proxy.join(1.0)
    return agreement.boundary(), agreement.is_alone


def goes_with_its_model(rank: int) -> Any:
    """Nobody calls close(): neither the thread nor what is under way keeps the agreement."""
    agreement = RankAgreement()
    steps(agreement, 3, {})
    proxy, gone = agreement._proxy, weakref.ref(agreement)
    del agreement
    assert proxy is not None
    while proxy._thread.is_alive():
        proxy.join(1.0)
    return gone() is None


class StopError(Exception):
    """Stands for OverflowDetected."""


def with_ddp(rank: int, faults: Faults) -> Any:
    """DDP's own collectives are under way on the default group; losses as without the agreement."""
    losses = []
    for agreement in (None, RankAgreement()):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(8, 4), bucket_cap_mb=0.0001)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(rank)
        for step in range(10):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
            if agreement is None:
                continue
            if faults.get(rank) == step:
                agreement.propose(step, b"bad")
            agreed = agreement.boundary()
            if agreed is not None:
                return step, told(agreed), losses[:10][: step + 1] == losses[10:]
    return None


class StopAfterJoin:
    def __init__(self, agreement: RankAgreement) -> None:
        self.agreement: Optional[RankAgreement] = agreement

    def at_step_boundary(self) -> None:
        assert self.agreement is not None
        raise StopError(self.agreement.boundary())


def in_join(rank: int, fault: tuple[int, int, int]) -> Any:
    """Ranks with different numbers of steps in each epoch, in torch's Join."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    agreement = RankAgreement()
    listener = StopAfterJoin(agreement)
    join_listeners.connect(listener)
    counts = []
    try:
        for epoch in range(3):
            with Join([model]):
                for step in range(3 + 2 * rank):
                    optimizer.zero_grad()
                    model(torch.ones(2, 4)).sum().backward()
                    optimizer.step()
                    if (rank, epoch, step) == fault:
                        agreement.propose(10 * epoch + step, b"bad")
                    agreed = agreement.boundary()
                    if agreed is not None:
                        raise StopError(agreed)
            counts.append(agreement._boundary_count)
    except StopError as stopped:
        return counts, told(stopped.args[0]), agreement.is_alone
    return counts, None, agreement.is_alone


def with_fsdp(rank: int, odd: int) -> Any:
    """A NaN in the shard that one rank has of a gradient: all ranks have to skip the update."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    optimizer = torch.optim.AdamW(model.parameters())
    plain = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    agreement = RankAgreement()
    words = []
    for step in range(8):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        shards = [local(parameter.grad) for parameter in model.parameters()]
        if rank == odd and step == 2:
            shards[0].view(-1)[0] = float("nan")
            agreement.propose(step, b"bad")
        word = torch.tensor(float(any(bool(shard.isnan().any()) for shard in shards)))
        own = float(word)
        reduce_found_inf(word, optimizer)
        words.append((own, float(word)))
        if not word:
            optimizer.step()
        agreed = agreement.boundary()
        if agreed is not None:
            return is_sharded(optimizer), is_sharded(plain), words, (step, told(agreed))
    return None


def store_server_dies(rank: int) -> Any:
    agreement = RankAgreement()

    def before(step: int) -> None:
        time.sleep(0.02)
        if rank == 0 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = steps(agreement, 60, {1: 50}, collective=lambda: None, before=before)
    return found, len(caught), agreement.is_alone
