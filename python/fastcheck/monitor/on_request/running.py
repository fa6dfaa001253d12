"""OpLevelSteps and StepDumps: observe the requested steps, at op level or with a Dumper each."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Callable, Protocol

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fastcheck.dump.dumper import Dumper
from fastcheck.dump.storage.files import place_of
from fastcheck.errors import ConfigError, explain
from fastcheck.monitor.session.config import Config
from fastcheck.monitor.session.options import Filter, Log, Stop
from fastcheck.monitor.session.request_options import OnRequest
from fastcheck.utils.torch.rank import own_rank

__all__ = ["Install", "OpLevelSteps", "RequestedSteps", "StepDumps"]

#: Installs a monitor of these modules, which neither meets other ranks nor waits for them.
Install = Callable[[Config, Sequence[torch.nn.Module]], Any]


class RequestedSteps(Protocol):
    """Steps that are observed from the moment this is made."""

    def next_step(self, step: int) -> None:
        """A step is over, and this one, too, is observed."""

    def close(self, is_whole: bool) -> str:
        """Ends the observation; what was observed, and where it is. ``is_whole``: the last step is
        over. May be called by any thread.
        """


class OpLevelSteps:
    """A second monitor, at op level, with a log of its own. It counts no event of its own."""

    def __init__(
        self, config: Config, models: Sequence[torch.nn.Module], step: int, install: Install
    ) -> None:
        options = config.on_request
        assert options is not None
        place = os.path.join(options.dir, f"step{step}-op")
        self._monitor = install(
            replace(
                config,
                level="op",
                sync="never",
                overflow_nums=-1,
                log_dir=None,
                every=1,
                stop=Stop(
                    count=config.stop.count,
                    max_skipped=config.stop.max_skipped,
                    protect_weights=False,
                    style=config.stop.style,
                ),
                log=Log(place, config.log.limit, config.log.history),
                filter=Filter(),
                on_request=None,
            ),
            models,
        )
        session = self._monitor._session
        with session.lock:
            session.begin_at(step)
            session.is_explicit = True  # its steps are those of the monitor that was asked

    def next_step(self, step: int) -> None:
        self._monitor.step()

    def close(self, is_whole: bool) -> str:
        monitor = self._monitor
        if is_whole:
            monitor.step()
        monitor.remove()
        store = monitor._session.event_store
        place, events = store.log.directory, monitor.event_count
        found = f"{monitor._session.next_seq:,} records, {events:,} event{'s'[: events != 1]}"
        return f"at op level: {found}, in {place} (fastcheck show {place})"


class StepDumps:
    """A Dumper for each step."""

    def __init__(self, options: OnRequest, models: Sequence[torch.nn.Module], step: int) -> None:
        # What a program puts on this stack later it takes off first; what lies there already is
        # taken off at some time that is not known, and would take the dump's mode with it.
        if _get_current_dispatch_mode_stack():
            raise ConfigError(
                explain(
                    "a dump can't begin within another mode",
                    expected="a step that ends outside of every TorchDispatchMode",
                    got=", ".join(type(m).__name__ for m in _get_current_dispatch_mode_stack()),
                    hint='OnRequest(level="op") needs no mode',
                )
            )
        self._options = options
        self._models = list(models)
        self._place = _free(os.path.join(options.dir, f"step{step}-dump"), step)
        self._begin(step)

    def _begin(self, step: int) -> None:
        options = self._options
        self._dumper = Dumper(
            self._place, step=step, tensors=options.tensors, model=self._models
        ).__enter__()

    def next_step(self, step: int) -> None:
        self._dumper.__exit__(None, None, None)
        self._begin(step)

    def close(self, is_whole: bool) -> str:
        self._dumper.__exit__(None, None, None)
        problem = f", which stopped early ({self._dumper.problem})" if self._dumper.problem else ""
        return f"by a dump{problem}, in {self._place} (docs/dump.md)"


def _free(directory: str, step: int) -> str:
    """``directory``, or with a number behind it where this rank has dumped the step already."""
    found = directory
    for number in itertools.count(2):
        if not os.path.exists(place_of(found, step, own_rank())):
            break
        found = f"{directory}-{number}"
    return found
