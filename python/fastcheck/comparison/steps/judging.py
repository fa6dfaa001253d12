"""Judges measured pairs by what they are, and excuses what noise or another schedule explains."""

from __future__ import annotations

from collections import Counter

import numpy as np

from fastcheck.comparison import measure
from fastcheck.comparison.block import Phase
from fastcheck.comparison.measure import PairState, Parameters, judge_updates
from fastcheck.comparison.tally import COMPUTED

from .noise import excuse, excuse_parts, excuse_small
from .schedule import excuse_schedule
from .step import StepPairs

# Statistics that went through text in float32, as msprobe's do.
_GIVEN_BY_STATISTICS = 1e-5
#: The most that a few elements whose update rounding has turned round make of an update's size.
_TURNED = 0.01
#: Two runs of one program are no more than this many times as far apart as two others.
_REPEATS = 4.0


def judge(pairs: StepPairs) -> None:
    """Judges the pairs of a step, in the order in which one judgement needs another."""
    _settle_arrived(pairs)
    _judge_sums(pairs)
    _judge_given(pairs)
    _settle_rewritten(pairs)
    _judge_moves(pairs)
    _judge_rates(pairs)
    excuse_schedule(pairs)
    _excuse_unsteady(pairs)
    _excuse_noise(pairs)


def _settle_arrived(pairs: StepPairs) -> None:
    """A float that a criterion reads may be a target or something computed between the modules:
    it counts as given while nothing computed before it in this step differs.
    """
    arrived = np.flatnonzero(pairs.phases == Phase.ARRIVED)
    if not len(arrived):
        return
    computed = np.isin(pairs.phases, COMPUTED[:3])
    bad = np.flatnonzero(computed & (pairs.states != PairState.SAME))
    first_bad = int(bad[0]) if len(bad) else len(pairs.phases)
    pairs.phases[arrived[arrived < first_bad]] = Phase.BATCHES
    pairs.phases[arrived[arrived > first_bad]] = Phase.FORWARD


def _judge_sums(pairs: StepPairs) -> None:
    """Marks a sum of parts of several ranks as different if the tensors computed next
    differ.
    """
    is_sum = np.isin(pairs.names, list(pairs.sums))
    for phase in (Phase.FORWARD, Phase.GRADIENTS) if is_sum.any() else ():
        here = np.flatnonzero(pairs.phases == phase)
        for index in here[is_sum[here]].tolist():
            after = here[(here > index) & ~is_sum[here]]
            if len(after) and pairs.states[after[0]] == PairState.DIFFERENT:
                pairs.set(
                    index, PairState.DIFFERENT, float(pairs.errors[after[0]]), measure.UNREDUCED
                )


def _judge_given(pairs: StepPairs) -> None:
    given = np.isin(pairs.phases, pairs.course.given)
    given &= (pairs.states == PairState.CLOSE) | (pairs.states == PairState.REORDERED)
    if "dtype" in pairs.course.accept:
        given &= pairs.left["dtype"] == pairs.right["dtype"]
    known = np.isin(np.arange(len(given)), list(pairs.elements)) | pairs.has_bits
    given &= known | (pairs.errors > _GIVEN_BY_STATISTICS)
    reordered = given & (pairs.states == PairState.REORDERED)
    for phase in pairs.phases[reordered & pairs.is_counted()].tolist():
        pairs.course.tally.given_reordered[Phase(phase)] += 1
    if "order" in pairs.course.accept:
        given &= ~reordered
    pairs.states[given] = PairState.DIFFERENT
    pairs.reasons[given & (pairs.reasons == 0)] = measure.GIVEN


