"""Chooses what to try where a loss, a gradient or a norm of gradients is not finite."""

from __future__ import annotations

from collections.abc import Iterator

from fastcheck.record.event import CHANGED_BY_LOOP, MAYBE_CHANGED, TARGET_OF_KL, WRITTEN_BY_LOOP
from fastcheck.record.format import Verdict, is_nonfinite
from fastcheck.utils.text.numbers import format_number

from . import activations
from .case import OF_LOG_TARGET, Advice, Case
from .source import how_written, on_source, on_written


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
        yield _read_outside(case)
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
    elif (lines := of_line or on_written(case.written)) is not None:
        yield lines
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


def _read_outside(case: Case) -> Advice:
    """Advice on what a loss has read that is not finite and has no graph."""
    inputs = case.report.made_by.inputs if case.report.made_by is not None else ()
    if any(label == TARGET_OF_KL for label, _ in inputs):
        return OF_LOG_TARGET
    if any(label == "target" and is_nonfinite(record) for label, record in inputs):
        return Advice(
            "The target was not finite before the loss read it: look at the data, or at what "
            f"computes it without a graph. Look where it is made: {_how_made(case)}.",
            "assert torch.isfinite(target).all()",
        )
    bad = case.outside_reading
    what = "a tensor" if bad is not None and bad.nonfinite_count else "a tensor, or a number,"
    return Advice(
        f"The loss read {what} that is not finite and has no graph: a target, or a weight, a "
        "mean or a mask that was made of data, or what another model gave under no_grad(), as a "
        f"teacher does (look at its weights). Look where it is made: {_how_made(case)}."
    )


def _how_made(case: Case) -> str:
    """The causes of NaN or infinite data, by what it holds."""
    bad, of_lines = case.outside_reading, how_written(case.written)
    if of_lines:
        return of_lines
    if bad is None or not bad.nonfinite_count:
        return "0/0 or x/0 (a count of 0: clamp it), log(0), a missing value, a cast out of range"
    if bad.neginf_count == bad.nonfinite_count:
        return (
            "log(0) is -Inf, and so is -1/0 or a maximum over what is masked whole, and 0 * Inf is "
            "NaN (clamp before, or leave such elements out)"
        )
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
        yield _scaled(case, scale)
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
    lines = on_written(case.written)
    if case.has_nan and case.trend.has_exploded:
        yield from activations.growth(case)
    elif lines:  # of a hook, or of a backward of the program's own
        yield lines
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
                "zero in the forward, whose derivative there is Inf, and for a large number that "
                "a result or the loss is multiplied by."
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


def _scaled(case: Case, scale: float) -> Advice:
    """Advice on a gradient of a loss that was multiplied by ``scale``."""
    if case.has_nan and not case.reading.inf_count:
        return Advice(
            "Only NaN, no Inf: a smaller loss scale won't help, 0 * Inf or 0/0 in the "
            "backward did it (see below)."
        )
    if scale < 1:
        return Advice(
            f"The loss scale has already fallen to {format_number(scale)} and the "
            "gradient is still too large: it is not the scale. Lower the learning rate"
            f"{case.rates} and clip gradients after scaler.unscale_(optimizer)."
        )
    return Advice(
        f"The gradient is multiplied by the loss scale ({format_number(scale)}). A "
        "GradScaler skips such steps and halves the scale; when they don't stop, start "
        "lower.",
        "torch.amp.GradScaler(device_type, init_scale=2.0**10)",
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
