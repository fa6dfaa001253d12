"""compare(): two runs, dumps or checkpoints, and the first thing in which they differ.

In the order of the flow: ``sources`` read either side into the Blocks of ``block``; ``align``
matches their tensors; ``measure`` (statistics) and ``elements`` (values) say how far each pair is
apart, ``thresholds`` what still counts as equal; ``run`` does so block by block and ``tally``
remembers; ``verdict`` asks the questions; ``result``, ``render`` and ``tables`` are what comes out.

The package is not called ``compare``: importing it would put a module in the place of the function
``fastcheck.compare``.
"""

from __future__ import annotations

from .compare import compare_sides
from .result import Comparison

__all__ = ["Comparison", "compare_sides"]
