"""Agreement of several ranks to stop at the same step boundary for the same event.

At each step boundary every rank starts an asynchronous MAX reduction of one integer over the
channel (channel.py), "first event: step, rank", and reads the reduction that it started ``lag``
boundaries before. MAX picks the earliest step, and reduction n means the same on every rank, so all
stop at the same boundary. There the ranks gather what each of them has proposed by then, and the
report of the event that comes first (propose()) is sent to all.

What a boundary costs: about 30 us to start a reduction, and nothing to read a complete reduction.
Under DDP, FSDP, tensor or pipeline parallelism it always is, but for the latency of the network: no
rank gets through step n+1 before every rank has passed boundary n and so has joined reduction n.

A rank that is busy elsewhere (it waits at a barrier, it saves a checkpoint, its training is over)
is replaced by a ProxyThread: when others wait for it, and it has not been at a boundary for
_IDLE_SECONDS, the thread joins in its place, once for each boundary that it is late. In torch's
Join, whose ranks have different numbers of steps, the thread joins at once, and all ranks go on
with the same number.

A rank that dies is noticed through its closed sockets; a rank that doesn't answer at all within the
timeout is given up. The other ranks warn once that they watch alone, and from then on post their
events in the store: they still stop for the same event, each at its next boundary.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Callable, Optional

import torch
import torch.distributed as dist

from fastcheck.errors import warn

from .channel import Agreed, Channel, Lost, Pending, decode, encode


class ProxyThread:
    """Runs ``watched.poll()`` from its own thread until stop(), or until ``watched`` is gone: it is
    held weakly.
    """

    def __init__(self, watched: RankAgreement, first_seconds: float) -> None:
        # A SimpleQueue, whose put() the garbage collector may call in the middle of anything.
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_run,
            args=(weakref.ref(watched), first_seconds, self._wake),
            name="fastcheck-proxy",
            daemon=True,
        )
        weakref.finalize(watched, self._wake.put, False)
        _live.add(self)
        self._thread.start()

    def wake(self) -> None:
        """Calls poll() now."""
        self._wake.put(True)

    def stop(self) -> None:
        """poll() is not called again. Does not wait for a call that is under way."""
        self._wake.put(False)

    def join(self, timeout_seconds: float) -> None:
        """Waits for the end of the thread."""
        self._thread.join(timeout_seconds)


_live: weakref.WeakSet[ProxyThread] = weakref.WeakSet()


def _run(watched: weakref.ref[RankAgreement], wait: float, wake: queue.SimpleQueue[bool]) -> None:
    while True:
        with contextlib.suppress(queue.Empty):
            if not wake.get(timeout=wait):
                return
        # Held only while it polls, so that it can go with its model.
        polled = watched()
        if polled is None:
            return
        wait = polled.poll()
        del polled


@atexit.register
def _end_all() -> None:
    """A thread that comes back from C++ while the interpreter goes down would abort the process."""
    for thread in list(_live):
        thread.stop()
        thread.join(2.0)


# The proxy thread joins for a rank that has not been at a boundary for this long.
_IDLE_SECONDS = 1.0
# The interval at which the proxy thread polls whether its rank is awaited, before it was and after.
_POLL_SECONDS = 0.5
_BUSY_POLL_SECONDS = 0.02
# The time for which it polls often after it was awaited: a step of the others, perhaps.
_NEEDED_SECONDS = 2.0

# The time for which a message that must be in the store is waited for.
_POST_SECONDS = 2.0

# The step and the priority of a rank that has proposed nothing.
_NOTHING = (2**63 - 1, 2**63 - 1)


class Proposals:
    """The proposals of a rank to stop: the messages by step and priority. Any thread may add a
    proposal.
    """

    def __init__(self) -> None:
        self.messages: dict[tuple[int, int], bytes] = {}
        self.sent: Optional[tuple[int, int]] = None

    @property
    def first(self) -> tuple[int, int]:
        return min(list(self.messages), default=_NOTHING)


class Reductions:
    """The reductions that this rank has joined, and the first event among those it has read.
    ``lag``: how many may be under way.
    """

    def __init__(self, lag: int) -> None:
        self.lag = lag
        # The reductions that were not read, oldest first; the first has number read_count.
        self.pending: deque[Pending] = deque()
        self.read_count = 0
        # The first event, and the number of the reduction that brought it.
        self.code = 0
        self._code_number = 0

    @property
    def next_number(self) -> int:
        return self.read_count + len(self.pending)

    @property
    def is_full(self) -> bool:
        return len(self.pending) > self.lag

    @property
    def are_over(self) -> bool:
        """Every rank has joined those that the event belongs to, and no other."""
        return self.next_number > self._code_number + self.lag

    def read(self, channel: Channel, timeout_seconds: float) -> None:
        """Waits for the oldest."""
        number = self.read_count
        code = channel.highest(self.pending[0], number, timeout_seconds)
        self.pending.popleft()
        self.read_count += 1
        if code and not self.code:
            self._code_number = number
        self.code = max(self.code, code)


class Presence:
    """The times when a rank was at a boundary last, and when others waited for it; ``is_away``: it
    is in a section in which the proxy thread joins for it at once; ``are_all_here``: whether every
    rank has an agreement, once a rank has asked.
    """

    def __init__(self) -> None:
        self.seen_at = time.monotonic()
        self.needed_at = 0.0
        self.is_away = False
        self.are_all_here: Optional[bool] = None

    @property
    def idle_in(self) -> float:
        """The seconds until the rank is taken to be busy elsewhere."""
        return 0.0 if self.is_away else self.seen_at + _IDLE_SECONDS - time.monotonic()


class RankAgreement:
    """Makes the ranks of a process group stop together. One per monitor; every rank of the group
    has to make an agreement, and those of several monitors in the same order.

    ``group``: None is the default group. ``lag``: how many boundaries later a reduction is read.
    ``timeout_seconds``: how long a rank waits for an answer before it goes on alone. ``channel``:
    this rank's end, where it has been opened.

    Making an agreement does not wait; the first boundary() waits until all ranks are there. No
    method raises, and none waits for a device. boundary() may be called from one thread only.
    """

    def __init__(
        self,
        group: Optional[dist.ProcessGroup] = None,
        *,
        lag: int = 1,
        timeout_seconds: float = 8.0,
        channel: Optional[Channel] = None,
    ) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size(group)
        self.timeout_seconds = timeout_seconds
        self.is_alone = False
        self._lock = threading.RLock()
        self._channel: Optional[Channel] = None
        self._is_closed = False
        self._proposals = Proposals()
        self._reductions = Reductions(lag)
        # This rank's own boundaries: the next boundary joins the reduction of this number, if the
        # proxy thread has not.
        self._boundary_count = 0
        # The agreement that the proxy thread has read, for the next boundary.
        self._agreed: Optional[Agreed] = None
        self._warning = ""
        self._presence = Presence()
        self._join_count = 0
        # Since the ranks are connected.
        self._proxy: Optional[ProxyThread] = None
        try:
            self._channel = Channel(group) if channel is None else channel
        except Exception as error:
            self._lose(error)

    @property
    def has_news(self) -> bool:
        """The proxy thread has read an agreement to stop; boundary() returns it."""
        return self._agreed is not None

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def are_all_here(self) -> bool:
        """True if every rank had made an agreement when the first of them called this: the same on
        every rank that reaches the store. Asks it once.
        """
        presence = self._presence
        if presence.are_all_here is None:
            presence.are_all_here = True
            with self._lock, contextlib.suppress(Exception):
                presence.are_all_here = self._channel is not None and self._channel.are_all_here()
        return presence.are_all_here

    def propose(self, step: int, message: bytes = b"", priority: int = 0) -> None:
        """Proposes that all ranks stop, because of an event of ``step``.

        The earliest step holds; among events of one step, on whatever rank, the lowest ``priority``
        (any int64 of at least 0), then the lowest rank.
        """
        # Without the lock, which boundary() holds while it waits.
        self._proposals.messages.setdefault((step, priority), message)

    def boundary(self) -> Optional[Agreed]:
        """Every rank calls this at each of its step boundaries. Not None: stop here.

        Waits at the first call for all ranks, and later only for ranks that are a step behind; at
        most ``timeout_seconds``.
        """
        return self._guarded(self._boundary)

    def finish(self) -> Optional[Agreed]:
        """The training is over: waits for what the last boundaries have started, and closes.

        Not None: the ranks agree that there was an event in the last steps.
        """
        agreed = self._guarded(self._finish)
        self.close()
        return agreed

    def close(self) -> None:
        """Ends the part of this rank; the others go on without waiting for it. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            try:
                if self._channel is not None and not self.is_alone:
                    if self._proxy is not None:
                        self._channel.close_one()
                    else:
                        self._channel.mark_broken(f"rank {self.rank} ended before its first step")
            except Exception as error:
                self._lose(error)
            if self._proxy is not None:
                self._proxy.wake()

    def _guarded(self, method: Callable[[], Optional[Agreed]]) -> Optional[Agreed]:
        with self._lock:
            if self._is_closed:
                return None
            try:
                agreed = self._alone() if self.is_alone else method()
            except Exception as error:
                self._lose(error)
                agreed = self._alone()
            self._presence.seen_at = time.monotonic()
            warning, self._warning = self._warning, ""
        if warning:
            warn(warning)
        return agreed

    # Together

    def _boundary(self) -> Optional[Agreed]:
        self._connect()
        agreed, self._agreed = self._agreed, None
        if agreed is not None:
            return agreed
        number = self._boundary_count
        self._boundary_count += 1
        self._join(number)
        reductions = self._reductions
        while reductions.read_count <= number - reductions.lag and not reductions.code:
            self._read()
        return self._settle()

    def _finish(self) -> Optional[Agreed]:
        agreed, self._agreed = self._agreed, None
        if agreed is not None or self._proxy is None:
            return agreed
        reductions, proposals = self._reductions, self._proposals
        if proposals.messages and proposals.sent != proposals.first:
            # No boundary came after it.
            self._join(reductions.next_number)
        while reductions.pending and not reductions.code:
            self._read()
        return self._settle()

    def _connect(self) -> None:
        if self._proxy is not None:
            return
        assert self._channel is not None
        self._channel.connect(self.timeout_seconds)
        self._proxy = ProxyThread(self, _IDLE_SECONDS)

    def _join(self, number: int) -> None:
        """Joins the reductions up to ``number``, unless there was an event. Before it joins number
        n it has read n-1-lag: see _settle().
        """
        reductions = self._reductions
        while reductions.next_number <= number and not reductions.code:
            if reductions.is_full:
                self._read()
            else:
                self._start()

    def _start(self) -> None:
        assert self._channel is not None
        code = 0
        if self._proposals.messages:
            self._proposals.sent = self._proposals.first
            code = encode(self._proposals.sent[0], self.rank)
        self._reductions.pending.append(self._channel.start_max(code))

    def _read(self) -> None:
        assert self._channel is not None
        self._reductions.read(self._channel, self.timeout_seconds)

    def _settle(self) -> Optional[Agreed]:
        """Reads what every rank has started by the time of a reduction that brought an event.

        A rank that reads reduction n at a boundary has started n+lag and no more; a rank that reads
        it in finish() starts what is missing. So all have read the same reductions, and nothing is
        left under way.
        """
        if not self._reductions.code:
            return None
        while not self._reductions.are_over:
            self._start()
        while self._reductions.pending:
            self._read()
        return self._conclude()

    def _conclude(self) -> Agreed:
        assert self._channel is not None
        step, rank = decode(self._reductions.code)
        self._reductions.code = 0
        self._boundary_count = self._reductions.next_number
        place, messages = self._proposals.first, self._proposals.messages
        own = messages.get(place, b"") if rank == self.rank else b""
        try:
            pending = self._channel.start_gather(torch.tensor(place, dtype=torch.int64))
            places = self._channel.gathered(pending, self.timeout_seconds)
            (step, _), index = min((tuple(row.tolist()), i) for i, row in enumerate(places))
            rank = self._channel.ranks[index]
            own = messages.get(place, b"") if rank == self.rank else b""
            message = self._channel.exchange(own, rank, self.timeout_seconds)
            agreed = Agreed(step, rank, message, together=True)
        except Exception as error:
            self._lose(error)
            if rank == self.rank:
                self._post(step, own)
            agreed = self._posted(_POST_SECONDS) or Agreed(step, rank, own, together=False)
        messages.clear()
        return agreed

    # Alone

    def _alone(self) -> Optional[Agreed]:
        """Looks in the store for the report of another rank that continues alone."""
        agreed, self._agreed = self._agreed, None
        agreed = agreed or self._posted()
        messages = self._proposals.messages
        if agreed is None and messages:
            first = self._proposals.first
            step, own = first[0], messages[first]
            self._post(step, own)
            # Not always its own: another rank may have been first.
            agreed = self._posted(_POST_SECONDS) or Agreed(step, self.rank, own, together=False)
        if agreed is not None:
            messages.clear()
        return agreed

    def _post(self, step: int, message: bytes) -> None:
        if self._channel is None:
            return
        try:
            self._channel.post(step, self.rank, message)
        except Exception:
            self._channel = None

    def _posted(self, timeout_seconds: float = 0.0) -> Optional[Agreed]:
        if self._channel is None:
            return None
        try:
            return self._channel.posted(timeout_seconds)
        except ValueError as error:
            self._warning = f"fastcheck: a message in the ranks' store was left out: {error}."
            return None
        except Exception:
            # The store is gone with the process that served it: from here on really alone.
            self._channel = None
            return None

    def _lose(self, error: Exception) -> None:
        """Warns once that the others can't be reached, and marks the channel broken for those that
        still wait."""
        if self.is_alone:
            return
        self.is_alone = True
        self._stop_proxy()
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        if not isinstance(error, Lost):
            # Without the source line that gloo starts with.
            reason = f"the connection failed: {re.sub(r'^.[^]]*[.]cc:[0-9]+. ', '', reason)[:120]}"
        if self._channel is not None:
            try:
                self._channel.mark_broken(reason)
            except Exception:
                self._channel = None
        self._warning = (
            f"fastcheck: rank {self.rank} can't agree with the other ranks ({reason}). Training "
            "is not affected; from now on this rank watches alone, and may stop alone."
        )

    # The proxy thread

    @contextlib.contextmanager
    def absent(self, ranks: Optional[Sequence[int]] = None) -> Iterator[None]:
        """A section in which the proxy thread joins for this rank at once.

        ``ranks``: who else is in such a section, and leaves it at the same time. When these are all
        ranks, they wait for each other at its end, and go on with the same number.
        """
        is_whole = False
        try:
            with self._lock:
                self._presence.is_away = True
                if self._proxy is not None:
                    self._proxy.wake()
            yield
            is_whole = self._channel is not None and list(ranks or ()) == self._channel.ranks
        finally:
            with self._lock:
                self._presence.is_away = False
                self._presence.seen_at = time.monotonic()
                is_with_others = self._proxy is not None and not self.is_alone
                if is_whole and is_with_others and not self._is_closed:
                    try:
                        self._align()
                    except Exception as error:
                        self._lose(error)

    def _align(self) -> None:
        assert self._channel is not None
        self._join_count += 1
        number = self._channel.highest_posted(
            self._join_count, self._reductions.next_number, self.timeout_seconds
        )
        self._join(number - 1)
        self._agreed = self._agreed or self._settle()
        self._boundary_count = self._reductions.next_number

    def poll(self) -> float:
        """Called by the proxy thread; returns the seconds until the next call. Never raises, never
        waits long.
        """
        left = 0.0 if self._is_closed else self._presence.idle_in
        if left > 0:
            return left
        if not self._lock.acquire(blocking=False):
            return _BUSY_POLL_SECONDS
        try:
            return _POLL_SECONDS if self.is_alone else self._poll()
        except Exception as error:
            self._lose(error)
            return 0.0
        finally:
            self._lock.release()

    def _poll(self) -> float:
        assert self._channel is not None
        if self._agreed is not None and not self._is_closed:
            return _POLL_SECONDS
        reductions, presence = self._reductions, self._presence
        if not reductions.is_full and self._channel.is_awaited(reductions.next_number):
            presence.needed_at = time.monotonic()
            self._start()
        elif self._is_closed and self._channel.all_closed:
            if all(reduction.is_complete for reduction in reductions.pending):
                reductions.pending.clear()
                self._channel.close()
                self._stop_proxy()
            return _BUSY_POLL_SECONDS
        # The loop does what a boundary does, but never waits: the others may need the whole of a
        # step to join.
        while (
            len(reductions.pending) > (0 if reductions.code else reductions.lag)
            and reductions.pending[0].is_complete
        ):
            self._read()
        if reductions.code and not reductions.pending:
            self._agreed = self._conclude()
        is_needed = time.monotonic() < presence.needed_at + _NEEDED_SECONDS
        is_awaited = reductions.code or presence.is_away or is_needed
        return _BUSY_POLL_SECONDS if is_awaited else _POLL_SECONDS

    def _stop_proxy(self) -> None:
        if self._proxy is not None:
            self._proxy.stop()
