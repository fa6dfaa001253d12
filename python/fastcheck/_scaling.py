"""What loss scaling did in the last steps: step, loss, overflow and scale, in torch's own numbers.

Values that live on a device are kept as small tensors there, and are fetched when somebody reads
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch

from ._layout import table
from ._numbers import spell

__all__ = ["ScalingLog", "ScalingRow", "scaling_table"]

_ROWS = 10


@dataclass(frozen=True)
class ScalingRow:
    """One step under a GradScaler. ``loss``: as it was given to ``scale()``, the last one of the
    step; ``scale``: what it was scaled with; ``overflow``: the scaler skipped the update.
    """

    step: int
    loss: Optional[float]
    overflow: bool
    scale: float


@dataclass
class _Kept:
    step: int
    loss: Optional[torch.Tensor]
    scale: torch.Tensor
    found: Optional[list[torch.Tensor]] = None
    is_skipped: bool = False


class ScalingLog:
    """Of one session. Methods expect its lock to be held."""

    def __init__(self, steps: int) -> None:
        self._kept: deque[_Kept] = deque(maxlen=steps)

    def scaled(self, step: int, outputs: Any, scale: torch.Tensor) -> None:
        """``GradScaler.scale(outputs)`` was called, and multiplies by ``scale``."""
        loss = outputs if isinstance(outputs, torch.Tensor) and outputs.numel() == 1 else None
        with torch.no_grad():
            kept = _Kept(step, None if loss is None else loss.detach().clone(), scale.clone())
        if self._kept and self._kept[-1].step == step:
            self._kept.pop()
        self._kept.append(kept)

    def decided(self, step: int, found: Sequence[torch.Tensor], is_skipped: bool) -> None:
        """The scaler has looked at the gradients of one optimizer."""
        if self._kept and self._kept[-1].step == step:
            kept = self._kept[-1]
            kept.is_skipped = kept.is_skipped or is_skipped
            kept.found = [*(kept.found or ()), *(word.detach().clone() for word in found)]

    def rows(self) -> list[ScalingRow]:
        """The steps that the scaler has decided, oldest first. Waits for the device."""
        return [
            ScalingRow(
                kept.step,
                None if kept.loss is None else float(kept.loss),
                kept.is_skipped or any(float(word) for word in kept.found),
                float(kept.scale),
            )
            for kept in self._kept
            if kept.found is not None
        ]


def scaling_table(rows: Sequence[ScalingRow], width: int) -> list[str]:
    """The last steps as a table; no lines without rows."""
    if not rows:
        return []
    cells = [
        [
            f"{row.step:,}",
            "-" if row.loss is None else spell(row.loss),
            "overflow, skipped" if row.overflow else "",
            spell(row.scale),
        ]
        for row in rows[-_ROWS:]
    ]
    lines = table(["step", "loss", "overflow", "scale"], cells, left=0, width=width)
    skipped = sum(row.overflow for row in rows)
    lines.append(f"{skipped:,} of the last {len(rows):,} updates skipped")
    return lines
