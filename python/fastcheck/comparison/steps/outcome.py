"""Adds the judged pairs of a step to the tally."""

from __future__ import annotations

import numpy as np

from fastcheck.comparison import measure
from fastcheck.comparison.block import Phase
from fastcheck.comparison.measure import PairState
from fastcheck.comparison.over_time import LossPair, loss_of
from fastcheck.comparison.tally import COMPUTED, KEPT_ROWS, KEPT_STEPS, Found, Unreduced
from fastcheck.record.format import Depth

from .step import StepPairs
from .trace import trace

# The number of pairs that are shown after the first difference.
_TRAIL = 8
# Reasons whose errors are relative to nothing.
_WHOLE = (measure.NUMEL, measure.NONFINITE, measure.SHAPE)
# Reasons of pairs that have no other numbers.
_REARRANGED = (measure.IN_PARTS, measure.SCHEDULE, measure.RESIZED, measure.SCALED)


def add_to_tally(pairs: StepPairs) -> None:
    """Adds the counts, the first finds, the rows and the losses of a step."""
    tally = pairs.course.tally
    inexact = (pairs.states != PairState.SAME) & (pairs.has_bits | (pairs.errors > 0))
    _count(pairs)
    for phase in np.unique(pairs.phases).tolist():
        here = pairs.phases == phase
        is_different = pairs.states == PairState.DIFFERENT
        _note_first(pairs, tally.firsts.different, phase, here & is_different)
        _note_first(pairs, tally.firsts.inexact, phase, here & inexact)
        is_nonfinite = pairs.reasons == measure.NONFINITE
        _note_first(pairs, tally.firsts.nonfinite, phase, here & is_nonfinite)
        _note_growth(pairs, Phase(phase), here)
    trace(pairs, inexact & ~np.isin(pairs.reasons, _REARRANGED))
    _keep_rows(pairs)
    _keep_losses(pairs)
    given = (pairs.phases == Phase.BATCHES) & pairs.has_bits
    batches = pairs.names[given], pairs.left[given], pairs.right[given]
    tally.batches[pairs.rank].keep(pairs.step, *batches, lambda n: str(pairs.table[n]))
    if pairs.course.has_ranks and not tally.unreduced:
        _compare_ranks(pairs)
    if tally.unchanged is not None:
        for index, is_same in enumerate((pairs.states == PairState.SAME).tolist()):
            name = str(pairs.name(index))
            tally.unchanged[name] = is_same and tally.unchanged.get(name, True)
    pairs.handed.computed = pairs.summed_up(np.isin(pairs.phases, COMPUTED[:3]))


def _compare_ranks(pairs: StepPairs) -> None:
    """Notes a gradient that is the same on all ranks of one side alone."""
    last: dict[int, tuple[int, int]] = {}
    for place in np.flatnonzero(pairs.has_bits).tolist():
        if pairs.name(place).role == "param_grad":
            sides = (pairs.left[place], pairs.right[place])
            mine, other = (int(side["checksum"]) for side in sides)
            last[int(pairs.names[place])] = mine, other
    step, first = pairs.course.first_gradients
    if step != pairs.step:
        pairs.course.first_gradients = pairs.step, last
        return
    both = [(number, last[number], first[number]) for number in last if number in first]
    apart = [[n for n, mine, its in both if mine[side] != its[side]] for side in (0, 1)]
    for side in (0, 1):
        if apart[side] and not apart[1 - side]:
            name = str(pairs.table[apart[side][0]])
            pairs.course.tally.unreduced = Unreduced(step, pairs.rank, name, side)


def _count(pairs: StepPairs) -> None:
    tally = pairs.course.tally
    settled = (pairs.states == PairState.SAME) | (pairs.states == PairState.UNREADABLE)
    without_bits = ~(pairs.has_bits | settled)
    tally.counts["without_bits"] += int(without_bits.sum())
    depth = np.minimum(pairs.left["depth"], pairs.right["depth"])
    tally.counts["without_statistics"] += int((without_bits & (depth < Depth.STATS)).sum())
    is_counted = pairs.is_counted()
    for phase in np.unique(pairs.phases).tolist():
        states = pairs.states[(pairs.phases == phase) & is_counted].tolist()
        tally.states[Phase(phase)].update(map(PairState, states))


