"""Results that activation checkpointing computes again in backward, beside those of before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Optional

import numpy as np

from fastcheck.log.history import joined
from fastcheck.record.format import NONFINITE_COUNTS, Depth, Flag
from fastcheck.record.site import Site, SiteTable

from .numbers import Number

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
