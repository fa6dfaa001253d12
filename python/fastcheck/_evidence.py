"""The evidence for a stop report, from what the session holds: inputs, parameters, trend, loss
scale.
"""

from __future__ import annotations

from typing import Optional

import numpy as np

from ._calls import Call
from ._compat import GradScaler
from ._finding import Finding
from ._op_judge import OpFinding
from ._record import Verdict
from ._report import StopReport
from ._session import Session
from ._site import Site
from ._step import Step
from ._story import input_site

__all__ = ["build_report", "report_of_step"]

_Evidence = list[tuple[Site, np.void]]


def build_report(
    session: Session, finding: Finding, step: Step, log_path: Optional[str], world_size: int
) -> StopReport:
    """Expects both locks to be held, and the records of ``step`` in the history (collect())."""
    ledger = session.ledger
    inputs = _inputs(session, finding, step)
    return StopReport(
        culprit=ledger.event(finding),
        step=step.index,
        events=tuple(map(ledger.event, sorted(step.judge.findings, key=lambda f: f.seq))),
        event_count=ledger.policy.counter.total,
        overflow_nums=session.config.overflow_nums,
        inputs=tuple(inputs),
        inputs_before=_before(session, inputs),
        trend=_trend(session, finding),
        log_path=log_path,
        scale=_loss_scale(session),
        rank=ledger.rank,
        world_size=world_size,
        style=session.config.style,
        weights_intact=step.is_protected or (step is session.step and step.update_count == 0),
    )


def _loss_scale(session: Session) -> Optional[float]:
    """Where it is known; reads a device value."""
    given = session.step.scaler
    scaler = session.config.scaler if given is None else given()
    if scaler is None:
        return None
    if isinstance(scaler, GradScaler):
        return float(scaler.get_scale())
    return float(scaler()) if callable(scaler) else float(scaler)


def _trend(session: Session, finding: Finding) -> np.ndarray:
    held = session.ledger.history.of_site(finding.site, int(finding.record["call"]))
    return held[held["seq"] <= finding.seq]


def _inputs(session: Session, finding: Finding, step: Step) -> _Evidence:
    if isinstance(finding, OpFinding):
        return _read_by_op(session, finding)
    call = finding.blamed_call
    if call is None:
        return []
    found: _Evidence = []
    if finding.is_gradient:
        found += _gradients_of_outputs(session, call, step)
    for token, site in zip(call.inputs, call.input_sites):
        record = session.ledger.history.find(token)
        if record is not None:
            found.append((session.sites[site], record))
    return found + _parameters(session, call, step)


def _read_by_op(session: Session, finding: OpFinding) -> _Evidence:
    """What the op read, under the names of its arguments."""
    found: _Evidence = []
    for name, seq in finding.inputs:
        record = session.ledger.history.find(seq)
        if record is not None:
            source = session.sites[int(record["site"])]
            found.append((input_site(session.sites[finding.site], name, source), record))
    return found


def _before(session: Session, evidence: _Evidence) -> tuple[Optional[np.void], ...]:
    """The last healthy record, of an earlier step, of each of these places."""
    history = session.ledger.history
    return tuple(history.last_finite(record) for _, record in evidence)


def report_of_step(session: Session, step: Step, log_path: Optional[str]) -> Optional[StopReport]:
    """What there is to tell of a step with counted events, as long as its records are held."""
    counted = [f for f in step.judge.findings if f.counted]
    began = [f for f in counted if f.verdict in (Verdict.ORIGIN, Verdict.ARRIVED)]
    culprit = min(began or counted, key=lambda f: f.seq, default=None)
    return None if culprit is None else build_report(session, culprit, step, log_path, 1)


def _gradients_of_outputs(session: Session, call: Call, step: Step) -> _Evidence:
    found: _Evidence = []
    for token in call.outputs:
        seq = step.gradients.get(token)
        record = None if seq is None else session.ledger.history.find(seq)
        if record is not None:
            found.append((session.sites[int(record["site"])], record))
    return found


def _parameters(session: Session, call: Call, step: Step) -> _Evidence:
    module = call.node.module()
    found: _Evidence = []
    for name in () if module is None else module._parameters:
        number = call.node.site("param", name, 0)
        record = session.ledger.history.latest(number)
        # One of an earlier step was changed by an update since.
        if record is not None and record["step"] == step.index:
            found.append((session.sites[number], record))
    return found
