"""The alarm: carries out what the policy decided, once the hook that found it is done with its own
work.
"""

from __future__ import annotations

from typing import Callable, Optional, Union

from ._config import Action, Config
from ._evidence import build_report
from ._finding import Finding
from ._log import default_directory, save_log
from ._policy import Decision
from ._record import Verdict
from ._report import StopReport
from ._session import Session
from ._step import Step
from .sinks import CallbackSink, ConsoleSink, RaisingSink

__all__ = ["Alarm"]

Sink = Callable[[StopReport], None]


class Alarm:
    """Called outside the session's lock and outside every guard: what a sink raises reaches the
    training loop.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sink = _make_sink(session.config)

    def __call__(self) -> None:
        session, ledger = self._session, self._session.ledger
        with ledger.lock:
            due, ledger.due = ledger.due, []
        for finding, decision, step in due:
            with session.lock, ledger.lock:
                try:
                    report = self._report(finding, decision, step)
                except Exception as error:
                    # A poor report is better than none, and far better than a run that goes on.
                    session.trouble("the evidence of its events", error)
                    report = StopReport(culprit=ledger.event(finding), step=step.index)
                if decision is Decision.STOP:
                    # Whoever catches the stop and goes on starts a new step.
                    session.is_closed = True
            self._sink(report)

    def _report(self, finding: Finding, decision: Decision, step: Step) -> StopReport:
        session, ledger = self._session, self._session.ledger
        session.collect()
        if decision is not Decision.STOP:
            return build_report(session, finding, step, self._log_directory())
        began = [
            f
            for f in step.judge.findings
            if f.counted and f.verdict in (Verdict.ORIGIN, Verdict.ARRIVED)
        ]
        culprit = min(began, key=lambda f: f.seq, default=finding)
        ledger.store(step)
        path = self._log_directory()
        if path is None:
            path = save_log(
                default_directory(),
                ledger.rank,
                ledger.history.all(),
                ledger.events,
                session.sites,
                session.config.to_meta(),
            )
        return build_report(session, culprit, step, path)

    def _log_directory(self) -> Optional[str]:
        log = self._session.ledger.log
        return None if log is None or log.failed else log.directory


def _make_sink(config: Config) -> Sink:
    action: Union[str, Action] = config.action
    if callable(action):
        return CallbackSink(action)
    return RaisingSink() if action == "raise" else ConsoleSink()
