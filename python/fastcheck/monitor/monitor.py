"""Monitor: the object that install() returns."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, Callable, NoReturn, Optional, Union

import numpy as np

from fastcheck.errors import warn
from fastcheck.log.step_table import StepRow
from fastcheck.log.table import named_table
from fastcheck.monitor.distributed.replicas import ReplicaMismatch, replica_check
from fastcheck.monitor.hooks import optimizers
from fastcheck.monitor.hooks.losses import check_given
from fastcheck.monitor.hooks.step_watcher import StepWatcher
from fastcheck.monitor.op_level.level import OpLevel
from fastcheck.monitor.precision import advice_of
from fastcheck.monitor.session.run_meta import BatchId, batch_name
from fastcheck.monitor.session.session import Removal
from fastcheck.notebook import guarded_html
from fastcheck.record.event import Event
from fastcheck.record.precision import PrecisionAdvice
from fastcheck.record.site import SiteTable
from fastcheck.report.error import OverflowDetected
from fastcheck.utils.names.style import check_style

from . import ended
from .core import Core
from .showing import held_records, html_of, summary_of, write_report
from .watching import Watching, connected


class Monitor:
    """Observes the modules given to install(), until remove(). May be used in a ``with``
    statement.

    Holds the modules weakly. All methods may be called from any thread, at any time.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._session = core.session
        self._event_store = core.session.event_store
        self._boundary = core.boundary
        self._watcher = core.watcher
        self._has_warned = False
        ended.follow(core.session)
        # Closed after all was written to it, and so still good to be read.
        self._log_is_whole = False

    def step(self, loss: Any = None, *, batch_id: Any = None) -> None:
        """Ends the step. From the first call on only this does: the optimizer's steps no longer do.

        Call it once per iteration, after the optimizer. ``loss``: a tensor (or a number, or a
        structure of tensors); it is read like any other, as role ``loss``. ``batch_id``: what the
        step was trained on, see batch(). Raises OverflowDetected like a hook does, and ConfigError
        for a loss that is none, or a batch_id that can't be used. After remove() it does nothing,
        and warns of that once.
        """
        check_given(loss)
        if batch_id is not None:
            self._name(batch_name(batch_id), is_next=False)
        if self._session.removed and not self._core.hooks and not self._has_warned:
            self._has_warned = True
            warn("monitor.step() after remove(): nothing is observed any more")
        self._watcher.guarded("monitor.step()", StepWatcher.explicit_step, loss)
        optimizers.tell_step_end()

    def batch(self, batch_id: Any) -> None:
        """Names what the next forward pass trains on, so that a stop report and the events of
        ``watch=`` name it too: an index, or any small object with a short text. Of a step of
        several micro-batches each may be named. Does not end a step, and costs nothing more.

        ``monitor.step(batch_id=)`` names the batch of the step that it ends; a stop within that
        step has been raised by then.

        Raises:
            ConfigError: a tensor that is large, or not on the CPU.
        """
        self._name(batch_name(batch_id), is_next=True)

    def _name(self, name: BatchId, is_next: bool) -> None:
        """The batch of the next pass, or of the step that is about to end."""
        session = self._session
        with session.lock:
            if session.removed:
                return
            step, batches = session.step.index, self._core.meta.batches
            if is_next:
                batches.add(step + session.is_closed, name, session.next_seq)
            else:
                batches.add(step, name)

    def begin_at(self, step: int) -> None:
        """Numbers the next step, counted from 0: for a run that resumes from a checkpoint.

        To be called after install(), before anything has run.

        Raises:
            ConfigError: ``step`` is no int of at least 0, or something was read already.
        """
        with self._session.lock:
            self._session.begin_at(step)

    def run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs one training step and returns what ``step(*args, **kwargs)`` does.

        With ``install(stop=Stop(replay=True))`` a stop within it comes with a replay: the step is
        run again at op level with ``sync="call"``, with its random numbers, its batch and its
        weights, and ``stop.report.replay`` and the message name the operator and the line. What it
        takes in must be given as arguments: what it draws from an iterator is another batch when it
        is run again.

        Costs a copy of the model's buffers and of the generators' states for each step. Everything
        is as before a replay after it: weights, gradients, buffers, the states of the optimizers,
        the GradScaler and the generators. What else the function changes stays changed.
        """
        if not self._session.config.runs_again:
            return step(*args, **kwargs)
        return self._core.replayer.run(step, args, kwargs)

    def records(self) -> np.ndarray:
        """The records that are held, oldest first: a structured array of ``RECORD_DTYPE``.

        In memory that is the last ``Log(history=)`` steps and the open step; with a log, all that
        it holds. ``records["site"]`` indexes ``monitor.sites``; ``min`` and ``max`` are in the type
        of the tensor (table() has numbers).
        """
        return held_records(self._session, self._log_is_whole)

    def table(self) -> dict[str, np.ndarray]:
        """records() as named columns, for ``pandas.DataFrame``: ``name``, ``abs_max`` (NaN for
        integers), and those that ``fastcheck export`` writes: ``step``, ``dtype``, ``rms``, ...
        """
        return named_table(self._event_store.ranks.own, self.records(), self.sites)

    def summary(self, style: Optional[str] = None) -> str:
        """The run in text: what was observed, the events, the first counted event in detail (its
        culprit, inputs, last healthy numbers and spread), one line for each kind of harmless event,
        the steps that loss scaling skipped, the operators that op level could not observe, and the
        statistics of the last step.

        Fetches the numbers of a GradScaler that lives on a device.

        ``style``: how tensors are named, as in ``Stop(style=)``; None: as given there.
        """
        session = self._session
        style = session.config.stop.style if style is None else check_style(style)
        with session.lock, self._event_store.lock:
            session.collect()
            return summary_of(self._core, style)

    def report(self, path: Union[str, os.PathLike[str]], style: Optional[str] = None) -> None:
        """Writes the run until now as one HTML page to ``path``, as ``fastcheck report`` writes a
        log: what the log holds or, without a log, what is held in memory. Waits for nothing.

        ``style``: as in summary(). Raises LogError when the log can't be read or ``path`` written.
        """
        style = self._session.config.stop.style if style is None else check_style(style)
        watched = () if self._core.watching is None else self._core.watching.events
        write_report(self._session, self._core.meta, watched, path, self._log_is_whole, style)

    def advice(
        self, tolerance: float = 0.001, formats: Optional[Sequence[str]] = None
    ) -> list[PrecisionAdvice]:
        """The advice for each tensor: the narrowest of float8, MXFP8, float16 and bfloat16 in which
        at most ``tolerance`` of its elements become zero and none overflows, the scale for that, or
        why it has to stay as it is (docs/precision.md). From the steps that were counted until now.

        ``formats``: other formats to try, among float8_e4m3fn, float8_e5m2, mxfp8_e4m3,
        mxfp8_e5m2, mxfp4, nvfp4, float16 and bfloat16, the most wanted first.

        Waits for the copies of counts from devices. Raises ConfigError without
        ``install(record="range")``, or if ``tolerance`` is not from 0 to below 1, or a format is
        unknown.
        """
        return advice_of(self._session, tolerance, formats)

    def step_table(self) -> list[StepRow]:
        """A row for each step of the run, oldest first: loss, overflow, loss scale, learning rate
        and gradient norm (``rows[0].loss``, ``rows[0].to_dict()``); the youngest 100,000 when there
        are more. Waits for nothing: steps that a device has not finished are not complete yet.
        """
        with self._session.lock, self._event_store.lock:
            self._session.collect()
            return self._event_store.archive.all_steps()

    def flush(self) -> None:
        """Waits for the devices, takes in all records, and writes them to the log if there is a
        log.

        Raises OverflowDetected like a hook does.
        """
        with self._session.lock:
            self._take_in()
        self._deliver()

    def _take_in(self) -> None:
        session, event_store = self._session, self._event_store
        session.flush()
        with event_store.lock:
            (event_store.end_run if session.removed else event_store.store)(session.step)

    def _pause(self, is_paused: bool) -> None:
        with self._session.lock:
            self._session.pause(is_paused)
        self._deliver()

    def _deliver(self) -> None:
        self._watcher.emit_warnings()
        if self._event_store.due:
            self._core.stops()

    def check_replicas(self, every: int = 100, *, gradients: bool = False) -> None:
        """Compares from now on, at every so many step boundaries, the checksums of the parameters
        on all ranks of the process group, which data parallelism keeps equal to the bit.

        What differs is named in a FastcheckWarning, in summary() and in replica_mismatches: the
        parameter, the ranks that are odd, and what to do. A parameter that is sharded over the
        group is left out. Every rank has to call this; a later call replaces the earlier.

        Args:
            every: how many boundaries from one comparison to the next.
            gradients: compare them too, as they are after the optimizer's step. Not for FSDP2,
                whose gradients are sharded.

        Raises ConfigError with a single rank. Synchronises nothing: the checksums are
        taken by the device, and one all-gather of 8 bytes a tensor brings them together later.
        """
        model = self._core.models[0]()
        if model is not None:
            check = replica_check(
                model, self._session.config.training.process_group, every=every, gradients=gradients
            )
            kept = [c for c in self._boundary.checks if c.replicas and c.ranks != check.ranks]
            self._boundary.checks = [*kept, check]

    @property
    def replica_mismatches(self) -> tuple[ReplicaMismatch, ...]:
        """The mismatches that check_replicas() has found, oldest first."""
        return tuple(self._boundary.mismatches)

    def remove(self) -> None:
        """Takes all hooks off, waits for the devices, and closes the log. The records can still be
        read. Idempotent. Raises OverflowDetected like a hook does; each of several ranks calls it.
        """
        self._remove(waits_for_ranks=True)

    def _remove(self, waits_for_ranks: bool) -> None:
        session = self._session
        with session.lock:
            if session.removed:
                return
            session.removed = Removal.DONE
            session.recorder.close()
            self._core.hooks.close()
            try:
                self._take_in()
            except Exception as error:
                session.report_internal_error("what was read last", error)
            if isinstance(session.level, OpLevel):
                session.level.end()
            log = self._event_store.archive.log
            if log is not None:
                self._log_is_whole = not log.failed
                log.sync()
                log.close()
        try:
            with self.at_end:
                self._boundary.finish(waits_for_ranks)
                self._deliver()
        finally:
            with session.lock:
                session.let_go()

    @property
    def at_end(self) -> contextlib.ExitStack:
        """The functions that remove() calls last, when all was read and delivered:
        ``monitor.at_end.callback(function, *args)`` adds a function. The function that was added
        last is called first.
        """
        return self._boundary.at_end

    @property
    def events(self) -> tuple[Event, ...]:
        """The events of the run, oldest first, counted or not; the youngest 16384 when there are
        more.
        """
        with self._session.lock, self._event_store.lock:
            self._session.collect()
            return self._event_store.events

    @property
    def event_count(self) -> int:
        """The number of events that were counted against ``overflow_nums``."""
        return self._event_store.counter.total

    @property
    def watch(self) -> Watching:
        """The findings of the watch, and callbacks for it; ConfigError with ``watch=False``."""
        return connected(self._core.watching)

    @property
    def sites(self) -> SiteTable:
        """The sites by number: ``monitor.sites[record["site"]]``."""
        return self._session.sites

    @property
    def step_index(self) -> int:
        """The number of the step that is open, or was closed last; the first is 0."""
        return self._session.step.index

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException] = None, *_: object
    ) -> None:
        ended.tell(error, self._session)
        try:
            # Whoever leaves by an exception won't be at the others' next boundary.
            self._remove(waits_for_ranks=kind is None)
        except OverflowDetected:
            # The exception that ended the block goes on, whatever the drain has found meanwhile.
            if kind is None:
                raise

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Monitor can't be copied or pickled: it belongs to this process and its model. If a "
            "module has it as an attribute, keep it outside of the module"
        )

    def __repr__(self) -> str:
        state = "removed" if self._session.removed else f"{len(self._core.nodes)} modules"
        return f"<fastcheck.Monitor: {state}, step {self.step_index}, {self.event_count} events>"

    def _repr_html_(self) -> str:
        """HTML for notebooks: the state of the run, its events, and the twenty tensors of the last
        step with the least headroom. Waits for no device: what it has not finished is not shown
        yet. Takes the records in that have arrived, as summary() does. Never raises.
        """
        return guarded_html(self, lambda: html_of(self._core, repr(self)))
