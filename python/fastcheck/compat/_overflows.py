"""Counts overflowing calls as ptdbg_ascend and msprobe did, logs them, and stops at a limit.

The record file is ``<dump_path>/overflow/overflows-rankR.jsonl``, a line a call; beside it is a
record log of the same events, for ``fastcheck show`` and ``Dumper(from_log=)``.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional

import numpy as np
import torch

from fastcheck.calls.modes import ApiCalls
from fastcheck.errors import warn
from fastcheck.extension import compiled, extension
from fastcheck.log.writer import RecordLog
from fastcheck.monitor.install import install
from fastcheck.monitor.session.event_store import SessionListener
from fastcheck.monitor.session.options import Stop
from fastcheck.record.event import Event
from fastcheck.record.statistics import statistics_of
from fastcheck.utils.names.msprobe import name_of
from fastcheck.utils.private import AppendFile
from fastcheck.utils.text.numbers import format_nonfinite
from fastcheck.utils.torch.rank import own_rank

from ._options import Dumps, warn_once


def call_name(event: Event) -> str:
    """The name of the call that made it, in msprobe's style: ``Functional.linear.145.backward``. An
    operator that no API has called has fastcheck's own name. A Dumper's lists accept both.
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


# A process has a single watch, as in the old tools: a new watch replaces the earlier.
_current: list[OverflowWatch] = []


class OverflowWatch(SessionListener):
    """``format_name``: converts a call_name() to the name that is printed."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        *,
        dump_path: str,
        overflow_nums: int,
        level: str = "op",
        format_name: Callable[[str], str] = str,
        first_step: int = 0,
    ) -> None:
        self._place = os.path.join(dump_path, "overflow")
        self._rank = own_rank()
        self._format_name = format_name
        self._limit = overflow_nums
        self._log: Optional[RecordLog] = None
        self._has_failed = False
        self.count = 0
        sync = "never"
        if level == "op":
            level, sync = _usable_level(models)
        while _current:
            _current[0].close()
        self.monitor = install(
            *models,
            level=level,
            sync=sync,
            overflow_nums=overflow_nums,
            stop=Stop(count="calls", style="msprobe"),
        )
        self.monitor._event_store.listeners.append(self)
        if first_step:
            self.monitor.begin_at(first_step)
        self._apis = ApiCalls(extension.op_observer().set_api) if level == "op" else None
        if self._apis is not None:
            self._apis.open()
        _current.append(self)

    def close(self) -> None:
        """Ends the watch. Raises OverflowDetected like a hook."""
        if self in _current:
            _current.remove(self)
        if self._apis is not None:
            self._apis.close()
        self.monitor.remove()

    def begin_step(self) -> None:
        """Calls are numbered from 0 again."""
        if self._apis is not None:
            self._apis.reset()

    def pause(self, is_paused: bool) -> None:
        """Stops or resumes reading. Raises OverflowDetected like a hook."""
        self.monitor._pause(is_paused)

    def counted(self, event: Event) -> None:
        """Prints the call and writes its line."""
        if 0 < self._limit <= self.count:
            return  # found together with the overflow that ends the run
        self.count += 1
        name = self._format_name(call_name(event))
        limit = "" if self._limit < 0 else f" of {self._limit}"
        counts = format_nonfinite(statistics_of(event.record))
        print(
            f"[fastcheck] overflow {self.count}{limit}: {name}, step {event.step}, {counts}",
            flush=True,
        )
        if self._has_failed:
            return
        try:
            self._write(event, name)
        except Exception as error:  # the file must never break the run that it describes
            self._has_failed = True
            warn(f"fastcheck: overflows are no longer written to {self._place}: {error}")

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
        with contextlib.closing(AppendFile(path)) as file:
            file.append(json.dumps(line, ensure_ascii=False).encode() + b"\n")


@dataclass(eq=False)
class SelectedSteps:
    """The steps that a PrecisionDebugger reads between start() and stop(), in either tool.

    Args:
        dumps: writes them; None: their overflows are counted.
        _begin_watch: begins to count, in these models, from a step on.
        _steps: the steps that are read; None: all.
        _is_mine: whether this rank reads any.
    """

    dumps: Optional[Dumps]
    _begin_watch: Callable[[Sequence[torch.nn.Module], int], OverflowWatch]
    _steps: Optional[frozenset[int]]
    _is_mine: bool

    def __post_init__(self) -> None:
        #: The number of the step that start() begins.
        self.step = 0
        self._is_running = False
        self._watch: Optional[OverflowWatch] = None
        atexit.register(self._close_dumps)

    def start(self, models: Sequence[torch.nn.Module]) -> None:
        """Starts to read calls, unless it has, or in this step there is nothing to read."""
        if not self._is_mine or self._is_running:
            return
        if self.dumps is None and self._watch is None:
            # Overflows are counted from here on, in a step that is left out too.
            self._watch = self._begin_watch(models, self.step)
            self._watch.pause(True)
        if self._steps is not None and self.step not in self._steps:
            return
        self._is_running = True
        if self.dumps is not None:
            self.dumps.open(self.step, models)
        if self._watch is not None:
            self._watch.pause(False)
            self._watch.begin_step()

    def stop(self) -> None:
        """Stops to read calls. Raises OverflowDetected like a hook."""
        self._is_running = False
        self._close_dumps()
        if self._watch is not None:
            self._watch.pause(True)

    def next_step(self) -> None:
        """The step is over. Raises OverflowDetected like a hook."""
        self.stop()
        self.step += 1
        if self._watch is not None:
            self._watch.monitor.step()

    def _close_dumps(self) -> None:
        if self.dumps is not None:
            self.dumps.close()


def _usable_level(models: Sequence[torch.nn.Module]) -> tuple[str, str]:
    """(level, sync) for install(): op level where possible, else module level, with a warning."""
    devices = {p.device for model in models for p in model.parameters() if not p.is_cpu}
    if compiled() is None:
        reason = "reading operators needs the compiled extension"
    elif any(d.type == "meta" for d in devices):
        reason = "the model is on meta, where there are no values"
    else:
        return "op", "call" if devices else "never"
    warn_once(f"{reason}: overflows are named at module level (Module.<path>.<type>...)")
    return "module", "never"
