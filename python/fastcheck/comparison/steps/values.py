"""Measures pairs: by their records, and by shapes, bytes and elements where these are there."""

from __future__ import annotations

import numpy as np
import torch

from fastcheck.comparison import measure
from fastcheck.comparison.block import Phase
from fastcheck.comparison.measure import FLOAT32, PairState, measure_records
from fastcheck.comparison.names import Name
from fastcheck.comparison.relation import relation_of
from fastcheck.record.format import DTYPES, Depth
from fastcheck.statistics.elements import compare_elements
from fastcheck.statistics.functions import crc32

from .step import StepPairs

# The number of pairs whose relation is looked for: each costs some passes over both tensors.
_RELATED = 100


def _path(name: Name) -> str:
    return f"{name.module}.{name.label}" if name.role == "param" and name.module else str(name)


def measure_pairs(pairs: StepPairs, which: np.ndarray) -> None:
    course = pairs.course
    readable = (pairs.left["version"][which] > 0) & (pairs.right["version"][which] > 0)
    for index in which[~readable].tolist():
        pairs.set(index, PairState.UNREADABLE, 0.0, measure.UNREADABLE)
    which = which[readable]
    left, right = pairs.left[which], pairs.right[which]
    measured = measure_records(left, right, course.thresholds, pairs.formats[which])
    pairs.states[which], pairs.errors[which] = measured.states, measured.errors
    pairs.reasons[which] = measured.reasons
    if pairs.ours.extras is not None and pairs.theirs.extras is not None:
        for index in which.tolist():
            _measure_more(pairs, index)
    for index in which[left["dtype"] != right["dtype"]].tolist():
        both = [DTYPES[int(side["dtype"][index])].name for side in (pairs.left, pairs.right)]
        course.tally.dtypes[both[0], both[1]] += 1
        if "dtype" not in course.accept and pairs.states[index] <= PairState.REORDERED:
            pairs.set(index, PairState.DIFFERENT, pairs.errors[index], measure.DTYPE)
    _relate(pairs, which[pairs.states[which] == PairState.DIFFERENT])


def _relate(pairs: StepPairs, which: np.ndarray) -> None:
    """Finds the relation of pairs that differ: by their values, where these are there; of
    weights by their checksums.
    """
    tally = pairs.course.tally
    has_values = pairs.ours.extras is not None and pairs.theirs.extras is not None
    if not has_values:
        which = which[pairs.phases[which] == Phase.WEIGHTS]
    held = {
        int(record["checksum"]): place
        for place, record in enumerate(pairs.theirs.records if len(which) else ())
        # of equal elements: zeros are no sign of the weight that they come from
        if record["depth"] == Depth.FULL and record["min"] != record["max"]
    }
    for index in which.tolist():
        place = held.get(int(pairs.left["checksum"][index]))
        is_elsewhere = place is not None and pairs.name(index) != (
            name := pairs.course.names[int(pairs.theirs.names[place])]
        )
        if is_elsewhere:
            pairs.relations[index] = f"it is what {_path(name)} is in reference"
        if pairs.phases[index] == Phase.WEIGHTS:
            own = _path(pairs.name(index))
            tally.elsewhere[own] = _path(name) if is_elsewhere else ""
        mine, other = pairs.extras(index)
        if mine.load is None or other.load is None or tally.counts["related"] >= _RELATED:
            continue
        tally.counts["related"] += 1
        if is_elsewhere:
            continue
        scales = _scales_of(pairs, index) if pairs.left["dtype"][index] != FLOAT32 else {}
        pairs.relations[index] = relation_of(mine.load().cpu(), other.load().cpu(), scales)


def _scales_of(pairs: StepPairs, index: int) -> dict[str, torch.Tensor]:
    """Floats of the actual side alone whose name begins with that of a tensor, or that of its
    module.
    """
    own = str(pairs.name(index))
    module = own.rpartition(".")[0]
    scales = {}
    for place in pairs.aligned.only_ours.tolist():
        name, extra = str(pairs.table[int(pairs.ours.names[place])]), pairs.ours.extra(place)
        is_near = name.startswith(own) or (module and name.rpartition(".")[0] == module)
        if is_near and extra.load is not None:
            scale = extra.load().cpu()
            if scale.is_floating_point():
                scales[name] = scale
    return scales


def _measure_more(pairs: StepPairs, index: int) -> None:
    """Compares a pair by shape, by CRC32, by the elements themselves, where they are there."""
    mine, other = pairs.extras(index)
    if mine.shape is not None and other.shape is not None and mine.shape != other.shape:
        pairs.set(index, PairState.DIFFERENT, float("inf"), measure.SHAPE)
        return
    if pairs.left["dtype"][index] == pairs.right["dtype"][index]:
        sums = [
            side.crc32 or (f"{crc32(side.load()):08x}" if needed and side.load else None)
            for side, needed in ((mine, other.crc32), (other, mine.crc32))
        ]
        if sums[0] is not None and sums[0] == sums[1]:
            pairs.set(index, PairState.SAME, 0.0, 0)
            return
    if mine.load is None or other.load is None:
        return
    left, right = mine.load(), other.load()
    if left.is_complex() != right.is_complex():
        return
    elements = compare_elements(left, right)
    if not elements.differing and left.dtype == right.dtype and crc32(left) == crc32(right):
        # Equal row by row: only how they lie in memory differs.
        pairs.set(index, PairState.SAME, 0.0, 0)
        return
    pairs.elements[index] = elements
    allowed = pairs.course.thresholds[int(pairs.formats[index])]
    error = elements.distance
    if elements.nonfinite:
        pairs.set(index, PairState.DIFFERENT, float("inf"), measure.NONFINITE)
    elif error > allowed.error or (allowed.error == 0 and elements.differing):
        pairs.set(index, PairState.DIFFERENT, error, measure.ELEMENTS)
    elif elements.largest > allowed.largest:
        pairs.set(index, PairState.DIFFERENT, error, measure.LARGEST)
    else:
        pairs.set(index, PairState.CLOSE, error, 0)
