"""Advice for activations: out of range, NaN from finite inputs, -Inf, divergence, bad input.

Each function covers one situation and yields advice, the most likely cause first. A piece of advice
states a number of this run before the suggestion, so that the reader can judge whether it applies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from fastcheck.record.format import Verdict
from fastcheck.record.site import OUTSIDE, module_name
from fastcheck.report.trend import format_factor
from fastcheck.utils.text.layout import listed
from fastcheck.utils.text.numbers import counted, format_number, format_share

from .case import Advice, Case, Operation, down_to
from .source import on_source, on_written


def fills_its_format(case: Case) -> bool:
    """True if the finite numbers of this record, or of the step before, come near the end of the
    dtype's range.
    """
    form = case.reading.float_format
    if form is None:
        return False
    used = case.reading.range_used or 0.0
    if not form.is_narrow:
        # float32 and bfloat16 end at 3e38: a run that diverges shows long before the half of that.
        return used >= 1e-6
    reached = case.trend.near_limit and (case.trend.has_grown or used >= 0.25)
    return case.reading.saturated_count > 0 or used >= 0.5 or reached


def out_of_range(case: Case) -> Iterator[Advice]:
    dtype, limit, trend = case.reading.dtype, case.limit, case.trend
    seen = f"{dtype} ends at {limit}"
    # The largest number of a sine is no sign of what overflowed in it.
    is_its_own = case.reading.inf_count > 0 or trend.near_limit
    if trend.last_abs_max is not None and is_its_own:
        share = format_share(trend.healthy[-1].range_used or 0.0, 1)
        reached = format_number(trend.last_abs_max)
        seen += f", and this tensor had reached {reached} ({share} of it) at step "
        seen += f"{trend.healthy[-1].step:,}"
    elif case.reading.abs_max is not None and is_its_own:
        seen += (
            f", and the largest number left in this tensor is {format_number(case.reading.abs_max)}"
        )
    if dtype.startswith("float8"):
        yield Advice(
            f"{seen}. Lower the scale of this tensor before it is cast to {dtype} (its scale "
            "factor is stale or too large), or keep this module in bfloat16."
        )
    else:
        whole = "this computation" if case.site.op else "the model"
        name = f"module {case.site.module}" if case.site.module else whole
        name = f"the code before {name}" if case.site.role == "input" else name
        is_scaled = case.report.scale is not None and case.site.direction == "forward"
        no_help = " Loss scaling can't help: it scales gradients, and this is an activation."
        yield Advice(
            f"{seen}. Use bfloat16: the same size, but the range of float32. Or keep only {name} "
            "in float32: outside autocast, with weights and input in float32."
            f"{no_help if is_scaled else ''}",
            "model.to(torch.bfloat16)  # or autocast(device, dtype=torch.bfloat16)",
        )
    if case.trend.has_grown:
        yield from growth(case)
    if case.is_like("attention"):
        yield Advice(
            "In attention, scale before the product, (q / d**0.5) @ k.transpose(-2, -1), or use "
            "torch.nn.functional.scaled_dot_product_attention; normalising q and k bounds the "
            "scores."
        )
    if case.is_like("norm"):
        root = math.sqrt(case.reading.float_format.max) if case.reading.float_format else 0.0
        yield Advice(
            f"A norm squares its input: in {dtype} anything above {format_number(root)} overflows. "
            "Compute it in float32 and cast the result."
        )
    yield from _upstream(case)
    if not case.trend.has_grown:
        yield from growth(case)


def _upstream(case: Case) -> Iterator[Advice]:
    """Advice to look upstream, where an input was already close to the end of the dtype's range."""
    for site, reading in case.read_inputs:
        used = reading.range_used
        if reading.float_format is None or not reading.float_format.is_narrow or used is None:
            continue
        if used >= 0.5:
            source = (
                f", from {site.module}," if site.module != case.site.module and site.module else ""
            )
            yield Advice(
                f"The input{source} already reaches {format_number(reading.abs_max)}, "
                f"{format_share(used, 1)} of {reading.dtype}: the growth is upstream (a residual "
                "stream that adds up). Normalise it or scale the residual branches down."
            )
            return


