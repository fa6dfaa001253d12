"""Event: a non-finite record with its verdict and the reason for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastcheck.record.format import Verdict
from fastcheck.record.site import Site

__all__ = ["Event"]


@dataclass(frozen=True)
class Event:
    """A non-finite record with its verdict.

    ``site`` is the place that produced the value. It differs from the record's own site for a
    gradient: the hook is on the tensor that one module made, and the gradient may have been
    computed by the module that read the tensor. ``record`` is a copy (a scalar of RECORD_DTYPE).
    ``counted``: it counts against overflow_nums."""

    site: Site
    record: np.void
    step: int
    verdict: Verdict
    reason: str
    counted: bool
    rank: int = 0
    # The line of Python that called the operator, at op level: "train.py:12 in forward".
    line: str = ""
    # The call of torch's Python API that made it, where those are numbered (fastcheck.compat):
    # "Functional.linear.145", in backward that of the forward.
    api: str = ""
    # At op level: the operator's arguments by name, each with the sequence number of its record.
    inputs: tuple[tuple[str, int], ...] = ()
