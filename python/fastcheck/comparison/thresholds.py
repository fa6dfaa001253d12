"""What still counts as the same number, by dtype: data, also printed in docs/compare.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

from .._errors import ConfigError, did_you_mean, explain
from .._record import DTYPES

__all__ = ["THRESHOLDS", "Threshold", "coarser", "make_thresholds"]


@dataclass(frozen=True)
class Threshold:
    """``error``: the distance of two tensors over the length of the reference,
    ``||a - b|| / ||b||``; of two records, the largest relative difference of their norms and sums
    of magnitudes, and of their sums over the sum of magnitudes. ``largest``: the largest
    difference of an element (of records: of min or max) over the largest magnitude.
    """

    error: float
    largest: float


#: Room for another order of summation through some tens of layers, and for other kernels; not for
#: another formula. About 2**10 spacings of float32 and float64, fewer of the narrow formats, whose
#: rounding dwarfs everything else.
THRESHOLDS: Mapping[str, Threshold] = {
    "float64": Threshold(1e-10, 1e-9),
    "float32": Threshold(1e-4, 1e-3),
    "float16": Threshold(5e-3, 2e-2),
    "bfloat16": Threshold(2e-2, 8e-2),
    "float8_e4m3fn": Threshold(1e-1, 2e-1),
    "float8_e5m2": Threshold(2e-1, 4e-1),
    "complex64": Threshold(1e-4, 1e-3),
    "complex128": Threshold(1e-10, 1e-9),
}
#: Integers and bool hold no rounding.
EXACT = Threshold(0.0, 0.0)

_NAMES = [info.name for info in DTYPES]


def make_thresholds(given: Optional[Mapping[str, float]] = None) -> list[Threshold]:
    """By dtype code. ``given`` sets the ``error`` of some dtypes; ``largest`` follows in
    proportion.

    Raises ConfigError for an unknown dtype or a number below 0.
    """
    table = {name: THRESHOLDS.get(name, EXACT) for name in _NAMES}
    for name, error in (given or {}).items():
        if name not in table or not isinstance(error, (int, float)) or not error >= 0:
            raise ConfigError(
                explain(
                    "a threshold can't be used",
                    expected="a dtype and a relative error of 0 or more: {'bfloat16': 0.05}",
                    came=f"{name!r}: {error!r}",
                    do=did_you_mean(str(name), _NAMES) if name not in table else "",
                )
            )
        before = table[name]
        ratio = before.largest / before.error if before.error else 10.0
        table[name] = Threshold(float(error), float(error) * ratio)
    return [table[name] for name in _NAMES]


def coarser(left: int, right: int) -> int:
    """Of two dtype codes, the one whose threshold two tensors of them are held to."""
    errors = [THRESHOLDS.get(_NAMES[code], EXACT).error for code in (left, right)]
    return left if errors[0] >= errors[1] else right
