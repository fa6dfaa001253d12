"""Watch: the options of ``install(watch=)``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Optional

from fastcheck.errors import ConfigError, names_options

# Most steps of window=, warm_up= and horizon=: a window takes 4 bytes of each signal and step.
_LONGEST = 1 << 16


@names_options
@dataclass(frozen=True)
class Watch:
    """Options of the watch: ``install(model, watch=fastcheck.Watch(threshold=8))``.

    Args:
        threshold: how many robust standard deviations (1.4826 times the median absolute deviation)
            a value has to leave the median of its own past by.
        window: how many past values of each signal that median is of. Values that were out of
            range do not enter it.
        warm_up: how many values of a signal have to be there before it is judged; at most
            ``window``. Both are at most 65,536.
        horizon: warn when a tensor is forecast to leave the range of its dtype within so many
            steps.
        skip_above: skip an update whose gradients have a norm of more than so many times the median
            norm of the steps before, without waiting for a device (docs/watch.md); None: none.

    Raises:
        ConfigError: an option has a value that can't be used.
    """

    threshold: float = 6.0
    window: int = 128
    warm_up: int = 64
    horizon: int = 20
    skip_above: Optional[float] = None

    def __post_init__(self) -> None:
        if not 1 <= _number(self.threshold) < math.inf:
            self._refuse("threshold", "a number of at least 1")
        if self.skip_above is not None and not 1 < _number(self.skip_above) < math.inf:
            self._refuse("skip_above", "a number above 1, or None")
        for name, least in (("window", 8), ("warm_up", 8), ("horizon", 1)):
            value = getattr(self, name)
            is_int = isinstance(value, int) and not isinstance(value, bool)
            if not is_int or not least <= value <= _LONGEST:
                self._refuse(name, f"an int from {least} to {_LONGEST:,}")
        if self.warm_up > self.window:
            self._refuse("warm_up", f"at most window={self.window}")

    def _refuse(self, name: str, expected: str) -> None:
        raise ConfigError(f"Watch({name}=) must be {expected}, got {getattr(self, name)!r}")


def _number(value: object) -> float:
    """``value`` as a float; NaN: it is no real number, or too large for a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan
