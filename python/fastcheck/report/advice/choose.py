"""Chooses what to try from the culprit's record, role, verdict and trend."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Callable

from fastcheck.record.event import (
    CHANGED_BY_LOOP,
    COMPUTED_OUTSIDE,
    GIVEN_INSTEAD,
    KNOWN_ALONE,
    MAYBE_CHANGED,
    NOT_STEPPED,
    NOT_UPDATED,
    TARGET_OF_KL,
    WRITTEN_BY_LOOP,
)
from fastcheck.record.format import Verdict, is_nonfinite
from fastcheck.record.statistics import RecordStatistics, statistics_of
from fastcheck.report.trend import Trend
from fastcheck.utils.text.layout import listed
from fastcheck.utils.text.numbers import counted, format_number

from . import activations
from .case import Advice, Case, Operation
from .operators import by_operator, target_outgrows
from .source import how_written, on_source

if TYPE_CHECKING:
    import numpy as np

    from fastcheck.record.site import Site
    from fastcheck.report.stop_report import StopReport

_STORED = ("param", "buffer", "optimizer_state")
_UPDATE = "optimizer"
#: Weights are seldom larger.
_LARGE_WEIGHT = 100.0
#: Optimizers whose update multiplies and adds alone.
_ADDING = frozenset({"SGD", "ASGD"})


def stored(case: Case) -> Iterator[Advice]:
    name = case.site.key
    if case.site.role == "buffer":
        is_new = case.has_nan and case.trend.healthy and not case.trend.has_grown
        if is_new and case.operation is None:
            yield Advice(
                "It was finite before, and became NaN in one step. A var or std of one row is 0/0 "
                "(unbiased: divided by n - 1), and so is a mean over no rows: look at the size of "
                "the batch.",
                "x.var(0, correction=0)  # or: if len(x) > 1",
            )
        form = case.reading.float_format
        is_variance = case.trend.healthy and name.endswith("running_var") and not case.has_nan
        if case.trend.has_grown and not (is_variance and case.is_narrow):
            yield from activations.growth(case)
        if is_variance and form:
            how = "keep this norm and its input in float32, " if case.is_narrow else ""
            yield Advice(
                f"If its module read a number above {format_number(math.sqrt(form.max))}, whose "
                f"square is beyond {case.reading.dtype}'s {case.limit}, the variance was infinite: "
                f"{how}scale the input, or look for the outlier in this step's batch. If not, look "
                "at what writes the buffer."
            )
        if not case.trend.healthy:
            yield Advice(
                f"Buffer {name} was non-finite before the first step that fastcheck observed: look "
                "at the checkpoint, and at the code that makes it. Beyond float16's 65,504 a "
                "number is Inf (a running variance, or a position, and cos(Inf) is NaN); "
                "torch.empty holds whatever was in memory."
            )
            return
        yield Advice(
            f"Buffer {name} keeps what earlier batches left in it, and a healthy batch doesn't "
            "repair it: load it from an earlier checkpoint, or reset it (BatchNorm: "
            "module.reset_running_stats()) once the cause is gone."
        )
        return
    if case.site.role == "optimizer_state" and case.verdict is Verdict.ARRIVED:
        yield from activations.arrived(case)
        return
    if case.site.role == "optimizer_state":
        form = case.reading.float_format
        for gradient, reading in case.read_inputs:
            peak = float(reading.abs_max or 0)
            if form is None or peak * peak <= form.max:
                continue
            yield Advice(
                f"The gradient of {gradient.key} reaches {format_number(peak)}, whose "
                f"square is beyond {case.reading.dtype}'s {case.limit}: look at what makes it so "
                "large, such as the loss of this step, and clip gradients before the update.",
                "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
            )
        yield Advice(
            "The optimizer's state is bad, and every later update will be: go back to a "
            "checkpoint from before this step, then clip gradients or lower the learning rate"
            f"{case.rates}."
        )
        return
    if case.reason.startswith(GIVEN_INSTEAD):
        yield Advice(
            f"What was given in place of {name} is not finite: look at what computes it, such as "
            "an inner step's gradient. The derivative of sqrt, log and division is Inf at 0, and "
            "Inf * 0 is NaN: add the eps inside, sqrt(x + eps)."
        )
        return
    if not case.trend.healthy:
        yield Advice(
            f"Parameter {name} was non-finite before the first step that fastcheck observed: check "
            "the checkpoint.",
            "state = torch.load(path)\n[k for k, v in state.items() if not v.isfinite().all()]",
        )
        if case.is_narrow:
            yield Advice(
                f"A weight above {case.limit} becomes Inf when it is cast to "
                f"{case.reading.dtype}: load in bfloat16 or float32."
            )
        yield Advice(
            "A parameter made with torch.empty and never initialised holds whatever was in memory, "
            "and a formula may overflow: log(exp(x) - 1) of a large x is Inf."
        )
        return
    is_near = case.trend.has_exploded or case.trend.near_limit
    is_near = is_near or activations.fills_its_format(case)
    is_near = is_near or (case.trend.has_grown and case.reading.inf_count > 0)
    if case.reason.endswith(NOT_UPDATED) and is_near:
        yield Advice(
            f"The program wrote {name}, and it has grown: look at what writes it, such as the sign "
            "and the decay of an average of weights, and go back to the last checkpoint."
        )
        return
    if case.reason.endswith(NOT_UPDATED) or (NOT_STEPPED in case.reason and not is_near):
        yield Advice(
            f"The program wrote {name}, as it does an average of weights, a target network, a "
            "scale that is set from the first batch or an update of its own: look there for x/0, "
            "0/0 and log(0) (1 - decay ** step is 0 at step 0, the std of equal numbers and the "
            "norm of a gradient may be), and go back to the last checkpoint."
        )
        return
    has_fault = bool(case.report.fault)
    steppers = {name for name, _ in case.report.learning_rates}
    is_far = not is_near and (case.has_nan or not case.is_narrow)
    is_far &= all(rate < 1e6 for _, rate in case.report.learning_rates)
    is_quotient = (case.has_nan and not is_near) or (is_far and bool(_state_of(case)))
    is_quotient &= bool(case.divider) and not has_fault
    is_written = bool(steppers) and steppers <= _ADDING and is_far and not has_fault
    if is_quotient:
        yield from _quotient_of_update(case)
    elif is_written:
        yield Advice(
            f"The weight was far from overflowing, and {' and '.join(sorted(steppers))} divides by "
            "no number that may be 0: of gradients that are far from overflowing it makes no NaN "
            "or Inf. The program may have written it after the update, as sharpness-aware "
            "minimisation, an average or a constraint does: look there for a division by a norm, a "
            "sum or a count of 0.",
            "p.add_(rho * p.grad / (norm + 1e-12))",
        )
    is_before = case.trend.healthy[-1].step < case.report.step
    what = "The update before this step or a later write" if is_before else "A write in this step"
    lost = f"{what} broke {name}: the model in memory is lost. Go back to the "
    if has_fault or is_quotient or is_written:
        yield Advice(f"{lost}last checkpoint.")
        return
    yield Advice(
        f"{lost}last checkpoint, then lower the learning rate{case.rates}, warm up for longer, or "
        "clip gradients.",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    )
    eps = " and the optimizer's eps if it has one (Adam: 1e-8 in float32; larger in 16-bit)"
    yield Advice(f"Check the schedule{eps if case.divider else ''}.")


def _state_of(case: Case) -> tuple[tuple[str, np.void], ...]:
    """The optimizer's state of a weight that an update has broken, where that tells of it."""
    made = case.report.made_by
    return () if made is None or made.operator else made.inputs


