"""Buffers that no pass changes."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np

from .updates import UPDATES, ObservedUpdates, UpdateInfo


class ConstantBuffers:
    """Arrays with a place for each buffer of the last Look."""

    def __init__(self) -> None:
        self._last = UpdateInfo(ObservedUpdates(), is_certain=False)
        self._sites = np.zeros(0, np.int64)
        # The row of each buffer's record among those of an update.
        self._rows = np.zeros(0, np.int64)
        self._last_row = 0
        self._is_known = np.zeros(0, np.bool_)
        self._checksums = np.zeros(0, np.uint64)
        self._numel = np.zeros(0, np.int64)
        # The number of updates in which its module ran and it stayed the same. The last updates, in
        # which every module ran and nothing changed, are counted apart.
        self._constant = np.zeros(0, np.int64)
        self._quiet_updates = 0

    def weigh(self, look: UpdateInfo, records: np.ndarray) -> np.ndarray:
        """The sites of those that this update finds changed. ``records``: of parameters and
        buffers.
        """
        last = self._last
        if (
            not look.written
            and last.buffers is look.buffers
            and last.is_training == look.is_training
            and all(map(operator.lt, last.calls, look.calls))
            and self._last_row < len(records)
            and records["checksum"][self._rows].tobytes() == self._checksums.tobytes()
        ):
            self._quiet_updates += 1
            self._last = look
            return self._sites[:0]
        row_of = {site: row for row, site in enumerate(records["site"].tolist())}
        if not all(site in row_of for site in look.buffers):
            return self._sites[:0]
        calls, was_training = self._know(look.buffers)
        self._last = look
        self._rows = np.array([row_of[site] for site in look.buffers], np.int64)
        self._last_row = int(self._rows.max())
        sums, numel = records["checksum"][self._rows], records["numel"][self._rows]
        # Statistics may be on for training alone.
        self._constant[np.array(look.is_training) != was_training] = 0
        is_same = (sums == self._checksums) & self._is_known
        is_sudden = ~is_same & (self._constant >= UPDATES) & (numel == self._numel)
        if look.written is not None:
            # A program may set what it likes between passes.
            is_written = np.isin(self._sites, list(look.written))
            is_sudden &= is_written
            # A running maximum is written to in every pass, though it may stay the same.
            self._constant[is_written] = 0
        self._constant[~is_same] = 0
        # A module that did not run had no occasion to change its buffers.
        self._constant += is_same & (np.array(look.calls) > calls)
        self._checksums, self._numel = sums, numel
        self._is_known[:] = True
        return self._sites[is_sudden]

    def _know(self, buffers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Makes a place for each of these; what is known of the old parameters stays known. How
        often the module of each had been called by the last Look, and whether it was training.
        """
        self._constant += self._quiet_updates
        self._quiet_updates = 0
        last = self._last
        place_of = {site: place for place, site in enumerate(last.buffers)}
        old = np.array([place_of.get(site, -1) for site in buffers], np.int64)

        def moved(column: np.ndarray) -> np.ndarray:
            kept = np.zeros(len(buffers), column.dtype)
            kept[old >= 0] = column[old[old >= 0]]
            return kept

        self._sites = np.array(buffers, np.int64)
        self._is_known, self._constant = moved(self._is_known), moved(self._constant)
        self._checksums, self._numel = moved(self._checksums), moved(self._numel)
        return moved(np.array(last.calls, np.int64)), moved(np.array(last.is_training, np.bool_))
