"""Adapters for scripts of ptdbg_ascend, msprobe and Cambricon Catch: only the import changes.

``ptdbg``, ``msprobe`` and ``catch`` provide the names of those tools over install(), Dumper,
seed_all() and compare(). ``_apis`` numbers calls of torch's API, ``_overflows`` counts overflows,
``_dumps`` writes dumps; ``_msprobe_config`` reads config.json.

Imports ``monitor`` and below.
"""
