"""Distance of two records, and of two updates, for all pairs of a block at once, in NumPy."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fastcheck.record.format import DTYPES, FINITE_COUNTS, NONFINITE_COUNTS, Depth
from fastcheck.record.statistics import component_counts, extreme_values
from fastcheck.statistics.thresholds import COARSENESS, Threshold

from .block import SOME

FLOAT32 = next(code for code, info in enumerate(DTYPES) if info.name == "float32")
# The most that the order of summation alone changes in a sum of float32 (docs/determinism.md).
_ORDER_ONLY = 1e-6
_TINY = np.finfo(np.float64).tiny


class PairState(enum.IntEnum):
    """The outcome for a pair, or of a tensor without a partner."""

    SAME = 0  #: equal to the bit
    CLOSE = 1  #: within the thresholds
    REORDERED = 2  #: the checksum differs and nothing else: another order, or some last bits
    DIFFERENT = 3
    ONLY_ACTUAL = 4
    ONLY_REFERENCE = 5
    UNREADABLE = 6


class Measured(NamedTuple):
    """The states and errors of pairs. ``reasons`` indexes REASONS."""

    states: np.ndarray
    errors: np.ndarray
    reasons: np.ndarray


REASONS = (
    "",
    "another number of elements",
    "NaN or infinities on one side",
    "the norms differ",
    "the sums of magnitudes differ",
    "the sums differ",
    "the smallest elements differ",
    "the largest elements differ",
    "the counts differ",
    "only the checksum differs: the same numbers in another order, or some last bits",
    "given values that are not equal to the bit",
    "the elements differ",
    "other shapes",
    "one element is far off",
    "other dtypes",
    "it can't be read",
    "its terms cancel: the error is relative to what was summed",
    "updated by rounding noise",
    "the whole gradient on one side, a module's part of it on the other",
    "it was updated on one side alone",
    "the updates differ: the error is relative to the size of the update",
    "each rank has a part of a sum that is equal: it is not reduced before it is read",
    "not deterministic: two runs of the reference's program differ too",
    "an operator of another schedule: the gradients of all parameters agree",
    "a side has this gradient in parts: the sums of all elements of all parts agree",
    "beside the largest gradient of its step it is no larger than rounding",
    "another number of elements: the loss and the gradients of all parameters agree",
    "scaled after it: the loss of the step and the gradients of all parameters agree",
)
NUMEL, NONFINITE, NORM, ABS_SUM, SUM, MIN, MAX, COUNTS, ORDER = range(1, 10)
GIVEN, ELEMENTS, SHAPE, LARGEST, DTYPE, UNREADABLE, CANCELLED, DRIFTED, PART = range(10, 19)
STILL, UPDATED, UNREDUCED, UNSTEADY, SCHEDULE, IN_PARTS, SMALL, RESIZED, SCALED = range(19, 28)
#: Measures whose difference rounding can cause.
MEASURED = (NORM, ABS_SUM, SUM, MIN, MAX, COUNTS, ELEMENTS, LARGEST, STILL, UPDATED)


@np.errstate(all="ignore")
def measure_records(
    left: np.ndarray, right: np.ndarray, thresholds: Sequence[Threshold], formats: np.ndarray
) -> Measured:
    """Pairs that are not known to be equal; ``right`` is the reference.

    ``formats``: by pair, the code of the dtype whose thresholds apply. A field that is unknown on
    one side, or beyond its depth, is ignored.
    """
    count = len(left)
    states = np.full(count, PairState.CLOSE, np.uint8)
    reasons = np.zeros(count, np.uint8)
    errors = np.zeros(count)
    allowed = np.array([threshold.error for threshold in thresholds])[formats]
    largest = np.array([threshold.largest for threshold in thresholds])[formats]
    has_stats = (left["depth"] >= Depth.STATS) & (right["depth"] >= Depth.STATS)
    components = np.maximum(component_counts(right), 1)

    def note(code: int, part: np.ndarray, limit: np.ndarray) -> None:
        part = np.where(np.isnan(part), 0.0, part)
        beyond = part > limit
        np.maximum(errors, part, out=errors)
        fresh = beyond & (states != PairState.DIFFERENT)
        reasons[fresh] = code
        states[beyond] = PairState.DIFFERENT

    never = np.zeros(count)
    numel = (left["numel"] != right["numel"]).astype(float)
    note(NUMEL, np.where(numel > 0, np.inf, 0.0), never)
    strange = _has_nonfinite(left) != _has_nonfinite(right)
    for field in NONFINITE_COUNTS:
        strange |= _both_known(left, right, field) & (left[field] != right[field])
    note(NONFINITE, np.where(strange, np.inf, 0.0), never)

    low, high = (extreme_values(left, f) for f in ("min", "max"))
    ref_low, ref_high = (extreme_values(right, f) for f in ("min", "max"))
    ours, theirs = np.sqrt(left["sum_sq"]), np.sqrt(right["sum_sq"])
    note(NORM, np.where(has_stats, _relative(ours, theirs), 0.0), allowed)
    note(ABS_SUM, np.where(has_stats, _relative(left["abs_sum"], right["abs_sum"]), 0.0), allowed)
    # Against the sum of magnitudes: a sum that cancels to nearly nothing has no digits of its own.
    scale = np.where(np.isnan(right["abs_sum"]), theirs * np.sqrt(components), right["abs_sum"])
    note(SUM, np.where(has_stats, _ratio(_apart(left, right, "sum"), scale), 0.0), allowed)
    extent = np.maximum(np.abs(ref_low), np.abs(ref_high))
    extent = np.where(np.isfinite(extent), extent, 0.0)
    for code, mine, other in ((MIN, low, ref_low), (MAX, high, ref_high)):
        off = np.where(mine == other, 0.0, _ratio(np.abs(mine - other), extent))
        # An extreme alone is one element: it makes no error of the whole, only a verdict.
        beyond = has_stats & (off > largest)
        reasons[beyond & (states != PairState.DIFFERENT)] = code
        states[beyond] = PairState.DIFFERENT
    counts = np.zeros(count)
    for field in FINITE_COUNTS:
        apart = _apart(left, right, field) / components
        np.maximum(counts, np.where(_both_known(left, right, field), apart, 0.0), out=counts)
    note(COUNTS, np.where(has_stats, 0.0, counts), allowed)

    # An integer of more than 53 bits may differ and have the same statistics.
    both_full = (left["depth"] == Depth.FULL) & (right["depth"] == Depth.FULL)
    off = (
        both_full & (allowed == 0) & (left["numel"] == 1) & (left["checksum"] != right["checksum"])
    )
    note(ELEMENTS, np.where(off & (errors == 0), _TINY, 0.0), allowed)

    reordered = _is_reordered(left, right, low, ref_low, high, ref_high)
    reordered &= states == PairState.CLOSE
    states[reordered] = PairState.REORDERED
    reasons[reordered] = ORDER
    return Measured(states, errors, reasons)


def _is_reordered(
    left: np.ndarray,
    right: np.ndarray,
    low: np.ndarray,
    ref_low: np.ndarray,
    high: np.ndarray,
    ref_high: np.ndarray,
) -> np.ndarray:
    is_reordered: np.ndarray = (left["depth"] == Depth.FULL) & (right["depth"] == Depth.FULL)
    is_reordered &= (left["dtype"] == right["dtype"]) & (left["numel"] == right["numel"])
    is_reordered &= (left["numel"] > 1) & (low == ref_low) & (high == ref_high)
    is_reordered &= left["checksum"] != right["checksum"]
    for field in (*NONFINITE_COUNTS, *FINITE_COUNTS):
        is_reordered &= left[field] == right[field]
    is_reordered &= _relative(left["abs_sum"], right["abs_sum"]) <= _ORDER_ONLY
    is_reordered &= _relative(left["sum_sq"], right["sum_sq"]) <= _ORDER_ONLY
    is_reordered &= _apart(left, right, "sum") <= _ORDER_ONLY * right["abs_sum"]
    return is_reordered


def _apart(left: np.ndarray, right: np.ndarray, field: str) -> np.ndarray:
    apart: np.ndarray = np.abs(left[field] - right[field])
    return apart


def _has_nonfinite(records: np.ndarray) -> np.ndarray:
    has_nonfinite: np.ndarray = np.asarray(records["nan_count"] == SOME)
    for field in NONFINITE_COUNTS:
        has_nonfinite |= records[field] > 0
    return has_nonfinite


def _both_known(left: np.ndarray, right: np.ndarray, field: str) -> np.ndarray:
    return (left[field] >= 0) & (right[field] >= 0)


def _relative(mine: np.ndarray, other: np.ndarray) -> np.ndarray:
    return _ratio(np.where(mine == other, 0.0, np.abs(mine - other)), np.abs(other))


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """``part / whole``; 0 where both are 0."""
    return np.where(part == 0, 0.0, part / np.maximum(whole, _TINY))


# ---- updates of parameters ----------------------------------------------------------------------
# They are judged against their own size: at a small learning rate a weight that was not updated, or
# in the wrong direction, is within any threshold that is relative to the weight.

#: Two updates differ if norm, sum or sum of magnitudes move apart by this part of what they move.
_APART = 0.25
#: And by this part of the weight's norm: less are the last bits of a float32 and of its sums.
_FLOOR = 1.2e-7
#: These are rounded one by one: over more elements than this they come to less.
_FEW = 64
#: A weight of a coarser dtype may stay as it is because an update is rounded off: it has to move by
#: this part of its norm on the other side.
_VISIBLE = 1e-4


class Parameters(NamedTuple):
    """The parameters of one step of one rank: numbers of their names, and both sides' records.
    ``formats``: the codes of the dtypes whose rounding they carry.
    """

    names: np.ndarray
    left: np.ndarray
    right: np.ndarray
    formats: np.ndarray


class Updates(NamedTuple):
    """``still``: which were updated on one side alone; ``apart``: which by more than rounding of
    gradients explains; ``beyond``: by more than rounding of the update itself; ``ratios``: the
    difference over the size of the update.
    """

    still: np.ndarray
    apart: np.ndarray
    beyond: np.ndarray
    ratios: np.ndarray


def judge_updates(before: Parameters, after: Parameters) -> Updates:
    """Compares the updates of the parameters of ``after`` on the two sides."""
    count = len(after.names)
    order = np.argsort(before.names, kind="stable")
    places = np.searchsorted(before.names[order], after.names)
    places = np.minimum(places, max(len(order) - 1, 0))
    if not len(order):
        never = np.zeros(count, bool)
        return Updates(never, never, never, np.zeros(count))
    matches = order[places]
    known = before.names[matches] == after.names
    sides = [(before.left[matches], after.left), (before.right[matches], after.right)]
    with np.errstate(all="ignore"):
        for old, new in sides:
            known &= (old["depth"] == Depth.FULL) & (new["depth"] == Depth.FULL)
            known &= (old["dtype"] == new["dtype"]) & (old["numel"] == new["numel"])
        moved = [(new["checksum"] != old["checksum"]) & known for old, new in sides]
        mine, other = (_projections(new) - _projections(old) for old, new in sides)
        size = np.fmax(np.abs(mine).max(0), np.abs(other).max(0))
        apart = np.abs(mine - other).max(0)
        norm = np.sqrt(after.right["sum_sq"])
        # The rounding of bfloat16 makes Adam turn many an element round.
        fine = COARSENESS[after.formats] <= COARSENESS[FLOAT32]
        fine &= COARSENESS[after.right["dtype"]] > 0
        still = (moved[0] != moved[1]) & (fine | (size > _VISIBLE * norm))
        both = moved[0] & moved[1] & fine & np.isfinite(apart)
        beyond = both & (apart > _FLOOR * norm)
        floor = _FLOOR * norm * np.sqrt(np.minimum(1.0, _FEW / after.right["numel"]))
        both &= (apart > floor) & (apart > _APART * size)
        ratios = np.where(still, 1.0, np.nan_to_num(apart / np.maximum(size, 1e-300)))
    return Updates(still, both, beyond, ratios)


def _projections(records: np.ndarray) -> np.ndarray:
    """Three numbers of each tensor that move by about the learning rate of Adam at an update."""
    root = np.sqrt(np.maximum(records["numel"], 1))
    parts = [np.sqrt(records["sum_sq"]), records["sum"] / root, records["abs_sum"] / root]
    return np.stack([np.asarray(part, np.float64) for part in parts])