def growth(case: Case) -> Iterator[Advice]:
    trend = case.trend
    if trend.has_grown and trend.growth is not None:
        if case.report.not_updated and case.report.culprit.site.op:
            yield Advice(
                f"No optimizer holds {' and '.join(case.report.not_updated)}: if that is what has "
                "grown, look at what writes it: the sign and the decay of an average of weights."
            )
            return
        if case.report.silent_norms:
            yield Advice(
                f"{case.report.silent_norms[0]} was never seen running, though the module that "
                "holds it was: is it left out of forward()?"
            )
        search = " Give LBFGS line_search_fn='strong_wolfe'." if case.searches else ""
        if not case.report.learning_rates:
            search = " Where the loop updates weights itself, look at the sign: p -= lr * p.grad."
        bound = "put a LayerNorm or RMSNorm before this module"
        if module_name(case.site) == OUTSIDE:
            bound = "standardise inputs and targets that are large"
        if case.is_narrow and case.reading.inf_count:
            bound += f". {case.reading.dtype} ends at {case.limit}: float32 and bfloat16 hold more"
        steps = trend.healthy[-1].step - trend.healthy[0].step
        during = f"in {counted(steps, 'step')}" if steps else "within a step"
        yield Advice(
            f"Stop the growth ({format_factor(trend.growth)} {during}): lower the "
            f"learning rate{case.rates} or warm up for longer, clip gradients, or {bound}.{search}",
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        )
    elif trend.has_jumped:
        yield Advice(
            "It jumped in one step, after steady steps: look at this step's batch (an outlier, a "
            "wrong scale, an empty sample) before you change the model."
        )
    else:
        yield Advice(
            "Bound what goes in: a LayerNorm or RMSNorm before this module, a smaller "
            f"initialisation, a lower learning rate{case.rates} or a longer warm-up."
        )


def nan_from_finite(case: Case) -> Iterator[Advice]:
    """NaN out of finite inputs: 0/0, Inf - Inf inside, log or sqrt of a negative, a fully masked
    row.
    """
    if case.trend.has_exploded:
        yield from growth(case)
    made = case.operation
    has_overflowed = made is not None and made.result is not None and made.result.inf_count > 0
    if case.is_sum_of_products or (case.is_narrow and has_overflowed and not case.has_domain):
        yield _sum_of_products(case)
        yield from out_of_range(case) if case.is_narrow else ()
        return
    peak = case.input_abs_max
    form = case.reading.float_format
    if form is not None and peak is not None and peak >= math.sqrt(form.max):
        instead = "Run this module in bfloat16 or float32, or normalise" if form.is_narrow else ""
        if case.is_like("norm") and not form.is_narrow:
            instead = "Look for what made it so large (weights that grew, or were made or loaded "
            instead += "so, or data): a norm squares"
        yield Advice(
            f"The input reaches {format_number(peak)}; its square or a product of two such numbers "
            f"is beyond {case.reading.dtype}'s {case.limit}, and Inf - Inf or Inf * 0 is NaN. "
            f"{instead or 'Normalise'} its input."
        )
        if not form.is_narrow:
            if not case.trend.has_exploded:
                yield from growth(case)
            return
    yield from _ignored_labels(case)
    if case.is_like("attention"):
        yield Advice(
            "If it takes a softmax: a row that is masked whole does this, for softmax over nothing "
            "but -inf is NaN. Let every query attend to at least one key, or mask with a large "
            "finite number.",
            "scores.masked_fill(mask, torch.finfo(scores.dtype).min)",
        )
    read = case.news if case.has_domain else []
    # A number below 0 or a zero in the input is no news if nothing earlier is held.
    has_earlier = any(before is not None for _, _, before in read)
    if not has_earlier and not case.op_name:
        yield _made_within(case)
    fewer = [(s, r, b) for s, r, b in read if b is not None and r.numel * 2 <= b.numel]
    negative = [(s, r) for s, r, b in read if r.negative_count and not (b and b.negative_count)]
    zeros = [(s, r) for s, r, b in read if r.zero_count > (b.zero_count if b else 0)]
    if fewer:
        site, reading, before = fewer[0]
        yield Advice(
            f"{site.label} has {reading.numel:,} elements, and {before.numel:,} in the last "
            "healthy step: a std or var of one element is 0/0 (it divides by n - 1), and so is a "
            "mean over none. Skip these, or pass correction=0."
        )
    if zeros:
        site, reading = zeros[0]
        more = ", more than in the last healthy step" if case.inputs_before else ""
        yield Advice(
            f"{site.label} holds {reading.zero_count:,} zeros of {reading.components:,}{more}: "
            "look for 0/0 (a mean over a count of zero, x / x.norm(), x / x.std()) and add an eps "
            "to the divisor."
        )
    if negative:
        site, reading = negative[0]
        yield Advice(
            f"{site.label} holds {counted(reading.negative_count, 'negative number')}"
            f"{down_to(reading)}: log, sqrt, rsqrt and fractional powers of them are NaN. "
            "Clamp before: x.clamp_min(eps)."
        )
    if has_earlier and not fewer and not negative and not zeros and not case.op_name:
        yield _made_within(case)
    if case.has_domain and case.reading.dtype == "float16":
        yield Advice(
            "Check eps: in float16 anything below 6e-8 is zero, so eps=1e-8 protects nothing."
        )
    if case.trend.has_grown and not case.trend.has_exploded:
        yield from growth(case)


