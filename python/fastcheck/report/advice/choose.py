"""Chooses what to try from the culprit's record, role, verdict and trend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Callable

from fastcheck.record.format import Verdict
from fastcheck.record.statistics import statistics_of
from fastcheck.report.trend import Trend
from fastcheck.utils.text.numbers import format_number

from .activations import (
    arrived,
    diverged,
    fills_its_format,
    growth,
    nan_from_finite,
    negative_infinity,
    out_of_range,
)
from .case import Advice, Case

if TYPE_CHECKING:
    from fastcheck.report.stop_report import StopReport


def stored(case: Case) -> Iterator[Advice]:
    name = case.site.key
    if case.site.role == "buffer":
        yield Advice(
            f"Buffer {name} keeps what earlier batches left in it, and a healthy batch doesn't "
            "repair it: load it from an earlier checkpoint, or reset it (BatchNorm: "
            "module.reset_running_stats()) once the cause is gone."
        )
        if case.trend.has_grown:
            yield from growth(case)
        return
    if case.site.role == "optimizer_state":
        yield Advice(
            "The optimizer's state is bad, and every later update will be: go back to a "
            "checkpoint from before the first bad gradient, then clip gradients or lower the "
            f"learning rate{case.rates}."
        )
        return
    if case.step == 0 or not case.trend.healthy:
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
            "A parameter made with torch.empty and never initialised holds whatever was in memory."
        )
        return
    yield Advice(
        f"The update before this step broke {name}: the model in memory is lost. Go back to the "
        f"last checkpoint, then lower the learning rate{case.rates}, warm up for longer, or clip "
        "gradients.",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    )
    if case.reading.dtype == "float16":
        yield Advice(
            "Adam on float16 weights divides by zero: eps=1e-8 is zero in float16. Keep float32 "
            "weights under autocast, or set eps=1e-4."
        )
    else:
        yield Advice(
            "Check the optimizer's eps (Adam: 1e-8 in float32; larger in 16-bit) and the schedule."
        )


def loss(case: Case) -> Iterator[Advice]:
    # What the records show comes before what is common.
    yield from growth(case) if case.trend.has_grown else ()
    if case.has_nan or not case.trend.has_grown:
        yield Advice(
            "Everything that the model gave was finite, so the loss made it. A mean over nothing "
            "is 0/0: cross_entropy with every target equal to ignore_index, or a masked mean with "
            "an empty mask. Divide by count.clamp_min(1)."
        )
    yield Advice(
        "log(0): use cross_entropy, log_softmax or binary_cross_entropy_with_logits on the "
        "logits, not log of a softmax or a sigmoid."
    )
    if case.is_narrow:
        yield Advice(
            f"A sum in {case.reading.dtype} ends at {case.limit}: compute the loss in float32, "
            "loss_fn(logits.float(), target)."
        )


def gradient(case: Case) -> Iterator[Advice]:
    scaled = case.scale is not None
    if scaled and case.scale is not None:
        if case.has_nan and not case.reading.inf_count:
            yield Advice(
                "Only NaN, no Inf: a smaller loss scale won't cure this, 0 * Inf or 0/0 in the "
                "backward did it (see below)."
            )
        elif case.scale < 1:
            yield Advice(
                f"The loss scale has already fallen to {format_number(case.scale)} and the "
                "gradient is still too large: it is not the scale. Lower the learning rate"
                f"{case.rates} and clip gradients after scaler.unscale_(optimizer)."
            )
        else:
            yield Advice(
                f"The gradient is multiplied by the loss scale ({format_number(case.scale)}). A "
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
                if scaled
                else ", or keep float32 weights and train under autocast with torch.amp.GradScaler."
            )
        )
    if case.has_nan and case.trend.has_exploded:
        yield from growth(case)
    elif case.has_nan:
        yield Advice(
            "The backward of sqrt, norm, log, x**p and division is Inf at 0, and Inf * 0 is NaN: "
            "add the eps inside, sqrt(x + eps), not outside. torch.where doesn't stop it: make "
            "the input safe before the function, f(torch.where(ok, x, 1.0)), and mask the result "
            "after."
        )
        if case.is_like("softmax", "attention", "attn"):
            yield Advice(
                "Attention: a fully masked row gives NaN gradients even where its output is "
                "masked away."
            )
    if not case.is_narrow and case.reading.inf_count:
        if case.trend.has_grown:
            yield from growth(case)  # the same once more is dropped
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


def collective(case: Case) -> Iterator[Advice]:
    yield Advice("Another rank sent it: look at the reports of the other ranks for the same step.")
    if case.is_narrow:
        yield Advice(
            f"A sum over ranks in {case.reading.dtype} ends at {case.limit}: divide before the "
            "all-reduce, or reduce in float32."
        )


MOST = 6


def advise(report: StopReport) -> list[Advice]:
    """At most six things to try, the most likely to help first. Never empty."""
    event = report.culprit
    case = Case(
        site=event.site,
        reading=statistics_of(event.record),
        verdict=Verdict(event.verdict),
        step=report.step,
        trend=Trend.of(report.trend),
        inputs=tuple((site, statistics_of(record)) for site, record in report.inputs),
        scale=report.scale,
        log_path=report.log_path,
        inputs_before=tuple(
            None if record is None else statistics_of(record) for record in report.inputs_before
        ),
        learning_rates=report.learning_rates,
        left_out_by=report.left_out_by,
    )
    found: list[Advice] = [*_saturating(case), *_broken_weight(case)]
    for item in _rules(case)(case):
        if item not in found:
            found.append(item)
    closer = [] if report.replay is not None else list(_closer(case))
    return [*found[: MOST - 1 - len(closer)], *closer, _go_on(report)]


def _rules(case: Case) -> Callable[[Case], Iterator[Advice]]:
    role = case.site.role
    if case.verdict is Verdict.PROPAGATED:
        return _propagated
    if role == "output" and case.broken_weight is not None:
        return _nothing_else
    if role in ("param", "buffer", "optimizer_state"):
        return stored
    if role == "loss":
        return loss
    if role == "collective":
        return collective
    if role == "grad_norm":
        return gradient_norm
    if role in ("param_grad", "grad_input", "grad_output"):
        return gradient
    if case.verdict is Verdict.ARRIVED or role == "input":
        return arrived
    full = fills_its_format(case)
    if case.only_neginf and not full:
        return negative_infinity
    if case.is_narrow and (full or case.overflows_to_nan or case.reading.inf_count):
        return out_of_range
    if case.has_nan and not full:
        return nan_from_finite
    return diverged


def _propagated(case: Case) -> Iterator[Advice]:
    yield Advice(
        'This tensor only carries on what an earlier one held (Stop(count="all") counts those '
        "too). Look at the first non-finite tensor of the step, not at this one."
    )


def _broken_weight(case: Case) -> Iterator[Advice]:
    """The records show that the weights went first: the module does what it always did."""
    if case.broken_weight is None:
        return
    site, now, before = case.broken_weight
    yield Advice(
        f"An update since step {before.step:,} took the largest number of {site.key} from "
        f"{format_number(before.abs_max)} to {format_number(now.abs_max)}, before this overflow: "
        f"lower the learning rate{case.rates}, or warm up for longer.",
    )
    yield Advice(
        "Look at the gradients of that step, too: one that is far too large does the same at a "
        "healthy learning rate. Clip it.",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    )


def _nothing_else(case: Case) -> Iterator[Advice]:
    yield from ()


def _saturating(case: Case) -> Iterator[Advice]:
    if case.reading.overflow_count > case.reading.nonfinite_count:
        yield Advice(
            "This device saturates: its largest number stands for an infinity and 0 for a NaN, so "
            "that more may be wrong than the values show. Atlas A2 and A3 give Inf and NaN where "
            "INF_NAN_MODE_FORCE_DISABLE is not set."
        )


def _closer(case: Case) -> Iterator[Advice]:
    """Suggests how to find the operator and the line within a module."""
    is_computed = case.site.role in ("output", "input", "grad_input", "grad_output", "param_grad")
    is_module = bool(case.site.module) or case.site.role != "input"
    if case.verdict is Verdict.ORIGIN and is_computed and is_module and not case.site.op:
        yield Advice(
            'For the operator and the line run it again with install(..., level="op"), or train by '
            "monitor.run(step, batch) with install(..., stop=fastcheck.Stop(replay=True))."
        )


def named_weights(broken: tuple[str, ...]) -> str:
    """The parameters that hold NaN or Inf, as the beginning of a sentence."""
    hidden = len(broken) - 3
    more = f" and {hidden:,} more weight{'s' if hidden > 1 else ''}" if hidden > 0 else ""
    return f"{', '.join(broken[:3])}{more} hold{'s' if len(broken) == 1 else ''} NaN or Inf"


def _go_on(report: StopReport) -> Advice:
    how = "To record and go on instead of stopping: install(..., overflow_nums=-1)"
    if report.broken_weights:
        return Advice(
            f"{how}. {named_weights(report.broken_weights)} by now: load a checkpoint from before "
            "that first, or all that follows comes from these."
        )
    return Advice(
        f"{how}. Then no update is held back for what fastcheck finds, and a weight that becomes "
        "NaN stays NaN: keep a checkpoint from before."
    )
