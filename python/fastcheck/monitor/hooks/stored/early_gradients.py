"""The gradients of the open step that were read before their update, where something was about to
change them, or may have been.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Optional

import torch

from fastcheck.utils.torch.memory_ref import MemoryRef
from fastcheck.utils.torch.sharding import local

#: In the place of a record's number.
FINITE = -1


class EarlyGradients:
    """Knows a gradient again while nothing but clipping has changed it since it was read."""

    def __init__(self) -> None:
        self._step = -1
        # By the gradient's id(): its memory, its version, and the number of its record.
        self._read: dict[int, tuple[MemoryRef, int, int]] = {}
        #: Of those that wait for what becomes of the gradient the numbers of their records, by
        #: site; FINITE: it has none, because it was finite.
        self.waiting: dict[int, int] = {}

    def begin(self, step: int) -> None:
        """Forgets what was read in another step than this one."""
        if step != self._step:
            self._step = step
            self._read.clear()
            self.waiting.clear()

    def add(self, gradient: torch.Tensor, seq: int) -> None:
        """``gradient`` was read, as the record ``seq``."""
        self._read[id(gradient)] = MemoryRef(gradient), local(gradient)._version, seq

    def find(self, gradient: torch.Tensor) -> Optional[int]:
        """The number of its record; None where it was not read, or has changed since."""
        known = self._read.get(id(gradient))
        if known is None or not known[0].is_of(gradient) or known[1] != local(gradient)._version:
            return None
        return known[2]

    def take_waiting(self, sites: Iterable[int]) -> dict[int, int]:
        """The numbers of those of these sites that waited, by site: the gradients are used."""
        taken = {}
        for site in sites if self.waiting else ():
            seq = self.waiting.pop(site, None)
            if seq is not None:
                taken[site] = seq
        return taken

    def changed(self, gradients: Iterable[torch.Tensor]) -> None:
        """Clipping has changed these: their records are those of what was clipped."""
        for gradient in gradients:
            known = self._read.get(id(gradient))
            if known is not None and known[0].is_of(gradient):
                self.add(gradient, known[2])

    def __bool__(self) -> bool:
        return bool(self._read)
