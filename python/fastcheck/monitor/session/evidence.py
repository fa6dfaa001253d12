"""Collects the data of a stop report from the session."""

from __future__ import annotations

from typing import Any, Optional

from fastcheck.calls.module_calls import Call
from fastcheck.record.format import Verdict
from fastcheck.report.build import Evidence, argument_records, make_report
from fastcheck.report.stop_report import StopReport
from fastcheck.utils.torch.versions import GradScaler
from fastcheck.verdict.findings import Finding
from fastcheck.verdict.step import Step

from .session import Session


def build_report(
    session: Session, finding: Finding, step: Step, log_path: Optional[str], world_size: int
) -> StopReport:
    """Expects both locks to be held, and the records of ``step`` in the history (collect())."""
    event_store = session.event_store
    culprit = event_store.event(finding)
    if session.config.level == "op":
        inputs = argument_records(event_store.history, culprit, session.sites)
    else:
        inputs = _module_inputs(session, finding, step)
    return make_report(
        event_store.history,
        culprit,
        map(event_store.event, step.findings.all),
        inputs,
        event_count=event_store.policy.counter.total,
        overflow_nums=session.config.overflow_nums,
        log_path=log_path,
        batch=session.batches.of(step.index),
        scale=_loss_scale(session, step),
        world_size=world_size,
        style=session.config.stop.style,
        learning_rates=session.learning_rates(),
        left_out_by=session.config.left_out_by,
        **_update(session, finding, step),
    )


def _update(session: Session, finding: Finding, step: Step) -> dict[str, Any]:
    """Whether the weights were updated in the step of the finding, and what with."""
    began = int(finding.record["step"])
    if began < step.index:  # what came of it was seen in a later step
        if began not in session.updated_steps:
            return {}
        why = f"what came of it was seen in step {step.index}"
        return {"weights_intact": False, "why_updated": why}
    is_by_hand = session.is_explicit and not session.updated_steps
    if is_by_hand and not step.update_count:
        return {}  # the loop may update weights without an optimizer
    if step.is_partly_updated:
        return {"weights_intact": False, "why_updated": "its closure was evaluated several times"}
    if not step.update_count and (step is session.step or not step.guarded_count):
        return {"weights_intact": True if step is session.step else None}
    if step.why_updated or step.update_count > step.guarded_count > 0:
        return {"weights_intact": False, "why_updated": step.why_updated}
    if are_skipped(step):
        return {"weights_intact": True}
    if step.guarded_count and (session.config.level == "op" or _has_bad_gradient(step)):
        return {}  # no gradient is read as that of a parameter; some of several were skipped
    why = "its gradients were finite" if step.guarded_count else ""
    return {"weights_intact": False, "why_updated": why}


def are_skipped(step: Step) -> bool:
    """Whether all updates of the step skipped themselves: the words that decide are on a device,
    and made of the gradients that were read.
    """
    is_one = step.guarded_count >= 1 >= step.update_count  # of several each has its own word
    return is_one and _has_bad_gradient(step)


def _has_bad_gradient(step: Step) -> bool:
    return any(finding.role == "param_grad" for finding in step.findings.all)


def _loss_scale(session: Session, step: Step) -> Optional[float]:
    """That of the step, where it is known; reads a device value."""
    if step.scale is not None:
        return float(step.scale)
    given = session.step.scaler
    scaler = session.config.training.scaler if given is None else given()
    if scaler is None:
        return None
    if isinstance(scaler, GradScaler):
        return float(scaler.get_scale())
    return float(scaler()) if callable(scaler) else float(scaler)


def _module_inputs(session: Session, finding: Finding, step: Step) -> Evidence:
    call = finding.blamed_call
    if call is None:
        return []
    found: Evidence = []
    if finding.is_gradient:
        found += _gradients_of_outputs(session, call, step)
    for token, site in zip(call.inputs, call.input_sites):
        record = session.event_store.history.find(token)
        if record is not None:
            found.append((session.sites[site], record))
    return found + _parameters(session, call, step)


def report_of_step(session: Session, step: Step, log_path: Optional[str]) -> Optional[StopReport]:
    """The report of a step with counted events, as long as its records are held."""
    counted = [f for f in step.findings.all if f.counted]
    began = [f for f in counted if f.verdict in (Verdict.ORIGIN, Verdict.ARRIVED)]
    culprit = min(began or counted, key=lambda f: f.seq, default=None)
    return None if culprit is None else build_report(session, culprit, step, log_path, 1)


def _gradients_of_outputs(session: Session, call: Call, step: Step) -> Evidence:
    found: Evidence = []
    for token in call.outputs:
        seq = step.gradients.get(token)
        record = None if seq is None else session.event_store.history.find(seq)
        if record is not None:
            found.append((session.sites[int(record["site"])], record))
    return found


def _parameters(session: Session, call: Call, step: Step) -> Evidence:
    module = call.node.module()
    found: Evidence = []
    for name in () if module is None else module._parameters:
        number = call.node.site("param", name, 0)
        record = session.event_store.history.latest(number)
        # One of an earlier step was changed by an update since.
        if record is not None and record["step"] == step.index:
            found.append((session.sites[number], record))
    return found
