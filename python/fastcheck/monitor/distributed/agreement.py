"""Agreement of several ranks to stop at the same step boundary for the same event.

At each step boundary every rank starts an asynchronous MAX reduction of one integer over the
channel (channel.py), "first event: step, rank", and reads the one that it started ``lag``
boundaries before. MAX picks the earliest step, and reduction n means the same on every rank, so all
stop at the same boundary. There the ranks gather what each of them has proposed by then, and the
report of the event that comes first (propose()) is sent to all.

What a boundary costs: about 30 us to start a reduction, and nothing to read one that is complete.
Under DDP, FSDP, tensor or pipeline parallelism it always is, but for the latency of the network: no
rank gets through step n+1 before every rank has passed boundary n and so has joined reduction n.

A rank that is busy elsewhere (it waits at a barrier, it saves a checkpoint, its training is over)
is replaced by a ProxyThread: when others wait for it, and it has not been at a boundary for
_IDLE_SECONDS, the thread joins in its place, once for each boundary that it is late. In torch's
Join, whose ranks have different numbers of steps, the thread joins at once, and all ranks go on
with the same number.

A rank that dies is noticed through its closed sockets; one that doesn't answer at all within the
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
from typing import Any, Callable, Optional, Protocol

import torch
import torch.distributed as dist

from fastcheck.errors import warn

from .channel import Agreed, Channel, Lost, Pending, decode, encode


class LoneRank:
    """The part of RankAgreement that needs no other rank to answer."""

    rank: int
    is_alone: bool
    _channel: Optional[Channel]
    _agreed: Optional[Agreed]
    _proposals: dict[tuple[int, int], bytes]
    _warning: str

    def _stop_proxy(self) -> None:
        raise NotImplementedError

    def _alone(self) -> Optional[Agreed]:
        """One look into the store for what another rank that is alone stopped for."""
        agreed, self._agreed = self._agreed, None
        agreed = agreed or self._posted()
        if agreed is None and self._proposals:
            first = min(list(self._proposals))
            step, own = first[0], self._proposals[first]
            self._post(step, own)
            # Not always its own: another rank may have been first.
            agreed = self._posted(_POST_SECONDS) or Agreed(step, self.rank, own, together=False)
        if agreed is not None:
            self._proposals.clear()
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


class Watched(Protocol):
    """Whose poll() the thread calls."""

    def poll(self) -> float:
        """Never raises, never waits long; returns the seconds until the next call."""
        ...


class ProxyThread:
    """Runs ``watched.poll()`` from its own thread until stop(), or until ``watched`` is gone: it is
    held weakly.
    """

    def __init__(self, watched: Watched, first_seconds: float) -> None:
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

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()


_live: weakref.WeakSet[ProxyThread] = weakref.WeakSet()


def _run(watched: weakref.ref[Watched], wait: float, wake: queue.SimpleQueue[bool]) -> None:
    while True:
        with contextlib.suppress(queue.Empty):
            if not wake.get(timeout=wait):
                return
        # Held only while it polls, so that it can go with its model.
        one = watched()
        if one is None:
            return
        wait = one.poll()
        del one


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
# How long after it was awaited it goes on polling often: a step of the others, perhaps.
_NEEDED_SECONDS = 2.0

# How long a message that must be in the store is waited for.
_POST_SECONDS = 2.0

# The step and the priority of a rank that has proposed nothing.
_NOTHING = (2**63 - 1, 2**63 - 1)


class RankAgreement(LoneRank):
    """Makes the ranks of a process group stop together. One per monitor; every rank of the group
    has to make one, and those of several monitors in the same order.

    ``group``: None is the default group. ``lag``: how many boundaries later a reduction is read.
    ``timeout_seconds``: how long a rank waits for an answer before it goes on alone. ``channel``:
    this rank's end, where it has been opened.

    Making one does not wait; the first boundary() waits until all ranks are there. No method
    raises, and none waits for a device. boundary() may be called from one thread only.
    """

    def __init__(
        self,
        group: Optional[dist.ProcessGroup] = None,
        *,
        lag: int = 1,
        timeout_seconds: float = 8.0,
        channel: Optional[Channel] = None,
    ) -> None:
        whole: Any = dist.group.WORLD
        group = whole if group is None else group
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size(group)
        self.lag = lag
        self.timeout_seconds = timeout_seconds
        self.is_alone = False
        self._lock = threading.RLock()
        self._channel: Optional[Channel] = None
        self._is_connected = False
        self._is_closed = False
        # What this rank wants to stop for: the messages by step and priority; and what was sent.
        self._proposals: dict[tuple[int, int], bytes] = {}
        self._sent: Optional[tuple[int, int]] = None
        # This rank's own boundaries: the next one joins reduction number _boundary_count, if the
        # proxy thread has not.
        self._boundary_count = 0
        # Pendings that were started and not read, oldest first; the first has number _read_count.
        self._pending: deque[Pending] = deque()
        self._read_count = 0
        # The first event among the reductions read, and the number of the one that brought it.
        self._code = 0
        self._code_number = 0
        # The agreement that the proxy thread has read, for the next boundary.
        self._agreed: Optional[Agreed] = None
        self._warning = ""
        self._seen_at = time.monotonic()
        self._is_away = False
        self._join_count = 0
        self._needed_at = 0.0
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

    def propose(self, step: int, message: bytes = b"", priority: int = 0) -> None:
        """This rank wants all to stop, because of an event of ``step``.

        The earliest step holds; among events of one step, on whatever rank, the lowest ``priority``
        (any int64 of at least 0), then the lowest rank.
        """
        # Without the lock, which boundary() holds while it waits.
        self._proposals.setdefault((step, priority), message)

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
        """This rank takes part no more; the others go on without waiting for it. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            try:
                if self._channel is not None and not self.is_alone:
                    if self._is_connected:
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
            self._seen_at = time.monotonic()
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
        if self._next_number <= number:
            self._join(number)
        while self._read_count <= number - self.lag and not self._code:
            self._read()
        return self._settle()

    def _finish(self) -> Optional[Agreed]:
        agreed, self._agreed = self._agreed, None
        if agreed is not None or not self._is_connected:
            return agreed
        if self._proposals and self._sent != min(list(self._proposals)):
            # No boundary came after it.
            self._join(self._next_number)
        while self._pending and not self._code:
            self._read()
        return self._settle()

    def _connect(self) -> None:
        if self._is_connected:
            return
        assert self._channel is not None
        self._channel.connect(self.timeout_seconds)
        self._is_connected = True
        self._proxy = ProxyThread(self, _IDLE_SECONDS)

    @property
    def _next_number(self) -> int:
        return self._read_count + len(self._pending)

    def _join(self, number: int) -> None:
        """Joins the reductions up to ``number``, unless there was an event. Before it joins number
        n it has read n-1-lag: see _settle().
        """
        while self._next_number <= number and not self._code:
            if len(self._pending) > self.lag:
                self._read()
            else:
                self._start()

    def _start(self) -> None:
        assert self._channel is not None
        code = 0
        if self._proposals:
            self._sent = min(list(self._proposals))
            code = encode(self._sent[0], self.rank)
        self._pending.append(self._channel.start_max(code))

    def _read(self) -> None:
        assert self._channel is not None
        number = self._read_count
        code = self._channel.highest(self._pending[0], number, self.timeout_seconds)
        self._pending.popleft()
        self._read_count += 1
        if code and not self._code:
            self._code_number = number
        self._code = max(self._code, code)

    def _settle(self) -> Optional[Agreed]:
        """After a reduction that brought an event: what every rank has started by then is read
        too.

        A rank that reads reduction n at a boundary has started n+lag and no more; one that reads it
        in finish() starts what is missing. So all have read the same ones, and nothing is left
        under way.
        """
        if not self._code:
            return None
        while self._next_number <= self._code_number + self.lag:
            self._start()
        while self._pending:
            self._read()
        return self._conclude()

    def _conclude(self) -> Agreed:
        assert self._channel is not None
        step, rank = decode(self._code)
        self._code = 0
        self._boundary_count = self._next_number
        place = min(list(self._proposals), default=_NOTHING)
        own = self._proposals.get(place, b"") if rank == self.rank else b""
        try:
            pending = self._channel.start_gather(torch.tensor(place, dtype=torch.int64))
            places = self._channel.gathered(pending, self.timeout_seconds)
            (step, _), index = min((tuple(one.tolist()), i) for i, one in enumerate(places))
            rank = self._channel.ranks[index]
            own = self._proposals.get(place, b"") if rank == self.rank else b""
            message = self._channel.exchange(own, rank, self.timeout_seconds)
            agreed = Agreed(step, rank, message, together=True)
        except Exception as error:
            self._lose(error)
            if rank == self.rank:
                self._post(step, own)
            agreed = self._posted(_POST_SECONDS) or Agreed(step, rank, own, together=False)
        self._proposals.clear()
        return agreed

    # The proxy thread

    @contextlib.contextmanager
    def absent(self, ranks: Optional[Sequence[int]] = None) -> Iterator[None]:
        """Within it the proxy thread joins for this rank at once.

        ``ranks``: who else is in such a section, and leaves it at the same time. When these are all
        ranks, they wait for each other at its end, and go on with the same number.
        """
        is_whole = False
        try:
            with self._lock:
                self._is_away = True
                if self._proxy is not None:
                    self._proxy.wake()
            yield
            is_whole = self._channel is not None and list(ranks or ()) == self._channel.ranks
        finally:
            with self._lock:
                self._is_away = False
                self._seen_at = time.monotonic()
                if is_whole and self._is_connected and not self.is_alone and not self._is_closed:
                    try:
                        self._align()
                    except Exception as error:
                        self._lose(error)

    def _align(self) -> None:
        assert self._channel is not None
        self._join_count += 1
        number = self._channel.highest_posted(
            self._join_count, self._next_number, self.timeout_seconds
        )
        self._join(number - 1)
        self._agreed = self._agreed or self._settle()
        self._boundary_count = self._next_number

    def poll(self) -> float:
        """Called by the proxy thread; returns the seconds until the next call."""
        if not self._is_closed and not self._is_away:
            left = self._seen_at + _IDLE_SECONDS - time.monotonic()
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
        if len(self._pending) <= self.lag and self._channel.is_awaited(self._next_number):
            self._needed_at = time.monotonic()
            self._start()
        elif self._is_closed and self._channel.all_closed:
            if all(reduction.is_complete for reduction in self._pending):
                self._pending.clear()
                self._channel.close()
                self._stop_proxy()
            return _BUSY_POLL_SECONDS
        # As at a boundary, but it never waits: the others may need the whole of a step to join.
        while len(self._pending) > (0 if self._code else self.lag) and self._pending[0].is_complete:
            self._read()
        if self._code and not self._pending:
            self._agreed = self._conclude()
        is_awaited = (
            self._code or self._is_away or time.monotonic() < self._needed_at + _NEEDED_SECONDS
        )
        return _BUSY_POLL_SECONDS if is_awaited else _POLL_SECONDS

    def _stop_proxy(self) -> None:
        if self._proxy is not None:
            self._proxy.stop()