def _quotient_of_update(case: Case) -> Iterator[Advice]:
    """NaN in a weight that was far from overflowing, or Inf where the state of it is finite."""
    names = [name for name, _ in case.report.learning_rates]
    tiny = next((n for n in names if "Adam" in n or n in ("Adagrad", "RMSprop")), "")
    if case.reading.dtype == "float16" and tiny:
        yield Advice(
            f"By default {tiny} on float16 weights divides by zero: its eps, at most 1e-8, is 0 in "
            "float16, and an element without a gradient becomes 0/0. Keep float32 weights under "
            "autocast, or set eps=1e-4.",
            f"{tiny}(parameters, eps=1e-4)",
        )
        return
    state = _state_of(case)
    if state and all(r["zero_count"] == case.reading.nonfinite_count for _, r in state):
        which = listed([label for label, _ in state], 5)
        verb = "is" if len(state) == 1 else "are"
        yield Advice(
            f"The weight was far from overflowing, and {which} of the optimizer {verb} 0 in the "
            "elements that broke: divided by such a number, its root or a sum of them, 0 is NaN "
            "and another number Inf, and 0 * rsqrt(0) is NaN. Add the eps to what is divided by, "
            "before the division or the rsqrt, and give an optimizer that has one an eps above 0.",
            "update = m / (v.sqrt() + eps)",
        )
        return
    if state:
        yield Advice(
            "The weight was far from overflowing, every element of it broke, and what the "
            "optimizer keeps of each is finite: look at the numbers that multiply or divide a "
            "whole weight: a bias correction (1 - beta ** t is 0 at t = 0: count from 1), a "
            "learning rate, a norm or a sum of 0. Or at a root of what may be below 0 (v - m * m, "
            "as of RMSprop(centered=True)): clamp before it. If the program wrote the weight after "
            "the update, look there."
        )
        return
    yield Advice(
        "The weight was far from overflowing. An update may make NaN of it by a division, 0/0, "
        "where a second moment, a row mean or a norm is 0 and its eps does not keep it away, or by "
        "a root of what may be below 0 (v - m * m, as of RMSprop(centered=True)): add an eps "
        "inside each root and each divisor, and clamp before a root. If the program wrote it "
        "after the update, look there."
    )