def _made_within(case: Case) -> Advice:
    made = "As far as was read, the module itself made it."
    if case.report.world_size > 1 and not case.op_name:
        made = (
            "As far as was read on this rank, the module itself made it, or a collective that it "
            "calls has brought it from another rank (an all_reduce, SyncBatchNorm, a parallel "
            "layer)."
        )
    return Advice(
        f"{made} Look in its forward for a division (0/0: a mean over nothing, x / x.norm()), log "
        "or sqrt of a negative number, or Inf - Inf, and add an eps or a clamp there."
    )


def _ignored_labels(case: Case) -> Iterator[Advice]:
    """Integers that are the same negative number throughout, as ignore_index is."""
    for site, reading in case.inputs:
        if reading.float_format is not None or reading.min is None:
            continue
        if reading.min == reading.max and reading.min < 0:
            yield Advice(
                f"{site.label} is {reading.min:,} throughout: a mean over no targets is 0/0, as "
                "cross_entropy gives where every target is ignore_index. Sum and divide by the "
                "count, or leave such a batch out.",
                'loss_fn(logits, target, reduction="sum") '
                f"/ (target != {reading.min}).sum().clamp_min(1)",
            )


def _sum_of_products(case: Case) -> Advice:
    """Advice on an operator that is known not to divide: what it multiplies is named."""
    name = case.op_name or f"A {case.site.module_type}"
    result = None if case.operation is None else case.operation.result
    dtype, form = (result or case.reading).dtype, (result or case.reading).float_format
    named = [(s.key if s.role == "param" else s.label, r) for s, r in case.inputs]
    # The inputs of the operator, where it is known, rather than of its module.
    if not case.site.op and case.operation is not None and case.operation.inputs:
        named = list(case.operation.inputs)
    read = [(label, r) for label, r in named if r.abs_max is not None and r.float_format]
    reached = [
        f"{label} reaches {format_number(r.abs_max)}"
        for label, r in sorted(read, key=lambda pair: -float(pair[1].abs_max or 0))
    ]
    if case.has_old_weights:
        seen = f" ({', '.join(reached)})" if reached else ""
        return Advice(
            f"{name} multiplies and adds, and divides by nothing{seen}: its weights are not "
            f"finite, or products left the range of {dtype}. They were last read "
            "before this call: the program may have written them since, as it does an average of "
            "weights, a target network or an update of its own. Look there for x/0, 0/0 and log(0) "
            "(1 - decay ** step is 0 at step 0)."
        )
    seen = f": {', '.join(reached)}" if reached else ""
    # The record of the report may be in a wider format than the result of the operator.
    if case.operation is not None and form is not None and form.is_narrow and not case.is_narrow:
        return narrow(case.operation, dtype, form.max)
    return Advice(
        f"{name} multiplies and adds, and divides by nothing: its products, or their sum, left "
        f"the range of {dtype}{seen}."
    )


