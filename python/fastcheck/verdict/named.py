"""The verdict on a tensor that observe() has named."""

from __future__ import annotations

from fastcheck.calls.module_calls import Call
from fastcheck.verdict.op_level.finding import OpFinding
from fastcheck.verdict.op_level.judge import OpJudge

from .finding import Finding
from .module_level import Judge

__all__ = ["named_op_tensor", "named_tensor"]


def named_tensor(
    judge: Judge, finding: Finding, call: Call, after_gap: bool, has_excluded: bool
) -> None:
    """At module level. ``call``: of the name, within that of the module that was running."""
    finding.blamed_call = call.parent
    if call.is_recompute:
        judge.recomputed(finding, call)
    elif call.parent is not None:
        judge.inner_input(finding, call.parent, after_gap)
    else:
        judge.batch(finding, 0, False, has_excluded, False)


def named_op_tensor(judge: Judge, finding: OpFinding, source: int, is_scaled: bool) -> None:
    """At op level. ``source``: the record of the operator that made it, whose verdict counts; -1:
    no observed operator has.
    """
    assert isinstance(judge, OpJudge)
    judge.named(finding, source, is_scaled)
