"""The Monitor: what install() returns, and all that a user does with it."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Callable, Optional

import numpy as np
import torch

from . import _boundaries, _graphs
from ._alarm import Alarm
from ._calls import ModuleNode
from ._compiled import Connection, connect, disconnect, set_hook_id
from ._config import Config
from ._errors import ConfigError, FastcheckWarning, OverflowDetected, explain
from ._evidence import report_of_step
from ._hooks import ModuleObserver
from ._log import RecordLog
from ._logread import read_log
from ._meeting import Meeting
from ._op_hooks import OpModuleObserver
from ._op_session import OpSession
from ._op_state import OpState
from ._op_unread import unread_lines
from ._rank_join import follow
from ._ranks import agreement_for
from ._replay import Replay, Replayer
from ._replicas import ReplicaMismatch, replica_check
from ._run_meta import RunMeta, own_rank
from ._scaling import scaling_table
from ._session import Session
from ._site import SiteTable
from ._spread import harmless
from ._state import StateReader
from ._steps import StepWatcher
from ._story import Block, story
from ._style import check_style
from ._summary import summary
from ._verdict import Event
from .backends import triton
from .dump.captured import OpCaptures
from .dump.on_stop import StopDumper

__all__ = ["Monitor"]

_TOP_SITES = 10
_NAMED_MODULES = 5
_SUMMARY_WIDTH = 78

# One for each monitor, and none that torch hands out: it counts up from 0.
_hook_ids = itertools.count(-1, -1)


class Monitor:
    """Watches the modules that install() was given, until remove(). May be used in a ``with``
    statement.

    Holds the modules weakly. All methods may be called from any thread, at any time.
    """

    def __init__(
        self,
        config: Config,
        sites: SiteTable,
        model: torch.nn.Module,
        nodes: Sequence[ModuleNode],
        has_excluded: bool,
    ) -> None:
        rank = own_rank()
        # One rank's stop would leave the others waiting for it in their next collective.
        lag = 1 if config.sync == "never" else 0
        agreement = agreement_for(config.process_group, lag=lag) if config.may_stop else None
        world_size = 1 if agreement is None else agreement.world_size
        session_type = OpSession if config.level == "op" else Session
        self._session = session = session_type(config, sites, rank, world_size)
        session.has_excluded = has_excluded
        self._ledger = ledger = session.ledger
        run_meta = RunMeta(config, nodes, ledger)
        ledger.describe = run_meta.to_dict
        if config.log_dir is not None:
            meta = run_meta.to_dict()
            ledger.log = RecordLog(config.log_dir, rank, config.log_limit, sites, meta)
            # A model that is deleted takes its monitor along, without remove().
            weakref.finalize(session, ledger.log.close)
        state = (OpState if config.level == "op" else StateReader)(session, nodes)
        ledger.check_parameters = state.check
        self._movement = state.movement
        alarm = session.deliver = Alarm(session, agreement)
        session.last_words = alarm.last_words
        self._dumper = self._make_dumper(nodes, rank)
        alarm.dumper = self._dumper
        self._meeting = session.meet = Meeting(session, alarm)
        if agreement is not None:
            follow(agreement, alarm.meet)
            session.drain.speak_at_exit()
        self._model = weakref.ref(model)
        self._nodes = nodes
        if isinstance(session, OpSession):
            self._observer: ModuleObserver = OpModuleObserver(session, state, nodes)
        else:
            self._observer = ModuleObserver(session, state)
        self._watcher = session.watcher = StepWatcher(session, state, run_meta.meet)
        self._graphs = self._watcher.graphs = _graphs.GraphFollower(self._watcher, nodes)
        # Set by install(), which it calls again.
        self._replays: Optional[Replayer] = None
        self._handles: list[Any] = []
        self._connection: Optional[Connection] = None
        self._has_warned = False
        # Closed after all was written to it, and so still good to be read.
        self._log_is_whole = False

    def _make_dumper(self, nodes: Sequence[ModuleNode], rank: int) -> Optional[StopDumper]:
        session, config = self._session, self._session.config
        if config.dump_on_overflow is None:
            return None
        if isinstance(session, OpSession):
            captures = session.captures = OpCaptures()
            return StopDumper(config.dump_on_overflow, rank, nodes, captures)
        why = "the step is not known: run it by monitor.run(step, batch)"
        if session.world_size > 1:
            why = "several ranks train together, of which none runs a step again alone"
        return StopDumper(config.dump_on_overflow, rank, nodes, None, why)

    def _attach(self) -> None:
        """Puts the hooks on; install() calls it once."""
        self._connection = connection = connect(self._observer, self._nodes)
        number = next(_hook_ids)
        for index, node in enumerate(self._nodes):
            module = node.module()
            if module is None:
                continue
            before, after = self._observer.attach(node)
            if connection is not None:
                before.address = after.address = connection.address(index)
                before.is_outermost = node.is_primary
            # always_call: a call that raises has to end too, or what runs next would seem to be
            # inside it. __call__: of a bound method the interpreter need not look it up.
            for handle in (
                module.register_forward_pre_hook(before.__call__, with_kwargs=True),
                module.register_forward_hook(after.__call__, with_kwargs=True, always_call=True),
            ):
                set_hook_id(handle, number)
                self._handles.append(handle)
        _boundaries.watchers.connect(self._watcher)
        _graphs.followers.connect(self._graphs)
        if isinstance(self._session, OpSession):
            self._session.begin(self._nodes)

    def step(self, loss: Any = None) -> None:
        """Ends the step. From the first call on only this does: the optimizer's steps no longer do.

        Call it once per iteration, after the optimizer. ``loss``: a tensor (or a number, or a
        structure of tensors); it is read like any other, as role ``loss``. Raises OverflowDetected
        like a hook does. After remove() it does nothing, and warns of that once.
        """
        if self._session.removed and not self._has_warned:
            self._has_warned = True
            text = "monitor.step() after remove(): nothing is observed any more"
            warnings.warn(text, FastcheckWarning, stacklevel=2)
        self._watcher.guarded("monitor.step()", StepWatcher.explicit_step, loss)

    def run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One training step: ``step(*args, **kwargs)``, and what it returns.

        With ``install(replay=True)`` a stop within it comes with a replay: the step is run again at
        op level with ``sync="call"``, with its random numbers, its batch and its weights, and
        ``stop.report.replay`` and the message name the operator and the line. What it takes in must
        be given as arguments: what it draws from an iterator is another batch when it is run again.

        Costs a copy of the model's buffers and of the generators' states for each step. Everything
        is as before a replay after it: weights, gradients, buffers, the states of the optimizers,
        the GradScaler and the generators. What else the function changes stays changed.
        """
        if not self._session.config.replay:
            return step(*args, **kwargs)
        return self._replayer().run(step, args, kwargs)

    def replay(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Replay:
        """Runs ``step(*args, **kwargs)`` once at op level with ``sync="call"``, to find the
        operator and the line of what is non-finite, and puts everything back that run() does.

        To be called where a stop is caught, on the CPU, at module level. Returns a Replay: what was
        found, and what could not be made as it was. Raises nothing that is due to the step.
        """
        return self._replayer().replay(step, args, kwargs)

    def _replayer(self) -> Replayer:
        if self._replays is None:
            raise ConfigError(
                explain(
                    "nothing can be replayed",
                    expected="a monitor that install() returned",
                    came=repr(self),
                )
            )
        return self._replays

    def records(self) -> np.ndarray:
        """What is held, oldest first: a structured array of ``RECORD_DTYPE``.

        In memory that is the last ``history`` steps and the open one; with ``log_dir``, all that
        the log holds. ``records["site"]`` indexes ``monitor.sites``.
        """
        session, ledger = self._session, self._ledger
        with session.lock, ledger.lock:
            session.collect()
            log = ledger.log
            if not session.is_deferred or session.removed:
                ledger.store(session.step)
            if log is None or (log.failed and not self._log_is_whole):
                return ledger.history.all()
            return read_log(log.directory, rank=ledger.rank).records

    def summary(self, style: Optional[str] = None) -> str:
        """What a person wants to read: what was watched, what was found, the story of the first
        counted event (the culprit, what it read, its last healthy numbers, how it spread), one line
        for each kind of what did no harm, what loss scaling did, what op level could not observe,
        and the last step in numbers.

        Fetches the numbers of a GradScaler that lives on a device.

        ``style``: how tensors are named, ``"fastcheck"`` or ``"msprobe"``
        (``Functional.softmax.7.forward.output.0``); None: as install() was told.
        """
        style = self._session.config.style if style is None else check_style(style)
        session, ledger = self._session, self._ledger
        with session.lock, ledger.lock:
            session.collect()
            verdicts, places = ledger.tallies()
            last = ledger.history.last_step()
            log = ledger.log
            return summary(
                steps=session.step.index + 1 if session.next_seq else 0,
                records=session.next_seq,
                sites=len(session.sites),
                event_count=ledger.policy.counter.total,
                overflow_nums=session.config.overflow_nums,
                verdict_counts=verdicts,
                top_sites=[(session.sites[n], k) for n, k in places.most_common(_TOP_SITES)],
                last_step=[(session.sites[int(record["site"])], record) for record in last],
                log_path=None if log is None else log.directory,
                notes=self._notes(),
                story=self._story(style),
                harmless=harmless(ledger.events, style, _SUMMARY_WIDTH),
                scaling=scaling_table(session.scaling.rows(), _SUMMARY_WIDTH),
                unread=self._unread(),
                style=style,
            )

    def _unread(self) -> list[str]:
        session = self._session
        rows = session.unread_ops() if isinstance(session, OpSession) else []
        return unread_lines(rows, _SUMMARY_WIDTH)

    def _story(self, style: str) -> list[Block]:
        session, ledger = self._session, self._ledger
        if ledger.first_bad is None:
            return []
        path = None if ledger.log is None else ledger.log.directory
        report = report_of_step(session, ledger.first_bad, path)
        return story(None if report is None else replace(report, style=style), _SUMMARY_WIDTH)

    def flush(self) -> None:
        """Waits for the devices, takes in all records, and writes them to the log if there is one.

        Raises OverflowDetected like a hook does.
        """
        with self._session.lock:
            self._take_in()
        self._deliver()

    def _take_in(self) -> None:
        session, ledger = self._session, self._ledger
        session.flush()
        with ledger.lock:
            ledger.store(session.step)

    def _pause(self, is_paused: bool) -> None:
        with self._session.lock:
            self._session.pause(is_paused)
        self._deliver()

    def _deliver(self) -> None:
        self._watcher.say_movement()
        if self._ledger.due:
            self._session.deliver()

    def check_replicas(self, every: int = 100, *, gradients: bool = False) -> None:
        """From now on compares, at every so many step boundaries, the checksums of the parameters
        on all ranks of the process group, which data parallelism keeps equal to the bit.

        What differs is named in a FastcheckWarning, in summary() and in replica_mismatches: the
        parameter, the ranks that are odd, and what to do. A parameter that is sharded over the
        group is left out. Every rank has to call this; a later call replaces the one before.

        Args:
            every: how many boundaries from one comparison to the next.
            gradients: compare them too, as they are after the optimizer's step. Not for FSDP2,
                whose gradients are sharded.

        Raises ConfigError where there is only one rank. Synchronises nothing: the checksums are
        taken by the device, and one all-gather of 8 bytes a tensor brings them together later.
        """
        model = self._model()
        if model is not None:
            self._meeting.check = replica_check(
                model, self._session.config.process_group, every=every, gradients=gradients
            )

    @property
    def replica_mismatches(self) -> tuple[ReplicaMismatch, ...]:
        """What check_replicas() has found, oldest first."""
        return tuple(self._meeting.mismatches)

    def remove(self) -> None:
        """Takes all hooks off, waits for the devices, and closes the log. What was recorded can
        still be read. Idempotent. Raises OverflowDetected like a hook does, afterwards; with
        several ranks, each of them has to remove().
        """
        self._remove(waits_for_ranks=True)

    def _remove(self, waits_for_ranks: bool) -> None:
        session = self._session
        with session.lock:
            if session.removed:
                return
            session.removed = True
            session.recorder.close()
            for handle in (*self._handles, *session.step.leaf_handles):
                handle.remove()
            self._handles.clear()
            session.step.leaf_handles.clear()
            _boundaries.watchers.disconnect(self._watcher)
            _graphs.followers.disconnect(self._graphs)
            self._graphs.leave()
            if self._connection is not None:
                disconnect(self._connection.number)
            self._watcher.release()
            self._take_in()
            if isinstance(session, OpSession):
                session.end()
            log = self._ledger.log
            if log is not None:
                self._log_is_whole = not log.failed
                self._ledger.note_scaling(session.scaling.rows())
                log.sync()
                log.close()
        self._meeting.finish(waits_for_ranks)
        self._deliver()

    @property
    def events(self) -> tuple[Event, ...]:
        """The events of the run, oldest first, counted or not; the youngest 16384 when there are
        more.
        """
        with self._session.lock, self._ledger.lock:
            self._session.collect()
            return self._ledger.events

    @property
    def event_count(self) -> int:
        """How many events were counted against ``overflow_nums``."""
        return self._ledger.policy.counter.total

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
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        try:
            # Whoever leaves by an exception won't be at the others' next boundary.
            self._remove(waits_for_ranks=error is None)
        except OverflowDetected:
            # What ended the block goes on, whatever the drain has found meanwhile.
            if error is None:
                raise

    def __repr__(self) -> str:
        state = "removed" if self._session.removed else f"{len(self._nodes)} modules"
        return f"<fastcheck.Monitor: {state}, step {self.step_index}, {self.event_count} events>"

    def _notes(self) -> list[str]:
        session = self._session
        notes = list(session.notes)
        silent = [node.name for node in self._nodes if node.is_callable and not node.total_calls]
        if silent:
            named = ", ".join(silent[:_NAMED_MODULES])
            more = (
                f" and {len(silent) - _NAMED_MODULES} more" if len(silent) > _NAMED_MODULES else ""
            )
            notes.append(
                "never seen running, because nothing called them or because they are compiled "
                f"where nothing can be read: {named}{more}"
            )
        compiled = [] if self._connection is None else self._connection.modules
        if compiled:
            notes.append(
                f"{len(compiled)} modules run compiled, {compiled[0]} first: of what is computed "
                "there, only what modules take and return is read"
            )
        notes += [str(mismatch) for mismatch in self._meeting.mismatches]
        if self._movement is not None:
            notes += self._movement.notes
        for device in self._session.unread_devices:
            notes.append(
                f"tensors on {device} are not read: torch.{device} has no streams and events"
            )
        notes += triton.remarks()
        notes += session.overflow.remarks()
        notes += self._graphs.remarks()
        lost = sum(ring.lost_count for ring in session.rings.values())
        if lost:
            notes.append(
                f"{lost:,} tensors found no slot in a full ring and left no record, but for the "
                "first non-finite ones: the host was too far ahead, give a smaller max_lag="
            )
        if session.drain.wait_count:
            notes.append(
                f"the host waited {session.drain.wait_count:,} times because it was "
                f"max_lag={session.config.max_lag} steps ahead of the device"
            )
        if self._ledger.history.dropped_records:
            notes.append(
                f"{self._ledger.history.dropped_records:,} records of a very long step were "
                "dropped from memory"
            )
        return notes
