"""Estimates how far rounding of its inputs may move an operator's result.

A stable kernel returns the exact result for inputs that are off by a few roundings. So the operator
runs again in float64 on inputs that are moved by as much; its results may differ by the distance
between the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Optional

import torch

from fastcheck.record.format import DTYPES
from fastcheck.statistics.thresholds import rounding_unit
from fastcheck.utils.torch.operators import OpInfo, tensors_of
from fastcheck.utils.torch.run_on_device import Elsewhere, compute

__all__ = ["movement"]

_UNITS = {info.name: rounding_unit(info.code) for info in DTYPES}
#: Rounding errors of many additions grow beyond that of the terms.
_ACCUMULATED = 4.0
#: So many times smaller than an input is the sum of one, at least.
_REDUCED = 4
#: The most roundings that are counted as pointing one way.
_MOST = 8.0
_POINTWISE = getattr(torch.Tag, "pointwise", None)


def movement(info: OpInfo, func: Any, args: Any, kwargs: Any) -> Sequence[float]:
    """``||a - b||`` of each output for inputs that are off by a rounding unit; empty where it can't
    be computed, or where an operator works element by element and sums up nothing.
    """
    if _POINTWISE is not None and _POINTWISE in getattr(func, "tags", ()):
        return []
    found: list[list[torch.Tensor]] = []
    places: tuple[Elsewhere, ...] = (
        Elsewhere(torch.device("cpu"), torch.float64),
        _Moved(0),
        _Moved(None),
    )
    for there in places:
        try:
            taken = there.moved(info, args, kwargs)
        except Exception:
            return []
        results, reason = compute(info, func, *taken, where="on the CPU")
        if reason:
            return []
        found.append(results)
    given = [t for value in (*args, *kwargs.values()) for _, t in tensors_of(value, "")]
    largest = max((tensor.numel() for tensor in given), default=0)
    movements = []
    for exact, scattered, together in zip(found[0], found[1], found[2]):
        moved = _ACCUMULATED * _distance(exact, scattered)
        terms = largest / max(exact.numel(), 1)
        if terms >= _REDUCED:
            # Added up one after the other in a narrow dtype, their roundings may point one way.
            moved = max(moved, min(math.sqrt(terms), _MOST) * _distance(exact, together))
        movements.append(moved)
    return movements


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    if left.shape != right.shape or not (left.is_floating_point() or left.is_complex()):
        return 0.0
    return float(torch.linalg.vector_norm(left - right))


class _Moved(Elsewhere):
    """Takes float tensors there with each element off by its dtype's rounding unit: in a direction
    of its own, or without ``seed`` all upwards.
    """

    def __init__(self, seed: Optional[int]) -> None:
        super().__init__(torch.device("cpu"), torch.float64)
        # Its own: the program's generators are not touched.
        self._draw = None if seed is None else torch.Generator().manual_seed(seed)

    def _moved(self, value: Any, known: dict[int, torch.Tensor], written: frozenset[int]) -> Any:
        found = None
        if isinstance(value, torch.Tensor) and id(value) not in known:
            found = super()._moved(value, known, written)
            unit = _UNITS.get(str(value.dtype)[6:], 0.0)
            if unit and self._draw is not None:
                signs = torch.randint(0, 2, found.shape, generator=self._draw) * 2 - 1
                known[id(value)] = found * (1 + unit * signs)
            elif unit:
                known[id(value)] = found * (1 + unit)
        return super()._moved(value, known, written)
