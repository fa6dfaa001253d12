"""Detects buffers that were constant and then changed, by their checksums before each update."""

from __future__ import annotations

import operator

import numpy as np

from .updates import UPDATES, UpdateInfo, Watch


class ConstantBuffers:
    """Arrays with a place for each buffer of the last Look."""

    def __init__(self) -> None:
        self._last = UpdateInfo(Watch(), is_certain=False)
        self._sites = np.zeros(0, np.int64)
        # Where each buffer's record stands among those of an update.
        self._rows = np.zeros(0, np.int64)
        self._is_known = np.zeros(0, np.bool_)
        self._checksums = np.zeros(0, np.uint64)
        self._numel = np.zeros(0, np.int64)
        # For how many updates in which its module ran. The last ones, in which every module ran and
        # nothing changed, are counted apart.
        self._constant = np.zeros(0, np.int64)
        self._quiet_updates = 0

    def weigh(self, look: UpdateInfo, records: np.ndarray) -> np.ndarray:
        """The sites of those that this update finds changed. ``records``: of parameters and
        buffers.
        """
        last = self._last
        if (
            last.buffers is look.buffers
            and last.is_training == look.is_training
            and all(map(operator.lt, last.calls, look.calls))
            and self._rows.max() < len(records)
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
        sums, numel = records["checksum"][self._rows], records["numel"][self._rows]
        # Statistics may be on for training alone.
        self._constant[np.array(look.is_training) != was_training] = 0
        is_same = (sums == self._checksums) & self._is_known
        is_sudden = ~is_same & (self._constant >= UPDATES) & (numel == self._numel)
        self._constant[~is_same] = 0
        # What did not run had no occasion to change.
        self._constant += is_same & (np.array(look.calls) > calls)
        self._checksums, self._numel = sums, numel
        self._is_known[:] = True
        sudden: np.ndarray = self._sites[is_sudden]
        return sudden

    def _know(self, buffers: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Makes a place for each of these; what is known of the old ones stays known. How often the
        module of each had been called by the last Look, and whether it was training.
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
