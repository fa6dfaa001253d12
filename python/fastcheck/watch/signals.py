"""Signals: what the records of a few steps say of each tensor, as arrays of steps by tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Optional

import numpy as np

from fastcheck.log.history import joined
from fastcheck.log.step_table import StepRow
from fastcheck.record.format import DTYPES, NONFINITE_COUNTS, RECORD_DTYPE, Depth, Flag
from fastcheck.record.site import MAX_SITES, OUTSIDE, Site, SiteTable
from fastcheck.record.statistics import LARGEST_FINITE, component_counts, extreme_values

#: A step that is over: its row in the table of steps, and its records.
StepOver = tuple[Optional[StepRow], Sequence[np.ndarray]]

#: The levels of a tensor, each as log2: a factor is a distance.
NAMES = ("abs max", "rms", "standard deviation")
ABS_MAX, RMS = range(2)

# Kinds of tensors of a site, in the order in which a fault of this kind shows within a step.
# Parameters are read before the update: their records show what the update of the step before made.
WEIGHT, INPUT, ACTIVATION, BUFFER, GRADIENT = range(1, 6)
_PHASES = {
    "param": WEIGHT,
    "buffer": BUFFER,
    "output": ACTIVATION,
    "grad_output": GRADIENT,
    "grad_input": GRADIENT,
    "param_grad": GRADIENT,
}

#: Stands in the place of log2(0): less than any format holds.
NOTHING = -1100.0
# The ratio to the last call of one that a line search has left.
_TRIED = 32.0
#: The steps of a part: of those that are judged together, so many are compared with the same
#: ranges, which are renewed after them.
PART = 16
#: True for a dtype that is a float, by its code.
IS_FLOAT = np.array([dtype.name.startswith(("float", "bfloat")) for dtype in DTYPES])
#: Functions that are flat at both ends, by the class of their module.
FUNCTIONS = {"Tanh": 1, "Sigmoid": 2}


@dataclass(frozen=True)
class Signals:
    """Several steps, each tensor once in a step: of several calls the largest, or all together.

    Arrays of (steps, tensors), the tensors in the order in which they were first read; NaN (of a
    bool: False) where a tensor was not read. ``levels`` has a row for each of NAMES, in log2, of
    scaled gradients as without the scale; of 0 it has NOTHING. ``headroom``: how many times the
    tensor could be doubled before it leaves its dtype; NaN of a tensor that holds the largest
    number. ``subnormal_share``: of the elements that are not zero. ``is_whole``: as far as extremes
    and sum tell; ``is_count``: and of at most the number of elements.

    ``codes``: of dtypes; one row stands for all steps if no tensor's dtype changes.

    Of one axis are ``sites``, ``phases``, ``functions``, ``is_of_parameter``
    (the gradient of a parameter) and ``gradient_at`` (of a weight the place of its gradient, or -1)
    by tensor, and ``rows``, ``steps``, ``is_limited`` (Watch(skip_above=) skipped the update),
    ``is_skipped`` (for whatever reason) and ``has_still_group`` (a learning rate of 0) by step.
    ``checksums``: of several calls their sum. ``is_tried``: in a step whose gradients were thrown
    away and made again, as by a line search, the last call was far smaller than another.
    """

    rows: Sequence[Optional[StepRow]]
    steps: np.ndarray
    is_limited: np.ndarray
    is_skipped: np.ndarray
    sites: np.ndarray
    phases: np.ndarray
    codes: np.ndarray
    functions: np.ndarray
    is_of_parameter: np.ndarray
    gradient_at: np.ndarray
    has_still_group: np.ndarray
    is_read: np.ndarray
    levels: np.ndarray
    abs_max: np.ndarray
    is_tried: np.ndarray
    headroom: np.ndarray
    zero_share: np.ndarray
    subnormal_share: np.ndarray
    saturated_share: np.ndarray
    is_equal: np.ndarray
    is_whole: np.ndarray
    is_count: np.ndarray
    numel: np.ndarray
    sums: np.ndarray
    abs_sums: np.ndarray
    squares: np.ndarray
    checksums: np.ndarray
    is_scaled: np.ndarray

    def code_of(self, k: int, at: int) -> int:
        """The code of a tensor's dtype in step ``k``."""
        return int(self.codes[k % len(self.codes), at])


def inputs_by_step(now: Signals) -> list[tuple[list[float], list[int]]]:
    """The numbers of elements and the checksums of the tensors that a step was given, by step."""
    at = np.flatnonzero(now.phases == INPUT)
    columns = (column[:, at].tolist() for column in (now.is_read, now.numel, now.checksums))
    return [
        (numel, checksums)
        if all(are_read)
        else (list(compress(numel, are_read)), list(compress(checksums, are_read)))
        for are_read, numel, checksums in zip(*columns)
    ]


