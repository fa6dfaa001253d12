"""A gloo group of fastcheck's own over the group's store, and messages in the store if it fails.

Why not the user's process group: a collective that one rank doesn't join (it has fewer steps, it
died, it never called install()) would pair with the user's next collective on the other ranks and
corrupt it, and on a device it would stand in the order of the user's kernels. Why not
dist.new_group(): it is collective over the whole world, and each call moves the counters that name
later groups, so that an install() on one rank alone would make the user's own new_group() hang. The
group here is formed directly over a prefix of the same store: nothing of torch's own state changes,
its collectives have sockets and threads of their own, and so no order with respect to DDP's or
FSDP's, whatever their backend (NCCL, HCCL, CNCL, gloo). What travels is known to the host; no
device is involved.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from fastcheck._version import __version__
from fastcheck.utils.grouping import grouped
from fastcheck.utils.text.layout import listed

# Between two looks at the store while a reduction is not complete.
_SLICE = timedelta(milliseconds=25)
_POLL_SECONDS = 0.01
# A reduction stays open for as long as some rank is busy between two boundaries (it saves a
# checkpoint, it evaluates); how long anyone waits for it is decided by the waiting rank.
_OPEN = timedelta(days=7)

# The number of channels that this process has opened over a group, for their names.
_opened: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


# The steps that fit an int64 beside the rank, below its sign.
_STEP_LIMIT = 1 << 42
_RANK_LIMIT = 1 << 20
# The bytes of a message, and of a rank's options. Whoever reaches the port of the store may write
# to it.
_MOST_BYTES, _MOST_OPTION_BYTES = 16 << 20, 64 << 10
# The number of reductions by which a rank can be ahead of another when they leave a Join.
_MOST_AHEAD = 1 << 16


@dataclass(frozen=True)
class Agreed:
    """The ranks stop. ``message`` is what rank ``rank`` gave propose() for ``step``; empty when it
    was lost with the rank. ``together``: it came over the channel, to all ranks.
    """

    step: int
    rank: int
    message: bytes
    together: bool


def encode(step: int, rank: int) -> int:
    """Larger for an earlier step, then for a lower rank; never 0."""
    steps_left = _STEP_LIMIT - min(step, _STEP_LIMIT - 1)
    return steps_left * _RANK_LIMIT + (_RANK_LIMIT - 1 - rank)


def decode(code: int) -> tuple[int, int]:
    steps_left, rank = divmod(code, _RANK_LIMIT)
    return _STEP_LIMIT - steps_left, _RANK_LIMIT - 1 - rank


class Lost(Exception):  # noqa: N818  (not an error: the channel has to be closed)
    """The other ranks can't be reached over this channel any more; ``str()`` gives the reason."""


@dataclass(frozen=True)
class Pending:
    """A collective under way. ``parts``: int64 on the CPU, right once ``work`` is done."""

    parts: list[torch.Tensor]
    work: Any

    @property
    def is_complete(self) -> bool:
        """True if the work has ended, well or not; only waiting for it tells which."""
        return bool(self.work.is_completed())


