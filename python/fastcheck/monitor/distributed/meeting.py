"""Compares the options of install() over all ranks, and warns of ranks that have not called it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional

import torch.distributed as dist

from fastcheck.errors import ConfigError, explain, warn
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
        explain(
            f"install() was not given the same on all ranks: {difference}",
            expected="the same options on every rank of the process group",
            got=difference,
            hint="where only some ranks watch, name them by Training(process_group=)",
        )
    )