def negative_infinity(case: Case) -> Iterator[Advice]:
    made, is_most = case.operation, re.fullmatch(r"a?max|(?:scatter|index)_reduce", case.op_name)
    is_given = made is not None and any(reading.inf_count for _, reading in made.inputs)
    if made is not None and (is_given or made.writes) and not (made.has_domain or is_most):
        yield Advice(
            f"{made.shown} {'was given' if is_given else 'wrote'} infinities, as a mask has. What "
            "reads -Inf makes NaN of it in a difference (Inf - Inf), a product with 0, a softmax "
            "of nothing else, and Inf in a mean or a squared error: leave these elements out "
            "there, or write a large finite number.",
        )
        return
    if not is_most:
        yield Advice(
            "-Inf alone is a mask, a maximum over nothing, or the log of zero (of the determinant "
            "of a singular matrix, too: add eps * torch.eye(n) to it). If it is a log: clamp its "
            "input, or use log_softmax, logsumexp or binary_cross_entropy_with_logits, which never "
            "form the zero.",
            "torch.log(p.clamp_min(torch.finfo(p.dtype).tiny))",
        )
    yield Advice(
        "If it is a mask: check that no row is masked whole, or has nothing to choose from (a node "
        "without neighbours): softmax turns such a row into NaN, and its maximum is -Inf."
    )
    if case.is_narrow:
        yield Advice(
            f"{case.reading.dtype} ends at {case.limit}: adding finfo.min to a negative score "
            "gives -Inf. Use masked_fill instead of adding the mask."
        )


def diverged(case: Case) -> Iterator[Advice]:
    """Inf in a dtype with the range of float32: divergence or a division by zero."""
    dtype = case.reading.dtype
    if case.trend.has_grown:
        yield from growth(case)
        yield Advice(
            f"{dtype} holds up to {case.limit}: numbers that large are a run that diverges, not a "
            "format that is too small."
        )
    elif case.is_sum_of_products:
        yield _sum_of_products(case)
        yield from growth(case)
    else:
        known = case.operation
        if known is not None:
            yield unexplained(known)
        else:
            yield Advice(
                f"{dtype} holds up to {case.limit}, and this tensor was nowhere near it: look in "
                "the module's forward for a division by zero, exp of a large number (above 88 in "
                "float32), 1/x or rsqrt near zero, and add an eps or a clamp there."
            )
        for site, reading in case.read_inputs if case.has_domain else ():
            if reading.zero_count:
                yield Advice(f"{site.label} holds {reading.zero_count:,} zeros: 1/0 is Inf.")
                break
        if known is None and (case.input_abs_max or 0) > 80:
            yield Advice(
                f"The input reaches {format_number(case.input_abs_max)}: subtract the maximum "
                "before exp, as softmax and logsumexp do."
            )


def unexplained(made: Operation) -> Advice:
    """Advice on an operator without a rule that has made NaN or Inf."""
    result = made.result
    is_finite = not any(reading.nonfinite_count for _, reading in made.inputs)
    if result is not None and not made.is_nan and is_finite and made.is_arithmetic:
        form = result.float_format
        if form is not None and form.is_narrow:
            return narrow(made, result.dtype, form.max)
    peak = format_number(max((float(r.abs_max or 0) for _, r in made.inputs), default=0.0))
    read = f" of numbers up to {peak} in magnitude" if made.inputs else ""
    if made.inputs and not any(r.numel for _, r in made.inputs):
        return Advice(f"{made.shown} read no elements. Skip it where there are none.")
    why = "look for those at which it leaves the range of its dtype, and"
    if made.is_nan:
        why = "a number left the range of its dtype, was divided by 0, or lies where the operator "
        why += "is not defined. Look for such numbers there, and scale or"
    made_it = f"made {'NaN' if made.is_nan else 'Inf'}{read}"
    if made.is_open:
        made_it = "read NaN or Inf, in what is not held, or made them of numbers there"
    return Advice(f"{made.shown} {made_it}: {why} clamp them before, or add an eps.")


def narrow(made: Operation, dtype: str, most: float) -> Advice:
    """Advice on an operator whose result has left the range of 16 bits, which end at ``most``."""
    is_root = made.name == "sqrt"
    peak = max((float(r.abs_max or 0) for _, r in made.inputs), default=0.0)
    seen = f", with numbers up to {format_number(peak)}" if peak and not made.is_open else ""
    # A tensor that it read may hold Inf as well where none is held.
    left = "left" if (made.inputs and not made.is_open) or is_root else "may have left"
    if made.is_open and not is_root:
        left = "read Inf, in what is not held, or left"
    return Advice(
        f"{'What was given to ' if is_root else ''}{made.shown} {left} the range of {dtype}, which "
        f"ends at {format_number(most)}{seen}: compute it in float32 or bfloat16, outside of "
        "float16 autocast, or scale it before."
    )


