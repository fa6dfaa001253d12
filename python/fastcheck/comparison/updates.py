"""Updates of parameters, judged against their own size: at a small learning rate a weight that was
not updated, or in the wrong direction, is within any threshold that is relative to the weight.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fastcheck.record.format import Depth
from fastcheck.statistics.thresholds import COARSENESS

#: Two updates differ if norm, sum or sum of magnitudes move apart by this part of what they move.
_APART = 0.25
#: And by this part of the weight's norm: less are the last bits of a float32 and of its sums.
_FLOOR = 1.2e-7
#: Of a coarser dtype a weight may stay as it is because an update is rounded off: it has to move by
#: this part of its norm on the other side.
_VISIBLE = 1e-4


class Parameters(NamedTuple):
    """The parameters of one step of one rank: numbers of their names, and both sides' records.
    ``formats``: the codes of the dtypes whose rounding they carry.
    """

    step: int
    names: np.ndarray
    left: np.ndarray
    right: np.ndarray
    formats: np.ndarray


class Updates(NamedTuple):
    """``still``: which were updated on one side alone; ``apart``: which by more than rounding
    explains; ``ratios``: the difference over the size of the update.
    """

    still: np.ndarray
    apart: np.ndarray
    ratios: np.ndarray


def judge_updates(before: Parameters, after: Parameters, float32: int) -> Updates:
    """Of each of ``after``. ``float32``: the code of that dtype."""
    count = len(after.names)
    order = np.argsort(before.names, kind="stable")
    places = np.searchsorted(before.names[order], after.names)
    places = np.minimum(places, max(len(order) - 1, 0))
    if not len(order):
        return Updates(np.zeros(count, bool), np.zeros(count, bool), np.zeros(count))
    found = order[places]
    known = before.names[found] == after.names
    sides = [(before.left[found], after.left), (before.right[found], after.right)]
    with np.errstate(all="ignore"):
        for old, new in sides:
            known &= (old["depth"] == Depth.FULL) & (new["depth"] == Depth.FULL)
            known &= (old["dtype"] == new["dtype"]) & (old["numel"] == new["numel"])
        moved = [(new["checksum"] != old["checksum"]) & known for old, new in sides]
        mine, other = (_projections(new) - _projections(old) for old, new in sides)
        size = np.fmax(np.abs(mine).max(0), np.abs(other).max(0))
        apart = np.abs(mine - other).max(0)
        norm = np.sqrt(after.right["sum_sq"])
        # Of bfloat16's rounding, Adam turns round many an element.
        fine = COARSENESS[after.formats] <= COARSENESS[float32]
        fine &= COARSENESS[after.right["dtype"]] > 0
        still = (moved[0] != moved[1]) & (fine | (size > _VISIBLE * norm))
        beyond = moved[0] & moved[1] & fine & (apart > _FLOOR * norm) & (apart > _APART * size)
        ratios = np.where(still, 1.0, np.nan_to_num(apart / np.maximum(size, 1e-300)))
    return Updates(still, beyond & np.isfinite(apart), ratios)


def _projections(records: np.ndarray) -> np.ndarray:
    """Three numbers of each tensor that move by about the learning rate of Adam at an update."""
    root = np.sqrt(np.maximum(records["numel"], 1))
    parts = [np.sqrt(records["sum_sq"]), records["sum"] / root, records["abs_sum"] / root]
    return np.stack([np.asarray(part, np.float64) for part in parts])
