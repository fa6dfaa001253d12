"""Dumper: what went through the ops or modules of a step, written to disk.

``dumper`` is the context manager; ``options``, ``spelling`` and ``selection`` say what is dumped.
``modules`` knows which module runs; ``op_calls`` and ``module_calls`` take the calls, ``state``
what modules store. They hand all to ``session``, which has ``records`` read it, ``shards`` write
values, and ``files`` the rest. ``reference`` runs ops once more. ``reading`` reads all that again.
"""

from __future__ import annotations

from .dumper import Dumper

__all__ = ["Dumper"]