def loss(case: Case) -> Iterator[Advice]:
    of_line = on_source(case.source)
    if of_line is not None and case.operation is None:
        yield of_line
        return
    if case.outside:
        yield Advice(
            f"{case.outside} was not finite before the loss read it: look at the data, or at what "
            f"computes it without a graph. Look where it is made: {_how_made(case)}.",
            f"assert torch.isfinite({case.outside}).all()",
        )
        return
    if case.outside_reading is not None:
        what = "a tensor" if case.outside_reading.nonfinite_count else "a tensor, or a number,"
        inputs = case.report.made_by.inputs if case.report.made_by is not None else ()
        if any(label == TARGET_OF_KL for label, _ in inputs):
            yield Advice(
                "If the target of kl_div holds log-probabilities, pass log_target=True. If not, "
                "give it probabilities: numbers below 0 have no logarithm.",
                "F.kl_div(log_p, log_q, log_target=True)",
            )
            return
        if any(label == "target" and is_nonfinite(record) for label, record in inputs):
            yield Advice(
                "The target was not finite before the loss read it: look at the data, or at what "
                f"computes it without a graph. Look where it is made: {_how_made(case)}.",
                "assert torch.isfinite(target).all()",
            )
            return
        yield Advice(
            f"The loss read {what} that is not finite and has no graph: a target, or a weight, a "
            f"mean or a mask that was made of data. Look where it is made: {_how_made(case)}."
        )
        return
    # The advice that the records show comes before the common advice.
    made = case.operation
    result = None if made is None else made.result
    form = None if made is None or result is None else result.float_format
    is_finite = made is not None and not any(r.nonfinite_count for _, r in made.inputs)
    is_safe = made is not None and made.is_arithmetic
    if made is not None and result is not None and form is not None and form.is_narrow:
        is_root = made.name == "sqrt" and not made.is_nan  # That of a finite number is none.
        has_left = (result.inf_count and (is_root or is_safe)) or case.is_sum_of_products
        if is_finite and has_left:
            yield activations.narrow(made, result.dtype, form.max)
            return
    yield from activations.growth(case) if case.has_run_away else ()
    if made is not None and result is not None and made.inputs and is_finite and is_safe:
        yield activations.unexplained(made)
    elif of_line is not None:
        yield of_line
    elif case.has_nan:
        yield Advice(
            "The loss's own code made it, or what that read beside the model (targets, weights): "
            "look for 0/0 (a mean over nothing: every target ignored, an empty mask; a std of one "
            "element), 0 * log(0), Inf - Inf, or the log or root of a negative number."
        )
    elif not case.has_run_away:
        yield Advice(
            "The loss's own code made it, or what that read beside the model (targets, weights): "
            "look for log(0), x/0 or exp of a large number. Use cross_entropy, log_softmax or "
            "binary_cross_entropy_with_logits on the logits, not log of a softmax or a sigmoid; "
            "clamp before exp."
        )
    if case.is_narrow:
        yield Advice(
            f"A sum in {case.reading.dtype} ends at {case.limit}: compute the loss in float32, "
            "loss_fn(logits.float(), target)."
        )


