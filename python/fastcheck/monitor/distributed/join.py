"""Lets ranks meet in install(), and supports torch's Join: a thread answers for a rank that has no
more batches and waits in it.

Join has no callback for other objects than its joinables, so its __exit__ is wrapped at class
level, from the first follow() on, as long as there is an agreement.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Callable, Optional

import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from fastcheck.errors import ConfigError, warn
from fastcheck.utils.torch.rank import group_size

from .agreement import RankAgreement
from .channel import Channel, Lost, spell

# How long install() waits for the other ranks to come.
_MEETING_SECONDS = 2.0


def agreement_for(
    group: Optional[dist.ProcessGroup] = None,
    lag: int = 1,
    options: Optional[Mapping[str, object]] = None,
    *,
    stops: bool = True,
) -> Optional[RankAgreement]:
    """An agreement over ``group`` (None: the default group); None where this rank is the only one,
    has no group, or does not stop.

    Waits at most two seconds for the other ranks, and warns of those that are not there.

    Raises:
        ConfigError: ``options`` are not the same on all ranks that are there; every rank that waits
            gets the same one.
    """
    if group_size(group) < 2:
        return None
    try:
        whole: Optional[dist.ProcessGroup] = dist.group.WORLD
        member = whole if group is None else group
        assert member is not None
        channel = Channel(member, options)
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


# Reentrant: the garbage collector may call _drop() in the middle of anything.
_lock = threading.RLock()
# In the order of their making, which is the same on every rank: at the end of a Join they align one
# after the other. With each, what delivers a stop.
_followed: dict[int, tuple[weakref.ref[RankAgreement], Callable[[], None]]] = {}
_original: Optional[Callable[..., Any]] = None


def follow(agreement: RankAgreement, deliver: Callable[[], None] = lambda: None) -> None:
    """Lets ``agreement`` follow each Join of the process from now on, as long as it exists.

    ``deliver`` is called when the ranks have stopped meanwhile: in place of the error of the Join,
    whose collectives the others have left. It may raise.
    """
    key = id(agreement)
    with _lock:
        _followed[key] = (weakref.ref(agreement), deliver)
        _wrap()
    weakref.finalize(agreement, _drop, key)


def _drop(key: int) -> None:
    global _original
    with _lock:
        _followed.pop(key, None)
        # Someone may have wrapped it after us: then that wrapper stays, and ours inside it has no
        # effect.
        if not _followed and getattr(Join.__exit__, "_fastcheck", False):
            join_class: Any = Join  # a method is put back, which mypy takes for a mistake
            join_class.__exit__ = _original
            _original = None


def _wrap() -> None:
    global _original
    if _original is not None:
        return
    original = _original = Join.__exit__

    @functools.wraps(original)
    def leave(
        self: Any,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> Any:
        open_ones = [] if kind is not None or not self._enable else _open()
        if not open_ones:
            return original(self, kind, error, traceback)
        ranks = dist.get_process_group_ranks(self._process_group)
        try:
            with contextlib.ExitStack() as stack:
                for agreement, _ in open_ones:
                    stack.enter_context(agreement.absent(ranks))
                result = original(self, kind, error, traceback)
        finally:
            for agreement, deliver in open_ones:
                if agreement.has_news:
                    deliver()
        return result

    wrapper: Any = leave
    wrapper._fastcheck = True  # tells our wrapper from another's
    join_class: Any = Join
    join_class.__exit__ = wrapper


def _open() -> list[tuple[RankAgreement, Callable[[], None]]]:
    with _lock:
        pairs = [(reference(), deliver) for reference, deliver in _followed.values()]
    return [(one, deliver) for one, deliver in pairs if one is not None and not one.is_closed]
