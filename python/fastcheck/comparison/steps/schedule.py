"""Excuses what another schedule makes of a step: other operators, gradients in parts, other
numbers of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fastcheck.comparison import measure
from fastcheck.comparison.align import uneven_calls
from fastcheck.comparison.block import Phase
from fastcheck.comparison.measure import MEASURED, PairState
from fastcheck.comparison.names import Name
from fastcheck.comparison.origin import rounding_limit
from fastcheck.comparison.split import PASSED
from fastcheck.record.format import DTYPES, Depth
from fastcheck.statistics.elements import compare_elements
from fastcheck.statistics.thresholds import coarser_of

from .noise import sizes_in_step
from .step import StepPairs

#: Sums in another order are this many times as far apart as rounding one number makes them.
_SUMMED = 10.0
#: Dtypes whose sums are this much more exact than a threshold.
_FINE = [code for code, info in enumerate(DTYPES) if info.name in ("float32", "float64")]


def excuse_schedule(pairs: StepPairs) -> None:
    """Leaves out what differs where the gradients of all parameters agree: operators that come
    in another order, once more, or between casts, up to the first that makes other numbers of
    the same inputs; and gradients of what modules take and return that one side has in parts,
    if their sums and the loss agree too.
    """
    has_missing = len(pairs.aligned.only_ours) + len(pairs.aligned.only_theirs) > 0
    if not has_missing and (pairs.states == PairState.SAME).all():
        return
    names = [pairs.table[n] for n in pairs.names.tolist()]
    grads = np.array([name.role == "param_grad" for name in names], bool)
    if not grads.any() or not pairs.course.judges_operators or not _has_all_gradients(pairs):
        return
    pairs.are_gradients_alike, are_equal = _compare_gradients(pairs, grads)
    if not pairs.are_gradients_alike:
        return
    if has_missing and are_equal:
        _find_parts(pairs)
        _note_parts(pairs)
    differs = (pairs.states == PairState.DIFFERENT) | (pairs.states == PairState.REORDERED)
    resizing = _resizing(pairs)
    criteria = _criteria(pairs) if differs.any() and pairs.has_same_loss else set()
    is_moved = _is_elsewhere(pairs) & bool(criteria)
    is_faulty = is_resized = False
    for index in np.flatnonzero(differs & (pairs.reasons != measure.NONFINITE)).tolist():
        name, number = names[index], int(pairs.names[index])
        if name.op and name.direction != "optimizer":
            is_faulty |= pairs.reasons[index] in MEASURED and _has_same_inputs(pairs, names, index)
            if is_faulty:  # what comes later may follow from it
                continue
            pairs.excused[index] = float(pairs.errors[index])
            pairs.set(index, PairState.CLOSE, 0.0, measure.SCHEDULE)
            pairs.course.tally.counts["rescheduled"] += 1
        elif (
            pairs.reasons[index] == measure.NUMEL
            and name.role in PASSED
            and (is_resized or name.module in resizing)
        ):
            is_resized = True
            pairs.leave_out(index, "resized", measure.RESIZED)
        elif (
            (name.module in criteria or is_moved[index])
            and name.role in ("output", "grad_output")
            and pairs.states[index] == PairState.DIFFERENT
        ):
            pairs.leave_out(index, "scaled", measure.SCALED)
        elif number in pairs.in_parts:
            pairs.set(index, PairState.CLOSE, pairs.in_parts[number][0], measure.IN_PARTS)


def _compare_gradients(pairs: StepPairs, grads: np.ndarray) -> tuple[bool, bool]:
    """Whether the gradients of all parameters are alike, and whether they are equal but for the
    rounding of sums.
    """
    left, right, errors = pairs.left[grads], pairs.right[grads], pairs.errors[grads]
    codes = coarser_of(left["dtype"], right["dtype"])
    limits = np.array([rounding_limit(int(code)) for code in codes])
    _, is_small = sizes_in_step(left, right, codes)
    is_known = (left["depth"] >= Depth.STATS) & (right["depth"] >= Depth.STATS)
    is_alike = is_known & (pairs.states[grads] != PairState.DIFFERENT)
    is_alike = (is_alike & (errors <= _SUMMED * limits)) | (pairs.states[grads] == PairState.SAME)
    are_alike = bool((is_alike | is_small).all())
    limits = np.where(np.isin(codes, _FINE), _SUMMED, 1) * limits
    return are_alike, are_alike and bool(((errors <= limits) | is_small).all())


def _note_parts(pairs: StepPairs) -> None:
    tally = pairs.course.tally
    for part, (_, is_told) in pairs.in_parts.items():
        tally.note("in_parts", name := str(pairs.table[part]))
        tally.noted["untold"].pop(name, None)
        if not is_told:
            tally.note("untold", name)


def _resizing(pairs: StepPairs) -> set[str]:
    """The modules that read another number of elements, or what one side alone has, where the
    loss agrees. What passes between modules from the first of them on is excused: the rows of
    an expert to which no token goes are in no gradient.
    """
    numbers = [
        pairs.names[pairs.reasons == measure.NUMEL],
        pairs.ours.names[pairs.aligned.only_ours],
        pairs.theirs.names[pairs.aligned.only_theirs],
    ]
    if not len(numbers[0]) or not pairs.has_same_loss:
        return set()
    read = (pairs.table[number] for number in np.concatenate(numbers).tolist())
    return {name.module for name in read if name.role == "input"}


def _criteria(pairs: StepPairs) -> set[str]:
    """The modules that return a loss, which the program may divide or sum before backward()."""
    losses = np.unique(pairs.names[pairs.phases == Phase.LOSS]).tolist()
    return {name.module for name in map(pairs.table.__getitem__, losses) if name.module}


def _is_elsewhere(pairs: StepPairs) -> np.ndarray:
    """True where a side has what the other has under a name that this side lacks: code that one of
    them has within a module, and the other behind it.
    """
    ours, theirs = pairs.ours.records, pairs.theirs.records
    alone = ours[pairs.aligned.only_ours], theirs[pairs.aligned.only_theirs]
    mine = np.isin(pairs.left["checksum"], alone[1]["checksum"])
    other = np.isin(pairs.right["checksum"], alone[0]["checksum"])
    is_elsewhere: np.ndarray = (mine | other) & pairs.has_bits & (pairs.left["numel"] > 1)
    return is_elsewhere


def _has_same_inputs(pairs: StepPairs, names: Sequence[Name], index: int) -> bool:
    """True if this is an output of an operator whose inputs, which stand right before it, are
    equal to the bit: no schedule has made it another.
    """
    inputs: list[int] = []
    for place in range(index - 1, -1, -1):
        is_call = names[place][:2] == names[index][:2] and names[place].op == names[index].op
        if not is_call or (inputs and names[place].role != "input"):
            break
        if names[place].role == "input":
            inputs.append(place)
    return names[index].role == "output" and bool((pairs.states[inputs] == PairState.SAME).all())


def _has_all_gradients(pairs: StepPairs) -> bool:
    """True if the last gradient of each parameter, which the optimizer reads, has a partner."""
    for block, paired in ((pairs.ours, pairs.aligned.ours), (pairs.theirs, pairs.aligned.theirs)):
        last = {number: place for place, number in enumerate(block.names.tolist())}
        wanted = [place for n, place in last.items() if pairs.table[n].role == "param_grad"]
        if not np.isin(wanted, paired).all():
            return False
    return True


def _find_parts(pairs: StepPairs) -> None:
    """Finds gradients of what modules take and return that come another number of times on the
    two sides, as where backward() is called for each part of a loss, and have the same sum: of
    their values, or of all elements, if the loss agrees too. Which does not tell their order:
    the gradients of parameters do that are computed from it.
    """
    names = [pairs.table[number] for number in pairs.theirs.names.tolist()]
    ends = {name: place for place, name in enumerate(names)}
    # A bias has the sum of all rows, whatever their order.
    trained = {n.module for n in ends if n.role == "param_grad" and "bias" not in n.label}
    outputs = [n for n in ends if n.role == "grad_output" and n.module in trained]
    read = max((ends[name] for name in outputs), default=-1)
    is_same_loss = pairs.has_same_loss
    blocks = pairs.ours, pairs.theirs
    for number, *places in uneven_calls(*blocks):
        name = pairs.table[number]
        sides = [block.records[at] for block, at in zip(blocks, places)]
        records = np.concatenate(sides)
        if name.op or name.role not in PASSED[2:] or records["depth"].min() < Depth.STATS:
            continue
        sums = [float(side["sum"].sum()) for side in sides]
        size = max(float(side["abs_sum"].sum()) for side in sides)
        limit = _SUMMED * max(rounding_limit(int(code)) for code in records["dtype"])
        error = abs(sums[0] - sums[1]) / size if size else 0.0
        extras = [[block.extra(at) for at in own.tolist()] for block, own in zip(blocks, places)]
        loads = [[extra.load for extra in side if extra.load] for side in extras]
        shapes = {extra.shape for side in extras for extra in side}
        has_values = len(shapes) == 1 and list(map(len, loads)) == list(map(len, extras))
        if has_values:
            mine, other = (torch.stack([load() for load in side]).sum(0) for side in loads)
            error = compare_elements(mine, other).distance
        if error <= limit and (has_values or is_same_loss):
            pairs.in_parts[number] = error, has_values or ends[name] <= read