def _how_made(case: Case) -> str:
    """The causes of NaN or infinite data, by what it holds."""
    bad, of_lines = case.outside_reading, how_written(case.written)
    if of_lines:
        return of_lines
    if bad is None or not bad.nonfinite_count:
        return "0/0 or x/0 (a count of 0: clamp it), log(0), a missing value, a cast out of range"
    if bad.neginf_count == bad.nonfinite_count:
        return "log(0) is -Inf, and so is -1/0 (clamp before, or leave such elements out)"
    if bad.nan_count:
        return (
            "0/0 (a mean over nothing, a std of one element, a count of 0: clamp it), a root, a "
            "log or a power of a negative number, a missing value, Inf - Inf"
        )
    return "x/0 (a count of 0: clamp it), log(0), a cast out of range"


def gradient(case: Case) -> Iterator[Advice]:
    is_written = case.reason.endswith(WRITTEN_BY_LOOP)
    is_changed = case.reason.startswith(CHANGED_BY_LOOP) or MAYBE_CHANGED in case.reason
    if is_written or is_changed:
        yield Advice(
            f"Look {'before' if is_written else 'between backward() and'} the update, where the "
            "loop writes to p.grad (clipping, unscaling, a projection, an average): where it "
            "divides by a norm, a sum or a count of 0, 0/0 is NaN, and x/0 is Inf. Add an eps to "
            "the divisor.",
            "p.grad.mul_(max_norm / (norm + 1e-6))",
        )
    if case.reason.startswith(CHANGED_BY_LOOP):
        return
    scale = case.report.scale
    if scale is not None:
        if case.has_nan and not case.reading.inf_count:
            yield Advice(
                "Only NaN, no Inf: a smaller loss scale won't help, 0 * Inf or 0/0 in the "
                "backward did it (see below)."
            )
        elif scale < 1:
            yield Advice(
                f"The loss scale has already fallen to {format_number(scale)} and the "
                "gradient is still too large: it is not the scale. Lower the learning rate"
                f"{case.rates} and clip gradients after scaler.unscale_(optimizer)."
            )
        else:
            yield Advice(
                f"The gradient is multiplied by the loss scale ({format_number(scale)}). A "
                "GradScaler skips such steps and halves the scale; when they don't stop, start "
                "lower.",
                "torch.amp.GradScaler(device_type, init_scale=2.0**10)",
            )
    if case.is_narrow and (case.reading.inf_count or case.trend.near_limit):
        seen = ""
        if case.trend.last_abs_max is not None:
            seen = f", and this gradient had reached {format_number(case.trend.last_abs_max)}"
        yield Advice(
            f"{case.reading.dtype} ends at {case.limit}{seen}. Use bfloat16, which needs no loss "
            "scaling"
            + (
                "."
                if scale is not None
                else ", or keep float32 weights and train under autocast with torch.amp.GradScaler."
            )
        )
    if case.has_nan and case.trend.has_exploded:
        yield from activations.growth(case)
    elif case.has_nan:
        yield Advice(
            "The backward of sqrt, log, division and x**p with p < 1 is Inf at 0, and Inf * 0 is "
            "NaN: add the eps inside, sqrt(x + eps), not outside. torch.where doesn't stop it: "
            "make the input safe before the function, f(torch.where(ok, x, 1.0)), and mask the "
            "result after."
        )
        if case.is_like("softmax", "attention"):
            yield Advice(
                "Attention: a fully masked row gives NaN gradients even where its output is "
                "masked away."
            )
    if not case.is_narrow and case.reading.inf_count:
        if case.trend.has_grown:
            yield from activations.growth(case)  # the same once more is dropped
        else:
            yield Advice(
                f"{case.reading.dtype} holds up to {case.limit}: look for 1/x, rsqrt or log near "
                "zero in the forward, whose derivative there is Inf."
            )
    if case.site.role == "grad_output" and case.verdict is not Verdict.PROPAGATED:
        yield Advice(
            f"The code after {case.site.module or 'the model'} (the loss, or a function between "
            "modules) made this gradient: pass the criterion to install(model, criterion) to see "
            "into it."
        )
    yield Advice(
        "clip_grad_norm_ can't repair it: the norm of a gradient with Inf or NaN is not finite "
        "either. Pass error_if_nonfinite=True to get an error."
    )