def arrived(case: Case) -> Iterator[Advice]:
    if case.site.direction == "optimizer":
        yield Advice(
            "No observed update of this run has made it: as a rule the optimizer's state was "
            "loaded from the checkpoint of a run that had overflowed. Load an earlier one, or "
            "begin with a new state; an infinite second moment makes every update 0.",
            "optimizer.state.clear()",
        )
        return
    report = case.report
    is_updated = bool(report.updated_since) or report.weights_intact is False
    if case.site.op and report.broken_weights and not is_updated:
        yield Advice(
            f"No update has made {listed(report.broken_weights, 3)} non-finite: look at what "
            "writes weights, in this line or outside of torch's operators (numpy(), an extension)."
        )
        return
    is_write = (case.site.op or "").startswith(("aten.fill_.", "aten.copy_"))
    if is_write and case.site.role == "input" and case.reading.numel == 1:
        yield Advice(
            "The line writes one number, which is not finite: look where it comes from, the data "
            "(a missing value, a target) or what computes it."
        )
        return
    if case.site.role == "input" and not case.site.module:
        # A cast makes no NaN.
        is_cast = case.is_narrow and not case.has_nan
        cast = Advice(
            f"A cast to {case.reading.dtype} turns anything above {case.limit} into Inf: "
            "normalise before the cast."
        )
        yield from [cast] if is_cast else ()
        is_within = case.site.op and module_name(case.site) != OUTSIDE
        written = " A buffer may have been written outside of torch." if is_within else ""
        # The lines come first: long paths may leave no room for a second item.
        lines = on_source(case.source) or on_written(case.written)
        yield from [lines] if lines else ()
        if case.site.op:
            yield Advice(
                f"It was not finite before {case.op_name or 'this operator'} read it "
                f"({case.site.label}), and no operator that was observed has made it: look at the "
                "data, or at what was computed before the run, as a table of a schedule or class "
                f"weights (log(0), or x/0 of a count of 0).{written}"
            )
        else:
            yield Advice(
                "The batch was non-finite before the model or the loss read it "
                f"({case.site.label}): look at the data, not at the model. Check the samples of "
                "this step where they are loaded.",
                "assert torch.isfinite(batch).all()",
            )
        if not lines:
            kept = ", a gradient that torch.func has made." if case.site.op else "."
            yield Advice(
                "Usual sources: missing values in the file, a normalisation that divides by a "
                "standard deviation of zero, log of zero, an augmentation that makes an empty "
                "crop, uninitialised memory (torch.empty), a state that is kept from an earlier "
                f"step{kept}"
            )
        yield from [cast] if case.is_narrow and not is_cast else ()
        return
    if case.verdict is Verdict.ORIGIN:
        if case.only_neginf and case.is_narrow:
            yield Advice(
                f"{case.reading.dtype} ends at {case.limit}: masks that are added to each other or "
                "to negative scores give -Inf there, and a row that is masked whole becomes NaN "
                "in softmax. Combine masks as bool and use masked_fill, or clamp the sum.",
                "scores.masked_fill(~(causal & padding), torch.finfo(scores.dtype).min)",
            )
        yield Advice(
            f"Code between the modules made it, before {case.site.module} is called: look there "
            "for a division by zero, a log, root or fractional power of zero or a negative number, "
            "or exp of a large number, and add an eps or a clamp."
        )
        return
    if case.report.left_out_by:
        options = " and ".join(f"{name}=" for name in case.report.left_out_by)
        yield Advice(
            f"What made this tensor may be what {options} leaves unread. Take that option away to "
            "find the origin."
        )
    if lines := on_written(case.written):
        yield lines
    yield Advice(
        "No observed module made it: it came from outside, as a batch does, or was computed by "
        f"code between the modules. Look at the lines before {case.site.module or 'this module'} "
        "is called, and at the data."
    )
    if case.only_neginf:
        yield Advice(
            "-Inf alone is often a mask, or the log of 0 (of a target, of a probability): clamp "
            "before the log.",
            "x.clamp_min(eps).log()",
        )
