"""Advice for a known operator: by what it does with the values that it read.

Each function covers operators of one kind, and yields nothing where these values do not explain the
result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Callable

from fastcheck.record.event import GIVEN_NUMBER
from fastcheck.record.statistics import RecordStatistics
from fastcheck.utils.text.numbers import counted, format_number

from . import derivatives, softmax
from .case import OF_LOG_TARGET, Advice, Case, Operation, down_to, least_magnitude

_Rule = Callable[[Case, Operation], Iterator[Advice]]
_Rules = tuple[tuple[str, _Rule], ...]

#: Numbers that only a factor far larger takes out of the range of float32.
_MODERATE = 1e6
#: The largest eps that is common in a norm.
_LARGEST_EPS = 1e-3
#: A target that is so many times as large as the prediction has grown by itself.
_OUTGROWN = 1e6
#: The largest number whose exp is finite.
_EXP_LIMITS = {"float16": 11.09, "float32": 88.72, "bfloat16": 88.72, "float64": 709.78}


def by_operator(case: Case) -> list[Advice]:
    """Advice from the operator; empty where none is known, or its values do not explain it."""
    made = case.operation
    if made is None:
        return []
    items = _by_rules(case, made, _BACKWARD if made.is_backward else _FORWARD)
    # An operator within a backward, one of a recomputed part too, does what it does in forward.
    if not items and made.is_backward and made.is_op and "_backward" not in made.shown:
        items = _by_rules(case, made, _FORWARD)
    how = "" if case.report.made_by is None else case.report.made_by.how
    if not items and GIVEN_NUMBER in case.reason + how:
        given = (
            f"{made.shown} was given a number that is NaN or infinite: look where it comes from."
        )
        return [Advice(given)]
    return items or list(
        derivatives.overflow(case, made) if made.is_backward else _infinite_operand(made)
    )


def _by_rules(case: Case, made: Operation, rules: _Rules) -> list[Advice]:
    fitting = (rule for names, rule in rules if re.fullmatch(names, made.name))
    return [item for rule in fitting for item in rule(case, made)]


def _infinite_operand(made: Operation) -> Iterator[Advice]:
    """Advice on what was made of infinities that were written on purpose, or did no harm before."""
    has_infinities = made.result is not None and made.result.posinf_count > 0
    for label, reading in made.inputs if made.is_nan or has_infinities else ():
        if reading.inf_count and not reading.nan_count:
            sign = "-Inf" if reading.neginf_count == reading.inf_count else "Inf"
            what = "NaN (Inf - Inf, 0 * Inf, sin(Inf))" if made.is_nan else "infinities"
            yield Advice(
                f"{label} holds {reading.inf_count:,} {sign}, of which {made.name} makes {what}. "
                "Put a finite number there before: a maximum over nothing is -Inf (a row that is "
                "masked whole), a minimum over nothing Inf, and log(0) -Inf.",
                "torch.where(x.isinf(), 0.0, x)",
            )
            return


def _zeros(label: str, reading: RecordStatistics) -> str:
    if reading.zero_count == reading.components:
        return f"{label} is 0" if reading.components == 1 else f"{label} is 0 throughout"
    return f"{label} is 0 in {reading.zero_count:,} of {reading.components:,} elements"


def _eps_is_0(reading: RecordStatistics) -> str:
    """A sentence on an eps that may have been added."""
    return " In float16 an eps below 3e-8 is 0." if reading.dtype == "float16" else ""


def _spread(case: Case, made: Operation) -> Iterator[Advice]:
    label, reading = made.operand(0)
    if reading is None or not made.may_be_nan:
        return
    if not reading.numel:
        yield Advice(f"{made.shown} of no elements: {label} is empty. Skip it where it is.")
    elif made.result is None or reading.numel <= made.result.numel:
        name = "std" if "std" in made.name else "var"
        yield Advice(
            f"{name} of one element is 0/0: it divides by n - 1, and {label} has one element for "
            "each result. Skip it where there is one, or divide by n with correction=0, which "
            "gives 0.",
            f"x.{name}(correction=0)  # or: x.{name}() if len(x) > 1 else torch.ones(())",
        )


def _mean(case: Case, made: Operation) -> Iterator[Advice]:
    """Losses of torch take a mask, too."""
    label, reading = made.operand(0)
    if made.result is None if reading is None else not reading.numel and made.may_be_nan:
        is_mean = made.name in ("mean", "nanmean")
        yield Advice(
            f"A mean over no elements is 0/0: {label or 'its input'} is empty. Leave the term out "
            "where nothing is selected, or divide a sum by the count.",
            "x.sum() / max(x.numel(), 1)"
            if is_mean
            else 'loss_fn(x, target, reduction="sum") / max(x.numel(), 1)',
        )


def _division(case: Case, made: Operation) -> Iterator[Advice]:
    label, divisor = made.operand(0 if made.name == "reciprocal" else 1)
    if divisor is None:
        if made.is_op and len(made.inputs) == 1 and made.result is not None:
            small = "0: x/0 is Inf, or so small that the quotient is"
            zero = "0 or NaN: 0/0 is NaN" if made.is_nan else small
            yield Advice(
                f"{made.shown} divides by a number, or by a tensor of whole numbers, that is "
                f"{zero}. Where it is a count, nothing was counted: clamp it.",
                "x / count.clamp_min(1)  # or x / max(number, eps)",
            )
        elif made.name == "reciprocal" and made.may_be_inf:
            yield Advice(
                "1/x divides by 0, or by a number so small that its inverse is out of range. Add "
                "an eps to it or clamp it.",
                "1 / x.clamp_min(eps)",
            )
        return
    if not divisor.zero_count:
        least, (_, dividend) = least_magnitude(divisor), made.operand(0)
        form = (made.result or case.reading).float_format
        peak = 1.0 if dividend is None or made.name == "reciprocal" else dividend.abs_max
        is_given = dividend is not None and dividend.inf_count > 0
        if least and not is_given and form is not None and peak and float(peak) / least > form.max:
            yield Advice(
                f"The divisor {label} is down to {format_number(least)}: the quotient is beyond "
                f"{format_number(form.max)}. Add an eps to it or clamp it.",
                "x / divisor.clamp_min(eps)",
            )
        return
    result = (
        "0/0 is NaN" if made.is_nan else "x/0 is Inf, 0/0 NaN" if made.may_be_nan else "x/0 is Inf"
    )
    seen = f"The divisor {_zeros(label, divisor)}: {result}.{_eps_is_0(divisor)}"
    origin = made.origins.get(label, "")
    if re.fullmatch(r"(?:linalg_(?:vector|matrix)_)?norm", origin):
        yield Advice(
            f"{seen} It is a norm: that of a row of zeros is 0. Add an eps.",
            "torch.nn.functional.normalize(x, dim=-1, eps=1e-6)  # or x / (norm + eps)",
        )
    elif origin == "sqrt":
        yield Advice(
            f"{seen} It is a root, of 0 there: a norm of zeros, or a variance of equal numbers. "
            "Add an eps inside, which keeps its derivative finite, too.",
            "x / (variance + eps).sqrt()",
        )
    elif re.search(r"\b(?:std|var)\b", origin):
        yield Advice(
            f"{seen} It is a {'variance' if origin == 'var' else 'standard deviation'}, which is 0 "
            "where all are equal: add an eps to it.",
            f"x / ({origin} + eps)",
        )
    elif re.search(r"\b(?:sum|count_nonzero)\b", origin):
        yield Advice(
            f"{seen} It is a sum: nothing was counted, or its terms are 0 or cancel: add an eps or "
            "clamp it.",
            "x / count.clamp_min(1)  # or x / (total + eps)",
        )
    elif origin == "exp":
        yield Advice(
            f"{seen} It is an exponential, which is 0 far below 0. Where both are exponentials, as "
            "of log probabilities, take the difference first; else add an eps to it.",
            "(log_p - log_q).exp()  # not log_p.exp() / log_q.exp()",
        )
    elif origin in ("sub", "rsub"):
        yield Advice(
            f"{seen} It is a difference, as that of the largest and the least number where all are "
            "equal, or 1 - beta ** t at t = 0 (count from 1). Add an eps to it or clamp it.",
            "x / divisor.clamp_min(eps)",
        )
    else:
        is_found = made.is_op or origin or case.written or case.source
        within = (
            " If no line of the program divides, it may be the derivative of a root or a norm, as "
            "torch.func.grad() computes it: add the eps inside the root."
        )
        yield Advice(
            f"{seen} Add an eps to it or clamp it.{'' if is_found else within}",
            "x / divisor.clamp_min(eps)",
        )


def _logarithm(case: Case, made: Operation) -> Iterator[Advice]:
    label, reading = made.operand(int(made.name == "xlogy"))
    if made.reads_integers and made.name != "log1p":
        what = "zeros: log(0) is -Inf. Clamp them, or take log1p."
        if made.is_nan:
            what = "negative numbers: their logarithm is NaN. Clamp them."
        yield Advice(f"{made.shown} read whole numbers, which hold {what}", "x.clamp_min(1).log()")
    if reading is None or reading.min is None:
        return
    end = -1 if made.name == "log1p" else 0
    name = f"{made.name}(-1) is log(0)" if end else f"{made.name.strip('xy')}(0)"
    low, least = format_number(reading.min), "-1 + " if end else ""
    code = f".{made.name.strip('xy')}()"
    if made.may_be_nan and reading.min < end:
        if set(made.origins.values()) == {"log_softmax"}:  # xlogy(target, target)
            yield OF_LOG_TARGET
            return
        yield Advice(
            f"{label} goes down to {low}: {made.name} of a negative number"
            f"{' below -1' if end else ''} is NaN. Clamp it, or look for what should have kept it "
            "positive.",
            f"x.clamp_min({least}eps){code}",
        )
        return
    if reading.min > end:
        return
    where = _zeros(label, reading) if not end else f"{label} reaches -1"
    if made.name == "xlogy" and case.is_density:
        yield Advice(
            f"{where}: log(0) is -Inf. log_prob() was given a value on the border of the "
            "distribution's support, or a rate of 0: clamp it inside.",
            "distribution.log_prob(value.clamp(eps, 1 - eps))",
        )
        return
    narrow = reading.float_format is not None and reading.float_format.is_narrow
    eps = {"bfloat16": "0.004", "float16": "0.0005"}.get(reading.dtype, "its spacing")
    yield Advice(
        f"{where}: {name}{' is' if not end else ','} -Inf. Clamp it"
        + (
            f" in float32 (in {reading.dtype} an eps below {eps} vanishes beside 1)."
            if narrow
            else "."
        ),
        f"x.float().clamp_min({least}1e-6){code}" if narrow else f"x.clamp_min({least}eps){code}",
    )
    yield Advice(
        "If it is a probability: log_softmax, logsigmoid or binary_cross_entropy_with_logits "
        "take the logits and never form the zero, as logsumexp does for a sum of exponentials. If "
        "it is a target: mask what is missing."
    )


def _entropy(case: Case, made: Operation) -> Iterator[Advice]:
    label, reading = made.operand(0)
    if reading is not None and reading.negative_count:
        yield Advice(
            f"{label} holds {counted(reading.negative_count, 'negative number')}"
            f"{down_to(reading)}, of which -x * log(x) is -Inf here: they are no probabilities. "
            "Look for what should have kept them positive, or clamp.",
            "torch.special.entr(x.clamp_min(0))",
        )


def _rounded(reading: RecordStatistics, origin: str) -> str:
    """A sentence on what is below 0 by a little, and may be a difference."""
    is_little = reading.min is not None and -reading.min <= 0.1 * (reading.max or 0)
    if not is_little or (origin and not re.search(r"\b(?:sub|addcmul)\b", origin)):
        return ""
    return (
        " A mean of squares less the square of a mean, or |x|^2 + |y|^2 - 2xy, may be below 0 by "
        "rounding: square the differences, x.var() or torch.cdist (RMSprop: centered=False)."
    )


def _power(case: Case, made: Operation) -> Iterator[Advice]:
    label, reading = made.operand(0)
    if reading is None:
        if made.is_nan and made.name == "sqrt":
            unless = " (or it read NaN, which is not held)" if made.is_open else ""
            yield Advice(
                f"sqrt of a negative number is NaN{unless}: clamp before, as torch.where after it "
                "does not keep the NaN out of the gradient.",
                "x.clamp_min(eps).sqrt()",
            )
        elif made.reads_integers and made.may_be_inf and _is_inverse_of_integers(made):
            what = "1/sqrt(0)" if made.name == "rsqrt" else "a negative power of 0"
            yield Advice(
                f"{made.shown} read whole numbers: {what} is Inf, as of a count of 0 (a node "
                "without neighbours). Clamp it before.",
                f"count.clamp_min(1){'.rsqrt()' if made.name == 'rsqrt' else ' ** p'}",
            )
        elif made.name == "rsqrt" and made.result is not None and made.result.posinf_count:
            yield Advice(
                "1/sqrt(0) is Inf, and so is that of a number that was rounded to 0, as an eps "
                "may be in float16: add a larger eps before.",
                "(x + eps).rsqrt()",
            )
        return
    if made.may_be_nan and reading.negative_count:
        held = f"{label} holds {counted(reading.negative_count, 'negative number')}"
        what = "a fractional power" if made.name in ("pow", "float_power") else made.name
        yield Advice(
            f"{held}{down_to(reading)}: {what} of them is NaN. torch.where after it keeps the NaN "
            f"in the gradient: clamp before.{_rounded(reading, made.origins.get(label, ''))}",
            f"x.clamp_min(eps){'.' + made.name + '()' if 'sqrt' in made.name else ' ** p'}",
        )
    elif made.may_be_inf and made.name != "sqrt" and made.is_inverse_of(reading):
        yield Advice(
            f"{_zeros(label, reading)}: "
            f"{'1/sqrt(0)' if made.name == 'rsqrt' else 'a negative power of 0'} is Inf."
            f"{_eps_is_0(reading)} Add an eps before.",
            "(x + eps).rsqrt()" if made.name == "rsqrt" else "(x + eps) ** p",
        )
    elif reading.min is None or reading.max is None or reading.nonfinite_count:
        return
    elif made.may_be_inf and "pow" in made.name:
        low, high = format_number(reading.min), format_number(reading.max)
        yield Advice(
            f"{label} goes from {low} to {high}: a power of it is beyond the range of "
            f"{(made.result or case.reading).dtype}. Look for what made it so large (for a "
            "negative power: so small), and scale or clamp it before.",
            "x.clamp(-limit, limit) ** p",
        )


def _is_inverse_of_integers(made: Operation) -> bool:
    """True if an Inf is that of 0: every other whole number has an inverse of at most 1."""
    largest = None if made.result is None else made.result.abs_max
    is_small = largest is not None and largest <= 1
    return made.name == "rsqrt" or (is_small and made.shown.endswith("Tensor_Scalar"))


def _exponential(case: Case, made: Operation) -> Iterator[Advice]:
    label, reading = made.operand(0)
    limit = _EXP_LIMITS.get((made.result or case.reading).dtype)
    if limit is None or not made.may_be_inf:
        return
    low = 10 if limit < 20 else 20
    if made.name == "exp2":
        limit /= math.log(2)
    is_even = made.name in ("cosh", "sinh")
    if is_even:
        limit += math.log(2)
    magnitude = " in magnitude" if is_even else ""
    seen = f"Its input is above {limit:.1f}{magnitude}"
    if reading is not None:
        peak = reading.abs_max if is_even else reading.max
        if peak is None or peak <= limit:
            return
        seen = f"{label} reaches {format_number(peak)}{magnitude}"
    if made.name == "cosh":
        yield Advice(
            f"{seen}: cosh of more than {limit:.1f} is beyond the range of "
            f"{(made.result or case.reading).dtype}. log(cosh(x)) has a form that has no cosh.",
            "x.abs() + torch.nn.functional.softplus(-2 * x.abs()) - math.log(2)",
        )
        return
    yield Advice(
        f"{seen}: {made.name} of more than {limit:.1f} is beyond the range of "
        f"{(made.result or case.reading).dtype}. Clamp it before"
        f"{', or subtract the maximum as softmax and logsumexp do' if 'exp' in made.name else ''}.",
        f"x.clamp({f'-{low}, ' if is_even else 'max='}{low}).{made.name}()",
    )


def _matrix_exponential(case: Case, made: Operation) -> Iterator[Advice]:
    yield Advice(
        "matrix_exp grows as exp() of the largest real part of the eigenvalues, and so does its "
        "derivative. Keep these below 0, or the time step small.",
        "torch.matrix_exp((a - a.T) * dt)  # imaginary eigenvalues alone",
    )


def _bessel(case: Case, made: Operation) -> Iterator[Advice]:
    label, reading = made.operand(0)
    form = (made.result or case.reading).float_format
    if reading is not None and form is not None and reading.abs_max and made.may_be_inf:
        yield Advice(
            f"{label} reaches {format_number(reading.abs_max)} in magnitude: i0 grows as exp(), "
            f"beyond {format_number(form.max)} here. Its logarithm has a form that does not.",
            "torch.special.i0e(x).log() + x.abs()  # not torch.i0(x).log()",
        )


def _segments(case: Case, made: Operation) -> Iterator[Advice]:
    _, reading = made.operand(0)
    is_finite = reading is None or not reading.nonfinite_count
    if made.is_op and not made.is_backward and (made.is_nan or made.may_be_inf) and is_finite:
        what = "the mean of none is 0/0" if made.is_nan else "the largest or least of none is Inf"
        yield Advice(
            f"A segment of no elements, as far as is known: {what}. Give an initial value, or "
            "leave such segments out.",
            "torch.segment_reduce(x, reduce, lengths=lengths, initial=0)",
        )


def _script(case: Case, made: Operation) -> Iterator[Advice]:
    yield Advice(
        "Look in that function for 0/0 and x/0 (as sin(x) / x at 0), log(0), exp of a large "
        "number, and the root or log of a negative number. With PYTORCH_JIT=0 in the environment "
        "it runs as Python, where a report can name its operator and line."
    )


def _gamma(case: Case, made: Operation) -> Iterator[Advice]:
    label, reading = made.operand(0)
    if reading is None or reading.min is None or reading.max is None:
        return
    form, peak = reading.float_format, float(reading.max)
    if reading.min > 0:
        # lgamma(x) is x * (log(x) - 1), but for terms that are small beside it.
        if made.name == "lgamma" and form and peak > 2 and peak * (math.log(peak) - 1) > form.max:
            yield Advice(
                f"{label} reaches {format_number(peak)}: lgamma of it, about x * log(x), is beyond "
                f"{reading.dtype}'s {format_number(form.max)}. Look for what made it so large."
            )
        return
    seen = _zeros(label, reading) if reading.zero_count else f"{label} goes down to "
    seen += "" if reading.zero_count else format_number(reading.min)
    yield Advice(
        f"{seen}: {made.name} is infinite or NaN at 0 and at negative whole numbers. Keep its "
        "input above 0: x + 1, or an eps.",
        f"x.clamp_min(eps).{made.name}()",
    )


def _cast(case: Case, made: Operation) -> Iterator[Advice]:
    label, reading = made.operand(0)
    form = None if made.result is None else made.result.float_format
    if reading is None or form is None or reading.nonfinite_count or not reading.abs_max:
        return
    if reading.abs_max <= form.max or made.result is None:
        return
    if reading.max == 0 and not made.result.abs_max:
        yield Advice(
            f"{label} holds {format_number(reading.min)} and 0, as a mask does, and "
            f"{made.result.dtype} ends at {format_number(form.max)}: the cast makes -Inf of it, "
            "and softmax of a row that is masked whole is NaN. Use the lowest number of the "
            "narrow format.",
            f"torch.finfo(torch.{made.result.dtype}).min",
        )
    else:
        yield Advice(
            f"{label} reaches {format_number(reading.abs_max)}, and {made.result.dtype} ends at "
            f"{format_number(form.max)}: the cast makes Inf of what is larger. Normalise it "
            "before the cast, keep it in float32, or cast to bfloat16, which has float32's range.",
            "x.to(torch.bfloat16)",
        )


def _normalisation(case: Case, made: Operation) -> Iterator[Advice]:
    read = {label.partition(" ")[0]: reading for label, reading in made.inputs}
    variance = read.get("running_var")
    if made.may_be_nan and variance is not None and (variance.min or 0) < -_LARGEST_EPS:
        yield Advice(
            f"running_var holds {counted(variance.negative_count, 'negative number')}"
            f"{down_to(variance)}, and no variance is below 0: in evaluation its root is NaN. "
            "Look at the checkpoint that it was loaded from, and at what writes it (an average of "
            "weights whose factors are not between 0 and 1)."
        )
        return
    if made.is_nan and not any(r.nonfinite_count or _has_large_square(r) for _, r in made.inputs):
        yield Advice(
            f"{made.shown} divides by the root of a variance plus eps. The variance of numbers "
            "that are all equal is 0: where eps is 0, or too small, that is 0/0 (and a running "
            "variance below 0 has no root). Give it an eps, such as 1e-5."
        )


def _weight_norm(case: Case, made: Operation) -> Iterator[Advice]:
    zeros = [label for label, reading in made.inputs if label[:1] == "v" and reading.zero_count]
    if zeros:
        yield Advice(
            "weight_norm divides a weight by its norm, and that of zeros is 0: 0/0 is NaN. Don't "
            "make such a weight 0 (a last layer that begins with zeros): make its factor g 0.",
            "torch.nn.init.zeros_(layer.parametrizations.weight.original0)",
        )


def _has_large_square(reading: RecordStatistics) -> bool:
    form, peak = reading.float_format, reading.abs_max
    return form is not None and peak is not None and peak > math.sqrt(form.max)


def target_outgrows(made: Operation) -> bool:
    """True for a loss whose target is far larger than what the model has made."""
    target = next((r for label, r in made.inputs if label.partition(" ")[0] == "target"), None)
    reading = made.operand(0)[1]
    if target is None or reading is None or not (target.abs_max and reading.abs_max):
        return False
    return float(target.abs_max) > _OUTGROWN * float(reading.abs_max)


def _square(case: Case, made: Operation) -> Iterator[Advice]:
    """Norms and squares of a number whose square is out of range."""
    is_norm = "norm" in made.name
    if made.may_be_inf and target_outgrows(made):
        label, target = next(pair for pair in made.inputs if pair[0].startswith("target"))
        name, reading = made.operand(0)
        peak = None if reading is None else format_number(reading.abs_max)
        yield Advice(
            f"{label} reaches {format_number(target.abs_max)}, and {name} {peak}: the target is "
            "too large, not what the model has made. Look at what makes it: a temperature or "
            "another coefficient that is learned by itself, a value that is made of a prediction "
            "of its own, the scale of the data."
        )
        return
    for label, reading in made.inputs if made.may_be_inf or not is_norm else ():
        form = reading.float_format
        is_large = _has_large_square(reading) and not reading.nonfinite_count
        if form is None or not is_large or (form.is_narrow and not is_norm):
            continue
        end = ". Look for what made it so large: weights that grew, or a division by almost 0."
        if is_norm:
            end = ": the norm is Inf. Divide the loss, or look for the term that is so large: "
            end += "clipping by an infinite norm sets every gradient to 0, or to NaN."
        peak, limit = format_number(reading.abs_max), format_number(form.max)
        yield Advice(
            f"{label} reaches {peak}, whose square is beyond {reading.dtype}'s {limit}{end}"
        )
        return


def _constant(case: Case, made: Operation) -> Iterator[Advice]:
    is_given = not any(reading.nonfinite_count for _, reading in made.inputs)
    if is_given and made.result is not None and made.result.posinf_count:
        yield Advice(f"{made.shown} was given Inf as a number. Give it a finite number.")
    elif made.is_nan and made.name == "scalar_tensor":
        yield Advice(
            "It was written there as a number, as x[i] = nan does on a device: look where it comes "
            "from, the data (a missing value, a target) or what computes it. torch.logdet does "
            "that for a matrix whose determinant is negative: take the logarithm of "
            "torch.linalg.slogdet, or keep the determinant positive."
        )


def _likelihood(case: Case, made: Operation) -> Iterator[Advice]:
    label, reading = made.operand(0)
    if reading is not None and reading.neginf_count and made.may_be_inf:
        yield Advice(
            f"{label} holds {reading.neginf_count:,} -Inf, log-probabilities of classes that are "
            "masked out or whose probability is 0: where one of them is the target the loss is "
            "Inf, and 0 * Inf is NaN. Correct such targets or leave them out, or mask with -1e4.",
            "logits.masked_fill(mask, -1e4)",
        )
    weights = [name for name, r in made.inputs if name.startswith("weight") and r.inf_count]
    if reading is not None and not reading.numel:
        yield from _mean(case, made)
    elif made.may_be_nan and weights:
        yield Advice(
            f"{weights[0]} holds Inf, such as 1 / count of a class without samples: where such a "
            "class is a target, the mean divides Inf by Inf. Clamp the count.",
            "1 / count.clamp_min(1)",
        )
    elif made.may_be_nan:
        ignored = "every target is ignore_index, or has the weight 0"
        if reading is None:
            ignored = "there are no rows, or every target is ignore_index or has the weight 0"
        yield Advice(
            f"A mean over no targets is 0/0: {ignored}. Sum and divide by the count, or leave such "
            "a batch out.",
            'loss_fn(logits, y, reduction="sum") / (y != ignore_index).sum().clamp_min(1)',
        )


def _product(case: Case, made: Operation) -> Iterator[Advice]:
    """Multiplications, whose NaN is 0 * Inf."""
    unknown = _unknown_factor(made)
    if unknown is not None:
        yield unknown
        return
    yield from _bad_number(case, made, "multiplies them by") if made.name != "xlogy" else ()
    if not made.may_be_nan:
        return
    for place, (label, reading) in enumerate(made.inputs[:2]):
        if reading.inf_count:
            other = made.operand(1 - place)[0] or "the other factor"
            yield Advice(
                f"{label} holds Inf, and 0 * Inf is NaN where {other} is 0: a product masks no "
                "Inf. Put a finite number there before (masked_fill, torch.where, clamp); "
                "torch.xlogy(p, p) is 0 at 0.",
                "torch.where(keep, x, 0.0)  # not x * keep",
            )
            return


def _unknown_factor(made: Operation) -> Advice | None:
    """Advice on a product of which one factor is known: as many zeros as the result has NaN."""
    if len(made.inputs) != 1 or made.result is None or not made.is_nan:
        return None
    (label, reading), result = made.inputs[0], made.result
    if reading.nonfinite_count or reading.zero_count != result.nan_count:
        return None
    is_all = reading.zero_count == reading.components
    if made.is_op:
        others = "" if is_all else ", and no other element became NaN"
        why = f"{others}: the number that it is multiplied by is Inf{' or NaN' if is_all else ''}"
    else:
        others = "" if is_all else ", and as many elements are NaN"
        why = f"{others}: the other factor, not held, may be Inf there"
    form = result.float_format
    most = format_number(form.max) if form is not None and form.is_narrow else ""
    code = "scores.masked_fill(keep == 0, -math.inf)" if made.is_op else "torch.xlogy(p, q)"
    return Advice(
        f"{_zeros(label, reading)}{why}, and 0 * Inf is NaN (a mask (1 - keep) * -inf, p * log(p) "
        f"at 0, a factor that was divided by 0{', a sum beyond ' * bool(most)}{most}). Write masks "
        "with masked_fill or torch.where; torch.xlogy(p, p) is 0 at 0.",
        code if reading.components > 1 else "",
    )


def _bad_number(case: Case, made: Operation, use: str) -> Iterator[Advice]:
    """Advice on a number that is NaN or Inf, or far too large: of finite numbers that are
    multiplied or added none becomes NaN.
    """
    finite = [(label, r) for label, r in made.inputs if not r.nonfinite_count]
    is_real = all(reading.components == reading.numel for _, reading in finite)
    # A node of the graph need not keep all that its operator has read.
    if not (finite and is_real and len(finite) == len(made.inputs) and made.is_op):
        return
    form, peak = finite[0][1].float_format, max(float(r.abs_max or 0) for _, r in finite)
    # A product of two tensors has no number beside them; a sum has, by which one is multiplied.
    is_one = len(finite) == 1 or made.name in ("add", "sub", "rsub")
    limit = form.max if form is not None and is_one and not form.is_narrow else 0.0
    # Numbers up to 1 times a number, or plus a number, that the format holds.
    is_infinite = made.may_be_inf and len(finite) == 1 and 0 < peak <= 1
    is_far = made.may_be_inf and 0 < peak <= _MODERATE and limit > 0
    if made.is_nan or is_infinite or is_far:
        beyond = (
            "beyond the format" if is_infinite else f"above {format_number(limit / (peak or 1))}"
        )
        value = "NaN or Inf" if made.is_nan else f"Inf, or {beyond}"
        rates = case.rates if case.site.direction == "optimizer" else ""
        yield Advice(
            f"{' and '.join(label for label, _ in finite)} held finite numbers alone, so the "
            f"number that {made.name} {use} is {value}: a learning rate{rates}, a factor or "
            "a temperature that was divided by 0. Print it."
        )


def _products(case: Case, made: Operation) -> Iterator[Advice]:
    """Products of two finite operands, and sums of them, in a format as wide as that of float32."""
    form = None if made.result is None else made.result.float_format
    read = [(label, r) for label, r in made.inputs if r.abs_max and not r.nonfinite_count][-2:]
    if made.result is None or form is None or form.is_narrow or len(read) < 2:
        return
    (name, a), (other, b) = read
    why = "weights that grew, or were made or loaded so, or data), and normalise or clamp before"
    if case.site.direction == "optimizer":
        why = "the loss of this step, if they are gradients), and clip these before the update"
    if float(a.abs_max or 0) * float(b.abs_max or 0) > form.max:
        yield Advice(
            f"{name} reaches {format_number(a.abs_max)} and {other} {format_number(b.abs_max)}, "
            f"whose product is beyond {made.result.dtype}'s {format_number(form.max)}: Inf, and "
            f"Inf - Inf is NaN. Look for what made them so large ({why}."
        )


def _sum(case: Case, made: Operation) -> Iterator[Advice]:
    _, reading = made.operand(0)
    result = made.result
    if result is None or result.float_format is None or not result.float_format.is_narrow:
        return
    # A sum over a dimension has several results.
    read = 0 if reading is None else reading.components
    terms, rest = divmod(read, max(result.components, 1))
    seen = f" of {terms:,} elements" if terms > 1 and not rest else ""
    yield Advice(
        f"A sum{seen} in {result.dtype}, which ends at {format_number(result.float_format.max)}: "
        "add up in float32.",
        "x.sum(dtype=torch.float32)  # or x.float().sum()",
    )


def _narrow_loss(case: Case, made: Operation) -> Iterator[Advice]:
    form = None if made.result is None else made.result.float_format
    is_finite = not made.is_nan and not any(r.nonfinite_count for _, r in made.inputs)
    if made.result is not None and form is not None and form.is_narrow and is_finite:
        yield Advice(
            f"{made.shown} in {made.result.dtype}, which ends at {format_number(form.max)}: a term "
            "of it, or their sum, is beyond that. Compute the loss in float32.",
            "loss_fn(x.float(), target.float())",
        )


def _mask_by_addition(case: Case, made: Operation) -> Iterator[Advice]:
    """Two numbers at the lower end of a narrow format, added."""
    result = made.result
    yield from _bad_number(case, made, "adds or multiplies by (alpha)")
    form = None if result is None else result.float_format
    if result is None or form is None or not form.is_narrow:
        return
    if result.neginf_count != result.nonfinite_count:
        return
    lowest = [label for label, r in made.inputs if r.min is not None and r.min <= -0.99 * form.max]
    if lowest:
        yield Advice(
            f"{' and '.join(lowest)} already hold{'s' if len(lowest) == 1 else ''} "
            f"{format_number(-form.max)}, the lowest number of {result.dtype}: adding to it "
            "gives -Inf, and a row that is masked whole becomes NaN in softmax. Don't add masks: "
            "combine them as bool and use masked_fill, or clamp the sum.",
            "scores.masked_fill(~(causal & padding), torch.finfo(scores.dtype).min)",
        )


def _difference(case: Case, made: Operation) -> Iterator[Advice]:
    """NaN of operands that are not all known."""
    is_open = not (made.is_op or case.source or any(r.nonfinite_count for _, r in made.inputs))
    if made.may_be_nan and is_open:
        yield Advice(
            f"{made.shown} makes NaN of Inf - Inf alone, or has it from what it read: look at both "
            "operands for log(0), x/0, exp of a large number, a maximum over nothing (-Inf), -Inf "
            "that masks the same place in both, or the log or root of a negative number."
        )


def _singular(case: Case, made: Operation) -> Iterator[Advice]:
    or_read = "If what it solves for is finite (targets may hold NaN), it" if made.is_open else ""
    yield Advice(
        f"{or_read or made.shown} divides by numbers that are 0, or almost 0, where the matrix is "
        "singular or nearly so (rows that depend on each other, fewer samples than dimensions, a "
        "matrix that underflows). Add a part of the identity that is not small beside its "
        "elements, or use lstsq or pinv.",
        "a + eps * torch.eye(n)",
    )


def _domain(case: Case, made: Operation) -> Iterator[Advice]:
    label, reading = made.operand(0)
    if reading is None or reading.min is None or reading.max is None:
        return
    is_above, is_share = made.name == "acosh", made.name == "logit"
    low = 1.0 if is_above else 0.0 if is_share else -1.0
    inside = "clamp_min(1 + 1e-4)" if is_above else f"clamp({low:g} + 1e-4, 1 - 1e-4)"
    code = "x.logit(eps=1e-4)" if is_share else f"x.{inside}.{made.name}()"
    # Outside of these the result was NaN before the derivative.
    if made.is_backward and low <= reading.min and (is_above or reading.max <= 1):
        is_inside = low < reading.min and (is_above or reading.max < 1)
        if is_inside and not made.has_zero:
            return
        at = "1" if is_above else f"{low:g} and 1"
        reason = "a sigmoid that saturates" if is_share else "a cosine that is rounded"
        reason = "" if is_above else f": {reason} does that"
        yield Advice(
            f"The derivative of {made.name} is infinite at {at}, where its input came{reason}. "
            "Clamp it inside.",
            code,
        )
        return
    seen = f"{label} goes from {format_number(reading.min)} to {format_number(reading.max)}"
    excess = max(low - reading.min, 0 if is_above else reading.max - 1)
    seen += f" ({format_number(excess)} beyond, as by rounding)" if 0 < excess < 1e-3 else ""
    where = "below 1" if is_above else f"outside of {low:g} to 1"
    ends = ", and infinite at these" if made.name in ("atanh", "erfinv", "logit") else ""
    yield Advice(f"{seen}: {made.name} is NaN {where}{ends}. Clamp it inside.", code)


def _optimizer(case: Case, made: Operation) -> Iterator[Advice]:
    label, reading = made.operand(2)
    if made.name.startswith("fused_"):  # it divides by what is made within
        seen = "It divides by sqrt(exp_avg_sq), 0 where a gradient always was, and"
        reading = made.result if made.is_nan else None
    else:
        reading = reading if reading and reading.zero_count else None
        seen = f"The divisor {_zeros(label, reading)}, and" if reading else ""
    if reading is None:
        return
    if not (case.site.direction == "optimizer" or made.name.startswith("fused_")):
        seen = f"The divisor {_zeros(label, reading)}: 0/0 is NaN, and x/0 Inf. Add an eps to it."
        yield Advice(seen, "x / (divisor + eps)")
        return
    yield Advice(
        f"{seen} the eps that the optimizer adds, if any, is lost: "
        + (
            "below 3e-8, as Adam's 1e-8, eps is 0 in float16. Keep float32 weights under "
            "autocast, or set eps=1e-4."
            if reading.dtype == "float16"
            else "it is 0, or below the dtype's spacing. Give it a larger eps."
        ),
        f"{case.divider or 'Adam'}(parameters, eps=1e-4)",
    )


_FORWARD: _Rules = (
    (r"addcdiv|fused_ada\w+", _optimizer),
    (r"(?:std|var)(?:_mean)?", _spread),
    (
        r"mean|nanmean|(?:smooth_)?l1_loss|mse_loss|huber_loss|binary_cross_entropy(?:_with_logits)?"
        r"|kl_div|soft_margin_loss",
        _mean,
    ),
    (r"div|reciprocal|remainder|fmod", _division),
    (r"log(?:2|10|1p)?|xlogy", _logarithm),
    (r"special_entr", _entropy),
    (r"r?sqrt|pow|float_power", _power),
    (r"exp2?|expm1|cosh|sinh", _exponential),
    (r"(?:linalg_)?matrix_exp", _matrix_exponential),
    (r"(?:\w+_)?(?:layer|group|batch|instance|rms)_norm(?:_legit\w*)?", _normalisation),
    (r"differentiable_graph", _script),
    (r"i0", _bessel),
    (r"segment_reduce", _segments),
    (r"lgamma|digamma", _gamma),
    (r"to_copy", _cast),
    (r"weight_norm(?:_interface)?", _weight_norm),
    (r"scalar_tensor|(?:masked_|index_)?fill|(?:new_)?full(?:_like)?", _constant),
    (r"(?:linalg_vector_)?norm|mse_loss|square|std|var", _square),
    (r"(?:log_)?softmax", softmax.softmax),
    (r"scaled_dot_product_\w*attention\w*", softmax.attention),
    (r"logsumexp|logaddexp|logcumsumexp", softmax.logsumexp),
    (r"ctc_loss", softmax.ctc),
    (r"nll_loss(?:2d|_nd)?|cross_entropy(?:_loss)?", _likelihood),
    (r"mul|addcmul|xlogy", _product),
    (r"(?:add|b|baddb)?mm|matmul|linear|convolution|(?:add)?mv|dot|mul|addcmul", _products),
    (r"sum|cumsum|nansum", _sum),
    (r"(?:mse|smooth_l1|huber|soft_margin)_loss", _narrow_loss),
    (r"neg|mean|sum|mul|div|add|sub|rsub", softmax.masked_classes),
    (r"add|sub|rsub", _mask_by_addition),
    (r"add|sub|rsub", _difference),
    (r"(?:linalg_)?(?:solve|inv|inverse|lu_solve|lu_factor|solve_triangular)(?:_ex)?", _singular),
    (r"acos|asin|atanh|erfinv|acosh|logit", _domain),
)
_BACKWARD: _Rules = (
    (r"pow", derivatives.power_beyond),
    (r"r?sqrt|pow", derivatives.root_at_zero),
    (r"div|reciprocal", derivatives.quotient),
    (r"log(?:2|10|1p)?|xlogy", derivatives.logarithm),
    (r"acosh?|asin|atanh|erfinv|logit", _domain),
    (r"(?:linalg_)?matrix_exp", _matrix_exponential),
    (r"angle", derivatives.angle),
    (r"hypot", derivatives.hypot),
    (r"(?:linalg_)?(?:svd|eigh|eig|symeig|qr)", derivatives.decomposition),
    (r"(?:log_)?softmax", softmax.softmax),
    (r"logsumexp|logaddexp|logcumsumexp", softmax.logsumexp),
    (r"ctc_loss", softmax.ctc),
    (
        r"mul|exp2?|expm1|pow|sqrt|sinh|cosh|(?:mse|smooth_l1|huber|soft_margin)_loss"
        r"|binary_cross_entropy_with_logits",
        derivatives.product,
    ),
    (r"mul|pow|square|addcmul|prod|gelu|silu|mish", derivatives.overflow),
)
