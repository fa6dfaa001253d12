"""The numbers that invariants take of each step: results that are computed again, the sequence of
batches, dtypes of siblings, stored images, equal weights, clipping, the learning rate.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Optional

import numpy as np

from fastcheck.log.history import joined
from fastcheck.log.step_table import StepRow
from fastcheck.record.format import DTYPES, NONFINITE_COUNTS, Depth, Flag
from fastcheck.record.site import Site, SiteTable

from .invariants import LEAST_RATE
from .numbers import Number
from .signals import ACTIVATION, INPUT, IS_FLOAT, WEIGHT, Signals

# The observed steps that are looked at, and those in a row in which a result has to differ.
_STEPS, _TIMES = 16, 3
_COMPARED = ("numel", "checksum", "zero_count")


class RecomputedResults:
    """Compares the checksums of results of modules in the first steps of a run."""

    def __init__(self, sites: SiteTable) -> None:
        self._sites = sites
        self._steps = self._times = 0

    def of_step(self, chunks: Sequence[np.ndarray]) -> Iterator[Number]:
        """The number of a step with these records, if a result was another when it was computed
        again.
        """
        if self._steps == _STEPS:
            return
        self._steps += 1
        records = joined(chunks) if len(chunks) else np.zeros(0)
        site = self._first_other(records) if len(records) else None
        self._times = 0 if site is None else self._times + 1
        if site is not None and self._times == _TIMES:
            self._steps = _STEPS
            full_name = f"{site.module} ({site.module_type})"
            yield Number("recomputed_dropout", _TIMES, full_name=full_name)

    def _first_other(self, records: np.ndarray) -> Optional[Site]:
        """The first module that has returned what it had not returned when it was called again, if
        it is one that drops elements and has dropped another number of them. Any other has read
        something else then, as where an equation is solved backwards, or does not give the same
        bits twice.
        """
        is_again = (records["flags"] & int(Flag.RECOMPUTE)) != 0
        if not is_again.any():
            return None
        is_whole = (records["depth"] >= Depth.FULL) & (records["numel"] > 1)
        for name in NONFINITE_COUNTS:
            is_whole &= records[name] == 0
        columns = [records[name][is_whole].tolist() for name in ("site", *_COMPARED)]
        first: dict[int, list[tuple[int, ...]]] = {}
        again: dict[int, list[tuple[int, ...]]] = {}
        # Not by calls: those within one checkpoint are repeated in order, checkpoints last first.
        for number, is_repeated, *made in zip(columns[0], is_again[is_whole], *columns[1:]):
            (again if is_repeated else first).setdefault(number, []).append(tuple(made))
        for number, results in again.items():
            site, known = self._sites[number], first.get(number, [])
            is_result = site.direction == "forward" and site.role == "output" and not site.op
            if not is_result or len(known) < len(results):
                continue
            others = [made[2] for made in results if made not in known]
            if others:
                # Its input may only have been rounded otherwise.
                has_others = any(zeros not in {made[2] for made in known} for zeros in others)
                return site if has_others and "Drop" in site.module_type else None
        return None


_BATCHES = 64
# The numbers of steps, of runs of one batch, and of rounds of a cycle that make a pattern.
_SAME, _RUNS, _ROUNDS = 64, 16, 4


class Batches:
    """The sequence of the batches' checksums, and the patterns in it, each reported once."""

    def __init__(self) -> None:
        self._last: deque[int] = deque(maxlen=_BATCHES * (_ROUNDS + 1))
        # The last batches with their steps.
        self._recent: deque[tuple[int, int]] = deque(maxlen=_BATCHES)
        self._runs: deque[int] = deque(maxlen=_RUNS + 1)
        self._run = 0
        self._steps = 0

    def last(self, before: int, count: int) -> tuple[int, list[int]]:
        """The last ``count`` steps before a step: the number of the latest, and their checksums,
        oldest first.
        """
        known = [(step, value) for step, value in self._recent if step < before][-count:]
        return known[-1][0] if known else -1, [value for _, value in known]

    def of_step(self, step: int, checksums: Sequence[int]) -> list[Number]:
        if not any(checksums):
            return []
        found: list[Number] = []
        value = hash(tuple(checksums))
        before = self._last[-1] if self._last else None
        self._last.append(value)
        self._recent.append((step, value))
        self._steps += 1
        if before == value:
            self._run += 1
        else:
            if before is not None:
                self._runs.append(self._run)
            self._run = 1
            if len(self._runs) > 1 and self._runs[1] > 1:
                found += self._repeated()
        if self._run == self._steps == _SAME:
            found.append(Number("same_batch", _SAME))
        if self._run == 1 and self._steps % _BATCHES == 0:
            found += self._cycle()
        return found

    def _repeated(self) -> Iterator[Number]:
        """Reports batches that come several times in a row. The first run may be incomplete and is
        left out.
        """
        runs = list(self._runs)[1:]
        if len(runs) == _RUNS and len(set(runs)) == 1:
            yield Number("repeated_batch", runs[0], _RUNS)

    def _cycle(self) -> Iterator[Number]:
        last = list(self._last)
        for period in range(2, _BATCHES + 1):
            count = period * _ROUNDS
            if len(last) < count + period:
                return
            if last[-count:] == last[-count - period : -period]:
                yield Number("cycle", period)
                return


