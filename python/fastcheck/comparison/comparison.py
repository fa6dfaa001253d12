"""Comparison: the Result that compare() returns, with its text as ``str()``."""

from __future__ import annotations

from .render import render_comparison
from .result import Result

__all__ = ["Comparison"]


class Comparison(Result):
    """A Result whose ``str()`` is the report."""

    def __str__(self) -> str:
        return render_comparison(self)
