"""Advice that belongs to the result of two runs: rounding or another order of the elements, and
which option accepts it.
"""

from __future__ import annotations

from collections.abc import Iterator

from .measure import PairState
from .origin import Cause, Origin
from .questions import Answer, Questions
from .tally import COMPUTED, Tally

#: The relative difference of two losses of the same weights and batch, in two layouts.
_SAME_LOSS = 1e-5
_ELEMENTS = (
    "Where a checksum differs, a log has norms, sums and extremes to compare, which a tensor has "
    "in any order of its elements. --exact demands equal bits; a Dumper(tensors=True) of that "
    "module, on both sides, compares the elements"
)


def advice_of(questions: Questions, tally: Tally, answers: tuple[Answer, ...]) -> Iterator[str]:
    """Sentences; none where the answers say it all."""
    origin = questions.origin
    is_level = origin is None or origin.is_level
    is_level &= tally.first(tally.different, COMPUTED) is None
    given = [answer for answer in answers[:4] if answer.answer == "no"]
    reordered = [
        answer.question
        for answer in given
        if answer.found is not None and tally.is_reordered(answer.found.row.phase)
    ]
    if reordered and is_level:
        error = 0.0 if origin is None else origin.error_after
        yield (
            f"{' and '.join(reordered)}: the same numbers in another order, and what is computed "
            f"from them stays at the level of rounding (largest error {error:.2g}): as of another "
            "memory layout (channels_last), or of rows in another order. If that is meant: "
            "--accept order"
        )
    if tally.elsewhere and all(tally.elsewhere.values()):
        yield from _of_names(tally)
    if origin is not None and not given and questions.expects_bits:
        yield from _of_origin(questions, origin)
    if any(answer.answer == "partly" for answer in answers) and questions.first is None:
        yield "If tensors of one side alone are meant (fused or split modules): --accept missing"


def _of_names(tally: Tally) -> Iterator[str]:
    """Each weight that differs is another of the reference."""
    name, other = next(iter(tally.elsewhere.items()))
    held = f"{name} is what {other} is in reference"
    first = tally.losses[min(tally.losses)] if tally.losses else None
    if first is None:
        yield f"weights stand in each other's place, or the names do (rename=): {held}"
    elif first.error <= _SAME_LOSS:
        yield (
            f"the names are wrong, not the weights: {held}, and the loss of step {first.step:,} "
            "agrees. Another rename= (--rename) pairs them"
        )
    else:
        yield (
            f"weights stand in each other's place: {held}, and the loss of step {first.step:,} "
            "differs too, which names alone do not change"
        )


def _of_origin(questions: Questions, origin: Origin) -> Iterator[str]:
    first, where = questions.first, f"step {origin.row.step:,}, {origin.row.name}"
    after = ""
    if origin.worst is not None:
        after = f"{origin.error_after:.2g} ({origin.worst.name})"
    turned = ""
    if origin.turned:
        turned = f", but for {origin.turned:,} parameters whose updates are alike within 1 %"
    if first is None and origin.cause is Cause.ROUNDING:
        yield (
            f"rounding: {where} is the first that is not equal to the bit, and what is computed "
            f"after it in its step differs by no more than {after}{turned}. {_ELEMENTS}"
        )
    elif first is None:
        yield (
            f"not explained: {where} is not equal to the bit, though all before it is"
            + (f", and what is computed after it differs by up to {after}" if after else "")
            + f". {_ELEMENTS}"
        )
    elif first.key != origin.key or origin.row.state not in (PairState.REORDERED, PairState.CLOSE):
        return
    elif origin.is_beyond:
        yield (
            "everything before it is equal to the bit, and rounding makes an error of about "
            f"{origin.limit:.2g} at most: another formula or constant. If it is meant: --accept "
            "order"
        )
    elif origin.is_permuted:
        yield (
            "another order of the elements: their sums agree further than they would if last bits "
            "differed. If it is meant: --accept order"
        )
    elif origin.cause is Cause.UNKNOWN:
        yield (
            "nothing that is computed from it is in both sides, so that rounding can't be told "
            "from another order of the elements. A Dumper(tensors=True) of that module, on both "
            "sides, tells them apart. If it is meant: --accept order"
        )
    else:
        yield (
            f"no rounding alone: what is computed after it in its step differs by up to {after}, "
            f"and rounding makes about {origin.limit:.2g} at most. Its elements stand in another "
            "order, or what follows has a cause of its own"
        )