def _settle_rewritten(pairs: StepPairs) -> None:
    """A first weight is read before the forward, and before each update. One that is equal at
    first was written to in the step.
    """
    equal: Counter[int] = Counter()
    is_given = (pairs.phases == Phase.WEIGHTS) & bool(pairs.course.given)
    for index in np.flatnonzero(is_given).tolist():
        number = int(pairs.names[index])
        if pairs.states[index] == PairState.SAME:
            equal[number] += 1
        elif equal[number]:
            pairs.phases[index] = Phase.UPDATE
            pairs.course.tally.counts["rewritten"] += equal[number] == 1


def _judge_rates(pairs: StepPairs) -> None:
    """The rates of groups that are divided in another way have one record of another length."""
    for index in np.flatnonzero(pairs.reasons == measure.NUMEL).tolist():
        left, right = pairs.left[index], pairs.right[index]
        is_same = left["min"] == right["min"] and left["max"] == right["max"]
        if pairs.name(index).role == "learning_rate" and is_same:
            pairs.set(index, PairState.SAME, 0.0, 0)
            pairs.course.tally.note("rates", str(pairs.name(index)))


def _judge_moves(pairs: StepPairs) -> None:
    """Compares the updates of parameters that are within the thresholds of their own size."""
    course = pairs.course
    stored = np.flatnonzero(np.isin(pairs.phases, [int(Phase.WEIGHTS), int(Phase.UPDATE)]))
    is_parameter = [pairs.name(index).role == "param" for index in stored.tolist()]
    where = stored[np.array(is_parameter, bool)]
    arrays = (pairs.names, pairs.left, pairs.right, pairs.formats)
    now = Parameters(*(array[where] for array in arrays))
    before, pairs.handed.parameters = pairs.handed.parameters, now
    if pairs.has_bits[where].all():
        _, first, counts = np.unique(now.names, return_index=True, return_counts=True)
        first = first[counts == counts.max(initial=0)]  # the first step has those that stay, too
        read = (now.names[first], now.left["checksum"][first], now.right["checksum"][first])
        names, mine, other = (column.tolist() for column in read)
        hashes = [hash(tuple(zip(names, side))) for side in (mine, other)]
        pairs.handed.states.append((pairs.step, hashes[0], hashes[1]))
    if before is None:
        pairs.handed.first_weights = now.names.tolist()
    if before is None or not course.given or course.tally.unchanged is not None:
        return
    wanted = (pairs.phases[where] == Phase.UPDATE) & np.isin(
        pairs.states[where], [int(PairState.CLOSE), int(PairState.REORDERED)]
    )
    if not wanted.any():
        return
    updates = judge_updates(before, now)
    pairs.turned[where] = updates.ratios < _TURNED
    pairs.beyond[where] = updates.beyond
    for which, reason in ((updates.still, measure.STILL), (updates.apart, measure.UPDATED)):
        for place in np.flatnonzero(which & wanted).tolist():
            ratio = float(updates.ratios[place])
            pairs.set(int(where[place]), PairState.DIFFERENT, ratio, reason)


def _excuse_unsteady(pairs: StepPairs) -> None:
    """Leaves out what two runs of the reference's program do not agree in either."""
    unsteady = pairs.course.unsteady
    for index in np.flatnonzero(pairs.states != PairState.SAME).tolist() if unsteady else ():
        name = pairs.name(index)
        if pairs.errors[index] <= _REPEATS * unsteady.get(name, -1.0):
            pairs.leave_out(index, "unsteady", measure.UNSTEADY, float(pairs.errors[index]))


def _excuse_noise(pairs: StepPairs) -> None:
    """Excuses what isn't comparable, and what rounding noise explains, up to the first
    difference.
    """
    course = pairs.course
    first = course.tally.first(course.tally.firsts.different, COMPUTED)
    if not course.given or (first is not None and first.key[0] < pairs.step):
        return
    if course.compares_parts:
        course.tally.counts["parts"] += excuse_parts(pairs)
    drift = pairs.handed.drift
    if course.split is not None:
        course.tally.note("small", *excuse_small(pairs, drift))
    course.tally.note("cancelled", *excuse(pairs, drift, COMPUTED))