def _note_first(pairs: StepPairs, table: dict[Phase, Found], phase: int, which: np.ndarray) -> None:
    where = np.flatnonzero(which)
    if not len(where):
        return
    first = int(where[0])
    key = pairs.key(phase, first)
    before = table.get(Phase(phase))
    if before is not None and before.key <= key:
        return
    computed = np.isin(pairs.phases, COMPUTED)
    # Parameters are read a step later than they are made.
    beside = computed & ((pairs.phases == Phase.UPDATE) == (phase == Phase.UPDATE))
    after = np.flatnonzero(beside & (np.arange(len(beside)) > first))[:_TRAIL]
    beside[first:] = False
    last = str(pairs.name(int(np.flatnonzero(beside)[-1]))) if beside.any() else ""
    error, exact = pairs.summed_up(beside)
    count = int(beside.sum())
    if phase == Phase.UPDATE:
        count += len(computed)
        before_error, before_exact = pairs.handed.computed
        error, exact = max(error, before_error), exact and before_exact
    trail = tuple(pairs.row(index) for index in after.tolist())
    has_places = phase in (Phase.FORWARD, Phase.LOSS, Phase.GRADIENTS)
    alone = _alone_before(pairs, phase, first) if has_places else ((), ())
    calls = pairs.other_order(first) if phase == Phase.FORWARD else None
    row = pairs.row(first)
    table[Phase(phase)] = Found(key, row, error, exact, trail, count, alone, last, calls)


def _alone_before(
    pairs: StepPairs, phase: int, first: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Outputs, or gradients, of one side alone before this pair; and what its module reads."""
    phase = Phase.FORWARD if phase == Phase.LOSS else phase
    phases = [phase, Phase.ARRIVED] if phase == Phase.FORWARD else [phase]
    found = []
    for block, only_here, matched in (
        (pairs.ours, pairs.aligned.only_ours, pairs.aligned.ours),
        (pairs.theirs, pairs.aligned.only_theirs, pairs.aligned.theirs),
    ):
        is_before = (only_here < matched[first]) & np.isin(block.phases[only_here], phases)
        names = [pairs.table[number] for number in block.names[only_here[is_before]].tolist()]
        own = pairs.name(first).module
        shown = [
            n
            for n in names
            if phase == Phase.GRADIENTS
            or n.role == "output"
            or (n.role == "input" and n.module == own)
        ]
        found.append(tuple(dict.fromkeys(map(str, shown))))
    return found[0], found[1]


def _note_growth(pairs: StepPairs, phase: Phase, here: np.ndarray) -> None:
    where = np.flatnonzero(here)
    # An error relative to zeros is no measure of a step.
    is_measure = (pairs.right["abs_sum"] != 0) | np.isin(pairs.reasons, _WHOLE)
    worst = int(where[np.argmax(np.where(is_measure, pairs.errors, 0.0)[where])])
    error = float(pairs.errors[worst]) if is_measure[worst] else 0.0
    name = str(pairs.name(worst))
    if phase in COMPUTED:
        pairs.course.tally.grow(pairs.step_of(phase, worst), error, name)
    before = pairs.course.tally.firsts.worst.get(phase)
    if error > (0.0 if before is None else before.row.error):
        key = pairs.key(int(phase), worst)
        pairs.course.tally.firsts.worst[phase] = Found(key, pairs.row(worst), 0.0, False)


def _keep_rows(pairs: StepPairs) -> None:
    course, tally = pairs.course, pairs.course.tally
    if course.sink is not None:
        for index in np.flatnonzero(pairs.states != PairState.SAME).tolist():
            course.sink(pairs.row(index))
    kept = np.flatnonzero(pairs.states > PairState.CLOSE)
    room = KEPT_ROWS - len(tally.rows)
    tally.counts["rows"] += len(kept[room:])
    tally.rows += [pairs.row(index) for index in kept[:room].tolist()]


def _keep_losses(pairs: StepPairs) -> None:
    """The loss of the step, of the lowest rank."""
    step, losses = pairs.step, pairs.course.tally.losses
    if step in losses or len(losses) >= KEPT_STEPS:
        return
    if (known := pairs.losses) is not None:
        losses[step] = known
        return
    for index in np.flatnonzero(pairs.phases == Phase.LOSS).tolist()[::-1]:
        if pairs.name(index).direction == "forward":
            mine, other = (loss_of(side[index]) for side in (pairs.left, pairs.right))
            if mine is not None and other is not None:
                losses[step] = LossPair(step, mine, other)
                return
