"""Thresholds of equality for each dtype, as data; docs/compare.md has the same table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

import numpy as np

from fastcheck.errors import ConfigError, did_you_mean
from fastcheck.record.format import DTYPES


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

#: Multiples of the dtype's epsilon by which a sum may be off: fewer for the narrow formats, which
#: are accumulated in a wider dtype.
_ROUNDINGS = {
    "float64": 32 * 2.0**-52,
    "float32": 32 * 2.0**-23,
    "float16": 2 * 2.0**-10,
    "bfloat16": 2.0**-7,
    "complex64": 32 * 2.0**-23,
    "complex128": 32 * 2.0**-52,
}

_NAMES = [info.name for info in DTYPES]


def make_thresholds(given: Optional[Mapping[str, float]] = None) -> list[Threshold]:
    """The thresholds by dtype code. ``given`` sets the ``error`` of some dtypes; ``largest``
    follows in proportion.

    Raises ConfigError for an unknown dtype or a number below 0.
    """
    table = {name: THRESHOLDS.get(name, EXACT) for name in _NAMES}
    given = {} if given is None else given
    for name, error in given.items() if isinstance(given, Mapping) else [(str(given), None)]:
        if name not in table or not isinstance(error, (int, float)) or not error >= 0:
            raise ConfigError(
                "a threshold can't be used",
                expected="a dtype and a relative error of 0 or more: {'bfloat16': 0.05}",
                got=f"{name!r}: {error!r}",
                hint=did_you_mean(str(name), _NAMES) if name not in table else "",
            )
        before = table[name]
        ratio = before.largest / before.error if before.error else 10.0
        table[name] = Threshold(float(error), float(error) * ratio)
    return [table[name] for name in _NAMES]


def rounding_unit(code: int) -> float:
    """The error of a sum that rounding explains, over the sum of its terms' magnitudes; 0 for
    dtypes that nothing is summed in.
    """
    return _ROUNDINGS.get(_NAMES[code], 0.0)


_ERRORS = [THRESHOLDS.get(name, EXACT).error for name in _NAMES]
_ORDERED = sorted(set(_ERRORS))
#: Coarseness by dtype code: 0 for what holds no rounding, more the coarser the dtype.
COARSENESS = np.array([_ORDERED.index(error) for error in _ERRORS])
#: A dtype code by its coarseness.
BY_COARSENESS = np.array([_ERRORS.index(error) for error in _ORDERED])


def coarser_of(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The dtype code, by pair, with the larger threshold: it applies to a pair of such tensors."""
    return np.where(COARSENESS[left] >= COARSENESS[right], left, right)
