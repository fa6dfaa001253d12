"""A reader for each kind of thing that can be compared; ``open`` chooses it.

Each returns its side as Blocks (``comparison.block``).

Imports ``comparison``, ``dump``, ``log``, ``record``, ``statistics`` and ``utils``.
"""
