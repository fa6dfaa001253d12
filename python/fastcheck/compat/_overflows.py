"""Watches a model as ptdbg_ascend and msprobe did: counts the calls that overflow, writes their
names down, and ends the run at the limit.

The record file is ``<dump_path>/overflow/overflows-rankR.jsonl``, a line a call; beside it is a
record log of the same events, for ``fastcheck show`` and ``Dumper(from_log=)``.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from typing import Any, Callable, Optional

import numpy as np
import torch

from .._errors import FastcheckWarning
from .._extension import compiled
from .._finding import Event
from .._install import install
from .._log import RecordLog
from .._numbers import read, spell_nonfinite
from .._op_names import name_of
from ._apis import ApiNumbers
from ._options import rank, say

__all__ = ["OverflowWatch", "call_name"]


def call_name(event: Event) -> str:
    """What made it, in msprobe's style: ``Functional.linear.145.backward``. An operator that no
    API has called goes by fastcheck's own name. A Dumper's lists take both.
    """
    site, call = event.site, int(event.record["call"])
    if event.api:
        return f"{event.api}.{site.direction}"
    if site.op:
        return " · ".join(filter(None, (site.module, f"{site.op} #{call}", site.direction)))
    name = name_of(site, call)
    if name is None or name.call is None:
        return str(site)
    return f"{name.kind}.{name.name}.{name.direction}.{name.call}"


# The old tools had one in a process: a new one takes the place of that before.
_current: list[OverflowWatch] = []


class OverflowWatch:
    """``spell`` makes of call_name() the name that is printed."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        *,
        dump_path: str,
        overflow_nums: int,
        level: str = "op",
        spell: Callable[[str], str] = str,
        first_step: int = 0,
    ) -> None:
        self._place = os.path.join(dump_path, "overflow")
        self._rank = rank()
        self._spell = spell
        self._limit = overflow_nums
        self._log: Optional[RecordLog] = None
        self._has_failed = False
        self.count = 0
        sync = "never"
        if level == "op":
            level, sync = _usable_level(models)
        while _current:
            _current.pop().close()
        self.monitor = install(
            *models,
            level=level,
            sync=sync,
            count="calls",
            overflow_nums=overflow_nums,
            style="msprobe",
        )
        self.monitor._ledger.on_counted = self._counted
        if first_step:
            self.monitor._session.begin_at(first_step)
        self._apis = ApiNumbers() if level == "op" else None
        if self._apis is not None:
            self._apis.open()
        _current.append(self)

    def close(self) -> None:
        """Watches no longer. Raises OverflowDetected like a hook."""
        if self._apis is not None:
            self._apis.close()
        self.monitor.remove()

    def begin_step(self) -> None:
        """Calls are numbered from 0 again."""
        if self._apis is not None:
            self._apis.reset()

    def pause(self, is_paused: bool) -> None:
        """What runs from now on is not read, or read again. Raises OverflowDetected like a hook."""
        self.monitor._pause(is_paused)

    def _counted(self, event: Event) -> None:
        if 0 < self._limit <= self.count:
            return  # found together with the one that ends the run
        self.count += 1
        name = self._spell(call_name(event))
        limit = "" if self._limit < 0 else f" of {self._limit}"
        found = spell_nonfinite(read(event.record))
        print(
            f"[fastcheck] overflow {self.count}{limit}: {name}, step {event.step}, {found}",
            flush=True,
        )
        if self._has_failed:
            return
        try:
            self._write(event, name)
        except Exception as error:  # the file must never break the run that it describes
            self._has_failed = True
            warnings.warn(
                f"fastcheck: overflows are no longer written to {self._place}: {error}",
                FastcheckWarning,
                stacklevel=2,
            )

    def _write(self, event: Event, name: str) -> None:
        if self._log is None:
            sites = self.monitor.sites
            self._log = RecordLog(self._place, self._rank, None, sites, {"overflows": True})
        log = self._log
        log.append(np.array([event.record]), event.step)
        log.append_event(event)
        record = event.record
        line: dict[str, Any] = {
            "name": name,
            "step": event.step,
            "rank": event.rank,
            "module": event.site.module,
            "tensor": event.site.label,
            "nan": int(record["nan_count"]),
            "posinf": int(record["posinf_count"]),
            "neginf": int(record["neginf_count"]),
            "numel": int(record["numel"]),
            "verdict": event.verdict.name.lower(),
            "line": event.line or None,
        }
        path = os.path.join(log.directory, f"overflows-rank{self._rank}.jsonl")
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _usable_level(models: Sequence[torch.nn.Module]) -> tuple[str, str]:
    """Op level where it can be had, else module level, which is said; and the ``sync`` it takes."""
    devices = {p.device for model in models for p in model.parameters() if not p.is_cpu}
    if compiled() is None:
        reason = "reading operators needs the compiled extension"
    elif any(d.type == "meta" for d in devices):
        reason = "the model is on meta, where there are no values"
    else:
        return "op", "call" if devices else "never"
    say(f"{reason}: overflows are found, and named, at module level (Module.<path>.<type>...)")
    return "module", "never"
