"""Advice for parameters, buffers, the loss, gradients and collectives."""

from __future__ import annotations

from collections.abc import Iterator

from fastcheck.record.format import Verdict
from fastcheck.utils.text.numbers import format_number

from .activations import growth
from .case import Advice, Case


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
