"""Chooses what to try from the culprit's record, role, verdict and trend."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Callable

from fastcheck.extension import status
from fastcheck.record.event import (
    COMPUTED_OUTSIDE,
    KNOWN_ALONE,
)
from fastcheck.record.format import Verdict
from fastcheck.record.statistics import RecordStatistics, statistics_of
from fastcheck.report.trend import Trend
from fastcheck.utils.text.numbers import counted, format_number

from . import activations, losses, stored
from .case import Advice, Case, Operation
from .operators import by_operator, target_outgrows

if TYPE_CHECKING:
    from fastcheck.record.site import Site
    from fastcheck.report.stop_report import StopReport

_STORED = ("param", "buffer", "optimizer_state")
_UPDATE = "optimizer"
#: Weights are seldom larger.
_LARGE_WEIGHT = 100.0


MOST = 4

#: Modules of torch, and their only operator that can make NaN of finite numbers.
_OPERATOR_OF = {
    "CrossEntropyLoss": "nll_loss",
    "NLLLoss": "nll_loss",
    "CTCLoss": "ctc_loss",
    "MultiheadAttention": "softmax",
    "Softmax": "softmax",
    "LogSoftmax": "softmax",
}


def advise(report: StopReport) -> list[Advice]:
    """Chooses at most four things to try, the most likely to help first. Never empty."""
    case = _case(report)
    items = list(_saturating(case))
    is_loaded = case.verdict is Verdict.ARRIVED and case.site.direction == "optimizer"
    is_loaded &= case.site.role != "param"  # functional_call() was given it
    is_known = not (items or is_loaded or case.verdict is Verdict.PROPAGATED)
    known = by_operator(case) if is_known else []
    is_given = case.site.role == "input" and not case.site.module
    if report.fault and not is_given and case.verdict is not Verdict.PROPAGATED:
        items.append(Advice(f"{report.fault}."))
        if case.site.direction == "optimizer" and case.site.op:
            # An update at such a setting makes Inf of numbers of any size.
            known = items[-1:]
    has_changed = case.has_run_away or (case.is_narrow and case.trend.has_jumped)
    items += _growth(report) if has_changed or case.broken_weight else ()
    operation = case.operation
    if operation is not None and operation.is_at_zero:
        items += known  # a weight that has changed is why it was 0, if anything
    items += list(_broken_weight(case)) or list(_updated_operand(case))
    items += _stored_infinity(case)
    is_large = case.reading.inf_count > 0 and not case.is_narrow and not case.has_domain
    if case.searches and report.why_updated and is_large and not is_given:
        items.append(
            Advice(
                f"Numbers left the range of {case.reading.dtype} within a step of LBFGS: give it "
                f"line_search_fn='strong_wolfe', or a lower learning rate{case.rates}. Its closure "
                "has to clear the gradients before each backward()."
            )
        )
    is_of_target = case.operation is not None and target_outgrows(case.operation)
    has_changed = has_changed and not is_of_target
    developed = list(activations.growth(case)) if known and has_changed else []
    is_grown = case.trend.has_exploded and not (case.operation and case.operation.is_of_zeros)
    for item in (
        *(developed if is_grown else ()),
        *known,
        *developed,
        # A buffer has to be repaired, whatever made its contents.
        *(() if known and case.site.role != "buffer" else _rules(case)(case)),
    ):
        if item not in items:
            items.append(item)
    if not items and case.operation is not None and case.operation.result is not None:
        items.append(activations.unexplained(case.operation))
    closer = [] if report.replay is not None else list(_closer(case, report))
    return [*items[: MOST - 1 - len(closer)], *closer, _go_on(report, case)]


def _case(report: StopReport) -> Case:
    # The report of the step that ran again, operator by operator, is nearer to the cause.
    again = None if report.replay is None else report.replay.report
    seen = report if again is None or not again.culprit.site.op else again
    event, made = seen.culprit, report.made_by
    reading = statistics_of(event.record)
    variable = "" if made is None else made.variable
    if variable.startswith("the result is used in "):  # What came from outside is not held.
        variable = ""
    outside = "" if made is None or made.operator else variable
    inputs = tuple((site, statistics_of(record)) for site, record in seen.inputs)
    return Case(
        report=report,
        site=event.site,
        reading=reading,
        verdict=Verdict(event.verdict),
        reason=event.reason,
        trend=Trend.of(report.trend),
        inputs=inputs,
        inputs_before=tuple(
            None if record is None else statistics_of(record) for record in seen.inputs_before
        ),
        operation=_operation(seen, reading, inputs),
        outside=re.split(r", (?:in )?(?:assigned|an argument)|; | in \S+$", outside)[0],
        outside_reading=statistics_of(made.inputs[-1][1])
        if made is not None and not made.operator and made.inputs
        else None,
        source=variable.partition(": ")[2],
        written=() if made is None else made.written,
    )


def _operation(
    report: StopReport, reading: RecordStatistics, inputs: tuple[tuple[Site, RecordStatistics], ...]
) -> Operation | None:
    """The operator of the culprit, or the operator that was found after it; None where none is
    known.
    """
    site, made = report.culprit.site, report.made_by
    is_backward = _is_derivative(site)
    if site.op:
        read = tuple((operand.label, record) for operand, record in inputs)
        return Operation(_short(site.op), site.op, is_backward, read, _origins(read), reading)
    if made is not None and made.operator:
        read = tuple((name, statistics_of(record)) for name, record in made.inputs)
        result = None if made.result is None else statistics_of(made.result)
        is_backward = made.is_backward and (made.site is None or _is_derivative(made.site))
        short, origins = _short(made.operator), _origins(read)
        is_open = KNOWN_ALONE in made.how
        return Operation(short, made.operator, is_backward, read, origins, result, is_open)
    name = _OPERATOR_OF.get(site.module_type)
    if (
        name is None
        or site.direction == "backward"
        or site.role == "input"
        or (reading.inf_count and name != "ctc_loss")
    ):
        return None
    return Operation(name, site.module_type, False, result=reading)


def _origins(inputs: Iterable[tuple[str, object]]) -> dict[str, str]:
    """The operators that made the operands, by label."""
    made = {label: label.partition(" (")[2].rstrip(")") for label, _ in inputs}
    return {
        label: _short(op)
        for label, op in made.items()
        if op.startswith("aten.") or re.search(r"Backward\d*$", op)
    }


def _is_derivative(site: Site) -> bool:
    """True for an operator's backward: the label names what ran. In a backward of the program's own
    an operator is what it is in forward.
    """
    return site.direction == "backward" and (" (" in site.label or "_backward" in (site.op or ""))


def _short(operator: str) -> str:
    """``div`` of ``aten.div_.Tensor`` and of ``DivBackward0``, ``nll_loss`` of
    ``aten.nll_loss_forward``.
    """
    node = re.fullmatch(r"(\w+?)Backward\d*", operator)
    if node:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", node[1]).lower()
        return re.sub(r"(?<=\d)_(?=[dp]\b)", "", name)
    parts = operator.split(".")
    name = parts[1] if len(parts) > 1 else parts[0]
    name = name.strip("_")
    for affix in ("native_", "true_", "foreach_"):
        name = name.removeprefix(affix)
    name = re.sub(r"_forward$|_backward(?:_data)?$", "", name)
    return {"divide": "div", "multiply": "mul"}.get(name, name)


def _rules(case: Case) -> Callable[[Case], Iterator[Advice]]:
    role = case.site.role
    if case.verdict is Verdict.PROPAGATED:
        return _propagated
    if role == "output" and case.broken_weight is not None:
        return lambda _: iter(())
    if role in _STORED:
        return stored.advice
    if role == "loss":
        return losses.loss
    if role == "grad_norm":
        return losses.gradient_norm
    if role in ("param_grad", "grad_input", "grad_output"):
        return losses.gradient
    if case.verdict is Verdict.ARRIVED or (role == "input" and case.operation is None):
        return activations.arrived
    full = activations.fills_its_format(case)
    # A product has overflowed: it takes no logarithm, and writes no mask.
    is_product = case.is_sum_of_products or case.op_name in ("mul", "addcmul", "prod", "cumprod")
    if case.only_neginf and not full and not is_product:
        return activations.negative_infinity
    if case.is_narrow and (full or case.overflows_to_nan or case.reading.inf_count):
        return activations.out_of_range
    if case.has_nan and not full:
        return activations.nan_from_finite
    return activations.diverged


def _propagated(case: Case) -> Iterator[Advice]:
    yield Advice(
        'This tensor only carries on what an earlier tensor held (Stop(count="all") counts those '
        "too). Look at the first non-finite tensor of the step, not at this tensor."
    )


def _updated_operand(case: Case) -> Iterator[Advice]:
    """Advice on a weight that an operator of forward has read: of what it was nothing is held."""
    updated = [(s.label, float(r.abs_max or 0)) for s, r in case.inputs if s.direction == _UPDATE]
    label, peak = max(updated, key=lambda pair: pair[1], default=("", 0.0))
    if case.site.direction == "forward" and case.site.op and peak >= _LARGE_WEIGHT:
        yield Advice(
            f"{label} was written by an update and reaches {format_number(peak)}: if that is far "
            f"more than it was, lower the learning rate{case.rates}, or warm up for longer."
        )


def _growth(report: StopReport) -> Iterator[Advice]:
    if report.outlier is None:
        return
    label, step = report.outlier.label, report.outlier.step
    times = format_number(report.outlier.now / report.outlier.before)
    which = "this" if step == report.step else "that"
    seen = f"{label} of the model is {times} times as large as"
    if which == "that":
        seen = f"{label} of the model was {times} times as large in step {step:,} as"
    if not report.outlier.has_grown:
        yield Advice(
            f"{seen} in the {report.outlier.steps} steps before: look at the data of {which} step, "
            "or at what else makes it, before the learning rate."
        )
    else:
        yield Advice(
            f"{seen} at first: look at the data, or at what else makes it, before the learning "
            "rate. What writes to a data set in place (sub_, div_, normalize(inplace=True)) does "
            "so again in each epoch: let it work on a copy."
        )


def _broken_weight(case: Case) -> Iterator[Advice]:
    """Advice if the records show that the weights changed first, and the module computes as
    before.
    """
    is_of_data = case.site.role == "loss" and case.operation is None
    if case.broken_weight is None or is_of_data:
        return
    site, now, before = case.broken_weight
    if site.key in case.report.not_updated:
        yield Advice(
            f"The program wrote {site.key}, which no optimizer holds: its largest number went from "
            f"{format_number(before.abs_max)} to {format_number(now.abs_max)}, before this. "
            "Look at what writes it: the sign and the decay of an average of weights."
        )
        return
    yield Advice(
        f"An update, or a write by the program, since step {before.step:,} took the largest number "
        f"of {site.key} from {format_number(before.abs_max)} to {format_number(now.abs_max)}, "
        f"before this: lower the learning rate{case.rates}, or warm up for longer."
    )
    yield Advice(
        "Look at the gradients of that step, too: a gradient far too large does the same at a "
        "healthy learning rate. Clip it.",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    )


def _stored_infinity(case: Case) -> Iterator[Advice]:
    """Advice on a buffer that has held NaN or Inf before, where what has read it makes a NaN."""
    named = re.search(r"(?:but for|stored in) (buffer [^\s,;]+)", case.reason)
    # A mask of -Inf is a buffer on purpose.
    is_mask = re.search(r"softmax|logsumexp|attention|add|sub", case.op_name or "add")
    if named is not None and not is_mask:
        yield Advice(
            f"{named[1]} held NaN or Inf before it was read: set it first. An observer of ranges "
            "that has seen nothing keeps Inf and -Inf, and a weight that is divided by a count of "
            "0 is Inf."
        )


def _saturating(case: Case) -> Iterator[Advice]:
    if case.reading.overflow_count > case.reading.nonfinite_count:
        yield Advice(
            "This device saturates: its largest number stands for an infinity and 0 for a NaN, so "
            "that more may be wrong than the values show. Atlas A2 and A3 give Inf and NaN where "
            "INF_NAN_MODE_FORCE_DISABLE is not set."
        )


def _closer(case: Case, report: StopReport) -> Iterator[Advice]:
    """Suggests how to find the operator and the line, where they are not known: by op level, which
    needs the extension.
    """
    made = report.made_by
    is_batch = case.site.role == "input" and not case.site.module
    # A stored tensor that was finite in an earlier step was made in the run, too.
    was_finite = case.site.role in _STORED and bool(case.trend.healthy)
    is_between = report.culprit.reason.startswith(COMPUTED_OUTSIDE)
    is_of_run = case.verdict is Verdict.ORIGIN or was_finite or is_between
    is_known = bool(case.site.op) or report.is_op_level
    if is_known or not is_of_run or (is_batch and not is_between) or status.module is None:
        return
    if case.site.role == "grad_norm" or (made is not None and made.line):
        return
    is_near = bool(case.written or case.source)
    what = "find the operator and the line"
    if made is not None and made.operator:
        what = "be sure of the line" if is_near else "find the line"
    # The step that made what is stored is over when it is read.
    replay = ", or with stop=fastcheck.Stop(replay=True) and monitor.run(step, batch)"
    yield Advice(
        f'To {what}, run again with install(..., level="op"){"" if was_finite else replay}.',
        is_kept=not is_near,
    )


def named_weights(broken: tuple[str, ...]) -> str:
    """The parameters that hold NaN or Inf, as the beginning of a sentence."""
    hidden = len(broken) - 3
    more = f" and {counted(hidden, 'more weight')}" if hidden > 0 else ""
    return f"{', '.join(broken[:3])}{more} hold{'s' if len(broken) == 1 else ''} NaN or Inf"


def _go_on(report: StopReport, case: Case) -> Advice:
    how = "To record and go on instead of stopping: install(..., overflow_nums=-1)"
    if report.broken_weights:
        is_weight = case.site.role in ("param", "buffer")
        never_was_finite = is_weight and not case.trend.healthy
        mend = (
            "repair that first" if never_was_finite else "first load a checkpoint from before that"
        )
        return Advice(
            f"{how}. {named_weights(report.broken_weights)} by now: {mend}, or everything that "
            "follows comes from these weights."
        )
    return Advice(
        f"{how}. fastcheck then prevents no update, and a weight that becomes NaN stays NaN: keep "
        "an earlier checkpoint."
    )
