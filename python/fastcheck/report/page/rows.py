"""The rows of a page as columns that grow."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


class PageRows:
    """One row for each name of each rank, in the order in which they are met. Names are numbers.

    ``rows[column]`` is a view. ``empty``: what a new row holds in each column, beside its ``rank``
    and its ``site``, which is its name.
    """

    def __init__(self, empty: Mapping[str, np.generic]) -> None:
        self._empty = {"rank": np.int64(0), "site": np.int64(0), **empty}
        self._columns = {name: np.zeros(0, value.dtype) for name, value in self._empty.items()}
        self._row_of: dict[int, np.ndarray] = {}
        self.count = 0

    def __getitem__(self, name: str) -> np.ndarray:
        return self._columns[name][: self.count]

    def columns(self) -> dict[str, np.ndarray]:
        """The columns by name, of length ``count``."""
        return {name: self[name] for name in self._columns}

    def number(self, rank: int, names: np.ndarray) -> np.ndarray:
        """The row of each of these names of ``rank``."""
        known = self._row_of.get(rank, np.zeros(0, np.int64))
        size = int(names.max(initial=-1)) + 1
        if size > len(known):
            known = np.concatenate([known, np.full(2 * size - len(known), -1)])
            self._row_of[rank] = known
        is_new = known[names] < 0
        if is_new.any():
            new, first = np.unique(names[is_new], return_index=True)
            new = new[np.argsort(first)]
            known[new] = self.count + np.arange(len(new))
            self._add(len(new))
            self["rank"][known[new]] = rank
            self["site"][known[new]] = new
        return known[names]

    def raise_to(self, name: str, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Sets a column to the largest value of each row; returns the positions of the values that
        raised it: of several for a row the last position stays, which is the first of the largest.
        """
        # Few, once some steps are over.
        higher = np.flatnonzero(values > self[name][rows])[::-1]
        higher = higher[np.argsort(values[higher], kind="stable")]
        self[name][rows[higher]] = values[higher]
        return higher

    def _add(self, rows: int) -> None:
        self.count += rows
        room = len(self._columns["rank"])
        if self.count > room:
            more = max(self.count, 2 * room) - room
            for name, column in self._columns.items():
                added = np.full(more, self._empty[name], column.dtype)
                self._columns[name] = np.concatenate([column, added])