class Channel:
    """The end of this rank of a channel among the ranks of a group (None: the default group).
    ``ranks`` are the group's ranks by their number in the world, ``index`` is this rank's position
    among them.

    The constructor uses the store once and does not wait; connect() waits. Every method but
    the constructor raises Lost, or whatever torch raises, when the others can't be reached.
    """

    def __init__(
        self, group: Optional[dist.ProcessGroup], options: Optional[Mapping[str, object]] = None
    ) -> None:
        whole: Any = dist.group.WORLD
        group = whole if group is None else group
        self.ranks: list[int] = list(dist.get_process_group_ranks(group))
        self.index: int = dist.get_rank(group)
        number = _opened.get(group, 0)
        _opened[group] = number + 1
        store = _store_of(group)
        # A client of its own: another thread may be waiting inside the group's, and hold its lock.
        with contextlib.suppress(Exception):
            store = store.clone()
        self._store = PrefixStore(f"fastcheck/{number}", store)
        self._gloo: Any = None
        self._needed: Optional[int] = None
        self._posts_seen = 0
        self._keys = [f"here/{index}" for index in range(len(self.ranks))]
        shown = {name: repr(value) for name, value in (options or {}).items()}
        self._store.set(self._keys[self.index], json.dumps({"fastcheck": __version__, **shown}))

    # Presence of the ranks

    def missing(self) -> list[int]:
        """The ranks that have not opened their end."""
        if self._store.check(self._keys):
            return []
        return [rank for rank, key in zip(self.ranks, self._keys) if not self._store.check([key])]

    def are_all_here(self) -> bool:
        """True if every rank had opened its end when the first of them asked: the same on every
        rank.
        """
        answer = "no" if self.missing() else "yes"
        return bool(self._store.compare_set("all here", "", answer) == b"yes")

    def wait_for_all(self, timeout_seconds: float) -> list[int]:
        """Returns when every rank has opened its end, or those that have not by then."""
        deadline = time.monotonic() + timeout_seconds
        missing = self.missing()
        while missing and time.monotonic() < deadline:
            self._raise_if_broken()
            time.sleep(_POLL_SECONDS)
            missing = self.missing()
        return missing

    def difference(self) -> str:
        """The options in which the ranks that are there differ, in one line; empty where they
        don't.
        """
        given = {
            rank: _options(self._store.get(key))
            for rank, key in zip(self.ranks, self._keys)
            if self._store.check([key])
        }
        differences = []
        for name in dict.fromkeys(name for options in given.values() for name in options):
            values = {rank: str(options.get(name)) for rank, options in given.items()}
            by_value = grouped(values, values.__getitem__)
            if len(by_value) > 1:
                parts = [f"{value} on {spell(ranks)}" for value, ranks in by_value.items()]
                differences.append(f"{name} is {' and '.join(parts)}")
        return "; ".join(differences)

    # The gloo group

    def connect(self, timeout_seconds: float) -> None:
        """Waits until every rank has opened its end, and forms the group."""
        deadline = time.monotonic() + timeout_seconds
        missing = self.wait_for_all(timeout_seconds)
        if missing:
            raise Lost(f"{spell(missing)} did not call fastcheck.install() on this process group")
        difference = self.difference()
        if difference:
            raise Lost(f"they differ: {difference}")
        left = max(1.0, deadline - time.monotonic())
        self._gloo = dist.ProcessGroupGloo(
            PrefixStore("gloo", self._store),
            self.index,
            len(self.ranks),
            timeout=timedelta(seconds=left),
        )
        # Its destructor waits for what is under way, holding the interpreter's lock: a rank that
        # raises would wait for the others, and they for it. Released only by close().
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))

    def start_max(self, value: int) -> Pending:
        """Starts a MAX all-reduce of an int64; returns at once."""
        tensor = torch.tensor([value], dtype=torch.int64)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        options.timeout = _OPEN
        return Pending([tensor], self._gloo.allreduce([tensor], options))

    def highest(self, pending: Pending, number: int, timeout_seconds: float) -> int:
        """The result of start_max(). ``number``: what this reduction is called in is_awaited()."""
        self._wait(pending.work, timeout_seconds, number)
        return int(pending.parts[0])

    def exchange(self, message: bytes, root: int, timeout_seconds: float) -> bytes:
        """The bytes of rank ``root`` on every rank; returns when every rank has them."""
        index = self.ranks.index(root)
        size = torch.tensor([len(message)], dtype=torch.int64)
        self._broadcast(size, index, timeout_seconds)
        if not 0 <= int(size) <= _MOST_BYTES:
            raise Lost(f"rank {root} has a message of {int(size):,} bytes")
        payload = torch.zeros(int(size), dtype=torch.uint8)
        if index == self.index and message:
            payload.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        if len(payload):
            self._broadcast(payload, index, timeout_seconds)
        # Whoever has the message may end its process: not before everybody has it.
        self._wait(self.start_max(0).work, timeout_seconds)
        return bytes(payload.numpy().tobytes())

    def start_gather(self, values: torch.Tensor) -> Pending:
        """Starts an all-gather of int64 values on the CPU, as many on every rank; returns at
        once.
        """
        parts = [torch.zeros_like(values) for _ in self.ranks]
        distributed: Any = dist.distributed_c10d  # its stub leaves the options out
        options = distributed.AllgatherOptions()
        options.timeout = _OPEN
        return Pending(parts, self._gloo.allgather([parts], [values], options))

    def gathered(self, pending: Pending, timeout_seconds: float) -> list[torch.Tensor]:
        """The values of every rank, in the order of ``ranks``."""
        self._wait(pending.work, timeout_seconds)
        return pending.parts

    def close(self) -> None:
        """Gives the group back. Only when nothing is under way on it."""
        gloo, self._gloo = self._gloo, None
        if gloo is not None:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(gloo))

    def _broadcast(self, tensor: torch.Tensor, index: int, timeout_seconds: float) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = index
        options.rootTensor = 0
        options.timeout = _OPEN
        self._wait(self._gloo.broadcast([tensor], options), timeout_seconds)

    def _wait(self, work: Any, timeout_seconds: float, number: Optional[int] = None) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not work.is_completed():
            try:
                work.wait(_SLICE)
            except RuntimeError:
                # The slice is over, or the collective has failed; only the first leaves it open.
                if work.is_completed():
                    break
            else:
                break
            self._raise_if_broken()
            if time.monotonic() > deadline:
                raise Lost(f"no answer for {timeout_seconds:g} seconds")
            if number is not None:
                self._store.set("needed", str(number))
        work.wait()

    # Notes in the store

    def is_awaited(self, number: int) -> bool:
        """True if some rank waits for this rank to join reduction ``number``."""
        if self._needed is None and not self._store.check(["needed"]):
            return False
        self._needed = int(self._store.get("needed"))
        return self._needed >= number

    def mark_broken(self, reason: str) -> None:
        """Tells the others not to wait: a rank whose neighbours are alive would not notice."""
        self._store.set("broken", reason)

    def post(self, step: int, rank: int, message: bytes) -> None:
        """Leaves a message for ranks that can't be reached otherwise; only the first message
        counts.
        """
        if self._store.add(f"claim/{self._posts_seen}", 1) == 1:
            # A str, as every version of torch takes it.
            self._store.set(f"post/{self._posts_seen}", f"{step} {rank} {message.hex()}")

    def posted(self, timeout_seconds: float = 0.0) -> Optional[Agreed]:
        """The message that was posted since the last message seen, if any.

        Raises:
            ValueError: it is no message of a rank.
        """
        key = f"post/{self._posts_seen}"
        deadline = time.monotonic() + timeout_seconds
        while not self._store.check([key]):
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_SECONDS)
        self._posts_seen += 1
        match = re.fullmatch(rb"([0-9]{1,12}) ([0-9]{1,7}) ([0-9a-f]*)", self._store.get(key))
        if match is None or int(match[2]) not in self.ranks or len(match[3]) > 2 * _MOST_BYTES:
            raise ValueError(f"no rank has written {key}")
        message = bytes.fromhex(match[3].decode())
        return Agreed(int(match[1]), int(match[2]), message, together=False)

    def highest_posted(self, occasion: int, number: int, timeout_seconds: float) -> int:
        """The highest number that any rank gives on this occasion; waits until all have given a
        number.
        """
        self._store.set(f"at/{occasion}/{self.index}", str(number))
        keys = [f"at/{occasion}/{index}" for index in range(len(self.ranks))]
        deadline = time.monotonic() + timeout_seconds
        while not self._store.check(keys):
            self._raise_if_broken()
            if time.monotonic() > deadline:
                raise Lost(f"no answer for {timeout_seconds:g} seconds")
            time.sleep(_POLL_SECONDS)
        highest = max(int(self._store.get(key)) for key in keys)
        if highest > number + _MOST_AHEAD:
            raise Lost(f"one of them has joined {highest:,} reductions, this one {number:,}")
        return highest

    def close_one(self) -> None:
        """Counts this rank among those that are done."""
        if self._store.add("closed", 1) == len(self.ranks):
            self._store.set("all_closed", "1")

    @property
    def all_closed(self) -> bool:
        return bool(self._store.check(["all_closed"]))

    def _raise_if_broken(self) -> None:
        if self._store.check(["broken"]):
            raise Lost(self._store.get("broken")[:_MOST_OPTION_BYTES].decode(errors="replace"))


def _options(text: bytes) -> dict[str, str]:
    """The options that a rank has written of itself.

    Raises:
        ValueError, RecursionError: something else.
    """
    options = json.loads(text) if len(text) <= _MOST_OPTION_BYTES else None
    if not isinstance(options, dict) or not all(
        isinstance(value, str) for value in options.values()
    ):
        raise ValueError("what a rank writes of its options is something else")
    return options


def _store_of(group: dist.ProcessGroup) -> Any:
    if hasattr(group, "get_group_store"):
        with contextlib.suppress(Exception):
            return group.get_group_store()
    return dist.distributed_c10d._world.pg_map[group][1]


def spell(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 1, 2``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {listed(ranks, 8, ', ...')}"
