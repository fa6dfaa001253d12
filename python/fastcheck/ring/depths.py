"""Depths: how deep the records of a step are."""

from __future__ import annotations

import torch


class Depths:
    """``whole``: the depth of records, as of a Depth. ``now``: that of the open step, which may be
    less.
    """

    __slots__ = ("now", "whole")

    def __init__(self, whole: int) -> None:
        self.now = self.whole = int(whole)

    def of(self, tensor: torch.Tensor) -> int:
        """The depth of a tensor that is read by itself: of one element, as the loss, ``whole``."""
        now, whole = self.now, self.whole
        return now if now == whole or tensor.numel() != 1 else whole

    @property
    def are_whole(self) -> bool:
        """The open step is read whole."""
        return self.now == self.whole
