"""Finds the step from which two runs' learning rates, weight decays or clip thresholds differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

from fastcheck.comparison.nested_diff import NOT_THERE, Setting

#: By name: (step, value from there on), in the order of the steps.
Schedules = Mapping[str, Sequence[tuple[int, float]]]


def schedules_of(lines: Sequence[Mapping[str, Any]], optimizers: Any) -> Schedules:
    """Of a log's lines, and its description of the optimizers, which has their first values."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        step, name, value = (line.get(key) for key in ("step", "name", "value"))
        if isinstance(step, int) and isinstance(name, str) and isinstance(value, (int, float)):
            if name not in found:
                first = _at(optimizers, name)
                found[name] = [] if first is None else [(-1, first)]
            found[name].append((step, float(value)))
    return found


def parted(
    actual: Schedules, reference: Schedules, bases: tuple[Any, Any], last_step: int
) -> list[Setting]:
    """The first step at which each differs, unless the first values do, which is known already.
    ``bases``: both sides' descriptions of optimizers, for names that one side never changes.
    """
    found = []
    for name in dict.fromkeys([*reference, *actual]):
        sides = [
            schedule.get(name) or _constant(base, name)
            for schedule, base in zip((actual, reference), bases)
        ]
        steps = sorted({step for side in sides for step, _ in side if step <= last_step})
        for step in steps:
            mine, other = (_value(side, step) for side in sides)
            if not _equal(mine, other):
                if step >= 0:
                    texts = [NOT_THERE if v is None else f"{v:.6g}" for v in (mine, other)]
                    found.append(Setting(f"{name} from step {step:,} on", *texts))
                break
    return found


def _constant(base: Any, name: str) -> list[tuple[int, float]]:
    value = _at(base, name)
    return [] if value is None else [(-1, value)]


def _value(schedule: Sequence[tuple[int, float]], step: int) -> Optional[float]:
    return next((value for start, value in reversed(schedule) if start <= step), None)


def _equal(mine: Optional[float], other: Optional[float]) -> bool:
    if mine is None or other is None:
        return mine is other
    return mine == other or math.isclose(mine, other, rel_tol=1e-9)


def _at(optimizers: Any, name: str) -> Optional[float]:
    """The value under a name such as ``optimizers[0].groups[1].lr``; None where there is none."""
    value: Any = {"optimizers": optimizers}
    for key in _keys(name):
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None


def _keys(name: str) -> Iterator[Any]:
    for part in name.replace("]", "").replace("[", ".").split("."):
        yield int(part) if part.isdigit() else part
