"""Advice for softmax and what it is part of: attention, CTC, classes that are masked."""

from __future__ import annotations

from collections.abc import Iterator

from fastcheck.utils.text.numbers import format_number

from .case import Advice, Case, Operation


def softmax(case: Case, made: Operation) -> Iterator[Advice]:
    label, reading = made.operand(0)
    # Other rows may have masked elements, or elements far below the largest.
    masked = 0 if made.result is None else made.result.neginf_count
    zeros = 0 if made.result is None else made.result.zero_count
    if made.may_be_nan and reading is not None and reading.posinf_count:
        yield Advice(
            f"{label} holds {reading.posinf_count:,} +Inf, and softmax subtracts the largest: "
            "Inf - Inf is NaN. Look for what made them, and clamp there."
        )
    elif made.may_be_nan and made.is_open and reading is None and zeros:
        yield Advice(
            f"{made.shown} makes NaN of a row of nothing but -inf, as one that is masked whole, "
            "and of one that holds +Inf, as a product that overflowed. Other rows hold 0, as those "
            "of masked elements, and of scores far below the largest. If there is a mask, let "
            "every query attend to at least one key (padding and causal mask together), or mask "
            "with a large finite number; if there is none, look for what made the scores so large.",
            "scores.masked_fill(mask, torch.finfo(scores.dtype).min)",
        )
    elif made.may_be_nan and made.is_open and reading is None and not masked:
        yield Advice(
            f"{made.shown} makes NaN of a row that holds +Inf, and of a row of nothing but -Inf "
            "(masked whole), or has it from what it read: look at what makes its input for x/0, "
            "exp or a product of large numbers, log(0), or a mask that leaves nothing."
        )
    elif made.may_be_nan:
        yield Advice(
            "A row that is masked whole: softmax over nothing but -inf is NaN. Let every query "
            "attend to at least one key (padding and causal mask together), or mask with a large "
            "finite number.",
            "scores.masked_fill(mask, torch.finfo(scores.dtype).min)",
        )


def attention(case: Case, made: Operation) -> Iterator[Advice]:
    """Scores that overflow; a row that is masked whole: ``nan_from_finite``."""
    read = {label.partition(" ")[0]: reading for label, reading in made.inputs}
    query, key = read.get("query"), read.get("key")
    form = None if query is None else query.float_format
    # Products of 16 bits are summed in float32.
    if query is None or key is None or form is None or form.is_narrow or not made.may_be_nan:
        return
    if float(query.abs_max or 0) * float(key.abs_max or 0) > form.max:
        yield Advice(
            f"query reaches {format_number(query.abs_max)} and key {format_number(key.abs_max)}, "
            f"whose product is beyond {query.dtype}'s {format_number(form.max)}: of scores that "
            "are Inf softmax makes NaN. Look for what made them so large (weights that grew, or "
            "were made or loaded so, or data); normalising q and k bounds the scores."
        )


def logsumexp(case: Case, made: Operation) -> Iterator[Advice]:
    is_empty = made.is_backward or (made.result is not None and made.result.neginf_count > 0)
    if is_empty and any(reading.neginf_count for _, reading in made.inputs):
        what = {
            "logaddexp": "Two operands that are both -inf",
            "logcumsumexp": "A row that begins with -inf",
        }.get(made.name, "A row of nothing but -inf")
        yield Advice(
            f"{what}: the {made.name} is -Inf, and the derivative, exp(-Inf + Inf), is NaN. Leave "
            "one entry open, or put a large finite number in place of -inf.",
            "scores.masked_fill(mask, -1e4)",
        )


def ctc(case: Case, made: Operation) -> Iterator[Advice]:
    label, reading = made.operand(0)
    if reading is not None and reading.nonfinite_count:
        yield Advice(
            f"{label} holds {reading.nonfinite_count:,} NaN or Inf: the gradient of CTC is NaN "
            "there, of -Inf too, as of a class that is masked out. Mask with a finite number.",
            "logits.masked_fill(mask, -1e4).log_softmax(-1)",
        )
        return
    yield Advice(
        "CTC is Inf where a target is longer than the frames that it is aligned to (repeated "
        "labels need one frame more each), and its gradient is NaN. Leave such samples out, or "
        "pass zero_infinity=True.",
        "ctc_loss(..., zero_infinity=True)",
    )


def masked_classes(case: Case, made: Operation) -> Iterator[Advice]:
    """Operators that pass on the log-probabilities of classes that are masked with -Inf."""
    result = made.result
    if result is None or not result.inf_count or result.nan_count:
        return
    for label, reading in made.inputs:
        is_of_classes = "log_softmax" in label or made.name == "neg"
        if is_of_classes and reading.neginf_count == reading.nonfinite_count > 0:
            yield Advice(
                f"{label} holds {reading.neginf_count:,} -Inf: a class that is masked with -Inf "
                "has a log-probability of -Inf. Where the target is another class that is left "
                "out, but label smoothing, soft targets and a sum or mean over classes take it "
                "in. Mask with a finite number, or leave such classes out of the sum.",
                "logits.masked_fill(mask, -1e4)",
            )
            return
