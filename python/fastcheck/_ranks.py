"""Several ranks: they stop together, at the same step boundary, for the same event.

At each step boundary every rank starts an asynchronous MAX reduction of one integer over the
channel (_rank_channel), "first event: step, rank", and reads the one that it started ``lag``
boundaries before. MAX picks the earliest step, then the lowest rank, and reduction n means the same
on every rank, so all stop at the same boundary; what the first rank has to say is then handed to
all.

What a boundary costs: about 30 us to start a reduction, and nothing to read one that is complete.
Under DDP, FSDP, tensor or pipeline parallelism it always is, but for the latency of the network: no
rank gets through step n+1 before every rank has passed boundary n and so has joined reduction n.

A rank that is busy elsewhere (it waits at a barrier, it saves a checkpoint, its training is over)
is stood in for: when others wait for it, and it has not been at a boundary for _IDLE_SECONDS, a
thread of its own joins in its place, once for each boundary that it is late. In torch's Join, whose
ranks have different numbers of steps, it is stood in for at once, and all go on with the same
number.

A rank that dies is noticed through its closed sockets; one that doesn't answer at all within the
timeout is given up. Those that are left say once that they watch alone, and from then on tell each
other through the store: they still stop for the same event, each at its next boundary.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

import torch.distributed as dist

from ._errors import FastcheckWarning
from ._rank_channel import Agreed, Channel, Lost, Pending, decode, encode
from ._rank_stand_in import StandIn

__all__ = ["Agreed", "RankAgreement", "agreement_for"]

# A rank is stood in for when it has not been at a boundary for this long.
_IDLE_SECONDS = 1.0
# How often the stand-in looks whether it is needed, before it was and after.
_LOOK_SECONDS = 0.5
_LOOK_AGAIN_SECONDS = 0.02
# How long after it was needed it goes on looking often: a step of the others, perhaps.
_NEEDED_SECONDS = 2.0

# How long a message that must be in the store is waited for.
_POST_SECONDS = 2.0


class RankAgreement:
    """Makes the ranks of a process group stop together. One per monitor; every rank of the group
    has to make one, and those of several monitors in the same order.

    ``group``: None is the default group. ``lag``: how many boundaries later a reduction is read.
    ``timeout_seconds``: how long a rank waits for an answer before it goes on alone.

    Making one waits for nobody; the first boundary() waits until all ranks are there. No method
    raises, and none waits for a device. boundary() may be called from one thread only.
    """

    def __init__(
        self,
        group: Optional[dist.ProcessGroup] = None,
        *,
        lag: int = 1,
        timeout_seconds: float = 8.0,
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
        # What this rank wants to stop for: the messages by step and grade; and what was sent.
        self._proposals: dict[tuple[int, int], bytes] = {}
        self._sent: Optional[tuple[int, int]] = None
        # This rank's own boundaries: the next one joins reduction number _boundary_count, if the
        # stand-in has not.
        self._boundary_count = 0
        # Pendings that were started and not read, oldest first; the first has number _read_count.
        self._pending: deque[Pending] = deque()
        self._read_count = 0
        # The first event among the reductions read, and the number of the one that brought it.
        self._code = 0
        self._code_number = 0
        # What the stand-in was told, for the next boundary.
        self._agreed: Optional[Agreed] = None
        self._unsaid = ""
        self._seen_at = time.monotonic()
        self._is_away = False
        self._join_count = 0
        self._needed_at = 0.0
        self._stand_in: Optional[StandIn] = None
        try:
            self._channel = Channel(group)
        except Exception as error:
            self._lose(error)

    @property
    def has_news(self) -> bool:
        """The ranks have agreed to stop while this one was stood in for; boundary() returns it."""
        return self._agreed is not None

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def propose(self, step: int, message: bytes = b"", grade: int = 0) -> None:
        """This rank wants all to stop, because of an event of ``step``.

        The earliest step holds; among events of one step, on whatever rank, the lowest ``grade``
        (0 to 7: where it began before where it arrived), then the lowest rank.
        """
        # Without the lock, which boundary() holds while it waits.
        self._proposals.setdefault((step, grade), message)

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
            if self._stand_in is not None:
                self._stand_in.wake()

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
            unsaid, self._unsaid = self._unsaid, ""
        if unsaid:
            warnings.warn(unsaid, FastcheckWarning, stacklevel=4)
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
        self._stand_in = StandIn(self, _IDLE_SECONDS)

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
            code = encode(*self._sent, self.rank)
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
        step, grade, rank = decode(self._code)
        own = self._proposals.get((step, grade), b"") if rank == self.rank else b""
        self._code = 0
        self._boundary_count = self._next_number
        try:
            message = self._channel.exchange(own, rank, self.timeout_seconds)
            agreed = Agreed(step, rank, message, together=True)
        except Exception as error:
            self._lose(error)
            if rank == self.rank:
                self._post(step, own)
            agreed = self._posted(_POST_SECONDS) or Agreed(step, rank, own, together=False)
        self._proposals.clear()
        return agreed

    # Standing in

    @contextlib.contextmanager
    def away(self, ranks: Optional[Sequence[int]] = None) -> Iterator[None]:
        """Within it this rank is stood in for at once.

        ``ranks``: who else is in such a section, and leaves it at the same time. When these are all
        ranks, they wait for each other at its end, and go on with the same number.
        """
        with self._lock:
            self._is_away = True
            if self._stand_in is not None:
                self._stand_in.wake()
        is_whole = False
        try:
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

    def look(self) -> float:
        """What the thread does now and then; returns the seconds until the next look."""
        if not self._is_closed and not self._is_away:
            left = self._seen_at + _IDLE_SECONDS - time.monotonic()
            if left > 0:
                return left
        if not self._lock.acquire(blocking=False):
            return _LOOK_AGAIN_SECONDS
        try:
            return _LOOK_SECONDS if self.is_alone else self._look()
        except Exception as error:
            self._lose(error)
            return 0.0
        finally:
            self._lock.release()

    def _look(self) -> float:
        assert self._channel is not None
        if self._agreed is not None and not self._is_closed:
            return _LOOK_SECONDS
        if len(self._pending) <= self.lag and self._channel.is_needed(self._next_number):
            self._needed_at = time.monotonic()
            self._start()
        elif self._is_closed and self._channel.all_closed:
            if all(reduction.is_complete for reduction in self._pending):
                self._pending.clear()
                self._channel.close()
                self._end_stand_in()
            return _LOOK_AGAIN_SECONDS
        # As at a boundary, but it never waits: the others may need the whole of a step to join.
        while len(self._pending) > (0 if self._code else self.lag) and self._pending[0].is_complete:
            self._read()
        if self._code and not self._pending:
            self._agreed = self._conclude()
        is_needed = (
            self._code or self._is_away or time.monotonic() < self._needed_at + _NEEDED_SECONDS
        )
        return _LOOK_AGAIN_SECONDS if is_needed else _LOOK_SECONDS

    def _end_stand_in(self) -> None:
        if self._stand_in is not None:
            self._stand_in.stop()

    # Alone

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
        except Exception:
            # The store is gone with the process that served it: from here on really alone.
            self._channel = None
            return None

    def _lose(self, error: Exception) -> None:
        """Says once that the others can't be reached, and tells those that still wait."""
        if self.is_alone:
            return
        self.is_alone = True
        self._end_stand_in()
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        if not isinstance(error, Lost):
            # Without the source line that gloo starts with.
            reason = f"the connection failed: {re.sub(r'^.[^]]*[.]cc:[0-9]+. ', '', reason)[:120]}"
        if self._channel is not None:
            try:
                self._channel.mark_broken(reason)
            except Exception:
                self._channel = None
        self._unsaid = (
            f"fastcheck: rank {self.rank} can't agree with the other ranks ({reason}). Training "
            "is not affected; from now on this rank watches alone, and may stop alone."
        )


def agreement_for(
    group: Optional[dist.ProcessGroup] = None, *, lag: int = 1
) -> Optional[RankAgreement]:
    """An agreement over ``group`` (None: the default group); None where this rank is the only
    one, or has no group.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    # -1 where this rank is not a member.
    if dist.get_world_size(group) < 2:
        return None
    return RankAgreement(group, lag=lag)
