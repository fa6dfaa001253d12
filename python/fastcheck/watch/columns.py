"""Columns: named arrays with one column for each tensor, which grow together."""

from __future__ import annotations

import numpy as np


class Columns:
    """Each argument is the first column of an array, whose last axis is the number of a tensor; new
    columns are like it.
    """

    def __init__(self, **first: np.ndarray) -> None:
        self._first = first
        self._arrays = {name: array[..., :0] for name, array in first.items()}
        self._count = 0

    def grow(self, count: int) -> None:
        """Makes room for the numbers below ``count``."""
        if count <= self._count:
            return
        more = max(count - self._count, self._count, 64)
        for name, first in self._first.items():
            new = np.repeat(first, more, axis=-1)
            self._arrays[name] = np.concatenate([self._arrays[name], new], axis=-1)
        self._count += more

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]