#: The facts of a site: ``weight`` is the number of the weight that it is about, or -1.
_SITE = np.dtype(
    [("phase", np.int8), ("function", np.int8), ("weight", np.int64)]
    + [(name, bool) for name in ("is_limit", "is_of_parameter", "is_rate", "is_input")]
)


class SignalReader:
    """Makes signals of the records of one rank, whose sites are found in ``sites`` by number.

    ``is_whole``: all modules are observed. Where the model itself is not called then, as that of a
    LightningModule, whose ``training_step`` calls its parts, the batch is the input of the first
    module that is. What a criterion is given without a gradient are targets: the batch too.
    """

    def __init__(self, sites: SiteTable, is_whole: bool = True) -> None:
        self.sites = sites
        self._is_whole = is_whole
        # By the number of a site.
        self._of = np.zeros(0, _SITE)
        # The weights by module and label.
        self._weights: dict[tuple[str, str], int] = {}
        self._plan: Optional[_RecordOrder] = None
        self._gradient_at = np.zeros(0, np.int64)

    def read(self, steps: Sequence[StepOver]) -> Optional[Signals]:
        """The signals of these steps. None: there are no records with statistics."""
        self._grow()
        lengths = [sum(map(len, chunks)) for _, chunks in steps]
        if not sum(lengths):
            return None
        records = _columns([chunk for _, chunks in steps for chunk in chunks])
        step_of = np.repeat(np.arange(len(steps)), lengths)
        sites = records["site"]
        inside = (sites >= 0) & (sites < len(self._of))
        known = np.where(inside, sites, 0)
        is_limit = inside & self._of["is_limit"][known] & (records["sum"] == 1.0)
        wanted = inside & (self._of["phase"][known] > 0)
        wanted &= (records["depth"] >= Depth.STATS) & (records["numel"] > 0)
        wanted &= (records["flags"] & int(Flag.RECOMPUTE)) == 0
        limited = np.bincount(step_of[is_limit], minlength=len(steps)) > 0
        anew = np.bincount(step_of[records["flags"] & int(Flag.ANEW) > 0], minlength=len(steps)) > 0
        is_still = inside & self._of["is_rate"][known] & (records["zero_count"] > 0)
        still = np.bincount(step_of[is_still], minlength=len(steps)) > 0
        if not wanted.all():
            records = {name: column[wanted] for name, column in records.items()}
            step_of = step_of[wanted]
        if not len(step_of):
            return None
        keys = step_of * MAX_SITES + records["site"]
        if self._plan is None or not np.array_equal(keys, self._plan.keys):
            before, self._plan = self._plan, _RecordOrder(keys, len(steps))
            self._find_batch(records, self._plan)
            if before is None or not np.array_equal(before.sites, self._plan.sites):
                self._gradient_at = self._gradients_of(self._plan.sites)
        rows = [row for row, _ in steps]
        scales = np.array([1.0 if r is None or not r.scale else r.scale for r in rows])
        is_skipped = limited | np.array([row is not None and row.overflow for row in rows])
        plan, of = self._plan, self._of[self._plan.sites]
        return Signals(
            rows=rows,
            steps=np.array([_number(row, chunks) for row, chunks in steps]),
            is_limited=limited,
            is_skipped=is_skipped,
            sites=plan.sites,
            phases=of["phase"],
            functions=of["function"],
            is_of_parameter=of["is_of_parameter"],
            gradient_at=self._gradient_at,
            has_still_group=still,
            **_by_site(records, plan, 1.0 / scales[step_of], anew),
        )

    def _grow(self) -> None:
        held = len(self._of)
        if held == len(self.sites):
            return
        roles = ("skipped_update", "param_grad", "learning_rate", "input")
        rows = []
        for site in (self.sites[number] for number in range(held, len(self.sites))):
            function = FUNCTIONS.get(site.module_type, 0) if site.role == "output" else 0
            is_of = (site.role == role for role in roles)
            rows.append((phase_of(site), function, self._weight_of(site), *is_of))
        self._of = np.append(self._of, np.array(rows, _SITE))

    def _weight_of(self, site: Site) -> int:
        """The number of the weight that this is the site of, or of its gradient; -1: of none."""
        if site.role not in ("param", "param_grad"):
            return -1
        key = site.module, site.label.removesuffix(".main_grad")
        return self._weights.setdefault(key, len(self._weights))

    def _gradients_of(self, sites: np.ndarray) -> np.ndarray:
        """The place among these of the gradient of each that is a weight; or -1."""
        weights, is_gradient = self._of["weight"][sites], self._of["is_of_parameter"][sites]
        place_of = np.full(len(self._weights) + 1, -1)  # the last: of no weight
        place_of[weights[is_gradient]] = np.flatnonzero(is_gradient)
        return np.where(is_gradient, -1, place_of[weights])

    def _find_batch(self, records: Mapping[str, np.ndarray], plan: _RecordOrder) -> None:
        phases = self._of["phase"]
        inputs = plan.sites[self._of["is_input"][plan.sites]].tolist()
        if inputs and self._is_whole and not (phases == INPUT).any():
            first = self.sites[inputs[0]].module
            phases[[n for n in inputs if self.sites[n].module == first]] = INPUT
        inputs = [n for n in inputs if phases[n] == ACTIVATION]
        if not inputs:
            return
        small = {int(n) for n in records["site"][records["numel"] == 1]}
        scalars = {self.sites[n].module for n in small if self.sites[n].role == "output"}
        criteria = [
            number
            for number in inputs
            if (site := self.sites[number]).module in scalars or site.module_type.endswith("Loss")
        ]
        with_gradient: set[tuple[str, str]] = set()
        if criteria:
            with_gradient.update((s.module, s.label) for s in self.sites if s.role == "grad_input")
        for number in criteria:
            site = self.sites[number]
            if (site.module, site.label) not in with_gradient:
                phases[number] = INPUT