def gradient_norm(case: Case) -> Iterator[Advice]:
    if case.is_narrow:
        yield Advice(
            f"The norm is computed in {case.reading.dtype}, which ends at {case.limit}: clip "
            "gradients of float32 weights."
        )
    yield Advice(
        "Clipping by an infinite norm sets every gradient to 0 (or to NaN, with max_norm=inf), and "
        f"the step is lost: lower the learning rate{case.rates}, or divide the loss. fastcheck "
        "show lists the gradients by their largest magnitude."
    )


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
        outside=re.split(r", (?:in )?(?:assigned|an argument)|; ", outside)[0],
        outside_reading=statistics_of(made.inputs[0][1])
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
        return {"log1_p": "log1p"}.get(name, name)
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
        return stored
    if role == "loss":
        return loss
    if role == "grad_norm":
        return gradient_norm
    if role in ("param_grad", "grad_input", "grad_output"):
        return gradient
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
    if report.outlier is not None and report.outlier.has_grown:
        label, now, before, *_ = report.outlier
        yield Advice(
            f"{label} of the model is {format_number(now / before)} times as large as at first: "
            "look at the data, or at what else makes it, before the learning rate. What writes to "
            "a data set in place (sub_, div_, normalize(inplace=True)) does so again in each "
            "epoch: let it work on a copy."
        )


def _broken_weight(case: Case) -> Iterator[Advice]:
    """Advice if the records show that the weights changed first, and the module computes as
    before.
    """
    if case.broken_weight is None:
        return
    site, now, before = case.broken_weight
    if site.key in case.report.not_updated:
        yield Advice(
            f"The program wrote {site.key}, which no optimizer holds: its largest number went from "
            f"{format_number(before.abs_max)} to {format_number(now.abs_max)}, before this "
            "overflow. Look at what writes it: the sign and the decay of an average of weights."
        )
        return
    yield Advice(
        f"An update since step {before.step:,} took the largest number of {site.key} from "
        f"{format_number(before.abs_max)} to {format_number(now.abs_max)}, before this overflow: "
        f"lower the learning rate{case.rates}, or warm up for longer."
    )
    yield Advice(
        "Look at the gradients of that step, too: a gradient far too large does the same at a "
        "healthy learning rate. Clip it.",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    )


def _stored_infinity(case: Case) -> Iterator[Advice]:
    """Advice on a buffer that has held NaN or Inf before, where what has read it makes a NaN."""
    stored = re.search(r"(?:but for|stored in) (buffer [^\s,;]+)", case.reason)
    # A mask of -Inf is a buffer on purpose.
    is_mask = re.search(r"softmax|logsumexp|attention|add|sub", case.op_name or "add")
    if stored is not None and not is_mask:
        yield Advice(
            f"{stored[1]} held NaN or Inf before it was read: set it first. An observer of ranges "
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
    """Suggests how to find the operator and the line, where they are not known."""
    made = report.made_by
    is_batch = case.site.role == "input" and not case.site.module
    # A stored tensor that was finite in an earlier step was made in the run, too.
    was_finite = case.site.role in _STORED and bool(case.trend.healthy)
    is_between = report.culprit.reason.startswith(COMPUTED_OUTSIDE)
    is_of_run = case.verdict is Verdict.ORIGIN or was_finite or is_between
    is_known = bool(case.site.op) or report.is_op_level
    if is_known or not is_of_run or (is_batch and not is_between):
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
