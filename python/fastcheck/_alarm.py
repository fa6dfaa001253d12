"""The alarm: carries out what the policy decided, once the hook that found it is done with its own
work. Among several ranks a stop waits for the step boundary, where all of them stop or none.
"""

from __future__ import annotations

import pickle
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Callable, Optional, Union

import numpy as np

from ._config import Action, Config
from ._evidence import build_report
from ._finding import Event
from ._ledger import Due
from ._log import default_directory, save_log
from ._policy import Decision
from ._ranks import Agreed, RankAgreement
from ._record import RECORD_DTYPE, Verdict
from ._report import StopReport
from ._session import Session
from ._site import Site
from .sinks import CallbackSink, ConsoleSink, RaisingSink

if TYPE_CHECKING:
    from .dump.on_stop import StopDumper

__all__ = ["Alarm"]

Sink = Callable[[StopReport], None]

# Of events of one step, where it began is told before where it came in: RankAgreement.propose().
_GRADES = {Verdict.ORIGIN: 0, Verdict.ARRIVED: 1}
_LAST_GRADE = 2


class Alarm:
    """Called outside the session's lock and outside every guard: what a sink raises reaches the
    training loop.

    ``agreement``: that of the ranks, None where this one decides alone.
    """

    def __init__(self, session: Session, agreement: Optional[RankAgreement] = None) -> None:
        self._session = session
        self._sink = _make_sink(session.config)
        self._agreement = agreement
        # The first stop that is due and was not proposed to the other ranks yet.
        self._held: Optional[Due] = None
        self._proposed: Optional[StopReport] = None
        # Set by the owner: what a stop leaves on disk of the call that is to blame.
        self.dumper: Optional[StopDumper] = None
        self._has_dumped = False

    def __call__(self) -> None:
        """What is due is done now, but for stops where several ranks have to agree first."""
        ledger = self._session.ledger
        with ledger.lock:
            due = list(ledger.due)
            ledger.due.clear()
        for item in due:
            if item[1] is not Decision.STOP:
                self._sink(self._report(item))
            elif self._agreement is None:
                self._stop(self._report(item))
            elif self._held is None and self._proposed is None:
                self._held = item

    def meet(self, is_last: bool = False) -> None:
        """At a step boundary: tells the other ranks of a stop, and stops if they all do.

        ``is_last``: there will be no further one, and what the last ones agree on is waited for.
        """
        agreement = self._agreement
        if agreement is None:
            self()
            return
        self._take_in()
        self._propose()
        self._obey(agreement.finish() if is_last else agreement.boundary())

    def close(self) -> None:
        """Takes part no more, and waits for nobody."""
        if self._agreement is not None:
            self._agreement.close()

    def last_words(self) -> None:
        """The process ends: what is due is raised, whatever the other ranks think of it."""
        self()
        if self._held is not None:
            held, self._held = self._held, None
            self._proposed = self._report(held)
        if self._proposed is not None:
            self._stop(self._proposed)

    # Several ranks

    def _take_in(self) -> None:
        session = self._session
        with session.lock:
            session.collect()
        self()

    def _propose(self) -> None:
        if self._held is None or self._agreement is None:
            return
        held, self._held = self._held, None
        report = self._proposed = self._report(held)
        grade = _GRADES.get(report.culprit.verdict, _LAST_GRADE)
        self._agreement.propose(report.step, pickle.dumps(report), grade)

    def _obey(self, agreed: Optional[Agreed]) -> None:
        if agreed is None:
            return
        own, self._proposed, self._held = self._proposed, None, None
        try:
            report = pickle.loads(agreed.message) if agreed.message else own
        except Exception as error:
            self._session.trouble("what another rank reports", error)
            report = own
        self._stop(report or _lost_report(agreed))

    # One rank

    def _stop(self, report: StopReport) -> None:
        session, ledger = self._session, self._session.ledger
        with session.lock, ledger.lock:
            # Whoever catches the stop and goes on starts a new step.
            session.is_closed = True
            if self._agreement is not None:
                # All into one directory, whose name came with the report: what of it is on one
                # file system `fastcheck show` reads as one.
                self._save(report.log_path)
            ledger.note_scaling(session.scaling.rows())
        self._sink(report)

    def _report(self, due: Due) -> StopReport:
        session, ledger = self._session, self._session.ledger
        finding, decision, step = due
        with session.lock, ledger.lock:
            try:
                report = self._whole_report(due)
            except Exception as error:
                # A poor report is better than none, and far better than a run that goes on.
                session.trouble("the evidence of its events", error)
                report = StopReport(ledger.event(finding), step=step.index, rank=ledger.rank)
        if self.dumper is None or (decision is not Decision.STOP and self._has_dumped):
            return report
        self._has_dumped = True
        return replace(report, dump=self.dumper.dump(report.culprit))

    def _whole_report(self, due: Due) -> StopReport:
        session, ledger = self._session, self._session.ledger
        finding, decision, step = due
        session.collect()
        world_size = 1 if self._agreement is None else self._agreement.world_size
        if decision is not Decision.STOP:
            return build_report(session, finding, step, self._log_directory(), world_size)
        began = [f for f in step.judge.findings if f.counted and f.verdict in _GRADES]
        culprit = min(began, key=lambda f: f.seq, default=finding)
        ledger.store(step)
        path = self._log_directory()
        if path is None:
            path = default_directory()
            if self._agreement is None:
                path = self._save(path)
        return build_report(session, culprit, step, path, world_size)

    def _log_directory(self) -> Optional[str]:
        log = self._session.ledger.log
        return None if log is None or log.failed else log.directory

    def _save(self, directory: Optional[str]) -> Optional[str]:
        """Writes what is held in memory, unless all of it is in the log already."""
        session, ledger = self._session, self._session.ledger
        if directory is None or self._log_directory() is not None:
            return None
        rows = session.scaling.rows()
        scaling = {"scaling": [asdict(row) for row in rows]} if rows else {}
        return save_log(
            directory,
            ledger.rank,
            ledger.history.all(),
            ledger.events,
            session.sites,
            {**ledger.describe(), **scaling},
        )


def _lost_report(agreed: Agreed) -> StopReport:
    """For a stop whose report was lost with the rank that had it."""
    record = np.zeros(1, RECORD_DTYPE)[0]
    record["step"] = agreed.step
    event = Event(
        site=Site("", "", "forward", "output", 0, "output"),
        record=record,
        step=agreed.step,
        verdict=Verdict.ARRIVED,
        reason=f"rank {agreed.rank} found it, and its report was lost with that rank",
        counted=True,
        rank=agreed.rank,
    )
    return StopReport(culprit=event, step=agreed.step, rank=agreed.rank, is_lost=True)


def _make_sink(config: Config) -> Sink:
    action: Union[str, Action] = config.action
    if callable(action):
        return CallbackSink(action)
    return RaisingSink() if action == "raise" else ConsoleSink()
