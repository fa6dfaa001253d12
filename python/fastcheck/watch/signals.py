"""The signals of a step: magnitude and spread of each tensor, from its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import numpy as np

from fastcheck.record.format import DTYPES, NONFINITE_COUNTS, Depth, Flag
from fastcheck.record.site import Site, SiteTable
from fastcheck.record.statistics import LARGEST_FINITE, component_counts, extreme_values

__all__ = [
    "ACTIVATION",
    "BUFFER",
    "GRADIENT",
    "INPUT",
    "NAMES",
    "STATE",
    "UPDATE",
    "WEIGHT",
    "SignalReader",
    "StepSignals",
    "phase_of",
    "signal_name",
]

#: The signals, each as log2: a factor is a distance.
NAMES = ("abs max", "rms", "standard deviation")

# What a site holds, in the order in which a fault of this kind shows within a step. Parameters are
# read before the update: their records show what the update of the step before made.
WEIGHT, INPUT, ACTIVATION, BUFFER, GRADIENT, STATE, UPDATE = range(1, 8)
_PHASES = {
    "param": WEIGHT,
    "optimizer_state": STATE,
    "update_ratio": UPDATE,
    "buffer": BUFFER,
    "output": ACTIVATION,
    "grad_output": GRADIENT,
    "grad_input": GRADIENT,
    "param_grad": GRADIENT,
}

# In the place of log2(0): less than any format holds.
_NOTHING = -1100.0

#: Formats in which small gradients underflow, by code.
_IS_NARROW = np.array([one.name == "float16" or one.name.startswith("float8") for one in DTYPES])


@dataclass(frozen=True)
class StepSignals:
    """One step, each tensor once: of several calls the largest, or all together. Arrays of one
    length, in the order in which the tensors were first read.

    ``values``: a row for each of NAMES, in log2, of 0 a very small number; NaN: not known.
    ``headroom``: how many times the tensor could be doubled before it leaves its dtype.
    ``zero_share``: of its elements. ``is_equal``: all its elements are the same. ``is_scaled``: its
    last record carries the loss scale.
    """

    sites: np.ndarray
    phases: np.ndarray
    values: np.ndarray
    abs_max: np.ndarray
    headroom: np.ndarray
    zero_share: np.ndarray
    is_equal: np.ndarray
    numel: np.ndarray
    is_narrow: np.ndarray
    dtypes: np.ndarray
    sums: np.ndarray
    abs_sums: np.ndarray
    is_scaled: np.ndarray


class SignalReader:
    """Makes signals of the records of one rank, whose sites are found in ``sites`` by number."""

    def __init__(self, sites: SiteTable) -> None:
        self._sites = sites
        self._phases = np.zeros(0, np.int8)

    def read(self, chunks: Sequence[np.ndarray], scale: Optional[float]) -> Optional[StepSignals]:
        """The signals of these records. ``scale``: the loss scale, which scaled gradients are
        divided by. None: there are no records with statistics.
        """
        records = chunks[0] if len(chunks) == 1 else np.concatenate(chunks) if chunks else None
        if records is None:
            return None
        phases = self._phases_of(records["site"])
        wanted = (phases > 0) & (records["depth"] >= Depth.STATS) & (records["numel"] > 0)
        wanted &= (records["flags"] & int(Flag.RECOMPUTE)) == 0
        records = records if wanted.all() else records[wanted]
        return _by_site(records, self._phases, scale) if len(records) else None

    def _phases_of(self, sites: np.ndarray) -> np.ndarray:
        known = len(self._phases)
        if known < len(self._sites):
            new = [phase_of(self._sites[number]) for number in range(known, len(self._sites))]
            self._phases = np.concatenate([self._phases, np.array(new, np.int8)])
        inside = (sites >= 0) & (sites < len(self._phases))
        found: np.ndarray = np.where(inside, self._phases[np.where(inside, sites, 0)], 0)
        return found


def phase_of(site: Site) -> int:
    """One of the constants above; 0: a number of the step, such as the loss."""
    if site.role == "input":  # of inner modules: made by code between modules
        return ACTIVATION if site.module else INPUT
    return _PHASES.get(site.role, 0)


def signal_name(row: int, phase: int) -> str:
    """How the signal of this row is called of a site that holds ``phase``."""
    return "norm / norm of the weight" if phase == UPDATE else NAMES[row]


def _by_site(records: np.ndarray, phases: np.ndarray, scale: Optional[float]) -> StepSignals:
    order = np.argsort(records["site"], kind="stable")
    sites = records["site"][order]
    starts = np.flatnonzero(np.diff(sites, prepend=-1))
    components = component_counts(records)
    bad = sum(records[name] for name in NONFINITE_COUNTS)

    def total(column: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.add.reduceat(column[order], starts)
        return found

    # Scaled gradients as they are without the scale.
    is_scaled = (records["flags"] & int(Flag.SCALED)) != 0
    factor = np.where(is_scaled & bool(scale), 1 / (scale or 1.0), 1.0)
    finite = total(components - bad)
    first, last = order[starts], order[np.append(starts[1:], len(order)) - 1]
    codes = records["dtype"][first]
    with np.errstate(all="ignore"):
        lowest, highest = (extreme_values(records, name) for name in ("min", "max"))
        largest = np.maximum(np.abs(lowest), np.abs(highest))
        low = np.minimum.reduceat(lowest[order], starts)
        is_equal = low == np.maximum.reduceat(highest[order], starts)
        abs_max = np.maximum.reduceat(largest[order], starts)
        unscaled = np.maximum.reduceat((largest * factor)[order], starts)
        mean_square = total(records["sum_sq"] * factor**2) / finite
        sums = total(records["sum"] * factor)
        mean = sums / finite
        # Less than the rounding of the mean square is no variance.
        variance = mean_square - mean * mean
        variance = np.where(variance > 1e-6 * mean_square, variance, 0.0)
        values = np.log2(np.stack([unscaled, np.sqrt(mean_square), np.sqrt(variance)]))
        limit = LARGEST_FINITE[codes]
        headroom = np.log2(limit / abs_max)
    # A tensor whose elements are all zero, or all equal, has become so from one step to the next.
    values = np.where(np.isneginf(values), _NOTHING, values)
    values = np.where(np.isfinite(values) & (finite > 0), values, np.nan)
    # A tensor that holds the largest number itself is a mask.
    headroom = np.where(np.isfinite(headroom) & (headroom > 0) & (finite > 0), headroom, np.nan)
    back = np.argsort(first, kind="stable")
    return StepSignals(
        sites=sites[starts][back].astype(np.int64),
        phases=phases[sites[starts]][back],
        values=values[:, back],
        abs_max=abs_max[back],
        headroom=headroom[back],
        zero_share=(total(records["zero_count"]) / np.maximum(finite, 1))[back],
        is_equal=is_equal[back],
        numel=finite[back],
        is_narrow=_IS_NARROW[codes][back],
        dtypes=codes[back],
        sums=sums[back],
        abs_sums=total(records["abs_sum"])[back],
        is_scaled=is_scaled[last][back],
    )
