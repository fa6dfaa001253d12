"""Requests: switches to op level, or to a dump, at the end of the step in which a request came.

From top to bottom: how a request comes (a file, a signal), what is observed (op level, a dump of
each step), and Requests, which begins and ends it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, Callable, Optional, Union

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fastcheck.calls.tracker import OptimizerListener, optimizer_listeners
from fastcheck.dump.dumper import Dumper
from fastcheck.dump.storage.files import place_of
from fastcheck.errors import ConfigError, first_line, warn
from fastcheck.monitor.hooks.optimizers import step_ends
from fastcheck.monitor.hooks.step_watcher import StepWatcher
from fastcheck.monitor.session.config import Config
from fastcheck.monitor.session.event_store import SessionListener
from fastcheck.monitor.session.options import Filter, Log, OnRequest, Stop
from fastcheck.monitor.session.session import Session
from fastcheck.report.stop_report import StopReport
from fastcheck.utils.torch.rank import own_rank

# The least time between two looks at the file.
_SECONDS = 1.0

#: Installs a monitor of these modules, which neither meets other ranks nor waits for them.
Install = Callable[[Config, Sequence[torch.nn.Module]], Any]


# ---- how a request comes ------------------------------------------------------------------------


class TouchedFile:
    """A file whose time of modification changes, or that appears. It is left where it is, so that
    several processes can look at the same file.
    """

    def __init__(self, path: str) -> None:
        self._path, self._time = path, _modified(path)
        self._next = time.monotonic() + _SECONDS

    def take(self) -> bool:
        """True if it was touched since the last call that looked; one ``stat`` in a second."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _SECONDS
        before, self._time = self._time, _modified(self._path)
        return self._time is not None and self._time != before


def _modified(path: str) -> Optional[int]:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


class SignalFlag:
    """Set by a signal, whose former handler is called too, and put back by close().

    Raises ConfigError outside of the main thread, and for a signal that no program can handle.
    """

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self._is_set = self._is_closed = False
        former = signal.getsignal(number)
        self._former: Any = former
        try:
            if former is None:
                raise ValueError("its handler is not Python's and could not be restored")
            signal.signal(number, self._handle)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"signal={number.name} can't be handled: {error}; OnRequest(file=) works everywhere"
            ) from None

    def _handle(self, number: int, frame: Optional[FrameType]) -> None:
        self._is_set = not self._is_closed
        if callable(self._former):
            self._former(number, frame)

    def take(self) -> bool:
        """True if the signal came since the last call."""
        was, self._is_set = self._is_set, False
        return was

    def close(self) -> None:
        """Puts the former handler back, unless another handler was installed since (it may call
        this handler), or another thread calls: then the signal does what it did before. Idempotent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        while isinstance(owner := getattr(self._former, "__self__", None), SignalFlag):
            if not owner._is_closed:
                break
            self._former = owner._former
        # A bound method is another object each time, and equal.
        if signal.getsignal(self._number) == self._handle:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(self._number, self._former)


# ---- what is observed ----------------------------------------------------------------------------
# From the moment an object of this class is made. close() may be called by any thread.


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
        place, events = store.archive.log.directory, monitor.event_count
        counts = f"{monitor._session.next_seq:,} records, {events:,} event{'s'[: events != 1]}"
        return f"at op level: {counts}, in {place} (fastcheck show {place})"


class StepDumps:
    """A Dumper for each step."""

    def __init__(self, options: OnRequest, models: Sequence[torch.nn.Module], step: int) -> None:
        # A mode that a program puts on this stack later is taken off first; a mode that lies there
        # already is taken off at some time that is not known, and would take the dump's mode with
        # it.
        if stack := _get_current_dispatch_mode_stack():
            modes = ", ".join(type(mode).__name__ for mode in stack)
            raise ConfigError(f"a dump can't begin within another mode of the dispatcher: {modes}")
        directory = os.path.join(options.dir, f"step{step}-dump")
        names = itertools.chain((directory,), (f"{directory}-{n}" for n in itertools.count(2)))
        # This rank may have dumped the step there already, in a run before.
        rank = own_rank()
        self._place = next(p for p in names if not os.path.exists(place_of(p, step, rank)))
        self._options, self._models = options, list(models)
        self._begin(step)

    def _begin(self, step: int) -> None:
        tensors, models = self._options.tensors, self._models
        self._dumper = Dumper(self._place, step=step, tensors=tensors, model=models).__enter__()

    def next_step(self, step: int) -> None:
        self._dumper.__exit__(None, None, None)
        self._begin(step)

    def close(self, is_whole: bool) -> str:
        self._dumper.__exit__(None, None, None)
        problem = f", which stopped early ({self._dumper.problem})" if self._dumper.problem else ""
        return f"by a dump{problem}, in {self._place} (docs/dump.md)"


# ---- requests ------------------------------------------------------------------------------------


class _EndBeforeStop(SessionListener):
    """A program that ends by the stop calls no remove(). Holds the requests weakly: they are
    closed with a model that is deleted.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = weakref.ref(requests)

    def stopping(self, report: StopReport) -> None:
        if (requests := self._requests()) is not None:
            requests.end_early()


class Requests:
    """Observes or dumps steps of one monitor on request, from begin() to close(). Nothing in here
    raises into the training.
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
        self._running: Union[OpLevelSteps, StepDumps, None] = None
        self._first = 0
        self._seen = watcher.ends.closed_steps
        self._is_closed = False
        # remove() may be called by another thread.
        self._lock = threading.RLock()
        if session.config.may_stop:
            session.event_store.listeners.append(_EndBeforeStop(self))
        self._listener = OptimizerListener()

    def begin(self) -> None:
        """Starts to look for requests. Raises ConfigError for a signal that can't be handled."""
        options = self._options
        if options.path is not None:
            self._asks.append(TouchedFile(options.path))
        if options.number is not None:
            flag = SignalFlag(options.number)
            self._asks.append(flag)
            weakref.finalize(self, flag.close)  # where a model is deleted without remove()
        optimizer_listeners.connect(self._listener)  # a Dumper begins within an optimizer's step
        step_ends.connect(self)

    def end_early(self) -> None:
        """Ends the observed steps early, because of a stop."""
        with self._lock, self._guarded():
            self._end(is_whole=False)

    def step_ended(self) -> None:
        """An optimizer or a GradScaler is done with its step, perhaps with one of this model."""
        if self._seen == self._watcher.ends.closed_steps or self._session.tape is not None:
            return
        self._seen = self._watcher.ends.closed_steps
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
        models = [model for reference in self._models if (model := reference()) is not None]
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
        self._session.faults.notes[text] = None
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
        """Ends the observation: no step follows. Idempotent."""
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
