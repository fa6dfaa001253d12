"""check_replicas(): compares the parameters of data-parallel ranks bit for bit.

Every so many steps each rank computes the checksums of what it holds, on the device, and one small
all-gather over a channel of fastcheck's own (``channel.py``) brings them together. The work is
divided over three boundaries, so that no rank waits: at the boundary where it is due the checksums
are computed and their copy to the host is started; at a later boundary, when the copy is there, the
gather; at another, when the gather is there, the comparison.

Copies that differ mean that training has silently split: a bit flipped in memory, a kernel that is
not deterministic and runs on every rank by itself, a seed or a weight that was not broadcast, a
parameter that DDP does not manage.

For each group of ranks that is known to hold replicas (``replica_groups.py``) this is done by
itself, at a few boundaries (``automatic_checks``): there no rank waits for another but at the first
of them and at the end, and nothing is said where the others can't be reached. Where each rank is to
train on batches of its own, the same exchange brings the checksums of the last batches together.
"""

from __future__ import annotations

import weakref
import zlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import torch
import torch.distributed as dist

from fastcheck.backends.table import guarded_streams
from fastcheck.errors import ConfigError, plain, printable, warn
from fastcheck.record.format import RECORD_BYTES, RECORD_DTYPE
from fastcheck.statistics.functions import stats
from fastcheck.utils.grouping import grouped
from fastcheck.utils.text.layout import listed
from fastcheck.utils.torch.readable import has_memory, without_bytes
from fastcheck.utils.torch.sharding import local
from fastcheck.utils.torch.streams import DeviceStreams

from .channel import Channel, Lost, Pending
from .replica_groups import ReplicaGroup, replica_groups

_HEADER = 1
# Stands for a tensor that a rank doesn't have now: a gradient that was not computed.
_ABSENT = -1
_NAMED = 5
# The number of steps whose batches' checksums each rank tells.
_BATCHES = 8
# The boundaries of an automatic check, and each hundredth.
_FIRST_CHECKS = (1, 10)
_EVERY = 100
# The time for which it waits for other ranks at its first check and at the end.
_PATIENCE_SECONDS = 2.0


class OwnBatches(NamedTuple):
    """``last``: the checksums of the last batches of this rank, before a step, and the step of the
    last batch. ``are_one``: told the ranks that had the same batches, and how many.
    """

    last: Callable[[int, int], tuple[int, Sequence[int]]]
    are_one: Callable[[int, int, str], None]


@dataclass(frozen=True)
class ReplicaMismatch:
    """The ranks of a data-parallel group hold different numbers where they should hold the same.

    ``parameter``: the first that differs, as named by ``model.named_parameters()``; ``is_gradient``
    when it is its gradient. ``checksums``: by rank; None where a rank has no such gradient.
    ``differing_ranks``: those that differ from the majority, or all when there is none (of two
    ranks, one of the two is wrong, and it is not known which). ``others``: what else differs, in
    the same order. ``reason``: what is known of the cause. ``what``: why these ranks should hold
    the same, where they are not all of the ranks that train together.
    """

    step: int
    parameter: str
    is_gradient: bool
    differing_ranks: tuple[int, ...]
    has_majority: bool
    checksums: dict[int, Optional[int]]
    others: tuple[str, ...] = ()
    reason: str = ""
    what: str = ""

    @property
    def label(self) -> str:
        """The parameter or its gradient."""
        return f"the gradient of {self.parameter}" if self.is_gradient else self.parameter

    def __str__(self) -> str:
        lines = [f"replicas differ at step {self.step:,}: {self.label}"]
        ranks = _spell_ranks(self.differing_ranks)
        if self.has_majority:
            lines.append(f"  differs on: {ranks}; all others agree")
        else:
            lines.append(f"  differs on: {ranks}, without a majority: any of them may be wrong")
        if self.what:
            lines.append(f"  replicas:   {_spell_ranks(list(self.checksums))}, {self.what}")
        for value, holders in grouped(self.checksums, self.checksums.__getitem__).items():
            spelt = "no gradient" if value is None else f"{value:016x}"
            lines.append(f"  checksum:   {spelt} on {_spell_ranks(holders)}")
        if self.others:
            lines.append(f"  also:       {listed(self.others, _NAMED)}")
        lines.append(f"  hint:       {self._advice()}")
        return printable("\n".join(lines), keep="\n")

    def _advice(self) -> str:
        if self.reason:
            return self.reason
        if self.has_majority and not self.others:
            return (
                "one tensor on a minority of the ranks: suspect the memory or the device of "
                f"{_spell_ranks(self.differing_ranks)}, or what it alone does to the tensor; go on "
                "from the last checkpoint"
            )
        if self.others:
            return (
                "several tensors: look for what each rank does by itself (a seed, a learning rate, "
                "a parameter or a model that was not broadcast, a reduction or an update that was "
                "left out, clipping)"
            )
        return "compare both with the last checkpoint, and go on from it"


