"""Dumper: what went through the ops or modules of a step, written to disk.

``dumper`` is the context manager; ``options``, ``spelling`` and ``selection`` say what is dumped.
``modules`` knows which module runs, ``dispatch`` which operator; ``op_calls`` and ``module_calls``
take the calls (``recorded_op_calls`` in C++), ``state`` what modules store. They hand all to
``session``, which has ``records`` read it, ``shards`` write values, and ``files`` the rest.
``reference`` runs ops once more, ``elsewhere`` on another device or in a wider dtype. ``reading``
reads all that again.

``on_stop`` dumps the call that stopped a run, which ``captured`` or ``module_call`` has kept, with
the ``script`` that runs it again.
"""

from __future__ import annotations

from .dumper import Dumper

__all__ = ["Dumper"]
