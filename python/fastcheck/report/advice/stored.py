"""Chooses what to try where a tensor is stored: a parameter, a buffer or the optimizer's state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fastcheck.record.event import GIVEN_INSTEAD, NOT_STEPPED, NOT_UPDATED
from fastcheck.record.format import Verdict
from fastcheck.utils.text.layout import listed
from fastcheck.utils.text.numbers import format_number

from . import activations
from .case import Advice, Case

if TYPE_CHECKING:
    import numpy as np

#: Optimizers whose update multiplies and adds alone.
_ADDING = frozenset({"SGD", "ASGD"})


def advice(case: Case) -> Iterator[Advice]:
    """Yields what to try, the most likely remedy first."""
    role = case.site.role
    if role == "buffer":
        return _buffer(case)
    if role == "optimizer_state":
        is_arrival = case.verdict is Verdict.ARRIVED
        return activations.arrived(case) if is_arrival else _optimizer_state(case)
    if case.reason.startswith(GIVEN_INSTEAD):
        return _given(case)
    return _updated(case) if case.trend.healthy else _never_finite(case)


def _buffer(case: Case) -> Iterator[Advice]:
    name = case.site.key
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
        beyond = (
            "Beyond float16's 65,504 a number is Inf (a running variance, or a position, and "
            "cos(Inf) is NaN)"
        )
        if not case.is_narrow and not case.has_nan:
            beyond = f"A power or an exponential may be beyond {case.reading.dtype}'s {case.limit}"
        yield Advice(
            f"Buffer {name} was non-finite before the first step that fastcheck observed: look "
            "at the checkpoint, and at the code that makes it. x/0 is Inf (a count of 0, as the "
            f"degree of a node without neighbours), and 0 * Inf NaN. {beyond}; torch.empty holds "
            "whatever was in memory."
        )
        return
    yield Advice(
        f"Buffer {name} keeps what earlier batches left in it, and a healthy batch doesn't "
        "repair it: load it from an earlier checkpoint, or reset it (BatchNorm: "
        "module.reset_running_stats()) once the cause is gone."
    )


def _optimizer_state(case: Case) -> Iterator[Advice]:
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


def _given(case: Case) -> Iterator[Advice]:
    yield Advice(
        f"What was given in place of {case.site.key} is not finite: look at what computes it, such "
        "as an inner step's gradient. The derivative of sqrt, log and division is Inf at 0, and "
        "Inf * 0 is NaN: add the eps inside, sqrt(x + eps)."
    )


def _never_finite(case: Case) -> Iterator[Advice]:
    yield Advice(
        f"Parameter {case.site.key} was non-finite before the first step that fastcheck observed: "
        "check the checkpoint.",
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


def _updated(case: Case) -> Iterator[Advice]:
    name = case.site.key
    is_near = case.trend.has_exploded or case.trend.near_limit
    is_near = is_near or activations.fills_its_format(case)
    is_near = is_near or (case.trend.has_grown and case.reading.inf_count > 0)
    if case.reason.endswith(NOT_UPDATED) or (NOT_STEPPED in case.reason and not is_near):
        yield _written(name, is_near)
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


def _written(name: str, has_grown: bool) -> Advice:
    """Advice on a parameter that no optimizer has updated."""
    if has_grown:
        return Advice(
            f"The program wrote {name}, and it has grown: look at what writes it, such as the sign "
            "and the decay of an average of weights."
        )
    return Advice(
        f"The program wrote {name}, as it does an average of weights, a target network, a "
        "scale that is set from the first batch or an update of its own: look there for x/0, "
        "0/0 and log(0) (1 - decay ** step is 0 at step 0, the std of equal numbers and the "
        "norm of a gradient may be)."
    )


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
    below = next((pair for pair in state if "sq" in pair[0] and pair[1]["min"] < 0), None)
    if below is not None:
        yield Advice(
            f"{below[0]} of the optimizer goes down to {format_number(float(below[1]['min']))}, "
            "and no average of squares is below 0: its root is NaN. Look at the checkpoint that "
            "the state was loaded from, and at what writes it."
        )
        return
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