class ReplicaCheck:
    """Compares the replicas of ``model``'s parameters every ``every`` boundaries.

    Every rank of ``group`` (None: the default group) has to make a check with the same arguments,
    and to call boundary() at each of its step boundaries. A DTensor is compared when every rank of
    the group holds the same part of it; what has no bytes of its own (sparse, quantized) is not. No
    method raises; the model is held weakly.

    ``replicas``: what a check is about that nobody has asked for. ``batches``: those of ranks that
    should have batches of their own.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        group: Optional[dist.ProcessGroup] = None,
        *,
        every: int = 100,
        gradients: bool = False,
        timeout_seconds: float = 8.0,
        replicas: Optional[ReplicaGroup] = None,
        batches: Optional[OwnBatches] = None,
    ) -> None:
        self.every = every
        self.gradients = gradients
        self.timeout_seconds = timeout_seconds
        self.is_off = False
        self.replicas = replicas
        self._batches = batches
        self._model = weakref.ref(model)
        self._names: list[str] = []
        self._channel: Optional[Channel] = None
        self._is_connected = False
        self._boundary_count = 0
        self._copies: Optional[_ChecksumCopies] = None
        # The gathers under way, oldest first.
        self._gathers: deque[Pending] = deque()
        # Mismatches that were reported: each is reported once.
        self._told: set[tuple[str, tuple[int, ...]]] = set()
        try:
            self._channel = Channel(group)
        except Exception as error:
            self._switch_off(error)

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(() if self._channel is None else self._channel.ranks)

    def boundary(self, step: int) -> Optional[ReplicaMismatch]:
        """Checks at each step boundary; ``step`` is the step that ends. Returns what an earlier
        check found, once.

        Does not wait for the device, and for the other ranks only at the first check, or where they
        are a whole ``every`` behind; at most ``timeout_seconds``, and then the check switches
        itself off and warns.
        """
        return self._guarded(step, is_last=False)

    def finish(self, step: int) -> Optional[ReplicaMismatch]:
        """Waits for the comparison that is under way."""
        return self._guarded(step, is_last=True)

    def _guarded(self, step: int, is_last: bool) -> Optional[ReplicaMismatch]:
        model = self._model()
        if self.is_off or model is None:
            return None
        mismatch: Optional[ReplicaMismatch] = None
        try:
            is_due = not is_last and self._is_due()
            self._boundary_count += not is_last
            mismatch = self._advance(must_end=(is_due and self.replicas is None) or is_last)
            if is_due:
                self._connect(model)
                self._start_gather(must_wait=True)
                self._copies = _ChecksumCopies(step, self._own_batches(step), self._tensors(model))
                self._start_gather(must_wait=False)
        except Exception as error:
            self._switch_off(error)
        return mismatch

    def _is_due(self) -> bool:
        count = self._boundary_count
        if self.replicas is None:
            return count % self.every == 0
        if count not in _FIRST_CHECKS and (count == 0 or count % self.every):
            return False
        if self.replicas.are_averaged():
            self.is_off = True  # replicas that differ are meant, between two averages
            return False
        # Every rank that has opened its end comes to the first check.
        return self._is_connected or not (self._channel and self._channel.missing())

    def _advance(self, must_end: bool) -> Optional[ReplicaMismatch]:
        """Advances the comparison that is under way, without waiting."""
        channel = self._channel
        assert channel is not None
        self._start_gather(must_wait=must_end)
        mismatch: Optional[ReplicaMismatch] = None
        while self._gathers and mismatch is None and (must_end or self._gathers[0].is_complete):
            rows = channel.gathered(self._gathers.popleft(), self.timeout_seconds)
            mismatch = self._compare(channel.ranks, np.stack([row.numpy() for row in rows]))
        return mismatch

    def _start_gather(self, must_wait: bool) -> None:
        assert self._channel is not None
        copies = self._copies
        if copies is not None and (must_wait or copies.are_here()):
            self._gathers.append(self._channel.start_gather(copies.words(must_wait)))
            self._copies = None

    def _connect(self, model: torch.nn.Module) -> None:
        if self._is_connected:
            return
        assert self._channel is not None
        self._channel.connect(self.timeout_seconds)
        self._names = self._choose(model)
        own = torch.tensor([len(self._names), zlib.crc32("\n".join(self._names).encode())])
        gather = self._channel.start_gather(own)
        counts = [int(row[0]) for row in self._channel.gathered(gather, self.timeout_seconds)]
        if any(not torch.equal(row, own) for row in gather.parts):
            raise Lost(f"their models have different parameters; number by rank: {counts}")
        self._is_connected = True

    # Tensors

    def _choose(self, model: torch.nn.Module) -> list[str]:
        return [
            name
            for name, parameter in model.named_parameters()
            if (self.replicas is None or name in self.replicas.names)
            and without_bytes(local(parameter)) is None
            and has_memory(local(parameter))
            and self._is_replicated(parameter)
        ]

    def _is_replicated(self, parameter: Any) -> bool:
        """True if the ranks of the group hold the same part of the parameter."""
        placements = getattr(parameter, "placements", None)
        if not placements:
            return True
        mesh = parameter.device_mesh  # a DTensor
        return all(
            placement.is_replicate()
            or len(self.ranks & set(dist.get_process_group_ranks(mesh.get_group(dimension)))) < 2
            for dimension, placement in enumerate(placements)
        )

    def _tensors(self, model: torch.nn.Module) -> list[Optional[torch.Tensor]]:
        parameters = dict(model.named_parameters())
        chosen = [parameters[name] for name in self._names]
        tensors: list[Optional[torch.Tensor]] = [local(parameter).detach() for parameter in chosen]
        if self.gradients:
            for parameter in chosen:
                gradient = None if parameter.grad is None else local(parameter.grad)
                is_read = gradient is not None and without_bytes(gradient) is None
                tensors.append(gradient if is_read else None)
        return tensors

    def _own_batches(self, step: int) -> list[int]:
        if self._batches is None:
            return []
        last, checksums = self._batches.last(step, _BATCHES)
        return [last, *checksums] if len(checksums) == _BATCHES else [_ABSENT] * (1 + _BATCHES)

    # Comparison

    def _compare(self, ranks: Sequence[int], words: np.ndarray) -> Optional[ReplicaMismatch]:
        """``words``: int64, a row for each rank: the step, then the checksums: of the batches, if
        they are told, and of the tensors.
        """
        step = int(words[0, 0])
        if (words[:, 0] != step).any():
            steps = words[:, 0].tolist()
            raise Lost(f"they are at different steps; step by rank: {steps}")
        told = 0 if self._batches is None else 1 + _BATCHES
        if self._batches is not None:
            rows = words[:, _HEADER : _HEADER + told]
            # One batch again and again is what some benchmarks train on.
            if (rows == rows[0]).all() and len(set(rows[0, 1:].tolist())) > 1:
                self._batches.are_one(step, _BATCHES, _spell_ranks(ranks))
                self._batches = self._batches._replace(are_one=lambda *_: None)
        values = words[:, _HEADER + told :]
        differing = np.flatnonzero((values != values[0]).any(axis=0)).tolist()
        found = [self._mismatch(column, ranks, step, values) for column in differing]
        fresh = [it for it in found if (it.label, it.differing_ranks) not in self._told]
        if not fresh:
            return None
        self._told.update((mismatch.label, mismatch.differing_ranks) for mismatch in fresh)
        others = tuple(mismatch.label for mismatch in fresh[1:])
        reason = self.replicas.reason() if self.replicas is not None and others else ""
        return replace(fresh[0], others=others, reason=reason)

    def _mismatch(
        self, column: int, ranks: Sequence[int], step: int, values: np.ndarray
    ) -> ReplicaMismatch:
        of_rank = values[:, column].tolist()
        is_of_some = self.replicas is not None and len(ranks) < dist.get_world_size()
        common, count = Counter(of_rank).most_common(1)[0]
        has_majority = 2 * count > len(ranks)
        odd = [rank for rank, v in zip(ranks, of_rank) if not has_majority or v != common]
        return ReplicaMismatch(
            step=step,
            parameter=self._names[column % len(self._names)],
            is_gradient=column >= len(self._names),
            differing_ranks=tuple(odd),
            has_majority=has_majority,
            checksums={
                rank: None if v == _ABSENT else int(np.int64(v).view(np.uint64))
                for rank, v in zip(ranks, of_rank)
            },
            what=self.replicas.what if self.replicas is not None and is_of_some else "",
        )

    def _switch_off(self, error: Exception) -> None:
        self.is_off = True
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        reason = first if isinstance(error, Lost) else f"{type(error).__name__}: {first[:200]}"
        if self.replicas is not None:
            return
        warn(
            f"fastcheck: the replicas can't be compared any more ({reason}). Training is not "
            "affected."
        )


def replica_check(
    model: torch.nn.Module, group: Optional[dist.ProcessGroup], *, every: int, gradients: bool
) -> ReplicaCheck:
    """A ReplicaCheck, or ConfigError where there is nothing to compare with."""
    every = plain(every)
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ConfigError(f"every must be an int >= 1, got {every!r}")
    is_on = dist.is_available() and dist.is_initialized()
    ranks = dist.get_world_size(group) if is_on else 1
    if ranks < 2:
        got = f"a group of {ranks}" if is_on else "torch.distributed is not initialised"
        raise ConfigError(f"check_replicas() has no other rank to compare with: {got}")
    return ReplicaCheck(model, group, every=every, gradients=gradients)


def automatic_checks(
    model: torch.nn.Module, calls_of: Callable[[torch.nn.Module], int], batches: OwnBatches
) -> list[ReplicaCheck]:
    """A check of each group of ranks that is known to hold parameters of the model alike, or to
    divide its batches. ``calls_of``: how often a module was called.
    """
    return [
        ReplicaCheck(
            model,
            replicas.group,
            every=_EVERY,
            timeout_seconds=_PATIENCE_SECONDS,
            replicas=replicas,
            batches=batches if replicas.is_data_parallel else None,
        )
        for replicas in replica_groups(model, calls_of)
    ]


class _ChecksumCopies:
    """Checksums on their way to the host: one list call for each device, and one copy. ``known``:
    numbers that are there already.
    """

    def __init__(
        self, step: int, known: Sequence[int], tensors: Sequence[Optional[torch.Tensor]]
    ) -> None:
        self._words = torch.tensor([step, *known, *[_ABSENT] * len(tensors)], dtype=torch.int64)
        self._first = _HEADER + len(known)
        self._parts: list[tuple[list[int], torch.Tensor]] = []
        # Behind the copies, an event for each device.
        self._events: list[tuple[DeviceStreams, Any]] = []
        there = [(place, tensor) for place, tensor in enumerate(tensors) if tensor is not None]
        for device, held in grouped(there, lambda pair: pair[1].device).items():
            # Not in storage order: the same numbers count as the same in any memory format.
            rows = stats([tensor for _, tensor in held], order="logical").tensor
            streams = None if rows.is_cpu else guarded_streams(device)
            if streams is not None:
                on_host = streams.pinned(len(held), RECORD_BYTES)
                on_host.copy_(rows, non_blocking=True)
                event = streams.new_event()
                event.record(streams.current())
                rows = on_host
                self._events.append((streams, event))
            self._parts.append(([place for place, _ in held], rows))

    def are_here(self) -> bool:
        return all(streams.is_done(event) for streams, event in self._events)

    def words(self, must_wait: bool) -> torch.Tensor:
        """int64 on the host: the step, what was known, then a checksum for each tensor."""
        for streams, event in self._events if must_wait else ():
            streams.wait_for(event)
        for positions, rows in self._parts:
            records = np.frombuffer(rows.cpu().numpy().tobytes(), RECORD_DTYPE)
            checksums = torch.from_numpy(records["checksum"].view(np.int64).copy())
            self._words[torch.tensor(positions) + self._first] = checksums
        return self._words


def _spell_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
