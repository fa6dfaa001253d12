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
    "NOTHING",
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

#: In the place of log2(0): less than any format holds.
NOTHING = -1100.0

#: Formats in which small gradients underflow, by code.
_IS_NARROW = np.array([one.name == "float16" or one.name.startswith("float8") for one in DTYPES])


@dataclass(frozen=True)
class StepSignals:
    """One step, each tensor once: of several calls the largest, or all together. Arrays of one
    length, in the order in which the tensors were first read.

    ``values``: a row for each of NAMES, in log2, of 0 a very small number; NaN: not known.
    ``headroom``: how many times the tensor could be doubled before it leaves its dtype.
    ``zero_share``, ``subnormal_share``, ``saturated_share`` (at the largest number of the dtype):
    of its elements. ``is_equal``: all its elements are the same. ``is_scaled``: its
    last record carries the loss scale.
    """

    sites: np.ndarray
    phases: np.ndarray
    values: np.ndarray
    abs_max: np.ndarray
    headroom: np.ndarray
    zero_share: np.ndarray
    subnormal_share: np.ndarray
    saturated_share: np.ndarray
    is_equal: np.ndarray
    numel: np.ndarray
    is_narrow: np.ndarray
    dtypes: np.ndarray
    sums: np.ndarray
    abs_sums: np.ndarray
    is_scaled: np.ndarray


class SignalReader:
    """Makes signals of the records of one rank, whose sites are found in ``sites`` by number.

    ``is_whole``: all modules are observed. Where the model itself is not called then, as that of a
    LightningModule, whose ``training_step`` calls its parts, the batch is the input of the first
    module that is.
    """

    def __init__(self, sites: SiteTable, is_whole: bool = True) -> None:
        self._sites = sites
        self._is_whole = is_whole
        self._phases = np.zeros(0, np.int8)
        self._plan: Optional[_Plan] = None

    def read(self, chunks: Sequence[np.ndarray], scale: Optional[float]) -> Optional[StepSignals]:
        """The signals of these records. ``scale``: the loss scale, which scaled gradients are
        divided by. None: there are no records with statistics.
        """
        chunks = [chunk for chunk in chunks if len(chunk)]
        if not chunks:
            return None
        records = chunks[0] if len(chunks) == 1 else _joined(chunks)
        phases = self._phases_of(records["site"])
        wanted = (phases > 0) & (records["depth"] >= Depth.STATS) & (records["numel"] > 0)
        wanted &= (records["flags"] & int(Flag.RECOMPUTE)) == 0
        records = records if wanted.all() else records[wanted]
        if not len(records):
            return None
        sites = records["site"]
        if self._plan is None or not np.array_equal(sites, self._plan.read):
            self._plan = _Plan(sites.copy())
            if self._is_whole and not (self._phases == INPUT).any():
                self._find_batch(self._plan.sites)
        return _by_site(records, self._plan, self._phases, scale)

    def _find_batch(self, sites: np.ndarray) -> None:
        """``sites``: in the order in which they were read."""
        inputs = [number for number in sites.tolist() if self._sites[number].role == "input"]
        for number in inputs:
            if self._sites[number].module == self._sites[inputs[0]].module:
                self._phases[number] = INPUT

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


def _joined(chunks: Sequence[np.ndarray]) -> np.ndarray:
    """Copied as bytes: field by field takes several times as long."""
    dtype = chunks[0].dtype
    whole = [np.ascontiguousarray(chunk).view(f"V{dtype.itemsize}") for chunk in chunks]
    found: np.ndarray = np.concatenate(whole).view(dtype)
    return found


class _Plan:
    """Which of the records that were read in this order belong together. Most steps have the order
    of the step before.
    """

    def __init__(self, read: np.ndarray) -> None:
        self.read = read
        order = np.argsort(read, kind="stable")
        starts = np.flatnonzero(np.diff(read[order], prepend=-1))
        first, last = order[starts], order[np.append(starts[1:], len(order)) - 1]
        #: Each site was read once.
        self.is_single = len(starts) == len(read)
        back = np.argsort(first, kind="stable")
        self._order, self._starts, self._back = order, starts, back
        #: The first and the last record of each site, in the order of the first.
        self.first, self.last = first[back], last[back]
        self.sites = read[self.first].astype(np.int64)

    def total(self, column: np.ndarray, reduce: np.ufunc = np.add) -> np.ndarray:
        """Of all records of each site, in the order of the first."""
        if self.is_single:
            return column
        found: np.ndarray = reduce.reduceat(column[self._order], self._starts)[self._back]
        return found


def _by_site(
    records: np.ndarray, plan: _Plan, phases: np.ndarray, scale: Optional[float]
) -> StepSignals:
    total = plan.total
    components = component_counts(records)
    bad = sum(records[name] for name in NONFINITE_COUNTS)
    finite = total(components - bad)
    codes = records["dtype"][plan.first]
    lowest, highest = (extreme_values(records, name) for name in ("min", "max"))
    plain = np.maximum(np.abs(lowest), np.abs(highest))
    squares, plain_sums = records["sum_sq"], records["sum"]
    largest = plain
    is_scaled = (records["flags"] & int(Flag.SCALED)) != 0
    if scale and is_scaled.any():
        # Scaled gradients as they are without the scale.
        factor = np.where(is_scaled, 1 / scale, 1.0)
        largest, squares, plain_sums = plain * factor, squares * factor**2, plain_sums * factor
    with np.errstate(all="ignore"):
        is_equal = total(lowest, np.minimum) == total(highest, np.maximum)
        abs_max = total(plain, np.maximum)
        mean_square = total(squares) / finite
        sums = total(plain_sums)
        mean = sums / finite
        # Less than the rounding of the mean square is no variance.
        variance = mean_square - mean * mean
        variance = np.where(variance > 1e-6 * mean_square, variance, 0.0)
        values = np.log2(np.stack([total(largest, np.maximum), mean_square, variance]))
        values[1:] *= 0.5
        headroom = np.log2(LARGEST_FINITE[codes] / abs_max)
    # A tensor whose elements are all zero, or all equal, has become so from one step to the next.
    values[np.isneginf(values)] = NOTHING
    values[:, finite <= 0] = np.nan
    values[~np.isfinite(values)] = np.nan
    # A tensor that holds the largest number itself is a mask.
    headroom[~(np.isfinite(headroom) & (headroom > 0) & (finite > 0))] = np.nan
    return StepSignals(
        sites=plan.sites,
        phases=phases[plan.sites],
        values=values,
        abs_max=abs_max,
        headroom=headroom,
        zero_share=total(records["zero_count"]) / np.maximum(finite, 1),
        subnormal_share=total(records["subnormal_count"]) / np.maximum(finite, 1),
        saturated_share=total(records["saturated_count"]) / np.maximum(finite, 1),
        is_equal=is_equal,
        numel=finite,
        is_narrow=_IS_NARROW[codes],
        dtypes=codes,
        sums=sums,
        abs_sums=total(records["abs_sum"]),
        is_scaled=is_scaled[plan.last],
    )
