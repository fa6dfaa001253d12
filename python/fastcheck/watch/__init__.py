"""Watches the records of a run over its steps: what is unusual, and what left its range first.

``rules`` is the table of what is unusual, ``invariants`` that of what does not hold; docs/watch.md
and docs/invariants.md have them in words. ``watcher`` takes the records of some steps, holds them
to the tables and returns events. ``signals`` makes arrays of the records, ``view`` puts them beside
their past (``bands``), ``numbers`` does that with the numbers of a step; ``program`` has what is in
no record, ``invariant_numbers`` what invariants take. ``movers`` has the order in which tensors
left their ranges, from which ``causes`` finds the cause.

Imports ``log``, ``record`` and ``utils``.
"""
