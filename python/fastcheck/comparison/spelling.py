"""How steps and shapes are written, in the report, in messages and in the CSV."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["spell_shape", "spell_steps"]


def spell_steps(steps: Sequence[int]) -> str:
    """``steps``: ascending."""
    if not steps:
        return "no steps"
    if len(steps) == 1:
        return f"step {steps[0]:,}"
    return f"steps {steps[0]:,} to {steps[-1]:,}"


def spell_shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"
