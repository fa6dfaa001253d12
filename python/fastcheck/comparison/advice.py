"""Advice that belongs to the result of two runs: rounding or another order of the elements, and
which option accepts it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Optional

from . import programs
from .batches import of_order
from .block import SIDES, Phase
from .measure import PairState
from .origin import Cause, Origin
from .over_time import SAME_LOSS
from .programs import Sides, path_of
from .questions import Answer, Questions
from .row import factor_of, factor_text, is_whole
from .tally import COMPUTED, Found, Tally

_ELEMENTS = (
    "Where a checksum differs, a log has only norms, sums and extremes to compare, which do not "
    "depend on the order of the elements. --exact demands equal bits; a Dumper(tensors=True) of "
    "that module, on both sides, compares the elements"
)
_TOTAL_NORM = " · total norm of the gradients"
_FORMULA = (
    ": the formula, a constant or the precision (TF32, bfloat16) is different, or something has "
    "written to it or to what it reads"
)


def advice_of(
    questions: Questions,
    answers: tuple[Answer, ...],
    sides: Sides,
    starts: tuple[int, int],
) -> Iterator[str]:
    """Sentences; none where the answers say it all. ``starts``: the first steps of the two that are
    compared.
    """
    tally, origin = questions.tally, questions.origin
    is_level = origin is None or origin.is_level
    is_level &= tally.first(tally.firsts.different, COMPUTED) is None
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
            f"from them differs by rounding only (largest error {error:.2g}), as with another "
            "memory layout (channels_last) or rows in another order. If this order is intended, "
            "use --accept order"
        )
    yield from _of_steps(tally, answers, questions.first)
    is_over = any(answer.answer == "not asked" for answer in answers)
    kinds = [answer.question for answer in given]
    is_renamed = bool(tally.lookalikes)
    if is_over and kinds and not is_renamed and set(kinds) <= {"environment", "hyper-parameters"}:
        yield from programs.of_other_model(sides)
        yield from programs.of_offset(sides) if starts[0] == starts[1] else ()
        options = " ".join(f"--accept {kind}" for kind in kinds)
        is_equal = is_level and bool(tally.losses)
        if is_equal and not all(entry.is_explained for entry in tally.missing.values()):
            options += " --accept missing"
        agrees = ", which agrees" * is_equal
        yield (
            f"if the two are meant to differ in that, {options} compares what they have "
            f"computed{agrees}"
        )
    asked = [answer.found for answer in answers if answer.answer == "no" and answer.found]
    if asked:
        yield from _of_dtypes(asked[0])
    if tally.elsewhere and all(tally.elsewhere.values()):
        yield from _of_names(tally, sides)
    first = questions.first
    told = [] if first is None or given else [*_of_first(first, tally, sides, starts)]
    if origin is not None and not given and questions.expects_bits:
        has_bits = not tally.counts["without_bits"]
        equal = "equal to the bit" if has_bits else "equal as far as the statistics tell"
        is_told = bool(told) or (first is not None and _begins_alone(first, tally))
        yield from _of_origin(questions, origin, equal, is_told)
    if any(answer.answer in ("partly", "no") for answer in answers):
        yield from programs.of_warnings(sides, starts, max(tally.growth, default=starts[1]))
        yield from programs.of_classes(None if given else first, tally, sides)
        yield from programs.of_one_side(tally, sides, starts)
        for answer in given:
            if answer.found is not None and answer.found.row.phase is Phase.WEIGHTS:
                yield from programs.of_settings([path_of(answer.found.row.name)], sides)
    if first is not None and not given:
        yield from programs.of_left_out(first, sides)
        yield from programs.of_modules(first, sides)
        yield from _of_calls(first)
        yield from programs.of_split(sides) if questions.is_split else ()
        if sides[1].options.get("level") != "op" and path_of(first.row.name) in sides[1].classes:
            yield from _of_inputs(first)
        yield from told
        if first.row.phase is Phase.UPDATE:
            yield from _of_update(first, origin, told, tally, sides, starts)
    if first is not None and first.row.phase in (Phase.LOSS, Phase.GRADIENTS):
        yield from _of_factor(first, None if given else origin, bool(told))
    if any(answer.answer == "partly" for answer in answers) and questions.first is None:
        yield (
            "If some tensors are on one side only on purpose (fused or split modules), use "
            "--accept missing"
        )


def _of_update(
    first: Found,
    origin: Optional[Origin],
    told: list[str],
    tally: Tally,
    sides: Sides,
    starts: tuple[int, int],
) -> Iterator[str]:
    """``told``: what is said of the first difference already."""
    found = [*programs.of_updates(tally), *programs.of_state(first, sides, starts)]
    is_open = not (told or found)
    if is_open and origin is not None and first.key == origin.key and not origin.is_late:
        equal = f". {origin.alike:,} other weights are equal to the bit in that step"
        yield (
            "gradients and settings agree: the optimizer computes something else, or "
            f"something else writes to it{equal * origin.is_alone}"
        )
    yield from found
    if is_open:
        yield from programs.of_rates(first, sides, starts)


def _of_factor(first: Found, origin: Optional[Origin], is_told: bool) -> Iterator[str]:
    """Advice on a loss or a gradient, by its factor and by what differs beside it."""
    factor = factor_of(first.row.actual, first.row.reference)
    is_alone = origin is not None and first.key == origin.key and origin.is_alone
    if is_alone and origin is not None and origin.is_parameters_gradient and origin.alike:
        yield (
            f"it is the only gradient of a parameter that differs in that step, of "
            f"{origin.alike + 1:,}: look at what changes it by itself (a hook on the "
            "parameter, a loss that it alone has a part in, a write to it)"
        )
    elif (
        origin is not None
        and first.key == origin.key
        and origin.is_parameters_gradient
        and not (origin.alike or origin.causes or is_told)
        and first.exact_before
        and " · backward · " in first.after
        and not is_whole(factor)
    ):
        yield (
            "no gradient of a parameter is equal to the bit in that step, and what modules pass on "
            "in backward is: look at what changes gradients after backward(), or at hooks on all "
            "parameters (noise, a decay, a clipping or an average that is written out)"
        )
    elif is_whole(factor):
        yield (
            f"a whole factor, {factor_text(factor)}: for example a mean on one side and a "
            "sum on the other, gradients that are not cleared, or a division by a loss scale, "
            "or by the number of micro-batches or of ranks, that one side leaves out"
        )


def _of_first(first: Found, tally: Tally, sides: Sides, starts: tuple[int, int]) -> Iterator[str]:
    """Causes of the first difference that leave nothing else to look for."""
    row = first.row
    if row.phase is Phase.UPDATE:
        yield from programs.of_gradient(first, tally, starts)
        if tally.counts["rewritten"] and row.step == starts[1]:
            yield (
                f"the weights of step {row.step:,} are equal to the bit when it begins, and not "
                "when optimizer.step() does: something writes to them between the two (weights "
                "that are moved for a second pass and not put back, a hook)"
            )
    elif tally.unreduced and row.step == tally.unreduced.step and " · gradient of " in row.name:
        _, rank, name, side = tally.unreduced
        yield (
            f"{name} of rank {rank} is that of the lowest rank in {SIDES[1 - side]}, to the bit, "
            f"and not in {SIDES[side]}: there gradients are not averaged over the ranks "
            "(no_sync(), a backward() that DistributedDataParallel does not see, an all_reduce() "
            "that is left out)"
        )
    elif row.name.endswith(_TOTAL_NORM) and first.exact_before:
        yield (
            "what clipping reads differs: gradients of other parameters, another norm_type=, or "
            "gradients that something has changed after backward()"
        )
    elif row.name == "loss" and first.exact_before and first.after:
        yield (
            f"what comes before the loss is equal to the bit, up to {first.after}: look at what "
            "the program makes of that (a term that is added, a weight, a division, a mean)"
        )


def _of_steps(tally: Tally, answers: tuple[Answer, ...], first: Optional[Found]) -> Iterator[str]:
    """Advice for batches that differ because the steps of the two sides are not the same, and for
    calls of one side alone.
    """
    step = min((a.found.row.step for a in answers[:4] if a.found is not None), default=None)
    for entry in tally.missing.values():
        if entry.phase is not Phase.BATCHES:
            continue
        side, other = SIDES[:: 1 if entry.state is PairState.ONLY_ACTUAL else -1]
        if not any(
            missing.phase is Phase.FORWARD
            and missing.state is entry.state
            and missing.first_step == entry.first_step
            for missing in tally.missing.values()
        ):
            calls = f"step {entry.first_step:,} has as many calls on both sides"
            if entry.is_alone:
                yield (
                    f"{calls}, and {side} alone reads {entry.name}: in {other} it is not given "
                    "(None, as a mask that is left out), is no tensor, or was read before in that "
                    "step under another name"
                )
            else:
                yield (
                    f"{calls}, and one of {side} alone reads {entry.name} as a tensor of its own: "
                    f"in {other} it reads what was read before in that step, as the same batch "
                    "twice"
                )
            return
        more = f"step {entry.first_step:,} has more batches in {side} ({entry.name})"
        if step is not None and entry.first_step <= step:
            yield (
                f"{more}, and the steps after it may hold other batches for that reason alone: as "
                "where that side leaves out an optimizer.step(), or takes more micro-batches"
            )
            return
        if step is None and (first is None or entry.first_step <= first.row.step):
            moves = ", may move what BatchNorm keeps, and draw random numbers" * (first is not None)
            yield f"{more}: a call that the other side does not make, as of an evaluation{moves}"
            return
    if step is not None:
        yield from of_order(tally.batches)


def _begins_alone(first: Found, tally: Tally) -> bool:
    """True if one side alone has something before the first difference, from its step on."""
    states = PairState.ONLY_ACTUAL, PairState.ONLY_REFERENCE
    entries = (
        tally.missing.get((state, name))
        for state, names in zip(states, first.alone)
        for name in names
    )
    return any(entry is not None and entry.first_step == first.row.step for entry in entries)


def _of_calls(first: Found) -> Iterator[str]:
    """Advice for modules that are called in another order before the first difference."""
    if first.calls is not None:
        before, mine, other = map(path_of, first.calls)
        after = f"after {before} " if before else ""
        yield (
            f"modules are called in another order: {after}the next that returns is {mine} in "
            f"actual, and {other} in reference"
        )


def _of_dtypes(found: Found) -> Iterator[str]:
    """Advice for a first difference that is one of dtypes."""
    row = found.row
    mine, other = ((side or {}).get("dtype") for side in (row.actual, row.reference))
    if mine != other:
        cause = ""
        if " · forward · output" in row.name:
            cause = ", as with torch.autocast on one side, or weights of another dtype"
        yield (
            f"{row.name} is {mine} in actual and {other} in reference{cause}. If this is intended, "
            "--accept dtype compares the numbers, within the threshold of the coarser dtype"
        )


def _own_inputs(first: Found) -> list[list[str]]:
    """The inputs of the module of the first difference that each side alone has."""
    own = f"{first.row.name.partition(' · ')[0]} · forward · input"
    return [[name for name in names if name.startswith(own)] for names in first.alone]


def _of_inputs(first: Found) -> Iterator[str]:
    """Advice for a tensor that code between the modules has made."""
    if " · forward · input" in first.row.name:
        after = f", after {first.after}" if first.after else ""
        yield (
            f"{first.row.name} is nothing that an observed module has returned as it is: code "
            f"between these modules computes it{after}"
        )
    for side, other, names in zip(SIDES, SIDES[::-1], first.alone):
        made = [name for name in names if " · forward · output" in name]
        path = path_of(made[-1]) if made else ""
        holds = path_of(first.after).startswith(f"{path}." if path else "")
        if made and first.row.phase is Phase.LOSS and holds:
            yield (
                f"in {side} alone {path or 'the model'} returns {made[-1].rpartition(' · ')[2]} as "
                f"a tensor of its own; in {other} it returns there what a module has returned "
                "before, or nothing. Look at its forward() (a scale, a bound), or at a hook on it"
            )
    inputs = _own_inputs(first)
    for place, (side, other) in enumerate((("actual", "reference"), ("reference", "actual"))):
        if inputs[place] and not inputs[1 - place]:
            yield (
                f"in {side} alone {path_of(first.row.name)} reads "
                f"{inputs[place][0].rpartition(' · ')[2]} as a tensor of its own; in {other} it "
                "reads there what an earlier module has returned or read, or nothing. Look at what "
                "hands it to the module (code between the modules, a hook)"
            )


def _of_names(tally: Tally, sides: Sides) -> Iterator[str]:
    """Advice for weights that are swapped or shared: each weight that differs equals another weight
    of the reference.
    """
    name, other = next(iter(tally.elsewhere.items()))
    held = f"{name} is what {other} is in reference"
    alone = {m.name for m in tally.missing.values() if m.state is PairState.ONLY_REFERENCE}
    if any(missing.endswith(f" · {other}") for missing in alone):
        why = "it is shared with another weight, or renamed"
        if other.rpartition(".")[0] not in sides[0].classes:
            why = "modules have other names, as where one before them is left out, or added"
        yield f"{held}, and actual has no {other}: {why}"
        return
    first = tally.losses[min(tally.losses)] if tally.losses else None
    if first is None:
        yield f"weights are swapped, or their names are (rename=): {held}"
    elif first.error <= SAME_LOSS:
        yield (
            f"the names are wrong, not the weights: {held}, and the loss of step {first.step:,} "
            "agrees. Another rename= (--rename) is needed"
        )
    else:
        yield (
            f"weights are swapped: {held}, and the loss of step {first.step:,} differs too, which "
            "wrong names alone do not cause"
        )


def _late(origin: Origin, equal: str, is_told: bool) -> str:
    """The end of a sentence on a tensor that was equal in the steps before."""
    others = ""
    if origin.alike and (origin.row.phase is Phase.UPDATE or origin.is_parameters_gradient):
        are = "others of its kind are" if origin.alike > 1 else "other of its kind is"
        others = f". {origin.alike:,} {are} {equal} in that step"
    known = f"{equal} in the steps before, as was all else{others}"
    if origin.causes or is_told:
        return known
    code = "code that writes to it, " if origin.row.phase is Phase.UPDATE else "code or "
    return (
        f"{known}: look for what begins there ({code}state that comes into play, an operator that "
        "is not deterministic, elements of another size), or for a fault of the hardware"
    )


def _of_origin(questions: Questions, origin: Origin, equal: str, is_told: bool) -> Iterator[str]:
    """``equal``: how the tensors before it are equal. ``is_told``: its cause is known."""
    first, where = questions.first, f"step {origin.row.step:,}, {origin.row.name}"
    known = _late(origin, equal, is_told)
    late = f". It was {known}" if origin.is_late else ""
    after, more = "", f". {_ELEMENTS}" if origin.row.elements is None else ""
    if origin.worst is not None:
        after = f"{origin.error_after:.2g} ({origin.worst.name})"
    turned = ""
    if origin.turned:
        turned = f", except for {origin.turned:,} parameters whose updates agree within 1 %"
    dtypes = [(origin.row.actual or {}).get("dtype"), (origin.row.reference or {}).get("dtype")]
    if first is None and dtypes[0] != dtypes[1]:
        yield (
            f"{where} is the first tensor that is not equal to the bit: it is {dtypes[0]} in "
            f"actual and {dtypes[1]} in reference"
        )
    elif first is None and origin.cause is Cause.ROUNDING:
        yield (
            f"{'the size of ' if late else ''}rounding: {where} is the first tensor that is not "
            "equal to the bit, and what is computed after it in its step differs by no more than "
            f"{after}{turned}{late}{more}"
        )
    elif first is None:
        yield (
            f"not explained: {where} is not equal to the bit, although everything before it is"
            + (f", and what is computed after it differs by up to {after}" if after else "")
            + more
        )
    elif first.key != origin.key:
        return
    elif origin.row.state not in (PairState.REORDERED, PairState.CLOSE):
        yield from origin.causes
        if late:
            yield f"{where} was {known}"
    elif origin.is_other_update:
        yield (
            f"everything before it is {equal}, gradients too, and it differs by more than "
            "rounding makes of an update"
            + (
                late
                or ": another formula, constant or state of the optimizer, or something else that "
                "writes to it"
            )
            + ". If this is intended, use --accept order"
        )
    elif origin.is_beyond:
        yield (
            f"everything before it is {equal}, and rounding makes an error of at most "
            f"about {origin.limit:.2g}"
            + (late or (": it reads another tensor" if any(_own_inputs(first)) else _FORMULA))
            + ". If this is intended, use --accept order"
        )
    elif origin.is_permuted:
        yield (
            "another order of the elements: their sums agree more closely than they would if last "
            "bits differed. If this is intended, use --accept order"
        )
    elif origin.cause is Cause.UNKNOWN:
        read = "no tensor computed from it is on both sides"
        if origin.is_updated:
            read = "the updates that follow are equal to the bit"
        yield (
            f"{read}, so rounding can't be distinguished from another order of the elements. "
            "A Dumper(tensors=True) of that module, on both sides, distinguishes "
            f"them{late}. If this is intended, use --accept order"
        )
    else:
        yield (
            f"not only rounding: what is computed after it in its step differs by up to {after}, "
            f"and rounding makes at most about {origin.limit:.2g}. Its elements are in another "
            f"order, or the later differences have a cause of their own{late}"
        )
