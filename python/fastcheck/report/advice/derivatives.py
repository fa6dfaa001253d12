"""Advice for an operator whose derivative is not finite at the values that it read."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fastcheck.utils.text.numbers import counted, format_number

from .case import Advice, Case, Operation, down_to, least_magnitude

#: The most that a number in a derivative, such as the 3 of x ** 3, is taken to multiply by.
_BESIDE = 16
#: For a format that ends before float32 does.
_WIDER = ", or compute it in float32 or bfloat16: f(x.float())"


def decomposition(case: Case, made: Operation) -> Iterator[Advice]:
    if "qr" in made.name:
        yield Advice(
            "The backward of qr divides by the diagonal of R, which is 0 where columns of the "
            "matrix depend on each other. Add a little noise to it.",
            "a + 1e-4 * torch.randn_like(a)",
        )
        return
    values = "singular values" if "svd" in made.name else "eigenvalues"
    only = "svdvals" if "svd" in made.name else "eigvalsh"
    yield Advice(
        f"The backward of {made.name.replace('linalg_', '')} divides by the differences of "
        f"{values}: two equal ones (several zeros of a matrix of low rank, an identity) make it "
        f"Inf or NaN. Add a little noise to the matrix, use only the values ({only} has a finite "
        "derivative), or detach the vectors.",
        "a + 1e-4 * torch.randn_like(a)",
    )


def power_beyond(case: Case, made: Operation) -> Iterator[Advice]:
    label, base = made.operand(0)
    exponent = dict(made.inputs).get("exponent")
    form = None if base is None else base.float_format
    if made.shown != "PowBackward0" or base is None or form is None or not base.abs_max:
        return
    power = None if exponent is None or exponent.min is None else float(exponent.min)
    if power is None or power <= 1:
        return
    if math.log(power) + (power - 1) * math.log(base.abs_max) <= math.log(form.max):
        return
    shown, less = format_number(power), format_number(power - 1)
    yield Advice(
        f"The derivative of x ** {shown} is {shown} * x ** {less}: {label} reaches "
        f"{format_number(base.abs_max)}, where that is beyond {base.dtype}'s "
        f"{format_number(form.max)}. Bound what goes into it"
        f"{_WIDER if form.is_narrow else ''}."
    )


def root_at_zero(case: Case, made: Operation) -> Iterator[Advice]:
    label, base = made.operand(0)
    if base is not None and base.nan_count:
        return  # product
    exponent = dict(made.inputs).get("exponent")
    # An exponent that is a tensor has a gradient, too, with the logarithm of the base.
    number = exponent if made.shown == "PowBackward0" else None
    is_whole = number is not None and (number.min or 0.5) % 1 == 0
    is_power = made.name == "pow" and not is_whole
    is_known = base is not None and made.is_op and made.result is not None
    if is_power and base and is_known and not (made.is_nan or made.is_inverse_of(base)):
        return  # overflow
    has_nan = case.has_nan if made.result is None else made.is_nan
    if is_power and base is not None and base.negative_count and has_nan:
        yield Advice(
            f"{label} holds {counted(base.negative_count, 'negative number')}{down_to(base)}: "
            "a fractional power of them is NaN, and so is the derivative of x ** p by p, x ** p * "
            "log(x), also where the power itself is finite (p = 2). torch.where after it does not "
            "stop that: clamp before.",
            "x.clamp_min(eps) ** p",
        )
        return
    if any(reading.nan_count for _, reading in made.inputs):
        yield Advice(
            f"The result of {made.name} was NaN (of a negative number), and torch.where after it "
            "does not keep that out of the gradient: clamp before.",
            f"x.clamp_min(eps).{made.name}()",
        )
        return
    if not made.has_zero or (case.trend.has_exploded and not made.is_of_zeros):
        return
    shown, how = {
        "pow": ("x ** p with p < 1", "(x + eps) ** p"),
        "rsqrt": ("rsqrt", "rsqrt(x + eps)"),
    }.get(made.name, ("sqrt", "sqrt(x + eps)"))
    result = ", and Inf * 0 or 0/0 is NaN" if case.has_nan else ""
    yield Advice(
        f"The derivative of {shown} is infinite at 0{result}. Add the eps inside, not outside: "
        f"{how}. torch.where after it does not stop it.",
        how,
    )


def quotient(case: Case, made: Operation) -> Iterator[Advice]:
    infinite = [label for label, reading in made.inputs if reading.inf_count]
    if len(infinite) > 1 and all(reading.posinf_count for _, reading in made.inputs):
        yield Advice(
            f"{' and '.join(infinite)} hold +Inf: Inf / Inf is NaN, and so is the derivative. Look "
            "for what overflowed before the division, such as exp: subtract the maximum, as "
            "softmax does.",
            "torch.softmax(x, dim)  # not x.exp() / x.exp().sum()",
        )
    elif infinite:
        yield Advice(
            f"The dividend holds Inf ({infinite[0]}), and the derivative by the divisor multiplies "
            "it by 0: Inf * 0 is NaN. Divide first, and mask after.",
            "(logits / temperature).masked_fill(mask, -math.inf)",
        )
    elif made.has_zero:
        yield Advice(
            "The derivative of x / n divides by n or its square, and 0 came there: x/0 is Inf, and "
            "0/0 is NaN. torch.where after the division does not stop it: make the divisor safe "
            "before.",
            "x / torch.where(n == 0, 1.0, n)  # or x / (n + eps)",
        )
        return
    label, divisor = made.operand(0 if made.name == "reciprocal" else 1)
    form = None if divisor is None or infinite else divisor.float_format
    least = 0.0 if divisor is None else least_magnitude(divisor)
    if divisor is not None and form is not None and 0 < least < 1 / math.sqrt(form.max):
        yield Advice(
            f"The derivative of x / n divides by the square of n, and {label} is down to "
            f"{format_number(least)}: that is beyond {divisor.dtype}'s {format_number(form.max)}. "
            "Add an eps to the divisor, or clamp it.",
            "x / n.clamp_min(eps)",
        )


def logarithm(case: Case, made: Operation) -> Iterator[Advice]:
    if made.has_zero:
        yield Advice(
            f"The derivative of {made.name} is infinite at "
            f"{'-1' if made.name == 'log1p' else '0'}: clamp its input, or use log_softmax, "
            "logsigmoid or binary_cross_entropy_with_logits on logits. torch.where after it does "
            "not stop it.",
            f"x.clamp_min({'-1 + ' if made.name == 'log1p' else ''}eps).{made.name.strip('xy')}()",
        )


def product(case: Case, made: Operation) -> Iterator[Advice]:
    # A result that is NaN, of a negative number: root_at_zero.
    is_root = made.name in ("sqrt", "pow")
    read = (one for one in made.inputs if one[1].inf_count or not is_root or one[0][:4] == "self")
    bad = next(((label, r) for label, r in read if r.nonfinite_count), None)
    if case.has_nan and bad is not None:
        value = "NaN" if bad[1].nan_count else "Inf"
        yield Advice(
            f"The backward of {made.name} multiplies the gradient by what its forward read, and "
            f"{bad[0]} holds {value}: 0 * {value} is NaN, also where the result was masked away or "
            f"left out by an index. Keep {value} out of its input: torch.where or an index before "
            "it, or a clamp.",
            "f(torch.where(ok, x, 1.0))",
        )


def overflow(case: Case, made: Operation) -> Iterator[Advice]:
    """Finite numbers whose product, or that times a number beside them, is out of range."""
    form = None if made.result is None else made.result.float_format
    peaks = [float(reading.abs_max) for _, reading in made.inputs if reading.abs_max]
    is_finite = not any(reading.nonfinite_count for _, reading in made.inputs)
    if made.result is None or form is None or not (peaks and is_finite and made.may_be_inf):
        return
    # An operator within the backward of a power raises to p - 1.
    is_power = made.is_op and made.name == "pow" and not made.is_of_zeros
    # A gradient that a loss scale has multiplied has advice of its own.
    is_beyond = is_power or math.prod(peaks) * _BESIDE > form.max
    if is_beyond and case.report.scale is None:
        yield Advice(
            f"The backward of {made.name} made Inf of numbers up to "
            f"{' and '.join(map(format_number, peaks))}: the result is beyond "
            f"{made.result.dtype}'s {format_number(form.max)}. Bound what goes into it"
            f"{_WIDER if form.is_narrow else ''}."
        )


def hypot(case: Case, made: Operation) -> Iterator[Advice]:
    if made.has_zero:
        yield Advice(
            "The derivative of hypot divides by its result, which is 0 where both operands are: "
            "0/0 is NaN. Add the eps inside the root.",
            "(x * x + y * y + eps).sqrt()",
        )


def angle(case: Case, made: Operation) -> Iterator[Advice]:
    yield Advice(
        "The derivative of angle divides by the square of the magnitude of a complex number: of a "
        "very small one (below 3e-23 in float32) that is 0, and x/0 is Inf. Put another number "
        "where it is so small, before angle: torch.where after it does not stop it.",
        "torch.where(z.abs() < 1e-8, 1.0, z).angle()",
    )
