"""Parameters that two healthy runs update differently, since their gradients are rounding noise.

Adam divides a gradient by its own size, so that noise moves a parameter by the learning rate in
either direction. The loss does not depend on such a parameter, but its module's output does (the
bias of a convolution before BatchNorm), and a running mean of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Optional

import numpy as np

from fastcheck.comparison.block import Phase, Source
from fastcheck.comparison.names import Name

#: A drift may be this much larger in what is computed from it.
_SPREAD = 4.0


class Drift:
    """Of one rank, over its steps."""

    def __init__(self, actual: Source, reference: Source) -> None:
        groups = [
            group
            for side in (actual, reference)
            for group in _groups(side.settings.get(Phase.HYPERPARAMETERS))
        ]
        #: The largest learning rate; 0 where no side records one.
        self._rate = max((rate for rate, _ in groups), default=0.0)
        #: Whether an optimizer moves a parameter by the learning rate whatever its gradient's size.
        self.normalises = any(kind not in ("", "SGD") for _, kind in groups)
        self._noisy: set[tuple[str, str]] = set()
        self._modules: set[str] = set()
        # A layer whose weight is moved by noise lies before something that takes it away again, and
        # all in between moves with it.
        self._spreads = False
        self._largest = 0.0
        self._first_step: Optional[int] = None

    def is_followed(self, name: Name) -> bool:
        """Whether a part of this gradient may be noise, and be followed by a drift."""
        return self.normalises and name.role == "param_grad" and name.label.endswith("bias")

    def follow(self, step: int, name: Name, is_noise: bool) -> None:
        """A parameter's gradient: noise as a whole, or with other last bits, in which case a part
        of a bias may be noise (that of fused keys).
        """
        if is_noise or self.is_followed(name):
            self._noisy.add((name.module, name.label))
            self._spreads |= is_noise and not name.label.endswith("bias")
            if self._first_step is None:
                self._first_step = step

    def explains(self, step: int, name: Name, numel: int, apart: float, error: float) -> bool:
        """Whether updates by noise are the cause. ``apart``: ``||a - b||``; ``error``: relative."""
        if self._first_step is None or not np.isfinite(error):
            return False
        steps = step - self._first_step + 1
        is_near = apart <= 2 * self._rate * steps * np.sqrt(max(numel, 1))
        if name.role == "param" and (name.module, name.label) in self._noisy and is_near:
            self._modules.add(name.module)
            self._largest = max(self._largest, error)
            return True
        is_made = name.direction == "forward" and name.module in self._modules
        if is_near and self._modules and (is_made or name.role == "buffer"):
            return True
        return self._spreads and error <= _SPREAD * self._largest


def _groups(value: Any, kind: str = "") -> Iterator[tuple[float, str]]:
    """(learning rate, the optimizer's type) of each group in the description of optimizers."""
    if isinstance(value, Mapping):
        kind = value.get("type", kind) if isinstance(value.get("type"), str) else kind
        rate = value.get("lr")
        if isinstance(rate, (int, float)):
            yield float(rate), kind
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _groups(item, kind)
