"""Requests: switches to op level, or to a dump, at the end of the step in which a request came."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Optional, Union

import torch

from fastcheck.calls.optimizer_steps import NoOptimizerListener, optimizer_listeners
from fastcheck.errors import first_line, warn
from fastcheck.monitor.hooks.optimizers import step_ends
from fastcheck.monitor.hooks.step_watcher import StepWatcher
from fastcheck.monitor.session.listener import Listener
from fastcheck.monitor.session.session import Session
from fastcheck.report.stop_report import StopReport

from .asking import SignalFlag, TouchedFile
from .running import Install, OpLevelSteps, RequestedSteps, StepDumps

__all__ = ["Requests"]


class _EndBeforeStop(Listener):
    """A program that ends by the stop calls no remove(). Holds the requests weakly: they are
    closed with a model that is deleted.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = weakref.ref(requests)

    def stopping(self, report: StopReport) -> None:
        if (requests := self._requests()) is not None:
            requests.end_early()


class Requests:
    """Of one monitor, from install() to remove(). Nothing in here raises into the training.

    Raises ConfigError if the signal can't be handled.
    """

    def __init__(
        self,
        session: Session,
        watcher: StepWatcher,
        models: Sequence[torch.nn.Module],
        install: Install,
    ) -> None:
        options = session.config.on_request
        assert options is not None
        self._options = options
        self._session = session
        self._watcher = watcher
        self._models = [weakref.ref(model) for model in models]
        self._install = install
        self._asks: list[Union[TouchedFile, SignalFlag]] = []
        if options.path is not None:
            self._asks.append(TouchedFile(options.path))
        if options.number is not None:
            flag = SignalFlag(options.number)
            self._asks.append(flag)
            weakref.finalize(self, flag.close)  # where a model is deleted without remove()
        self._running: Optional[RequestedSteps] = None
        self._first = 0
        self._seen = watcher.closed_steps
        self._is_closed = False
        # remove() may be called by another thread.
        self._lock = threading.RLock()
        if session.config.may_stop:
            session.event_store.listeners.append(_EndBeforeStop(self))
        self._listener = NoOptimizerListener()
        optimizer_listeners.connect(self._listener)  # a Dumper begins within an optimizer's step
        step_ends.connect(self)

    def end_early(self) -> None:
        """A stop comes in the middle of what is observed."""
        with self._lock, self._guarded():
            self._end(is_whole=False)

    def step_ended(self) -> None:
        """An optimizer or a GradScaler is done with its step, perhaps with one of this model."""
        if self._seen == self._watcher.closed_steps or self._session.tape is not None:
            return
        self._seen = self._watcher.closed_steps
        if self._running is None and not self._is_asked():
            return
        with self._lock, self._guarded():
            if not self._is_closed and not self._session.removed:
                self._advance(self._session.step.index + 1)

    def _is_asked(self) -> bool:
        asked = [ask.take() for ask in self._asks]  # each of them, so that none is left for later
        return True in asked

    def _advance(self, step: int) -> None:
        running = self._running
        if running is not None:
            if step < self._first + self._options.steps:
                running.next_step(step)
                return
            self._end(is_whole=True)
            if not self._is_asked():  # once more, in the meantime
                return
        config = self._session.config
        models = [model for one in self._models if (model := one()) is not None]
        self._first = step
        if self._options.level == "op":
            self._running = OpLevelSteps(config, models, step, self._install)
        else:
            self._running = StepDumps(self._options, models, step)

    def _end(self, is_whole: bool) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        first, last = self._first, self._session.step.index
        text = running.close(is_whole)
        steps = f"steps {first:,} to {last:,} were" if last > first else f"step {first:,} was"
        if last < first:
            steps = "no step was (none followed)"
        self._tell(f"on request, {steps} observed {text}")

    def _tell(self, text: str) -> None:
        self._session.notes[text] = None
        with contextlib.suppress(Warning):  # one that is an error here
            warn(text)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            running, self._running = self._running, None
            if running is not None:
                with contextlib.suppress(Exception):
                    running.close(False)
            self._tell(f"what was asked for was not observed: {first_line(error)}")

    def close(self) -> None:
        """No step follows. Idempotent."""
        with self._lock, self._guarded():
            if self._is_closed:
                return
            self._is_closed = True
            step_ends.disconnect(self)
            for ask in self._asks:
                if isinstance(ask, SignalFlag):
                    ask.close()
            self._end(is_whole=self._session.is_closed)
            optimizer_listeners.disconnect(self._listener)