# The observed step in which dtypes are compared, and the least number of modules of a class.
_SETTLED, _SIBLINGS = 8, 4
# Steps at a rate that is next to 0 after which a schedule has ended, if there were no more at a
# larger one.
_ENDED = 64
#: Classes of modules whose weight is a matrix, or several matrices.
_MATRICES = re.compile(r"(Linear|(Lazy)?Conv(Transpose)?[123]d|Embedding)$")
# The largest number of an image as it is stored, and the least number of elements of a batch.
_BRIGHTEST, _PIXELS = 255, 1024
# The least number of elements of a weight that is looked at.
_MANY = 32


def _odd_siblings(sites: SiteTable, now: Signals, k: int) -> Iterator[Number]:
    """A comparison of the dtypes that modules of one class return, in step ``k``. Those without a
    weight, such as dropout, return that of their input.
    """
    weighted = {sites[number].module for number in now.sites[now.phases == WEIGHT].tolist()}
    kinds: dict[str, dict[str, list[str]]] = {}
    for at in np.flatnonzero((now.phases == ACTIVATION) & now.is_read[k]).tolist():
        site = sites[int(now.sites[at])]
        if site.role != "output" or site.op or site.module not in weighted:
            continue
        code = now.code_of(k, at)
        if IS_FLOAT[code]:
            of_kind = kinds.setdefault(site.module_type, {})
            of_kind.setdefault(DTYPES[code].name, []).append(site.module)
    for kind, modules in kinds.items():
        count = sum(map(len, modules.values()))
        common = max(modules, key=lambda name: len(modules[name]))
        odd = [(m, name) for name in modules if name != common for m in modules[name]]
        if count >= _SIBLINGS and odd and len(odd) <= count / 4:
            named = ", ".join(f"{module} ({name})" for module, name in odd[:3])
            text = f"{len(odd)} of {count} modules of class {kind} return a dtype other than "
            yield Number("siblings", len(odd), full_name=f"{text}{common}: {named}")
            return


def _of_stored_images(sites: SiteTable, now: Signals, k: int) -> Iterator[Number]:
    """A batch of whole numbers from 0 to 255 in step ``k`` that is given as it is to a layer that
    is trained, which no norm follows.
    """
    is_stored = (now.phases == INPUT) & now.is_read[k] & now.is_count[k] & IS_FLOAT[now.codes[0]]
    is_stored &= (now.abs_max[k] == _BRIGHTEST) & (now.numel[k] >= _PIXELS)
    if not is_stored.any():
        return
    of_step = [(sites[int(n)], phase) for n, phase in zip(now.sites, now.phases * now.is_read[k])]
    first, *others = [site for site, phase in of_step if phase == ACTIVATION]
    is_layer = first.role == "output" and _MATRICES.match(first.module_type)
    is_trained = any(s.role == "param_grad" and s.module == first.module for s, _ in of_step)
    following = next((site.module_type for site in others if site.role == "output"), "")
    if is_layer and is_trained and "Norm" not in following:
        yield Number("stored_images", _BRIGHTEST, full_name=f"{first.module} ({first.module_type})")