def phase_of(site: Site) -> int:
    """One of the constants above; 0: a number of the step, such as the loss."""
    if site.role == "input":  # of inner modules: made by code between modules
        return ACTIVATION if site.module else INPUT
    if site.role == "output" and site.module_type == OUTSIDE:  # of the loss, or of an optimizer
        return 0
    return _PHASES.get(site.role, 0)


def _number(row: Optional[StepRow], chunks: Sequence[np.ndarray]) -> int:
    """The number of a step; -1: it has neither a row nor records."""
    if row is not None:
        return row.step
    return next((int(chunk["step"][-1]) for chunk in chunks if len(chunk)), -1)


class _RecordOrder:
    """A plan of which records that were read in this order belong together. Most steps have the
    order of the step before.
    """

    def __init__(self, keys: np.ndarray, steps: int) -> None:
        self.keys = keys
        order = np.argsort(keys, kind="stable")
        starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
        counts = np.diff(starts, append=len(order))
        back = np.argsort(order[starts], kind="stable")
        first = self._first = order[starts][back]
        #: The last record of each tensor in each step, in the order of the first.
        self.last = order[starts + counts - 1][back]
        #: Each tensor was read once in a step.
        self.is_single = len(starts) == len(keys)
        # The places of tensors that were read several times, and their records.
        is_several = counts > 1
        self._several = np.argsort(back)[is_several]
        self._records = order[np.repeat(is_several, counts)]
        self._begins = np.cumsum(counts[is_several]) - counts[is_several]
        sites = (keys % MAX_SITES)[first].astype(np.int64)
        places = np.sort(np.unique(sites, return_index=True)[1])
        #: The tensors, in the order in which they were first read.
        self.sites = sites[places]
        self._shape = steps, len(self.sites)
        column = np.zeros(MAX_SITES, np.int64)
        column[self.sites] = np.arange(len(self.sites))
        step = (keys // MAX_SITES)[first]
        at = step * len(self.sites) + column[sites]
        self._at = None if np.array_equal(at, np.arange(steps * len(self.sites))) else at

    def total(self, column: np.ndarray, reduce: np.ufunc = np.add) -> np.ndarray:
        """The column with all records of a tensor in a step reduced to a single value."""
        if self.is_single:
            return column
        totals = column[self._first]
        totals[self._several] = reduce.reduceat(column[self._records], self._begins)
        return totals

    def spread(self, column: np.ndarray) -> np.ndarray:
        """The column as an array of (..., steps, tensors)."""
        if self._at is None:
            return column.reshape(*column.shape[:-1], *self._shape)
        empty = np.nan if column.dtype.kind == "f" else 0
        size = self._shape[0] * self._shape[1]
        values = np.full((*column.shape[:-1], size), empty, column.dtype)
        values[..., self._at] = column
        return values.reshape(*column.shape[:-1], *self._shape)


# Fields of records of which signals are made.
_FIELDS = (
    *("site", "numel", "depth", "flags", "dtype", "min", "max", "sum", "abs_sum", "sum_sq"),
    *("zero_count", "subnormal_count", "saturated_count", *NONFINITE_COUNTS, "checksum"),
)
# Records of 192 bytes that stay in a core's cache while their fields are copied one by one.
_IN_CACHE = 2048


def _columns(chunks: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """The fields of all records, each in an array of its own."""
    size, start = sum(map(len, chunks)), 0
    columns = {name: np.empty(size, RECORD_DTYPE[name]) for name in _FIELDS}
    for part in _in_cache(chunks):
        stop = start + len(part)
        for name, column in columns.items():
            column[start:stop] = part[name]
        start = stop
    return columns


def _in_cache(chunks: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """The records of all chunks, in parts of about _IN_CACHE."""
    few: list[np.ndarray] = []
    count = 0
    for chunk in chunks:
        few.append(chunk)
        count += len(chunk)
        if count >= _IN_CACHE or chunk is chunks[-1]:
            part, few, count = few[0] if len(few) == 1 else joined(few), [], 0
            for start in range(0, len(part), _IN_CACHE):
                yield part[start : start + _IN_CACHE]


def _is_whole(numbers: np.ndarray) -> np.ndarray:
    """True where each value is a finite integer."""
    return numbers - np.trunc(numbers) == 0


def _by_site(
    records: Mapping[str, np.ndarray], plan: _RecordOrder, factor: np.ndarray, anew: np.ndarray
) -> dict[str, Any]:
    """``factor``: by record, what undoes the loss scale. ``anew``: the steps whose gradients were
    made again.
    """
    total, spread = plan.total, plan.spread
    components = component_counts(records)
    bad: np.ndarray = np.add.reduce([records[name] for name in NONFINITE_COUNTS])
    finite = total(components - bad).astype(np.float64)
    lowest, highest = (extreme_values(records, name) for name in ("min", "max"))
    plain = np.maximum(np.abs(lowest), np.abs(highest))
    squares, sums, largest = records["sum_sq"], records["sum"], plain
    is_scaled = (records["flags"] & int(Flag.SCALED)) != 0
    if is_scaled.any():
        factor = np.where(is_scaled, factor, 1.0)
        largest, squares, sums = plain * factor, squares * factor**2, sums * factor
    last_codes = records["dtype"][plan.last]
    with np.errstate(all="ignore"):
        abs_max, sums, squares = total(plain, np.maximum), total(sums), total(squares)
        least, most = total(lowest, np.minimum), total(highest, np.maximum)
        mean, mean_square = sums / finite, squares / finite
        # Less than the rounding of the mean square is no variance.
        variance = mean_square - mean * mean
        variance = np.where(variance > 1e-6 * mean_square, variance, 0.0)
        levels = np.log2(np.stack([total(largest, np.maximum), mean_square, variance]))
        levels[1:] *= 0.5
        headroom = np.log2(LARGEST_FINITE[last_codes] / abs_max)
        is_whole = _is_whole(least) & _is_whole(most) & _is_whole(sums)
        is_count = is_whole & (least >= 0) & (abs_max <= finite)
    # A tensor whose elements are all zero, or all equal, has become so from one step to the next.
    levels[np.isneginf(levels)] = NOTHING
    levels[:, finite <= 0] = np.nan
    levels[~np.isfinite(levels)] = np.nan
    # A tensor that holds the largest number itself is a mask.
    headroom[~(np.isfinite(headroom) & (headroom > 0) & (finite > 0))] = np.nan
    there = np.maximum(finite, 1)
    zeros, subnormal = total(records["zero_count"]), total(records["subnormal_count"])
    by_step = spread(last_codes.astype(np.int64) + 1)
    is_read, codes = by_step > 0, by_step.max(axis=0, keepdims=True)
    if (is_read & (by_step != codes)).any():
        codes = np.where(is_read, by_step, codes)
    return {
        "codes": codes - 1,
        "is_read": is_read,
        "levels": spread(levels),
        "abs_max": spread(abs_max),
        "is_tried": spread(plain[plan.last] < abs_max / _TRIED) & anew[:, None],
        "headroom": spread(headroom),
        "zero_share": spread(zeros / there),
        "subnormal_share": spread(np.minimum(subnormal / np.maximum(there - zeros, 1), 1.0)),
        "saturated_share": spread(total(records["saturated_count"]) / there),
        "is_equal": spread((least == most) & (total(bad) == 0)),
        "is_whole": spread(is_whole),
        "is_count": spread(is_count),
        "numel": spread(finite),
        "sums": spread(sums),
        "abs_sums": spread(total(records["abs_sum"])),
        "squares": spread(squares),
        "checksums": spread(total(records["checksum"])),
        "is_scaled": spread(is_scaled[plan.last]),
    }
