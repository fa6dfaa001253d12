"""Facts of learning rates: when schedulers step and by which factor, and rates that are set where
no optimizer of torch reads them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from fastcheck.calls.stored import parameter_ids
from fastcheck.utils.torch.rank import group_size

from .beginnings import updates_of
from .chains import Chain, SchedulerCalls
from .streaks import Streaks

# A function of LambdaLR that returns less than this is hardly a factor, unless it is a warm-up, by
# which it would have grown to more than so many times its first value.
_LEAST_FACTOR, _WARM_UP = 0.01, 2.0
# Rates from which such a factor makes an ordinary rate.
_LARGE_RATE = 0.1
# The number of calls after which a factor is looked at.
_STEPS = 64


class SchedulerFacts:
    """Notices facts of schedulers. ``chains``: of the optimizers that have stepped; ``group``: of
    the ranks that train together.
    """

    def __init__(
        self, streaks: Streaks, chains: Mapping[torch.optim.Optimizer, Chain], group: Any
    ) -> None:
        self._streaks = streaks
        self._chains = chains
        self._group = group
        # The rates that each optimizer had at first where it does not read them.
        self._unread: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[str, float]] = (
            weakref.WeakKeyDictionary()
        )

    def stepped(self, scheduler: Any) -> None:
        """A learning rate scheduler has stepped, of whatever optimizer."""
        optimizer = getattr(scheduler, "optimizer", None)
        if not isinstance(optimizer, torch.optim.Optimizer):
            return
        about = f"{type(scheduler).__name__} of {type(optimizer).__name__}"
        chain = self._chains.get(optimizer)
        if chain is None:
            self._streaks.count("idle_schedule", self._is_replaced(optimizer), about, id(scheduler))
            return
        if chain.schedulers is None:
            chain.schedulers = weakref.WeakKeyDictionary()
        calls = chain.schedulers.setdefault(scheduler, SchedulerCalls())
        is_idle = chain.updates == calls.updates and self._is_replaced(optimizer)
        self._streaks.count("idle_schedule", is_idle, about, id(scheduler))
        calls.since += 1
        calls.all += 1
        calls.updates = chain.updates
        if calls.all == _STEPS and (small := _small_factor(scheduler, calls.factor)):
            self._streaks.tell_once("small_factor", 0.0, small)
        if calls.all == 1:
            calls.factor = _factor_of(scheduler)
            # Where step(number) was called the number of steps is not that.
            updates, steps = updates_of(optimizer), getattr(scheduler, "_step_count", 1) - 1
            if getattr(scheduler, "last_epoch", 0) == 1 and updates > chain.updates:
                self._streaks.tell_once("schedule_anew", updates, type(scheduler).__name__)
            elif steps > chain.updates + 1 and 0 < updates <= chain.updates:
                self._streaks.tell_once("optimizer_anew", steps, about)

    def _is_replaced(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if another optimizer of the same parameters was met after this optimizer, which does
        not wrap it: it has other groups.
        """
        own, groups = parameter_ids(optimizer), set(map(id, optimizer.param_groups))
        met = list(self._chains)
        later = met[met.index(optimizer) + 1 :] if optimizer in self._chains else met
        return any(
            not own.isdisjoint(parameter_ids(other))
            and groups.isdisjoint(map(id, other.param_groups))
            for other in later
        )

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks for a rate that was set since the first look where nothing reads it."""
        now = _unread_rates(optimizer)
        first = self._unread.setdefault(optimizer, now)
        used = [group.get("lr") for group in optimizer.param_groups]
        if any(map(torch.is_tensor, used)):
            return
        for place, rate in now.items():
            if rate != first.get(place) and rate not in used:
                self._streaks.tell_once("unread_rate", rate, place)

    def before_update(self, schedulers: Mapping[Any, SchedulerCalls]) -> None:
        """The optimizer of these is about to step."""
        # Some wrappers step a scheduler once for each rank.
        if group_size(self._group) > 1:
            return
        for scheduler, calls in schedulers.items():
            about = f"{type(scheduler).__name__} {calls.since} times"
            self._streaks.count("scheduled_twice", calls.since > 1, about, id(scheduler))
            calls.since = 0


def _unread_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Learning rates by the place where an optimizer of torch does not read them."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return {}
    rates = {
        "optimizer.lr": vars(optimizer).get("lr"),
        'optimizer.defaults["lr"]': optimizer.defaults.get("lr"),
    }
    for number, group in enumerate(optimizer.param_groups):
        place = f"optimizer.param_groups[{number}]"
        rates[f'{place}["learning_rate"]'] = group.get("learning_rate")
    return {place: rate for place, rate in rates.items() if isinstance(rate, (int, float))}


def _factor_of(scheduler: Any) -> float:
    """The factor by which a LambdaLR multiplies the rate of the first group; 0: it is none."""
    bases = getattr(scheduler, "base_lrs", None)
    if not isinstance(scheduler, LambdaLR) or not bases or not 0 < bases[0] < _LARGE_RATE:
        return 0.0
    return float(scheduler.optimizer.param_groups[0]["lr"]) / float(bases[0])


def _small_factor(scheduler: Any, first: float) -> str:
    """Names a factor that can hardly be meant as one; empty: it is none. ``first``: at the first
    step.
    """
    factor = _factor_of(scheduler)
    if not 0 < factor < min(_LEAST_FACTOR, _WARM_UP * first):
        return ""
    rate = float(scheduler.optimizer.param_groups[0]["lr"])
    return (
        f"by {factor:.3g} the {float(scheduler.base_lrs[0]):.3g} that it was made with: {rate:.3g}"
    )
