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


def before_each(
    held: np.ndarray, values: np.ndarray, is_read: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what was read last of each tensor before each of these steps, and after each.
    ``held``: before all of them.
    """
    known = np.concatenate([held[None], values])
    if not is_read.all():
        # The last of these steps in which each was read; 0: before them.
        place = np.where(is_read, np.arange(1, len(known))[:, None], 0)
        last = np.maximum.accumulate(np.concatenate([np.zeros_like(place[:1]), place]))
        known = np.take_along_axis(known, last, 0)
    return known[:-1], known[1:]


def readings(
    held: np.ndarray, values: np.ndarray, is_read: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the readings of each tensor in order, which are those ``held`` and those of these
    steps; the place of the last of them until each step; and what is to be held after the steps.
    """
    place = np.cumsum(is_read, axis=0) + (len(held) - 1)
    if is_read.all():
        known = np.concatenate([held, values])
        return known, place, known[-len(held) :]
    known = np.concatenate([held, np.full(values.shape, np.nan)])
    step, column = np.nonzero(is_read)
    known[place[step, column], column] = values[step, column]
    lasts = place[-1] + np.arange(1 - len(held), 1)[:, None]
    return known, place, np.take_along_axis(known, lasts, 0)
