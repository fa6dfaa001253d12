"""The rule for experts that get no tokens, of modules that are called for theirs alone.

An expert is a module whose path has the word "expert": ``moe.experts.3``, ``moe.expert_3``. Its
siblings are those of the same path but for the number. Without tokens it is not called, or with an
empty tensor, which is no record either.
"""

from __future__ import annotations

import math
import re
from typing import Optional

import numpy as np

from fastcheck.record.site import SiteTable

from .numbers import Found, Reading
from .signals import ACTIVATION, StepSignals

__all__ = ["ExpertRules", "expert_of"]

# By chance it would have no tokens in so many steps in a row once in a million times.
_CHANCE = math.log(1e6)
# A step counts if so many of the other experts have tokens.
_LEAST_BUSY = 0.5
# The share of steps in which it had some is of about so many steps, and of at least so many.
_PAST, _LEAST_PAST = 64, 16
#: It warns after so many steps.
EXPERT_STEPS = 50
_PAUSE = 32


def expert_of(module: str) -> Optional[tuple[str, str]]:
    """The path of the expert that a module is, or is within, and what its siblings share of it."""
    parts = module.split(".")
    for at, part in enumerate(parts):
        if "expert" not in part.lower() or "shared" in part.lower():
            continue
        if re.search(r"\d", part):
            group = re.sub(r"\d+", "", part)
            return ".".join(parts[: at + 1]), ".".join([*parts[:at], group])
        if at + 1 < len(parts) and re.search(r"\d", parts[at + 1]):
            return ".".join(parts[: at + 2]), ".".join(parts[: at + 1])
    return None


class ExpertRules:
    """Of one rank, whose sites are found in ``sites`` by number."""

    def __init__(self, sites: SiteTable) -> None:
        self._sites = sites
        # Of each site the expert, -1: none; of each expert its group, and its first site.
        self._of_site = np.zeros(0, np.int64)
        self._groups = np.zeros(0, np.int64)
        self._first: list[int] = []
        self._names: dict[str, int] = {}
        self._group_names: dict[str, int] = {}
        # Of each expert: in how many steps in a row it was idle, the weighted number of steps and
        # of those in which it had tokens, and whether it was reported.
        self._idle = np.zeros(0, np.int64)
        self._steps = np.zeros(0)
        self._busy = np.zeros(0)
        self._is_reported = np.zeros(0, bool)
        self._last_warning = -_PAUSE

    def add(self, step: int, signals: StepSignals) -> list[Found]:
        """One step. At most one finding, of the first expert."""
        self._grow()
        if not len(self._groups):
            return []
        experts = self._of_site[signals.sites]
        is_busy = np.zeros(len(self._groups), bool)
        is_busy[experts[(experts >= 0) & (signals.phases == ACTIVATION)]] = True
        size = np.bincount(self._groups)[self._groups]
        busy = np.bincount(self._groups, is_busy)[self._groups]
        counts = (busy - is_busy >= np.maximum(_LEAST_BUSY * (size - 1), 1)) | is_busy
        idle = self._idle
        # A row without tokens enters the past when it is over.
        back = np.where(is_busy, idle + 1, 0)
        decay = (1 - 1 / _PAST) ** back
        self._steps = self._steps * decay + back
        self._busy = self._busy * decay + is_busy
        idle = self._idle = np.where(is_busy, 0, idle + counts)
        self._is_reported &= ~is_busy
        is_idle = counts & ~is_busy
        rate = (self._busy + 1) / (self._steps + 2)
        with np.errstate(divide="ignore"):
            is_unlikely = -idle * np.log1p(-rate) >= _CHANCE
        is_unlikely &= (self._steps >= _LEAST_PAST) & is_idle & ~self._is_reported
        # Of one that never had tokens there is no past.
        may_warn = (self._steps == 0) | (-idle * np.log1p(-rate) >= _CHANCE)
        warned = is_idle & (idle == EXPERT_STEPS) & may_warn
        self._is_reported |= is_unlikely | warned
        warns = bool(warned.any()) and step - self._last_warning >= _PAUSE
        chosen = np.flatnonzero(warned if warns else is_unlikely)
        if not len(chosen):
            return []
        if warns:
            self._last_warning = step
        expert = int(chosen[0])
        number = int(idle[expert])
        text = f"this expert has had no tokens for {number} steps, while {int(busy[expert])} of "
        text += f"{int(size[expert]) - 1} others beside it have some"
        if len(chosen) > 1:
            text += f"; so have {len(chosen) - 1} more"
        if warns:
            text += ". A router learns from the experts that it chooses: this one may stay out. "
            text += "Look at the loss that balances the load, and at the router's weights"
        reading = Reading("expert", float(number), float(rate[expert]), math.nan, warns)
        return [Found(self._first[expert], reading, text)]

    def _grow(self) -> None:
        held, count = len(self._of_site), len(self._sites)
        if count == held:
            return
        new = np.full(count - held, -1, np.int64)
        groups: list[int] = []
        for number in range(held, count):
            site = self._sites[number]
            found = expert_of(site.module)
            if found is None:
                continue
            name, group = found
            if name not in self._names:
                self._names[name] = len(self._names)
                self._first.append(number)
                groups.append(self._group_names.setdefault(group, len(self._group_names)))
            expert = new[number - held] = self._names[name]
            if site.module == name and site.role == "output":
                self._first[expert] = number  # what a reader looks for
        self._of_site = np.concatenate([self._of_site, new])
        more = len(groups)
        if more:
            self._groups = np.concatenate([self._groups, np.array(groups, np.int64)])
            for name in ("_idle", "_steps", "_busy", "_is_reported"):
                setattr(self, name, np.pad(getattr(self, name), (0, more)))
