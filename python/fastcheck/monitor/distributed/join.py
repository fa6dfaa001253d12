"""Lets ranks meet in install(), and supports torch's Join: a thread answers for a rank that has no
more batches and waits in it.

Join has no callback for other objects than its joinables, so its __exit__ is wrapped at class
level, as long as there is a listener.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Callable, Optional, Protocol

import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from fastcheck.errors import ConfigError, warn
from fastcheck.utils.torch.patching import Listeners, wrap_method
from fastcheck.utils.torch.rank import group_size

from .agreement import RankAgreement
from .channel import Channel, Lost, spell

# The time for which install() waits for the other ranks to come.
_MEETING_SECONDS = 2.0


def agreement_for(
    group: Optional[dist.ProcessGroup] = None,
    lag: int = 1,
    options: Optional[Mapping[str, object]] = None,
    *,
    stops: bool = True,
) -> Optional[RankAgreement]:
    """An agreement over ``group`` (None: the default group); None where this rank is alone, has no
    group, or does not stop.

    Waits at most two seconds for the other ranks, and warns of those that are not there.

    Raises:
        ConfigError: ``options`` are not the same on all ranks that are there; every rank that waits
            gets the same error.
    """
    if group_size(group) < 2:
        return None
    try:
        channel = Channel(group, options)
        missing = channel.wait_for_all(_MEETING_SECONDS)
        difference = channel.difference()
    except Lost as refused:  # by a rank that came later
        raise _refusal(str(refused)) from None
    except Exception:
        # RankAgreement reports what is wrong with the connection, and works without it.
        return RankAgreement(group, lag=lag) if stops else None
    if difference:
        channel.mark_broken(difference)
        raise _refusal(difference)
    if not stops:
        return None
    if missing:
        warn(
            f"{spell(missing)} did not call fastcheck.install() within {_MEETING_SECONDS:g} "
            f"seconds of rank {dist.get_rank()}, which goes on and waits at its first step "
            "boundary: call it on every rank, at the same place"
        )
    return RankAgreement(group, lag=lag, channel=channel)


def _refusal(difference: str) -> ConfigError:
    return ConfigError(
        f"install() was not given the same on all ranks: {difference}",
        expected="the same options on every rank of the process group",
        got=difference,
        hint="where only some ranks watch, name them by Training(process_group=)",
    )


class JoinListener(Protocol):
    """A part of a monitor whose ranks go through a Join."""

    agreement: Optional[RankAgreement]

    def at_step_boundary(self) -> None:
        """Delivers a stop on which the ranks have agreed meanwhile: in place of the error of the
        Join, whose collectives the others have left. May raise.
        """


def _wrap(at_end: contextlib.ExitStack) -> None:
    wrap_method(at_end, Join, "__exit__", _leave)


#: The listeners that follow each Join of the process, in the order of their making, which is the
#: same on every rank: at the end of a Join their agreements align in this order.
join_listeners: Listeners[JoinListener] = Listeners(_wrap)


def _leave(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def leave(
        self: Any,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> Any:
        followed = [] if kind is not None or not self._enable else _open()
        if not followed:
            return original(self, kind, error, traceback)
        ranks = dist.get_process_group_ranks(self._process_group)
        try:
            with contextlib.ExitStack() as stack:
                for agreement, _ in followed:
                    stack.enter_context(agreement.absent(ranks))
                result = original(self, kind, error, traceback)
        finally:
            for agreement, listener in followed:
                if agreement.has_news:
                    listener.at_step_boundary()
        return result

    return leave


def _open() -> list[tuple[RankAgreement, JoinListener]]:
    pairs = [(listener.agreement, listener) for listener in join_listeners]
    return [
        (agreement, listener)
        for agreement, listener in pairs
        if agreement is not None and not agreement.is_closed
    ]
