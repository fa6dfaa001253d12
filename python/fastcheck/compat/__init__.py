"""Adapters for scripts of ptdbg_ascend, msprobe and Cambricon Catch: only the import changes.

``ptdbg``, ``msprobe`` and ``catch`` provide the names of those tools over install(), Dumper,
seed_all() and compare(). ``_options`` checks options and writes dumps, ``_overflows`` counts
overflows.

Imports ``calls``, ``comparison``, ``dump``, ``log``, ``monitor``, ``record``, ``reproducibility``
and ``utils``.
"""