def _of_one_number(sites: SiteTable, now: Signals, k: int) -> Iterator[Number]:
    """A weight whose elements are equal in step ``k``, before the first update."""
    is_one = (now.phases == WEIGHT) & now.is_read[k] & now.is_equal[k] & (now.sums[k] != 0)
    for at in np.flatnonzero(is_one & (now.numel[k] >= _MANY)).tolist():
        site = sites[int(now.sites[at])]
        if site.label == "weight" and _MATRICES.match(site.module_type):
            yield Number("one_number", now.sums[k, at] / now.numel[k, at], full_name=site.key)
            return


class Clipping:
    """The norm of all gradients relative to the clipping threshold."""

    def __init__(self) -> None:
        # Thresholds of clip_grad_norm_(), each with the step from which it is so.
        self._thresholds: deque[tuple[int, float]] = deque()

    def noticed(self, step: int, threshold: float) -> None:
        """Takes in the norm at which gradients are clipped from ``step`` on."""
        self._thresholds.append((step, threshold))

    def of_step(self, norm: float, row: StepRow) -> tuple[Optional[float], float]:
        """``norm``: of all gradients, without the loss scale; NaN: there is none. Its ratio to the
        threshold, if there is one, and the threshold.
        """
        while len(self._thresholds) > 1 and self._thresholds[1][0] <= row.step:
            self._thresholds.popleft()
        since, threshold = self._thresholds[0] if self._thresholds else (0, 0.0)
        if norm != norm or row.overflow or not threshold or row.step < since:
            return None, threshold
        return norm / threshold, threshold


class Invariants:
    """The numbers that invariants take of each step."""

    def __init__(self, sites: SiteTable) -> None:
        self.clipping = Clipping()
        #: The batches of the steps.
        self.batches = Batches()
        #: The results that activation checkpointing computes again.
        self.recomputed = RecomputedResults(sites)
        self._sites = sites
        self._steps = 0
        self._most_rate = 0.0
        # Steps at a learning rate that is a part worth naming of the largest, those in a row at one
        # that is not, and the step in which these are as many.
        self._full_rates = self._tiny_rates = 0
        self._has_ended = -1

    def of_step(self, now: Signals, k: int, step: int, checksums: Sequence[int]) -> list[Number]:
        """Takes in step ``k``, of this number, with the checksums of its batch."""
        numbers = self.batches.of_step(step, checksums)
        self._steps += 1
        if self._steps == _SETTLED:
            numbers += _odd_siblings(self._sites, now, k)
            numbers += _of_stored_images(self._sites, now, k)
        elif self._steps == 1:
            numbers += _of_one_number(self._sites, now, k)
        if step == self._has_ended:
            numbers.append(Number("rate_ended", max(_ENDED, self._full_rates)))
        return numbers

    def rate(self, row: StepRow) -> tuple[Optional[float], float]:
        """The learning rate of a step, by its row of the step table, and the largest so far."""
        rate = row.learning_rate or 0.0
        self._most_rate = max(self._most_rate, rate)
        is_tiny = 0 < rate < LEAST_RATE * self._most_rate
        self._full_rates += rate > 0 and not is_tiny
        self._tiny_rates = self._tiny_rates + 1 if is_tiny else 0
        if is_tiny and self._tiny_rates == max(_ENDED, self._full_rates):
            self._has_ended = row.step
        return row.learning_rate, self._most_rate
